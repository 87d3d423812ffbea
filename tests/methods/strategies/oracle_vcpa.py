"""VCPA by plain loops in float64, from the paper only (Kim, Guerrero, Pham, Pavlovic: Variational Continual
Proxy-Anchor for Deep Metric Learning). Vectors are lists (tensors are converted).

From the paper: the cosine, Eq. 1; the loss, Eq. 4 = 18 = 20; the KL, Eq. 15–16; its derivatives, Eq. 21–22; those of
the loss by p̂, Eq. 23–25; the chain rule, Eq. 26–27; their sum, Eq. 28–29; the Newton step, Eq. 13; the order of
events, Algorithm 1; the spread σ̄, Eq. 30; the median cosine s̄ and Pearson's correlation, appendix B; the
second-order baseline of §4.6; the momentum and the queue, Eq. 14 and §4.7.

Readings
 1. "All mathematical operations in this section are element-wise": the Hessians are their diagonals, one number per
    proxy and dimension. μ and σ move together, by derivatives taken at the same point and the same ε (Eq. 13).
 2. KL is the sum over classes and dimensions, not a mean, while L_PA is divided by |C|. `kl` has the constant of Eq.
    16: −1/2 per dimension, so that it is 0 if q_t = q_{t−1}.
 3. Derivatives are those of the re-scaled loss τ·KL + L_PA (footnote 3). A Newton step does not depend on the scale,
    but the floor does: it is max(H, floor), entry by entry, on the re-scaled H. The paper has no floor: floor = 0 is
    the paper.
 4. `positives="batch"`: |C| under the positive sum becomes the number of proxies with a positive in the batch, in Eq.
    24 and 25 as in Eq. 4; the negative sum keeps |C|.
 5. Every class moves at every step, including those without a sample in the batch (their positive sums are empty).
 6. q_{t−1} is (μ, σ) after the steps of the last batch, clamped; the warm start is the same point. Hence the KL and its
    gradient are 0 at the first inner step, and the Hessian of the KL is not.
 7. A fresh ε for each inner step and one more for the loss that moves θ. That loss is L_PA, neither divided by τ nor
    with the KL (Algorithm 1, last line), and p̂ is a constant in it.
 8. σ is clamped after every step, μ never; a σ that a step would make negative becomes σ_min.
 9. First order (no algorithm is printed): M steps of Adam (β = 0.9, 0.999; ε = 1e-8; no weight decay) on (μ, σ) and
    τ·KL + L_PA. ‖p̂‖ is not held (`hold=False`): the paper holds it for Newton's sake. `hold=True` is Eq. 24. Adam's
    moments are reset at each batch (`keep=False`) or kept (`keep=True`). σ is clamped after each step.
10. Several samples per step: `eps[m]` may be a list of [C, D]; derivatives and losses are averaged over it.
11. `of[j]` is the class of proxy j, j itself by default. With several proxies per class |C| is the number of proxies.
12. p̂ = 0 (μ⁰ = 0 and ε = 0: the ablation's first step) has no cosine. ‖p̂‖ is max(‖p̂‖, least); least = 0, the
    default, divides by zero, as the paper would.
13. Eq. 30: the "trace of the empirical standard deviation matrix" is the sum over dimensions of each one's standard
    deviation, divided by K (`ddof=0`) or K − 1 (`ddof=1`). The median of an even number is the middle two's mean.
14. MoCo-like (§4.7): L_PA over the batch and the queue together (180 + 900 = 1080), the queue's entries from earlier
    batches, without a gradient; |C| and the classes with a positive are those of the joint set.
"""

import math
from statistics import fmean, median

from oracles import dot, log1p_sum


def lists(a):
    return a.tolist() if hasattr(a, "tolist") else a


def norm(v):
    return math.sqrt(dot(v, v))


def samples_of(eps):
    """Reading 10: one [C, D] or several, as a list of several."""
    eps = lists(eps)
    return eps if isinstance(eps[0][0], (list, tuple)) else [eps]


def sample(mu, sigma, eps):
    """p̂ = μ + σ • ε, Eq. 20."""
    mu, sigma, eps = lists(mu), lists(sigma), lists(eps)
    return [[m + s * e for m, s, e in zip(*row, strict=True)] for row in zip(mu, sigma, eps, strict=True)]


def cosine(z, p, least=0.0):
    """s(x, p), Eq. 1."""
    return dot(z, p) / (norm(z) * max(norm(p), least))


def split(y, label):
    """B_j⁺ and B_j⁻."""
    return [i for i in range(len(y)) if y[i] == label], [i for i in range(len(y)) if y[i] != label]


def shares(y, p, of, positives):
    """What the positive and the negative sum are divided by (reading 4)."""
    present = sum(1 for label in of if label in y)
    return (max(present, 1) if positives == "batch" else len(p)), len(p)


# ---------------------------------------------------------------------------------------------- Eq. 4, 15–16


def anchor_terms(x, y, p, *, alpha, delta, of=None, least=0.0):
    """The two logarithms of Eq. 4 for each proxy."""
    x, y, p = lists(x), lists(y), lists(p)
    terms = []
    for j, label in enumerate(of or range(len(p))):
        kin, other = split(y, label)
        pull = log1p_sum(alpha * (delta - cosine(x[i], p[j], least)) for i in kin)
        push = log1p_sum(alpha * (cosine(x[i], p[j], least) + delta) for i in other)
        terms.append((pull, push))
    return terms


def loss(x, y, p_hat, *, alpha, delta, positives="all", of=None, least=0.0):
    """L_PA(B), Eq. 4; over several p̂, their mean."""
    y, p_hats = lists(y), samples_of(p_hat)
    of = of or list(range(len(p_hats[0])))
    values = []
    for p in p_hats:
        terms = anchor_terms(x, y, p, alpha=alpha, delta=delta, of=of, least=least)
        over_kin, over_other = shares(y, p, of, positives)
        values.append(sum(t[0] for t in terms) / over_kin + sum(t[1] for t in terms) / over_other)
    return fmean(values)


def loss_gradient(x, y, p_hat, *, alpha, delta, positives="all", of=None, least=0.0):
    """∇ of L_PA by the embeddings x, p̂ a constant: which moves θ (Algorithm 1, last line)."""
    x, y, p_hats = lists(x), lists(y), samples_of(p_hat)
    of = of or list(range(len(p_hats[0])))
    out = [[0.0] * len(x[0]) for _ in x]
    for p in p_hats:
        over_kin, over_other = shares(y, p, of, positives)
        for j, label in enumerate(of):
            kin, other = split(y, label)
            p_bar = [a / max(norm(p[j]), least) for a in p[j]]
            for mine, sign, over in ((kin, -1.0, over_kin), (other, 1.0, over_other)):
                s = {i: cosine(x[i], p[j], least) for i in mine}
                h = {i: math.exp(alpha * (delta + sign * s[i])) for i in mine}
                for i in mine:
                    by_s = sign * alpha * h[i] / (1 + sum(h.values())) / over / len(p_hats)
                    for d in range(len(x[0])):
                        out[i][d] += by_s * (p_bar[d] - s[i] * x[i][d] / norm(x[i])) / norm(x[i])
    return out


def kl(mu, sigma, mu0, sigma0):
    """KL(q_t ‖ q_{t−1}), Eq. 15–16 with the constant."""
    out = 0.0
    for m, s, m0, s0 in zip(lists(mu), lists(sigma), lists(mu0), lists(sigma0), strict=True):
        for d in range(len(m)):
            out += 0.5 * (s[d] ** 2 / s0[d] ** 2 + (m[d] - m0[d]) ** 2 / s0[d] ** 2 - 2 * math.log(s[d] / s0[d]) - 1)
    return out


# ---------------------------------------------------------------------------------------------- Eq. 21–29


def kl_derivatives(mu, sigma, mu0, sigma0):
    """∇_μ, ∇_σ, ∇²_μ, ∇²_σ of the KL, Eq. 21 and 22."""
    g_mu, g_sigma, H_mu, H_sigma = [], [], [], []
    for m, s, m0, s0 in zip(lists(mu), lists(sigma), lists(mu0), lists(sigma0), strict=True):
        D = range(len(m))
        g_mu.append([(m[d] - m0[d]) / s0[d] ** 2 for d in D])
        g_sigma.append([s[d] / s0[d] ** 2 - 1 / s[d] for d in D])
        H_mu.append([1 / s0[d] ** 2 for d in D])
        H_sigma.append([1 / s0[d] ** 2 + 1 / s[d] ** 2 for d in D])
    return g_mu, g_sigma, H_mu, H_sigma


def proxy_derivatives(x, y, p_hat, *, alpha, delta, positives="all", of=None, least=0.0):
    """∇ and diagonal ∇² of L_PA by p̂, ‖p̂‖ held constant: Eq. 23–25, [C][D] each."""
    x, y, p_hat = lists(x), lists(y), lists(p_hat)
    of = of or list(range(len(p_hat)))
    over_kin, over_other = shares(y, p_hat, of, positives)
    f_bar = [[a / norm(z) for a in z] for z in x]  # Eq. 23
    first, second = [], []
    for j, label in enumerate(of):
        kin, other = split(y, label)
        size = max(norm(p_hat[j]), least)
        h_plus = {i: math.exp(alpha * (delta - cosine(x[i], p_hat[j], least))) for i in kin}  # Eq. 23
        h_minus = {i: math.exp(alpha * (cosine(x[i], p_hat[j], least) + delta)) for i in other}
        g, H = [], []
        for d in range(len(p_hat[j])):
            below_plus, below_minus = 1 + sum(h_plus.values()), 1 + sum(h_minus.values())
            G_plus = sum(h_plus[i] * f_bar[i][d] for i in kin) / below_plus  # Eq. 24
            G_minus = sum(h_minus[i] * f_bar[i][d] for i in other) / below_minus
            square_plus = sum(h_plus[i] * f_bar[i][d] ** 2 for i in kin) / below_plus  # Eq. 25
            square_minus = sum(h_minus[i] * f_bar[i][d] ** 2 for i in other) / below_minus
            g.append(alpha / size * (G_minus / over_other - G_plus / over_kin))
            H.append(
                alpha**2 / size**2 * ((square_plus - G_plus**2) / over_kin + (square_minus - G_minus**2) / over_other)
            )
        first.append(g)
        second.append(H)
    return first, second


def derivatives(x, y, mu, sigma, q_mu, q_sigma, eps, *, tau, hold=True, **anchor):
    """g_μ, g_σ, H_μ, H_σ of τ·KL + L_PA: Eq. 26–29 times τ. With `hold=False` g has the part of ‖p̂‖ too."""
    C, D = len(lists(mu)), len(lists(mu)[0])
    parts = kl_derivatives(mu, sigma, q_mu, q_sigma)
    g_mu, g_sigma, H_mu, H_sigma = ([[tau * a for a in row] for row in part] for part in parts)
    draws = samples_of(eps)
    for e in draws:
        p_hat = sample(mu, sigma, e)
        first, second = proxy_derivatives(x, y, p_hat, **anchor)
        for j in range(C):
            if not hold:  # d/dp̂ of z̄ᵀp̂/‖p̂‖ is (z̄ − s p̂/‖p̂‖)/‖p̂‖
                along = dot(first[j], p_hat[j]) / dot(p_hat[j], p_hat[j])
                first[j] = [a - along * b for a, b in zip(first[j], p_hat[j], strict=True)]
            for d in range(D):
                g_mu[j][d] += first[j][d] / len(draws)  # Eq. 26
                g_sigma[j][d] += e[j][d] * first[j][d] / len(draws)
                H_mu[j][d] += second[j][d] / len(draws)  # Eq. 27
                H_sigma[j][d] += e[j][d] ** 2 * second[j][d] / len(draws)
    return g_mu, g_sigma, H_mu, H_sigma


# ---------------------------------------------------------------------------------------------- steps


def newton_steps(
    x, y, mu, sigma, q_mu, q_sigma, eps, tau, alpha, delta, sigma_min, positives="all", floor=0.0, *, of=None, least=0.0
):
    """(μ, σ) after as many steps as there is noise: the inner loop of Algorithm 1 with Eq. 13."""
    mu, sigma = [list(m) for m in lists(mu)], [list(s) for s in lists(sigma)]
    options = {"tau": tau, "alpha": alpha, "delta": delta, "positives": positives, "of": of, "least": least}
    for e in eps:
        g_mu, g_sigma, H_mu, H_sigma = derivatives(x, y, mu, sigma, q_mu, q_sigma, e, **options)
        for j in range(len(mu)):
            for d in range(len(mu[j])):
                mu[j][d] -= g_mu[j][d] / max(H_mu[j][d], floor)  # Eq. 13
                sigma[j][d] -= g_sigma[j][d] / max(H_sigma[j][d], floor)
                sigma[j][d] = max(sigma[j][d], sigma_min)
    return mu, sigma


def adam_start(mu):
    """Adam's state for (μ, σ) before its first step."""
    C, D = len(lists(mu)), len(lists(mu)[0])
    return {"t": 0, **{k: [[0.0] * D for _ in range(C)] for k in ("m_mu", "v_mu", "m_sigma", "v_sigma")}}


def adam_steps(
    x, y, mu, sigma, q_mu, q_sigma, eps, tau, alpha, delta, sigma_min, positives="all", *, lr, hold=False,
    state=None, of=None, least=0.0,
):  # fmt: skip
    """(μ, σ) after as many Adam steps on τ·KL + L_PA as there is noise, and Adam's state (reading 9)."""
    mu, sigma = [list(m) for m in lists(mu)], [list(s) for s in lists(sigma)]
    options = {"tau": tau, "alpha": alpha, "delta": delta, "positives": positives, "of": of, "least": least}
    state = state or adam_start(mu)
    for e in eps:
        g_mu, g_sigma, _, _ = derivatives(x, y, mu, sigma, q_mu, q_sigma, e, hold=hold, **options)
        state["t"] += 1
        for name, value, gradient in (("mu", mu, g_mu), ("sigma", sigma, g_sigma)):
            m, v = state[f"m_{name}"], state[f"v_{name}"]
            for j in range(len(value)):
                for d in range(len(value[j])):
                    g = gradient[j][d]
                    m[j][d] = 0.9 * m[j][d] + 0.1 * g
                    v[j][d] = 0.999 * v[j][d] + 0.001 * g * g
                    m_hat, v_hat = m[j][d] / (1 - 0.9 ** state["t"]), v[j][d] / (1 - 0.999 ** state["t"])
                    value[j][d] -= lr * m_hat / (math.sqrt(v_hat) + 1e-8)
        sigma = [[max(s, sigma_min) for s in row] for row in sigma]
    return mu, sigma, state


class Run:
    """Algorithm 1 over a sequence of batches, with the noise given: `form` is "newton" or "adam"."""

    def __init__(
        self, proxies, dim, *, tau=0.01, alpha=32.0, delta=0.1, sigma_min=1e-5, positives="all", floor=0.0,
        form="newton", lr=0.01, hold=False, keep=False, of=None, least=0.0,
    ):  # fmt: skip
        self.mu = [[0.0] * dim for _ in range(proxies)]  # μ⁰ = 0
        self.sigma = [[1.0] * dim for _ in range(proxies)]  # σ⁰ = 1
        self.anchor = {"alpha": alpha, "delta": delta, "positives": positives, "of": of, "least": least}
        self.tau, self.sigma_min, self.floor, self.form = tau, sigma_min, floor, form
        self.lr, self.hold, self.keep, self.state = lr, hold, keep, None

    def step(self, x, y, eps, eps_loss):
        """M = len(eps) inner steps, then L_PA(B_t) on a fresh sample; `eps_loss` is that sample's noise."""
        self.q_mu, self.q_sigma = self.mu, self.sigma
        common = (x, y, self.mu, self.sigma, self.q_mu, self.q_sigma, eps)
        options = {"tau": self.tau, "sigma_min": self.sigma_min, **self.anchor}
        if self.form == "newton":
            self.mu, self.sigma = newton_steps(*common, floor=self.floor, **options)
        else:
            state = self.state if self.keep else None
            more = {"lr": self.lr, "hold": self.hold, "state": state}
            self.mu, self.sigma, self.state = adam_steps(*common, **options, **more)
        self.p_hat = [sample(self.mu, self.sigma, e) for e in samples_of(eps_loss)]
        return loss(x, y, self.p_hat, **self.anchor)


# ---------------------------------------------------------------------------------------------- §4.6, §4.7, appendix B


def newton_proxies(x, y, p, steps, *, floor=0.0, **anchor):
    """The second-order baseline of §4.6: p ← p − ∇/∇² of L_PA by Eq. 24–25, without q."""
    p = [list(row) for row in lists(p)]
    for _ in range(steps):
        first, second = proxy_derivatives(x, y, p, **anchor)
        for j in range(len(p)):
            for d in range(len(p[j])):
                p[j][d] -= first[j][d] / max(second[j][d], floor)
    return p


def momentum(w, theta, alpha):
    """w ← αw + (1 − α)θ, Eq. 14, on flat lists."""
    return [alpha * a + (1 - alpha) * b for a, b in zip(lists(w), lists(theta), strict=True)]


def queue_loss(x, y, queue, queue_labels, proxies, **anchor):
    """Proxy-Anchor over the batch and the queue together (§4.7, reading 14)."""
    return loss(lists(x) + lists(queue), lists(y) + lists(queue_labels), lists(proxies), **anchor)


def sigma_bar(mu, sigma, eps, ddof=0):
    """σ̄_j of every proxy, Eq. 30; `eps` is [K][D], shared by the proxies, or [K][C][D]."""
    mu, sigma, eps = lists(mu), lists(sigma), lists(eps)
    out = []
    for j in range(len(mu)):
        units = []
        for e in eps:
            mine = e[j] if isinstance(e[0], (list, tuple)) else e
            p_hat = sample([mu[j]], [sigma[j]], [mine])[0]
            units.append([a / norm(p_hat) for a in p_hat])
        total = 0.0
        for d in range(len(mu[j])):
            column = [u[d] for u in units]
            middle = math.fsum(column) / len(column)
            total += math.sqrt(math.fsum((a - middle) ** 2 for a in column) / (len(column) - ddof))
        out.append(total)
    return out


def s_bar(x, y, mu, of=None):
    """s̄_j: the median cosine of a proxy's mean with the samples of its class; None if there are none."""
    x, y, mu = lists(x), lists(y), lists(mu)
    out = []
    for j, label in enumerate(of or range(len(mu))):
        values = [cosine(x[i], mu[j]) for i in split(y, label)[0]]
        out.append(median(values) if values else None)
    return out


def pearson(a, b):
    """Pearson's correlation of two lists."""
    a, b = lists(a), lists(b)
    mean_a, mean_b = fmean(a), fmean(b)
    above = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    return above / math.sqrt(sum((p - mean_a) ** 2 for p in a) * sum((q - mean_b) ** 2 for q in b))
