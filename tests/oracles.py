"""One naive oracle per loss: the paper's equation in float64, with plain loops over samples and references.

Each is `oracle(x, y, refs, ref_labels, self_row, *, space, **options) -> float`. `x` and `refs` are raw vectors as
lists; `self_row[j]` is the batch row of reference j, −1 if it is not in the batch; a reference of label −1 is an empty
slot. Options are those of the loss; `weights[i][j]` multiply where the header says. `SETTINGS` are the options each
loss is tested with besides its defaults, `LARGE` options with which the exponent reaches ±100 on the unit sphere.
"""

import math

EMPTY = -1


class Pairs:
    """What every oracle needs: projected points, similarities, distances, positives and negatives."""

    def __init__(self, x, y, refs, ref_labels, self_row, space, weights=None):
        self.y, self.labels = list(y), list(ref_labels)
        self.x, self.v = [point(a, space) for a in x], [point(a, space) for a in refs]
        self.B, self.R = len(self.x), len(self.v)
        self.d = [[math.dist(a, b) for b in self.v] for a in self.x]
        self.s = [
            [1 - math.dist(a, b) ** 2 / 2 if space in ("ball", "euclidean") else dot(a, b) for b in self.v]
            for a in self.x
        ]
        self.w = weights or [[1.0] * self.R for _ in self.x]
        filled = [j for j in range(self.R) if self.labels[j] != EMPTY]
        self.filled = filled
        self.P = [[j for j in filled if self.labels[j] == self.y[i] and self_row[j] != i] for i in range(self.B)]
        self.N = [[j for j in filled if self.labels[j] != self.y[i]] for i in range(self.B)]
        self.P_of = [[i for i in range(self.B) if j in self.P[i]] for j in range(self.R)]  # by reference
        self.N_of = [[i for i in range(self.B) if j in self.N[i]] for j in range(self.R)]


def dot(a, b):
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def point(v, space):
    """The vector as a point of the space."""
    norm = math.sqrt(dot(v, v))
    if space in ("inner", "euclidean") or norm == 0 or (space in ("ball", "ball_inner") and norm <= 1):
        return [float(a) for a in v]
    return [a / norm for a in v]


def hinge(z):
    return max(z, 0.0)


def mean(values):
    """Mean, or 0 of no values."""
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def log_sum(values):
    """log Σ exp, about the largest."""
    values = list(values)
    top = max(values)
    return top + math.log(math.fsum(math.exp(v - top) for v in values))


def log1p_sum(values):
    """log(1 + Σ exp)."""
    return log_sum([0.0, *values])


def n_pair_terms(p):
    """One term per positive pair."""
    return [
        log1p_sum(p.w[i][k] * p.s[i][k] - p.w[i][j] * p.s[i][j] for k in p.N[i]) for i in range(p.B) for j in p.P[i]
    ]


def n_pair(x, y, refs, ref_labels, self_row, *, norm, space="inner", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    norms = mean(dot(a, a) for a in p.x) + mean(dot(p.v[j], p.v[j]) for j in p.filled)
    return mean(n_pair_terms(p)) + norm / 2 * norms


def angular(x, y, refs, ref_labels, self_row, *, angle, n_pair, positives, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    tan = math.tan(math.radians(angle)) ** 2
    terms = []
    for i in range(p.B):
        for j in sorted(p.P[i], key=lambda j: p.s[i][j])[:positives]:
            both = [a + b for a, b in zip(p.x[i], p.v[j], strict=True)]
            kin = 2 * (1 + tan) * p.w[i][j] * dot(p.x[i], p.v[j])
            terms.append(log1p_sum(4 * tan * p.w[i][k] * dot(both, p.v[k]) - kin for k in p.N[i]))
    return mean(terms) + n_pair * mean(n_pair_terms(p))


def softmax_of_nearest(p, scale, own, smoothing=0.0):
    """Cross-entropy over classes of scale · max_k s, the sample's own class by way of `own`."""
    classes, terms = classes_of(p), []
    for i in range(p.B):
        S = {c: max(p.s[i][j] for j in mine) for c, mine in classes.items()}
        z = {c: scale * mean(p.w[i][j] for j in classes[c]) * (own(S[c]) if c == p.y[i] else S[c]) for c in classes}
        if p.y[i] in classes:
            target = {c: smoothing / len(z) + (1 - smoothing) * (c == p.y[i]) for c in z}
            terms.append(math.fsum(target[c] * (log_sum(z.values()) - z[c]) for c in z))
    return mean(terms)


def arcface(x, y, refs, ref_labels, self_row, *, scale, margin, per_class, space="cosine", weights=None):
    def own(S):
        if -math.cos(margin) > S:
            return S - margin * math.sin(margin)
        if -1 < S < 1:
            return math.cos(math.acos(S) + margin)
        return S * math.cos(margin) - math.sqrt(max(1 - S * S, 1e-12)) * math.sin(
            margin
        )  # no cosine: as the header has it

    return softmax_of_nearest(Pairs(x, y, refs, ref_labels, self_row, space, weights), scale, own)


def cosface(x, y, refs, ref_labels, self_row, *, scale, margin, per_class, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    return softmax_of_nearest(p, scale, lambda S: S - margin)


def norm_softmax(
    x, y, refs, ref_labels, self_row, *, temperature, smoothing, per_class, space="cosine", weights=None
):  # fmt: skip
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    return softmax_of_nearest(p, 1 / temperature, lambda S: S, smoothing)


def circle(
    x, y, refs, ref_labels, self_row, *, margin, gamma, space="cosine", weights=None, frozen=None
):  # fmt: skip
    """`frozen` is the point that the weights a⁺, a⁻ are taken at."""
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    at = Pairs(*frozen[:1], y, *frozen[1:], ref_labels, self_row, space).s if frozen else p.s
    terms = []
    for i in range(p.B):
        if p.P[i] and p.N[i]:
            other = log_sum(gamma * p.w[i][k] * hinge(at[i][k] + margin) * (p.s[i][k] - margin) for k in p.N[i])
            kin = log_sum(-gamma * p.w[i][j] * hinge(1 + margin - at[i][j]) * (p.s[i][j] - 1 + margin) for j in p.P[i])
            terms.append(log1p_sum([other + kin]))
    return mean(terms)


def fast_ap(x, y, refs, ref_labels, self_row, *, bins, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    step, losses = 4 / bins, []
    for i in range(p.B):
        volume = sum(p.w[i][j] for j in p.P[i])
        if not volume:
            continue
        H_kin = H_all = precision = 0.0
        for b in range(bins + 1):
            vote = {j: p.w[i][j] * hinge(1 - abs(min(p.d[i][j] ** 2, 4) - b * step) / step) for j in p.P[i] + p.N[i]}
            h_kin = sum(vote[j] for j in p.P[i])
            H_kin, H_all = H_kin + h_kin, H_all + sum(vote.values())
            precision += H_kin * h_kin / H_all if H_all else 0.0
        losses.append(1 - precision / volume)
    return mean(losses)


def lifted(x, y, refs, ref_labels, self_row, *, margin, smooth, space="euclidean", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        for j in p.P[i]:
            reach = [p.w[i][k] * (margin - p.d[i][k]) for k in p.N[i]]
            reach += [p.w[k][j] * (margin - p.d[k][j]) for k in p.N_of[j]]
            J = (log_sum(reach) if smooth else max(reach)) + p.w[i][j] * p.d[i][j] if reach else -math.inf
            terms.append(hinge(J) ** 2)
    return mean(terms) / 2


def ranked_list(
    x, y, refs, ref_labels, self_row, *, radius, margin, temperature, balance,
    space="cosine", weights=None, frozen=None,
):  # fmt: skip
    """`frozen` is the point that the weights of the negatives are taken at."""
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    at = Pairs(*frozen[:1], y, *frozen[1:], ref_labels, self_row, space).d if frozen else p.d
    out = 0.0
    for i in range(p.B):
        out += mean(p.w[i][j] * (p.d[i][j] - radius + margin) for j in p.P[i] if p.d[i][j] > radius - margin)
        near = [j for j in p.N[i] if p.d[i][j] < radius]
        if near:
            share = [math.exp(temperature * p.w[i][j] * (radius - at[i][j])) for j in near]
            pushes = [p.w[i][j] * (radius - p.d[i][j]) for j in near]
            out += balance * sum(a * b for a, b in zip(share, pushes, strict=True)) / sum(share)
    return out / p.B


def supcon(x, y, refs, ref_labels, self_row, *, temperature, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        z = [w * s / temperature for w, s in zip(p.w[i], p.s[i], strict=True)]
        if p.P[i]:
            terms.append(mean(log_sum(z[k] for k in p.P[i] + p.N[i]) - z[j] for j in p.P[i]))
    return mean(terms)


def hard_negatives(p, key):
    """For each row as many negatives as positives, those of smallest `key[i][j]`; ties go to the first columns."""
    return [sorted(p.N[i], key=lambda j: (key[i][j], j))[: len(p.P[i])] for i in range(p.B)]


def contrastive(
    x, y, refs, ref_labels, self_row, *, form, margin, positive, negative, reduce, mining, space="cosine", weights=None
):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    N = p.N
    if mining == "hard":
        N = hard_negatives(p, [[-s for s in row] for row in p.s] if form == "c1" else p.d)
    kin = [(i, j, p.w[i][j]) for i in range(p.B) for j in p.P[i]]
    other = [(i, j, p.w[i][j]) for i in range(p.B) for j in N[i]]
    if form == "c1":
        pull, push = (
            sum(hinge(w * (1 - p.s[i][j])) for i, j, w in kin),
            sum(hinge(w * (p.s[i][j] - margin)) for i, j, w in other),
        )
        return (pull + push) / p.B
    if form == "squared":
        pull, push = (
            sum((w * p.d[i][j]) ** 2 for i, j, w in kin),
            sum(hinge(w * (negative - p.d[i][j])) ** 2 for i, j, w in other),
        )
        return (pull + push) / max(len(kin) + len(other), 1)
    pull = [t for i, j, w in kin if (t := hinge(w * (p.d[i][j] - positive))) > 0]
    push = [t for i, j, w in other if (t := hinge(w * (negative - p.d[i][j]))) > 0]
    return mean(pull) + mean(push) if reduce == "mean" else sum(pull) + sum(push)


def proxy_anchor(x, y, refs, ref_labels, self_row, *, alpha, delta, positives, per_class, space="cosine", weights=None):
    """Weights multiply the exponents, as in Proxy-ISA (Eq. 12)."""
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    pull = [log1p_sum(-alpha * p.w[i][j] * (p.s[i][j] - delta) for i in p.P_of[j]) for j in p.filled]
    push = [log1p_sum(alpha * p.w[i][j] * (p.s[i][j] + delta) for i in p.N_of[j]) for j in p.filled]
    present = sum(1 for j in p.filled if p.P_of[j])
    over = present if positives == "batch" else len(p.filled)
    return (sum(pull) / over if over else 0.0) + (sum(push) / len(p.filled) if p.filled else 0.0)


def margin(
    x, y, refs, ref_labels, self_row, *, margin, boundary, learn, nu, sampling, drawn, cutoff, upper, over,
    space="cosine", weights=None, beta=None, frozen=None,
):  # fmt: skip
    """`beta` are the learnt boundaries, by class; `frozen` the point that the negatives' shares are taken at."""
    assert not drawn, "what is drawn at random has no one value"
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    D = len(p.x[0])
    at = Pairs(*frozen[:1], y, *frozen[1:], ref_labels, self_row, space).d if frozen else p.d
    nearest = hard_negatives(p, at)
    out = nonzero = counted = 0.0
    for i in range(p.B):
        b = beta[p.y[i]] if learn else boundary
        times = {j: 1.0 if sampling == "all" or j in nearest[i] else 0.0 for j in p.N[i]}
        if sampling == "distance":
            omega = {}
            for j in p.N[i]:
                far = max(at[i][j], cutoff)
                omega[j] = far ** -(D - 2) * (1 - far**2 / 4) ** (-(D - 3) / 2) if at[i][j] < upper else 0.0
            if not any(omega.values()):
                omega = dict.fromkeys(omega, 1.0)
            times = {j: len(p.P[i]) * w / sum(omega.values()) for j, w in omega.items()}
        terms = [(1.0, hinge(p.w[i][j] * (p.d[i][j] - b + margin))) for j in p.P[i]]
        terms += [(t, hinge(p.w[i][j] * (b + margin - p.d[i][j]))) for j, t in times.items()]
        out += sum(t * h for t, h in terms) + nu * len(p.P[i]) * b
        nonzero += sum(t for t, h in terms if h > 0)
        counted += len(p.P[i]) + sum(times.values())
    n = nonzero if over == "nonzero" else counted
    return out / (n or 1)


def mpa_terms(x, y, refs, ref_labels, self_row, space, weights, *, similarity, gamma, per_class):
    """S(x_i, c) and the weight of every sample and class, the classes, and the regulariser."""
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    classes = classes_of(p)
    S = [{c: class_similarity(s, mine, similarity=similarity, gamma=gamma) for c, mine in classes.items()} for s in p.s]
    w = [{c: mean(row[j] for j in mine) for c, mine in classes.items()} for row in p.w]
    return S, w, list(classes), centre_spread(p, per_class)


def mpa(
    x, y, refs, ref_labels, self_row, *, alpha, delta, gamma, tau, similarity, per_class, space="cosine", weights=None
):
    options = {"similarity": similarity, "gamma": gamma, "per_class": per_class}
    S, w, classes, spread = mpa_terms(x, y, refs, ref_labels, self_row, space, weights, **options)
    pull, push = [], []
    for c in classes:
        kin, other = [i for i in range(len(y)) if y[i] == c], [i for i in range(len(y)) if y[i] != c]
        if kin:
            pull.append(log1p_sum(-alpha * w[i][c] * (S[i][c] - delta) for i in kin))
        if other:
            push.append(log1p_sum(alpha * w[i][c] * (S[i][c] + delta) for i in other))
    return mean(pull) + mean(push) + tau * spread


def mpa_dw(
    x, y, refs, ref_labels, self_row, *, alpha, delta, gamma, tau, similarity, per_class, space="cosine", weights=None
):
    options = {"similarity": similarity, "gamma": gamma, "per_class": per_class}
    S, w, classes, spread = mpa_terms(x, y, refs, ref_labels, self_row, space, weights, **options)
    out = 0.0
    for i in range(len(y)):
        out += log1p_sum(-alpha * w[i][c] * (S[i][c] - delta) for c in classes if c == y[i])
        out += log1p_sum(alpha * w[i][c] * (S[i][c] + delta) for c in classes if c != y[i])
    return out / len(y) + tau * spread


def mpa_ap(
    x, y, refs, ref_labels, self_row, *, alpha, delta, gamma, tau, similarity, per_class, space="cosine", weights=None
):
    options = {"similarity": similarity, "gamma": gamma, "per_class": per_class}
    S, w, classes, spread = mpa_terms(x, y, refs, ref_labels, self_row, space, weights, **options)
    with_margin = [{c: delta - S[i][c] if c == y[i] else S[i][c] + delta for c in classes} for i in range(len(y))]
    return mean(log1p_sum(alpha * w[i][c] * with_margin[i][c] for c in classes) for i in range(len(y))) + tau * spread


def multi_similarity(
    x, y, refs, ref_labels, self_row, *, alpha, beta, base, epsilon, mining, space="cosine", weights=None
):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    out = 0.0
    for i in range(p.B):
        s, w = p.s[i], p.w[i]
        kin, other = p.P[i], p.N[i]
        if mining:
            hardest, easiest = (
                max((s[k] for k in p.N[i]), default=-math.inf),
                min((s[k] for k in p.P[i]), default=math.inf),
            )
            kin = [j for j in kin if s[j] - epsilon < hardest]
            other = [j for j in other if s[j] + epsilon > easiest]
        out += log1p_sum(-alpha * w[j] * (s[j] - base) for j in kin) / alpha
        out += log1p_sum(beta * w[j] * (s[j] - base) for j in other) / beta
    return out / p.B


def proxy_nca(x, y, refs, ref_labels, self_row, *, scale, per_class, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        z = [scale * (2 * (p.w[i][j] - 1) * p.s[i][j] - p.d[i][j] ** 2) for j in range(p.R)]
        if p.P[i] and p.N[i]:
            terms.append(log_sum(z[j] for j in p.N[i]) - max(z[j] for j in p.P[i]))
    return mean(terms)


def proxy_nca_pp(x, y, refs, ref_labels, self_row, *, temperature, per_class, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        z = [(2 * (p.w[i][j] - 1) * p.s[i][j] - p.d[i][j] ** 2) / temperature for j in range(p.R)]
        if p.P[i]:
            own = max(z[j] for j in p.P[i])
            terms.append(log_sum([own, *(z[j] for j in p.N[i])]) - own)
    return mean(terms)


def proxy_gml(x, y, refs, ref_labels, self_row, *, ratio, scale, weight, over, per_class, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    classes = classes_of(p)
    k = min(max(math.ceil(ratio * p.R), per_class + 1), p.R)
    samples = [i for i in range(p.B) if p.y[i] in classes]
    terms = []
    for i in samples:
        joined = sorted(range(p.R), key=lambda j: -p.s[i][j] - 1000 * (p.labels[j] == p.y[i]))[:k]
        votes = {}
        for j in joined:
            votes[p.labels[j]] = votes.get(p.labels[j], 0.0) + p.w[i][j] * p.s[i][j]
        terms.append(log_sum(scale * v for v in votes.values()) - scale * votes[p.y[i]])
    anchors = list(range(p.R)) if over != "batch" else [j for i in samples for j in classes[p.y[i]]]
    own = []
    for j in anchors:
        votes = {c: sum(dot(p.v[j], p.v[m]) for m in mine) for c, mine in classes.items()}
        own.append(log_sum(votes.values()) - votes[p.labels[j]])
    return mean(terms) + weight * mean(own)


def classes_of(p):
    """The references of each class, by class."""
    return {c: [j for j in p.filled if p.labels[j] == c] for c in sorted({p.labels[j] for j in p.filled})}


def class_similarity(s, mine, *, similarity, gamma):
    """S(x, c) of one sample and the centres `mine` of one class (MPA's Eq. 1, or the largest, or the mean)."""
    values = [s[j] for j in mine]
    if similarity == "max":
        return max(values)
    if similarity == "mean":
        return mean(values)
    below = log_sum(v / gamma for v in values)
    return sum(math.exp(v / gamma - below) * v for v in values)


def centre_spread(p, per_class):
    """MPA's Eq. 3: distances between the centres of a class; 0 if there is one."""
    if per_class == 1:
        return 0.0
    classes = classes_of(p)
    pairs = [math.dist(p.v[a], p.v[b]) for mine in classes.values() for a in mine for b in mine if a < b]
    return sum(pairs) / (len(classes) * per_class * (per_class - 1))


def soft_triple(
    x, y, refs, ref_labels, self_row, *, scale, delta, gamma, tau, similarity, per_class, space="cosine", weights=None
):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    classes, terms = classes_of(p), []
    for i in range(p.B):
        if p.y[i] not in classes:
            continue
        z = {}
        for c, mine in classes.items():
            S = class_similarity(p.s[i], mine, similarity=similarity, gamma=gamma)
            z[c] = mean(p.w[i][j] for j in mine) * scale * (S - delta if c == p.y[i] else S)
        terms.append(log_sum(z.values()) - z[p.y[i]])
    return mean(terms) + tau * centre_spread(p, per_class)


def nca(x, y, refs, ref_labels, self_row, *, scale, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        picks = {k: math.exp(-scale * p.w[i][k] * p.d[i][k] ** 2) for k in p.P[i] + p.N[i]}
        if p.P[i]:
            terms.append(-math.log(math.fsum(picks[j] for j in p.P[i]) / math.fsum(picks.values())))
    return mean(terms)


def nt_xent(x, y, refs, ref_labels, self_row, *, temperature, space="cosine", weights=None):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        z = [w * s / temperature for w, s in zip(p.w[i], p.s[i], strict=True)]
        terms += [log_sum([z[j], *(z[k] for k in p.N[i])]) - z[j] for j in p.P[i]]
    return mean(terms)


def triplet(
    x, y, refs, ref_labels, self_row, *, margin, squared, mining, over, swap, smooth, space="cosine", weights=None
):
    p = Pairs(x, y, refs, ref_labels, self_row, space, weights)
    terms = []
    for i in range(p.B):
        u = [w * (d**2 if squared else d) for w, d in zip(p.w[i], p.d[i], strict=True)]
        triplets = [(j, k) for j in p.P[i] for k in p.N[i]]
        if mining == "semi_hard":
            triplets = [(j, k) for j, k in triplets if u[j] < u[k] < u[j] + margin]
        if mining == "hard":
            triplets = list(zip(sorted(p.P[i], key=lambda j: -u[j]), sorted(p.N[i], key=lambda k: u[k]), strict=False))
        for j, k in triplets:
            across = math.dist(p.v[j], p.v[k])
            across = p.w[i][k] * (across**2 if squared else across)
            z = u[j] - (min(u[k], across) if swap else u[k]) + margin
            terms.append(log1p_sum([z]) if smooth else hinge(z))
    n = sum(t > 0 for t in terms) if over == "nonzero" else len(terms)
    return sum(terms) / max(n, 1)


ORACLES = {
    "angular": angular,
    "arcface": arcface,
    "circle": circle,
    "contrastive": contrastive,
    "cosface": cosface,
    "fast_ap": fast_ap,
    "lifted": lifted,
    "margin": margin,
    "mpa": mpa,
    "mpa_ap": mpa_ap,
    "mpa_dw": mpa_dw,
    "multi_similarity": multi_similarity,
    "n_pair": n_pair,
    "nca": nca,
    "norm_softmax": norm_softmax,
    "nt_xent": nt_xent,
    "proxy_anchor": proxy_anchor,
    "proxy_gml": proxy_gml,
    "proxy_nca": proxy_nca,
    "proxy_nca_pp": proxy_nca_pp,
    "ranked_list": ranked_list,
    "soft_triple": soft_triple,
    "supcon": supcon,
    "triplet": triplet,
}

# Parameters of losses besides proxies, as arguments of the oracle.
STATE = {
    "margin": lambda m: {"beta": next(m.parameters()).tolist()} if m.spec.options["learn"] else {},
}

MPA_SETTINGS = (
    {"per_class": 3, "alpha": 5.0, "delta": 0.2, "gamma": 0.5, "tau": 0.7},
    {"per_class": 2, "similarity": "max"},
    {"per_class": 3, "similarity": "mean"},
    {"per_class": 1},
)

SETTINGS = {
    "angular": ({"angle": 36.0, "n_pair": 0.5}, {"positives": 1}),
    "arcface": ({"margin": 0.8, "scale": 4.0, "per_class": 3},),
    "circle": ({"margin": 0.4, "gamma": 80.0}, {"gamma": 3.0}),
    "contrastive": (
        {"form": "c1", "margin": 0.2},
        {"form": "c2", "positive": 0.3, "negative": 1.2},
        {"form": "c2", "reduce": "sum", "positive": 0.1},
        {"form": "squared", "negative": 1.3},
        {"form": "squared", "mining": "hard"},
        {"form": "c1", "mining": "hard"},
        {"form": "c2", "mining": "hard", "reduce": "sum"},
    ),
    "cosface": ({"margin": 0.2, "scale": 4.0, "per_class": 3},),
    "fast_ap": ({"bins": 4},),
    "lifted": ({"smooth": False}, {"margin": 2.0}),
    "margin": (
        {"sampling": "all", "nu": 0.1, "over": "all"},
        {"sampling": "hard", "margin": 0.3, "boundary": 1.0, "learn": True},
        {"cutoff": 0.9, "upper": 1.2, "learn": True, "nu": 0.2, "over": "all"},
        {"drawn": True},
    ),
    "mpa": MPA_SETTINGS,
    "mpa_ap": MPA_SETTINGS,
    "mpa_dw": MPA_SETTINGS,
    "multi_similarity": (
        {"mining": False},
        {"alpha": 3.0, "beta": 10.0, "base": 0.2, "epsilon": 0.4},
        {"alpha": 14.35, "beta": 75.83, "base": 0.66, "mining": False},
    ),
    "n_pair": ({"norm": 0.2},),
    "nca": ({"scale": 5.0},),
    "norm_softmax": ({"temperature": 0.3, "per_class": 3}, {"smoothing": 0.2}),
    "nt_xent": ({"temperature": 0.5},),
    "proxy_anchor": ({"alpha": 4.0, "delta": 0.3, "per_class": 3}, {"positives": "all"}),
    "proxy_gml": (
        {"per_class": 2, "ratio": 0.5, "scale": 3.0, "weight": 0.8, "over": "all"},
        {"per_class": 3, "over": "batch"},
        {"per_class": 1, "ratio": 1.0, "weight": 0.0},
    ),
    "proxy_nca": ({"scale": 8.0, "per_class": 3},),
    "proxy_nca_pp": ({"temperature": 0.7, "per_class": 3},),
    "ranked_list": ({"radius": 1.5, "margin": 0.8, "temperature": 3.0, "balance": 0.4},),
    "soft_triple": (
        {"per_class": 3, "scale": 5.0, "delta": 0.2, "gamma": 0.5, "tau": 0.7},
        {"per_class": 2, "similarity": "max"},
        {"per_class": 3, "similarity": "mean"},
        {"per_class": 1},
    ),
    "supcon": ({"temperature": 0.5},),
    "triplet": (
        {"squared": False, "margin": 0.5},
        {"over": "all"},
        {"mining": "semi_hard", "margin": 0.6},
        {"mining": "semi_hard", "squared": False, "over": "all"},
        {"mining": "hard"},
        {"mining": "hard", "over": "all", "squared": False},
        {"swap": True, "squared": False, "margin": 0.5},
        {"swap": True, "mining": "hard", "over": "all"},
        {"smooth": True, "squared": False},
        {"swap": True, "smooth": True, "mining": "semi_hard", "margin": 0.6},
    ),
}

LARGE = {
    "angular": {"angle": 80.0},
    "arcface": {"scale": 100.0},
    "circle": {"margin": 0.4, "gamma": 1000.0},
    "contrastive": {},
    "cosface": {"scale": 100.0},
    "fast_ap": {},
    "lifted": {},
    "margin": {},
    "mpa": {"alpha": 100.0, "gamma": 0.01, "per_class": 2},
    "mpa_ap": {"alpha": 100.0, "gamma": 0.01, "per_class": 2},
    "mpa_dw": {"alpha": 100.0, "gamma": 0.01, "per_class": 2},
    "multi_similarity": {"alpha": 100.0, "beta": 100.0},
    "n_pair": {},
    "nca": {"scale": 50.0},
    "norm_softmax": {"temperature": 0.01},
    "nt_xent": {"temperature": 0.01},
    "proxy_anchor": {"alpha": 100.0},
    "proxy_gml": {"scale": 100.0, "per_class": 3},
    "proxy_nca": {"scale": 100.0},
    "proxy_nca_pp": {"temperature": 0.01},
    "ranked_list": {"temperature": 100.0},
    "soft_triple": {"scale": 100.0, "gamma": 0.01, "per_class": 2},
    "supcon": {"temperature": 0.01},
    "triplet": {},
}

# The published settings that are the defaults: of the paper, or of its authors' code if the paper states none.
MPA_PUBLISHED = {"alpha": 32, "delta": 0.1, "gamma": 0.1, "tau": 0.2, "similarity": "soft", "per_class": 10}

PUBLISHED = {
    "angular": {"angle": 45},
    "arcface": {"scale": 64, "margin": 0.5, "per_class": 1},
    "circle": {"margin": 0.25, "gamma": 256},
    "contrastive": {"form": "c2", "margin": 0.5, "reduce": "mean", "mining": "all"},
    "cosface": {"scale": 64, "margin": 0.35, "per_class": 1},
    "fast_ap": {"bins": 10},
    "lifted": {"margin": 1, "smooth": True},
    "margin": {"margin": 0.2, "boundary": 1.2, "nu": 0, "sampling": "distance", "cutoff": 0.5, "upper": 1.4},
    "mpa": MPA_PUBLISHED,
    "mpa_ap": MPA_PUBLISHED,
    "mpa_dw": MPA_PUBLISHED,
    "multi_similarity": {"alpha": 2, "beta": 50, "base": 0.5, "epsilon": 0.1, "mining": True},
    "n_pair": {"norm": 0.002},
    "nca": {"scale": 1},
    "norm_softmax": {"temperature": 0.05, "smoothing": 0, "per_class": 1},
    "nt_xent": {"temperature": 0.1},
    "proxy_anchor": {"alpha": 32, "delta": 0.1, "positives": "batch", "per_class": 1, "speed": 100},
    "proxy_gml": {"ratio": 0.05, "scale": 1, "weight": 0.3, "per_class": 12},
    "proxy_nca": {"scale": 1, "per_class": 1, "speed": 1},
    "proxy_nca_pp": {"temperature": 1 / 9, "per_class": 1},
    "ranked_list": {"radius": 1.2, "margin": 0.4, "temperature": 10, "balance": 1},
    "soft_triple": {"scale": 20, "delta": 0.01, "gamma": 0.1, "tau": 0.2, "similarity": "soft", "per_class": 10},
    "supcon": {"temperature": 0.1},
    "triplet": {"margin": 0.2, "squared": True},
}
