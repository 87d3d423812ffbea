"""PROFS by plain loops in float64, from the paper only (Can, Gürbüz, Alatan: Deep Metric Learning with Alternating
Projections onto Feasible Sets). Vectors are lists (tensors are converted).

From the paper: the steps of a projection, §5.4; batches, representatives and the anchor of the weights, Algorithm 1;
the objectives, Eq. 3.1–3.3, 4.6 and §3; terms left out of them, §5.3; hard pairs, §5.3; hard negative classes, §4.
Lifted structure, N-pair and angular loss follow their own papers (Oh Song 2016; Sohn 2016; Wang 2017).

Readings
 1. M = ⌈ρ / p⌉ with p = B/(I·L), exactly (ρ as its binary value).
 2. A batch has B/I classes; of each the representative, once, before the other rows of the class, and I − 1 other
    images of it. If a class has fewer than I, some image is repeated; which one is not checked. Which row belongs to
    which image is read from the batch, not from its layout.
 3. Representatives and θ⁽ᵏ⁾ change together, before steps 0, M, 2M …; θ⁽ᵏ⁾ is the current network, so the pull is 0 at
    the first step of each projection. λ multiplies ½‖θ⁽ᵏ⁾ − θ‖² (Eq. 4.6, §5.2; Eq. 4.7 and Algorithm 1 print none).
    Whether a representative may be drawn again is open (§4 asks for disjoint sets, then for random ones).
 4. A pair is (representative r, any other row j), as (l, j) ∈ Y × N in Eq. 4.6: two representatives form two pairs, one
    from each side. Never a row with itself; a representative and a copy of its own image in another row are positive.
 5. Contrastive, margin: all such pairs, |P| their number (with mining: after it). ε of the margin loss is that of the
    representative's class if there is one per class.
 6. Triplet: the representative is i of (i, j⁺, j⁻): so both distances have it on one side. |T| counts all triplets;
    `over="nonzero"` those that are not 0.
 7. Lifted: positive pairs (r, j) once; of r all negatives in the batch, of j the negatives that are representatives.
 8. N-pair, angular ("consistent with PROFS" as they are): the representatives are the "positives" x⁺ of the N-pair
    batch; each other row i is compared with its own and with those of the other classes, which are its negatives. One
    term per row that is not a representative. In the angular loss a and p are treated alike, and the third side is of
    two representatives. `anchors="representatives"` (N-pair only) compares r with its positives and all rows of other
    classes. The norm term of N-pair is of the rows that take part: non-representatives and representatives.
 9. Hard pairs: for each representative as many negatives as it has positives in the batch, the nearest, including other
    representatives; ties go to the first rows. Triplets: the farthest positive with the nearest negative, the next with
    the next.
10. Hard classes: N = B/I classes per batch; ⌈N/2⌉ are drawn, then each drawn class in the order of the draw adds the
    nearest class (by the stored embeddings) that is not in the batch yet, until there are N; ties go to the lowest. A
    class never embedded is no candidate and adds none. Missing classes are drawn: `spare` in order.
11. The stored embedding of a class stays when its representative changes, until the new one is embedded
    (`forget=False`); `forget=True` empties all at a new projection: "a representative never embedded yet is not a
    candidate".
12. The space is an argument: distances and inner products are of the projected vectors.
"""

import math
from fractions import Fraction

import torch
from oracles import dot, hinge, log1p_sum, log_sum, mean, point


def lists(a):
    return a.tolist() if hasattr(a, "tolist") else a


def projection_steps(rho, I, L, B):  # noqa: E741
    """M of §5.4."""
    return math.ceil(Fraction(rho) * I * L / B)


# ---------------------------------------------------------------------------------------------- batches


def faults(batch, labels, representatives, I):  # noqa: E741
    """What is wrong with a batch of indices, in words; `representatives[c]` is an index (reading 2)."""
    batch, labels, representatives = lists(batch), lists(labels), lists(representatives)
    found, classes = [], []
    for i in batch:
        if labels[i] not in classes:
            classes.append(labels[i])
    if len(classes) * I != len(batch):
        found.append(f"{len(classes)} classes in a batch of {len(batch)}, {I} images per class")
    for c in classes:
        mine = [i for i in batch if labels[i] == c]
        own, images = representatives[c], [i for i in range(len(labels)) if labels[i] == c]
        if len(mine) != I:
            found.append(f"{len(mine)} images of class {c}")
        if mine[0] != own:
            found.append(f"class {c} begins with image {mine[0]}, its representative is {own}")
        if len(set(mine)) != len(mine) and len(images) >= I:
            found.append(f"class {c} repeats an image and has others")
    return found


def representative_rows(batch, labels, representatives):
    """The rows of a batch that are representatives: of each class the first that is its representative's image."""
    batch, labels, representatives = lists(batch), lists(labels), lists(representatives)
    rows, met = [], set()
    for row, i in enumerate(batch):
        if representatives[labels[i]] == i and labels[i] not in met:
            rows.append(row)
            met.add(labels[i])
    return rows


def hard_classes(drawn, embeddings, count, spare=()):
    """The classes of a batch, the drawn ones first (reading 10); `embeddings[c]` is a vector or None."""
    embeddings = [None if v is None else lists(v) for v in lists(embeddings)]
    classes = list(lists(drawn))
    for d in lists(drawn):
        if len(classes) == count:
            break
        candidates = [c for c in range(len(embeddings)) if embeddings[c] is not None and c not in classes]
        if embeddings[d] is not None and candidates:
            classes.append(min(candidates, key=lambda c: (math.dist(embeddings[d], embeddings[c]), c)))
    for c in lists(spare):
        if len(classes) < count and c not in classes:
            classes.append(c)
    return classes


class Kept:
    """The last embedding of each class's representative, None if there is none yet."""

    def __init__(self, classes, forget=False):
        self.vectors, self.forget = [None] * classes, forget

    def store(self, x, y, rows):
        """After a step: the embeddings of the batch's representatives."""
        for r in rows:
            self.vectors[lists(y)[r]] = list(lists(x)[r])

    def redrawn(self):
        """There are new representatives."""
        if self.forget:
            self.vectors = [None] * len(self.vectors)


# ---------------------------------------------------------------------------------------------- pairs


def pairs(y, rows):
    """All (r, j, positive?) of a batch with the representatives at `rows` (reading 4)."""
    y = lists(y)
    return [(r, j, y[r] == y[j]) for r in rows for j in range(len(y)) if j != r]


def hard_pairs(x, y, rows, space="cosine"):
    """The pairs after mining (reading 9)."""
    x, y = [point(v, space) for v in lists(x)], lists(y)
    out = []
    for r in rows:
        same = [j for j in range(len(y)) if y[j] == y[r] and j != r]
        other = [j for j in range(len(y)) if y[j] != y[r]]
        hardest = sorted(other, key=lambda j: (math.dist(x[r], x[j]), j))[: len(same)]
        out += [(r, j, True) for j in same] + [(r, j, False) for j in hardest]
    return out


def chosen_pairs(x, y, rows, mining, space):
    return hard_pairs(x, y, rows, space) if mining == "hard" else pairs(y, rows)


def as_anchors(x, y, rows):
    """The batch as the arguments of the oracles of losses, the representatives being the samples."""
    x, y = lists(x), lists(y)
    own = [rows.index(j) if j in rows else -1 for j in range(len(y))]
    return [x[r] for r in rows], [y[r] for r in rows], x, y, own


def as_references(x, y, rows, others_only=False):
    """The same, the representatives being the references and all rows (or all others) the samples."""
    x, y = lists(x), lists(y)
    samples = [i for i in range(len(y)) if not (others_only and i in rows)]
    own = [samples.index(r) if r in samples else -1 for r in rows]
    return [x[i] for i in samples], [y[i] for i in samples], [x[r] for r in rows], [y[r] for r in rows], own


# ---------------------------------------------------------------------------------------------- objectives


def projection(x, y, rows, *, positive, negative, space="cosine"):
    """The sum of Eq. 4.6 over the batch: ε⁺ and ε⁻ are `positive` and `negative`."""
    v = [point(a, space) for a in lists(x)]
    out = 0.0
    for r, j, same in pairs(y, rows):
        d = math.dist(v[r], v[j])
        out += hinge(d - positive) if same else hinge(negative - d)
    return out


def contrastive(x, y, rows, *, margin, mining="all", space="cosine"):
    """Eq. 3.1; ε is `margin`."""
    v = [point(a, space) for a in lists(x)]
    terms = []
    for r, j, same in chosen_pairs(x, y, rows, mining, space):
        d = math.dist(v[r], v[j])
        terms.append(d**2 if same else hinge(margin - d) ** 2)
    return mean(terms)


def margin(x, y, rows, *, delta, boundary, mining="all", over="all", space="cosine"):
    """Eq. 3.3; ε is `boundary`, a number or one per class."""
    v, y = [point(a, space) for a in lists(x)], lists(y)
    terms = []
    for r, j, same in chosen_pairs(x, y, rows, mining, space):
        d, e = math.dist(v[r], v[j]), boundary[y[r]] if isinstance(boundary, (list, tuple)) else boundary
        terms.append(hinge(d - e + delta) if same else hinge(e + delta - d))
    return mean(t for t in terms if t > 0 or over == "all")


def triplet(x, y, rows, *, margin, mining="all", over="all", squared=True, space="cosine"):
    """Eq. 3.2; ε is `margin`."""
    v, y = [point(a, space) for a in lists(x)], lists(y)
    terms = []
    for r in rows:
        u = [math.dist(v[r], a) ** (2 if squared else 1) for a in v]
        same = [j for j in range(len(y)) if y[j] == y[r] and j != r]
        other = [j for j in range(len(y)) if y[j] != y[r]]
        triplets = [(j, k) for j in same for k in other]
        if mining == "hard":
            hardest = [j for a, j, alike in hard_pairs(x, y, rows, space) if a == r and not alike]
            triplets = list(zip(sorted(same, key=lambda j: (-u[j], j)), hardest, strict=False))
        if mining == "semi_hard":
            triplets = [(j, k) for j, k in triplets if u[j] < u[k] < u[j] + margin]
        terms += [hinge(u[j] - u[k] + margin) for j, k in triplets]
    return mean(t for t in terms if t > 0 or over == "all")


def lifted(x, y, rows, *, margin, smooth=True, space="euclidean"):
    """Lifted structure without the terms of two rows that are not representatives (§5.3); α is `margin`."""
    v, y = [point(a, space) for a in lists(x)], lists(y)
    terms = []
    for r, j, same in pairs(y, rows):
        if same:
            reach = [margin - math.dist(v[r], v[k]) for k in range(len(y)) if y[k] != y[r]]
            reach += [margin - math.dist(v[j], v[k]) for k in rows if y[k] != y[j]]
            J = (log_sum(reach) if smooth else max(reach)) + math.dist(v[r], v[j]) if reach else -math.inf
            terms.append(hinge(J) ** 2)
    return mean(terms) / 2


def n_pair(x, y, rows, *, norm=0.0, anchors="samples", space="inner"):
    """log(1 + Σ_k exp(xᵀv_k − xᵀv⁺)), the mean over positive pairs."""
    v, y = [point(a, space) for a in lists(x)], lists(y)
    others = [i for i in range(len(y)) if i not in rows]
    terms = []
    for r in rows:
        for i in (i for i in others if y[i] == y[r]):
            if anchors == "samples":
                terms.append(log1p_sum(dot(v[i], v[k]) - dot(v[i], v[r]) for k in rows if y[k] != y[i]))
            else:
                rivals = [k for k in range(len(y)) if y[k] != y[r]]
                terms.append(log1p_sum(dot(v[r], v[k]) - dot(v[r], v[i]) for k in rivals))
    return mean(terms) + norm / 2 * (mean(dot(v[i], v[i]) for i in others) + mean(dot(v[r], v[r]) for r in rows))


def angular(x, y, rows, *, angle, n_pair_weight=0.0, space="cosine"):
    """log(1 + Σ_k exp(4 tan²α (x + v⁺)ᵀv_k − 2(1 + tan²α) xᵀv⁺)), the mean over positive pairs; α is `angle`°."""
    v, y = [point(a, space) for a in lists(x)], lists(y)
    t = math.tan(math.radians(angle)) ** 2
    terms = []
    for r in rows:
        for i in range(len(y)):
            if y[i] == y[r] and i not in rows:
                f = [
                    4 * t * (dot(v[i], v[k]) + dot(v[r], v[k])) - 2 * (1 + t) * dot(v[i], v[r])
                    for k in rows
                    if y[k] != y[i]
                ]
                terms.append(log1p_sum(f))
    return mean(terms) + n_pair_weight * n_pair(x, y, rows, space=space)


# ---------------------------------------------------------------------------------------------- Algorithm 1


def pull(gradient, theta, anchor, weight):
    """∇ of λ/2 ‖θ⁽ᵏ⁾ − θ‖² added, on flat lists."""
    return [g + weight * (t - a) for g, t, a in zip(lists(gradient), lists(theta), lists(anchor), strict=True)]


class Run:
    """Algorithm 1 with f(x; θ) = θx and plain gradient descent; `objective(x, y, rows)` is of tensors."""

    def __init__(self, theta, *, steps, objective, weight=1e-3, lr=0.1):
        self.theta = torch.tensor(lists(theta), dtype=torch.float64)  # [D, inputs]
        self.M, self.objective, self.weight, self.lr = steps, objective, weight, lr
        self.t, self.k = 0, -1

    def step(self, inputs, y, rows):
        """One batch; at steps 0, M, 2M … θ⁽ᵏ⁾ is taken first. The loss without the pull, before the step."""
        if self.t % self.M == 0:
            self.anchor, self.k = self.theta.clone(), self.k + 1
        theta = self.theta.clone().requires_grad_()
        loss = self.objective(torch.tensor(lists(inputs), dtype=torch.float64) @ theta.T, lists(y), rows)
        (g,) = torch.autograd.grad(loss, theta)
        flat = pull(g.flatten(), self.theta.flatten(), self.anchor.flatten(), self.weight)
        self.theta = self.theta - self.lr * torch.tensor(flat, dtype=torch.float64).reshape(g.shape)
        self.t += 1
        return loss.item()
