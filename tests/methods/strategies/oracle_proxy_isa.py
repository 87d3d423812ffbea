"""Proxy-ISA by plain loops in float64, from the paper only (Li, Sato, Ishikawa, Kawakami, Yokota: Informative
Sample-Aware Proxy for Deep Metric Learning). Vectors are lists (tensors are converted).

From the paper: effective number, Eq. 8; learned and average similarity, Eq. 10; the loss, Eq. 13 (12); ν, η, the
weights and the decay σ, Eq. 14–17; the order of events, Algorithm 1; the penalties of Table 3; Proposition 1, Eq. 6–7
and 18–19.

Readings
 1. n of E_n counts the samples of the class in *earlier* batches (`now=False`): E_n says what was learned, and
    Algorithm 1 changes no state before the loss. `now=True` counts the current batch first. `count="batches"` counts
    batches with the class in them instead of samples. Outliers count; so do batches before the queue is on.
 2. A class never seen has E_0 = 0, ν = 1, σ = 1, S_avg = 0, hence η = 1 + k + λ and ω⁻ = 1 by max(1, E).
 3. Weights, η and the filter use S_avg after the last step; it is updated after the loss, for the classes of the batch
    only (outliers' classes too), over the queue at that time, and only while the queue is on. A class of the batch
    without an entry in the queue (T_c = 0) keeps its S_avg.
 4. "Against the current proxies": `moved` are the proxies after the optimiser's step, if the caller updates then; by
    default those of the loss, since Algorithm 1 is one iteration on one P.
 5. Filter off: ω⁺ = 1, nothing is an outlier, ω⁻ still by Eq. 16. Filter on with the queue off is possible.
 6. The queue is FIFO: samples are added in the order of the batch, and the oldest are removed beyond T. Of a batch of
    more than T the last T stay. Embeddings are stored unchanged; only cosines are taken of them.
 7. An outlier has S < hS_avg − η, strictly; the informative range is closed on both sides; ω⁻ is cut where S < hS_avg −
    η, strictly (Eq. 16 and Algorithm 1 agree).
 8. ω̄_c⁺ averages over the samples of class c, ω̄_c⁻ over those of the other classes. Where a class has no negative in
    the batch (a batch of one class) ω̄_c⁻ is `alone` = 1, so that ω ≡ 1 gives Proxy-Anchor's Eq. 4.
 9. Table 3: the penalty replaces σ in Eq. 16, so ω⁺ is 1 + penalty in the informative range and the penalty outside it;
    1/E_n is 1/max(1, E_n) as in Eq. 16. "1 (no penalty)" is ω = 1 everywhere, in the range too: that column's scores
    are Proxy-Anchor's. `inside="one"` has 1 in the range instead of 1 + penalty.
10. Proxy-NCA (Fig. 11b) is not written out: "apply the adaptive weighting scores directly". Here they multiply
    the similarities in the exponents −d² = 2S − 2 of unit vectors, and the loss is the mean over samples of
    −log(e^{2ω⁺S(x, p_y)} / Σ_{c≠y} e^{2ω⁻S(x, p_c)}); no averages ω̄, since there are no two sums. On −d², which is
    never positive, a small weight would lift an easy negative above the hard ones.
11. Proposition 1: P(δ) takes part in the entropy (Eq. 19 holds only so); its own payoff is 0. Maximising freely over
    the simplex of the samples and that one more outcome gives P(δ) of Eq. 7.
12. `code=True`: Algorithm 1 as the authors published it as a program, from a description of that program. S_learned,
    not S_avg, is the state, and it is 1 for a class until the queue gives it a value; E counts the samples that were
    not filtered; the similarities of the queue are with the proxies of the loss, not with those after the step.
    That queue and filter begin an epoch later is the caller's `queue_on` and `filter_on`.
"""

import math

from oracles import dot, log1p_sum, log_sum, mean

POSITIVE = ("none", "inverse", "nu", "sigma")  # Table 3's first row
NEGATIVE = ("none", "inverse")  # its second
TABLE_3 = (("none", "none"), ("none", "inverse"), ("inverse", "inverse"), ("nu", "inverse"), ("sigma", "inverse"))


def lists(a):
    return a.tolist() if hasattr(a, "tolist") else a


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def effective(n, V):
    """E_n, Eq. 8, β = (V − 1)/V."""
    beta = (V - 1) / V
    return (1 - beta**n) / (1 - beta)


def lower_bound(E):
    """ν_n, Eq. 14."""
    return 1 / (1 + math.log(1 + E))


def search_length(nu, S_avg, *, k, h, lam):
    """η_c, Eq. 15."""
    return (1 + k * (1 - h * S_avg)) * nu + lam


def decay(E, nu, *, V, tau):
    """σ_n, Eq. 17."""
    return 1 + (1 + math.exp(-tau)) * (nu - 1) / (1 + math.exp(min(V - E - tau, 700)))


def positive_weight(S, S_avg, eta, *, h, penalty, inside="penalty"):
    """ω⁺, Eq. 16; with no penalty (None) 1."""
    if penalty is None:
        return 1.0
    if h * S_avg - eta <= S <= h * S_avg:
        return 1.0 if inside == "one" else 1 + penalty
    return penalty


def negative_weight(S, S_avg, eta, E, *, h, penalised=True):
    """ω⁻, Eq. 16."""
    if penalised and h * S_avg - eta > S:
        return 1 / max(1, E)
    return 1.0


def loss(S, y, w_plus, w_minus, *, alpha, delta, alone=1.0):
    """L_ISA, Eq. 13: `S[i][c]`; the weights [i][c] of the pairs they are for, anything elsewhere."""
    m, C = len(S), len(S[0])
    pull = below_pull = push = below_push = 0.0
    for c in range(C):
        kin, other = [i for i in range(m) if y[i] == c], [i for i in range(m) if y[i] != c]
        if kin:  # c ∈ C⁺
            pull += log1p_sum(w_plus[i][c] * alpha * (delta - S[i][c]) for i in kin)
            below_pull += mean(w_plus[i][c] for i in kin)
        push += log1p_sum(w_minus[i][c] * alpha * (delta + S[i][c]) for i in other)
        below_push += mean(w_minus[i][c] for i in other) if other else alone
    return pull / below_pull + push / below_push


def nca_loss(S, y, w_plus, w_minus, *, scale=1.0):
    """Proxy-NCA with the same weights (reading 10) on S, where −d² = 2S − 2; `scale` multiplies every d²."""
    terms = []
    for i in range(len(S)):
        own = scale * (2 * w_plus[i][y[i]] * S[i][y[i]] - 2)
        others = [scale * (2 * w_minus[i][c] * S[i][c] - 2) for c in range(len(S[i])) if c != y[i]]
        terms.append(log_sum(others) - own)
    return mean(terms)


class Run:
    """Algorithm 1, batch after batch. Readable state: n, S_avg, queue; of the last step also E, nu, eta,
    sigma, learned (S_learned as used), S, w_plus, w_minus, filtered (batch rows)."""

    def __init__(
        self, classes, *, size, V=100.0, h=0.15, k=0.9, lam=0.1, tau=1.5, alpha=32.0, delta=0.1, positive="sigma",
        negative="inverse", inside="penalty", count="samples", now=False, alone=1.0, inner="proxy_anchor", scale=1.0,
        code=False,
    ):  # fmt: skip
        self.C, self.T = classes, size
        self.V, self.h, self.k, self.lam, self.tau = V, h, k, lam, tau
        self.alpha, self.delta, self.alone, self.scale, self.inner = alpha, delta, alone, scale, inner
        self.positive, self.negative, self.inside = positive, negative, inside
        self.count, self.now = count, now
        self.n = [0] * classes
        self.code = code
        self.S_avg = [1 / h if code else 0.0] * classes
        self.queue = []  # (vector, label), oldest first

    def step(self, x, y, proxies, *, queue_on, filter_on, moved=None):
        """One iteration: the loss of the batch, then the state after it."""
        x, y, proxies = lists(x), lists(y), lists(proxies)
        if self.now:
            self.see(y)
        self.S = [[cosine(a, p) for p in proxies] for a in x]
        self.lengths()
        self.weigh(y, filter_on)
        weights = (self.S, y, self.w_plus, self.w_minus)
        if self.inner == "proxy_nca":
            value = nca_loss(*weights, scale=self.scale)
        else:
            value = loss(*weights, alpha=self.alpha, delta=self.delta, alone=self.alone)
        if queue_on:
            self.remember(x, y, proxies if moved is None or self.code else lists(moved))
        if not self.now:
            self.see([label for i, label in enumerate(y) if i not in self.filtered] if self.code else y)
        return value

    def see(self, y):
        """n, reading 1."""
        for c in range(self.C):
            hits = sum(1 for label in y if label == c)
            self.n[c] += min(hits, 1) if self.count == "batches" else hits

    def lengths(self):
        """E, ν, η, σ and S_learned of every class."""
        self.E = [effective(n, self.V) for n in self.n]
        self.nu = [lower_bound(E) for E in self.E]
        self.eta = [
            search_length(nu, S, k=self.k, h=self.h, lam=self.lam) for nu, S in zip(self.nu, self.S_avg, strict=True)
        ]
        self.sigma = [decay(E, nu, V=self.V, tau=self.tau) for E, nu in zip(self.E, self.nu, strict=True)]
        self.learned = [self.h * S for S in self.S_avg]  # Eq. 10

    def weigh(self, y, filter_on):
        """ω⁺, the filter, ω⁻: the two loops of Algorithm 1."""
        m = len(y)
        self.w_plus = [[1.0] * self.C for _ in range(m)]
        self.w_minus = [[1.0] * self.C for _ in range(m)]
        self.filtered = []
        for i in range(m):
            c = y[i]
            if filter_on:
                penalties = {"none": None, "inverse": 1 / max(1, self.E[c]), "nu": self.nu[c], "sigma": self.sigma[c]}
                self.w_plus[i][c] = positive_weight(
                    self.S[i][c], self.S_avg[c], self.eta[c], h=self.h, penalty=penalties[self.positive],
                    inside=self.inside,
                )  # fmt: skip
                if self.S[i][c] < self.learned[c] - self.eta[c]:
                    self.filtered.append(i)
        for c in range(self.C):
            for i in range(m):
                if y[i] != c:
                    self.w_minus[i][c] = negative_weight(
                        self.S[i][c], self.S_avg[c], self.eta[c], self.E[c], h=self.h,
                        penalised=self.negative == "inverse",
                    )  # fmt: skip

    def remember(self, x, y, proxies):
        """Enqueue samples that are not filtered, dequeue the oldest, S_avg of the batch's classes (Eq. 10)."""
        for i in range(len(y)):
            if i not in self.filtered:
                self.queue.append((list(x[i]), y[i]))
        while len(self.queue) > self.T:
            self.queue.pop(0)
        for c in sorted(set(y)):
            similar = [cosine(v, proxies[c]) for v, label in self.queue if label == c]
            if similar:
                self.S_avg[c] = sum(similar) / len(similar)


def proposition_1(payoffs):
    """Both sides of Eq. 6 for the payoffs α(δ ∓ S_i), and the distribution of Eq. 18 with P(δ) last."""
    left = log1p_sum(payoffs)
    below = 1 + sum(math.exp(a) for a in payoffs)
    P = [math.exp(a) / below for a in payoffs] + [1 / below]  # Eq. 18, Eq. 7
    return left, regularised(P, payoffs), P


def regularised(P, payoffs):
    """α Σ_i P(i)(δ ∓ S_i) + H(P), the entropy over the samples and the one more outcome, whose payoff is 0."""
    entropy = -sum(p * math.log(p) for p in P if p > 0)
    return sum(p * a for p, a in zip(P, [*payoffs, 0.0], strict=True)) + entropy
