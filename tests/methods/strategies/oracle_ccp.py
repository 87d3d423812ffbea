"""CCP by plain loops in float64, from the paper and the notes on its authors' code (Gürbüz, Can, Alatan: Deep Metric
Learning with Chance Constraints). Vectors are lists (tensors are converted).

From the paper: the greedy choice, Algorithm 2; the alternation and its gradients, Algorithm 1 and Eq. 14; the loss of
the toy run, Eq. 5 with the averages of Algorithm 1; the normalisation, §IV-D; covering radius and inter-class distance,
§V-B and Figs. 2, 3, 10. From the authors' code: the seeds, the snapshots, when it alternates (readings 6 to 9).

Readings
 1. Algorithm 2 for one class: q = argmax over the remaining pool of the smallest distance to the old proxies and
    earlier picks; ties go to the first in the pool. K picks replace all K. Picks are identified by position in the
    pool, not by value. If the pool is exhausted (b < K) it is used again: then all are at distance 0 and the first is
    picked, which only shows that K picks are always made.
 2. Distances are between the vectors passed in: the authors' code gives raw embeddings and raw proxies, before the
    normalisation to the ball; the text writes f(s; θ) without saying.
 3. First draw: the text seeds with random samples, the code with the zero vector (the first pick is the one of largest
    norm). Seeds are an argument.
 4. Covering radius: "we take k samples with minimum cover for k ∈ [n] … then the average of these radii". The cover of
    k samples is the largest distance of any sample of the class to its nearest of the k. `exact=True` finds the k best
    by trying all; else greedy: the best one for k = 1, then always the farthest sample (ties go to the first). Averaged
    over k = 1 … n for a class (the last is 0), then over classes with equal weight.
 5. Mean inter-class distance: over all pairs of samples of different classes, with equal weight.
 6. Patience: a score is an improvement if it is above the best *of this sub-problem* by more than `least` (1e-5 in the
    code, of scores in [0, 1]). The first score of a sub-problem always is. The `patience`-th score in a row without an
    improvement ends the sub-problem, so it lasts at least patience + 1 checks. NaN is no improvement.
 7. At an improvement θ and ρ are copied. At the end of a sub-problem θ* := the copied θ, seeds := the copied ρ, the
    best score is reset; θ itself is not rolled back, and the pool is embedded with the current θ.
 8. λ is 0 in the first sub-problem, then constant. The text has λ throughout, with a random θ* in the first.
 9. The pull λ(θ − θ*) is on the network only, never on the proxies; it is added to the gradient before the optimiser.
10. The loss averages over all m·|ρ| pairs (Algorithm 1); every proxy takes part in every step. Embeddings and proxies
    are projected into the ball in the loss; the stored proxy stays raw.
11. Samples instead of proxies (§V-B) are not implemented here.
"""

import itertools
import math

import torch
from oracles import mean


def lists(a):
    return a.tolist() if hasattr(a, "tolist") else a


# ---------------------------------------------------------------------------------------------- Algorithm 2


def k_center(pool, seeds, K):
    """Positions in the pool of the K picks, in order."""
    pool, seeds = lists(pool), lists(seeds)
    taken = []
    for _ in range(K):
        free = [u for u in range(len(pool)) if u not in taken] or list(range(len(pool)))
        best, farthest = None, -math.inf
        for u in free:
            near = min((math.dist(pool[u], v) for v in [*seeds, *(pool[r] for r in taken)]), default=math.inf)
            if near > farthest:
                best, farthest = u, near
        taken.append(best)
    return taken


def redraw(pool, pool_labels, proxies, proxy_labels):
    """Algorithm 2: new vectors for all proxies, class by class, in the order of the picks."""
    pool, pool_labels = lists(pool), lists(pool_labels)
    proxies, proxy_labels = lists(proxies), lists(proxy_labels)
    new = [None] * len(proxies)
    for c in sorted(set(proxy_labels)):
        mine = [i for i in range(len(pool)) if pool_labels[i] == c]
        slots = [j for j in range(len(proxies)) if proxy_labels[j] == c]
        picks = k_center([pool[i] for i in mine], [proxies[j] for j in slots], len(slots))
        for j, pick in zip(slots, picks, strict=True):
            new[j] = list(pool[mine[pick]])
    return new


# ---------------------------------------------------------------------------------------------- geometry


def cover(points, chosen):
    """The largest distance of a point to its nearest chosen one."""
    return max(min(math.dist(p, points[c]) for c in chosen) for p in points)


def covering_radii(points, exact=False):
    """The radius of the cover by k of the points, for k = 1 … n."""
    points, n = lists(points), len(lists(points))
    if exact:
        return [min(cover(points, s) for s in itertools.combinations(range(n), k)) for k in range(1, n + 1)]
    chosen = [min(range(n), key=lambda c: cover(points, [c]))]
    radii = [cover(points, chosen)]
    for _ in range(n - 1):
        distance = [min(math.dist(p, points[c]) for c in chosen) for p in points]
        free = [i for i in range(n) if i not in chosen]
        chosen.append(max(free, key=lambda i: distance[i]))
        radii.append(cover(points, chosen))
    return radii


def covering_radius(x, y, exact=False):
    """The mean over k of the radii of a class, the mean over classes of that."""
    x, y = lists(x), lists(y)
    return mean(mean(covering_radii([x[i] for i in range(len(y)) if y[i] == c], exact)) for c in sorted(set(y)))


def inter_class_distance(x, y):
    """The mean distance of two samples of different classes."""
    x, y = lists(x), lists(y)
    pairs = itertools.combinations(range(len(y)), 2)
    return mean(math.dist(x[i], x[j]) for i, j in pairs if y[i] != y[j])


# ---------------------------------------------------------------------------------------------- Algorithm 1


class Patience:
    """When a sub-problem has converged, from the scores of its checks."""

    def __init__(self, patience=3, least=1e-5):
        self.patience, self.least = patience, least
        self.best, self.stale, self.problem = -math.inf, 0, 0

    def check(self, score):
        """ "better", "stale" or "renew"; after "renew" the next sub-problem has started."""
        if score > self.best + self.least:
            self.best, self.stale = score, 0
            return "better"
        self.stale += 1
        if self.stale < self.patience:
            return "stale"
        self.best, self.stale, self.problem = -math.inf, 0, self.problem + 1
        return "renew"


def pull(gradient, theta, anchor, weight):
    """g_θ ← g_θ − λ(θ* − θ), on flat lists."""
    return [g - weight * (a - t) for g, t, a in zip(lists(gradient), lists(theta), lists(anchor), strict=True)]


def generalised_contrastive(x, y, proxies, proxy_labels, *, alpha=0.2, beta=0.6):
    """1/(m|ρ|) Σ (ι(‖ρ_i − f(x_j)‖ − β) + α)₊ (Eq. 5, Algorithm 1), in the ball; tensors, for their gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(x)):
        for j in range(len(proxies)):
            a, b = (v / v.norm() if v.norm() > 1 else v for v in (x[i], proxies[j]))
            sign = 1.0 if y[i] == proxy_labels[j] else -1.0
            total = total + (sign * ((a - b).norm() - beta) + alpha).clamp_min(0)
    return total / (len(x) * len(proxies))


class Run:
    """Algorithm 1 with f(x; θ) = θx and plain gradient descent.

    `draw(θ)` where the first proxies are wanted, `step` per batch, `check` per score. `lengths` are the steps of the
    sub-problems that are over."""

    def __init__(
        self,
        theta,
        classes,
        *,
        per_class,
        weight=2e-4,
        lr=0.1,
        patience=3,
        least=1e-5,
        objective=generalised_contrastive,
    ):
        self.theta = torch.tensor(lists(theta), dtype=torch.float64)  # [D, inputs]
        self.labels = [c for c in range(classes) for _ in range(per_class)]  # class c owns rows cK … cK + K − 1
        self.weight, self.lr, self.objective = weight, lr, objective
        self.patience = Patience(patience, least)
        self.anchor, self.kept_theta, self.kept_proxies = None, None, None
        self.steps, self.lengths = 0, []

    def embed(self, inputs):
        return (torch.tensor(lists(inputs), dtype=torch.float64) @ self.theta.T).detach()

    def draw(self, pool, pool_labels, seeds):
        """New proxies from the pool's inputs, seeded with `seeds` [|ρ|, D]."""
        picks = redraw(self.embed(pool), pool_labels, seeds, self.labels)
        self.proxies = torch.tensor(picks, dtype=torch.float64)

    def step(self, inputs, y):
        """One batch: g_θ with the pull, g_ρ without; the loss before the step."""
        theta, proxies = self.theta.clone().requires_grad_(), self.proxies.clone().requires_grad_()
        inputs = torch.tensor(lists(inputs), dtype=torch.float64)
        loss = self.objective(inputs @ theta.T, lists(y), proxies, self.labels)
        g_theta, g_proxies = torch.autograd.grad(loss, (theta, proxies))
        if self.anchor is not None:  # reading 8: there is none in the first sub-problem
            flat = pull(g_theta.flatten(), self.theta.flatten(), self.anchor.flatten(), self.weight)
            g_theta = torch.tensor(flat, dtype=torch.float64).reshape(g_theta.shape)
        self.theta, self.proxies = self.theta - self.lr * g_theta, self.proxies - self.lr * g_proxies
        self.steps += 1
        return loss.item()

    def check(self, score, pool, pool_labels):
        """After a score: keep, wait, or take the next sub-problem with proxies from the pool's inputs."""
        what = self.patience.check(score)
        if what == "better":
            self.kept_theta, self.kept_proxies = self.theta.clone(), self.proxies.clone()
        if what == "renew":
            self.anchor = self.kept_theta
            self.draw(pool, pool_labels, self.kept_proxies)
            self.lengths.append(self.steps - sum(self.lengths))
        return what
