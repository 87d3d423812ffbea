"""VCPA. Kim, Guerrero, Pham, Pavlovic: Variational Continual Proxy-Anchor for Deep Metric Learning. AISTATS 2022.

Each proxy is a Gaussian, carried from batch to batch as in continual learning; the loss uses a sample of it.

    L_PA(B) = 1/|C| Σ_j { log(1 + Σ_{x∈B_j⁺} e^{α(δ − s(x, p_j))}) + log(1 + Σ_{x∈B_j⁻} e^{α(s(x, p_j) + δ)}) }    (4)
    min_{μ,σ}  KL(q_t ‖ q_{t−1}) + 1/τ E_{q_t}[L_PA(B_t)]                                                        (12)
    μ ← μ − g_μ/H_μ,   σ ← σ − g_σ/H_σ                                                                           (13)
    KL = Σ_j ½ 1ᵀ(σ²/σ'² + (μ − μ')²/σ'² − 2 log(σ/σ') − 1)                                                  (15, 16)
    p̂_j = μ_j + σ_j ε_j,  ε_j ~ N(0, I)                                                                         (20)
    ∇_μ KL = (μ − μ')/σ'²,   ∇_σ KL = σ/σ'² − 1/σ                                                                (21)
    ∇²_μ KL = 1/σ'²,         ∇²_σ KL = 1/σ'² + 1/σ²                                                              (22)
    h_j⁺(x) = e^{α(δ − s(x, p̂_j))},   h_j⁻(x) = e^{α(s(x, p̂_j) + δ)}                                            (23)
    ∇_p̂ L_PA  = α/(|C|‖p̂_j‖) (G_j⁻ − G_j⁺),   G_j^± = Σ_x h_j^±(x) f(x) / (1 + Σ_x h_j^±(x))                     (24)
    ∇²_p̂ L_PA = α²/(|C|‖p̂_j‖²) Σ_± {Σ_x h_j^±(x) f(x)² / (1 + Σ_x h_j^±(x)) − (G_j^±)²}                         (25)
    ∇_μ = ∇_p̂,  ∇_σ = ε ∇_p̂,  ∇²_μ = ∇²_p̂,  ∇²_σ = ε² ∇²_p̂   of L_PA                                        (26, 27)
    g = ∇ KL + 1/τ ∇ L_PA,   H = ∇² KL + 1/τ ∇² L_PA                                                         (28, 29)
    σ̄_j = Tr(std({p̂_jᵏ/‖p̂_jᵏ‖}_{k=1…K}))                                                                       (30)

Symbols
    q_t = Π_j N(p_j; μ_j, σ_j²) over the proxies of C; μ, σ of this batch, μ', σ' of the last; B_j⁺, B_j⁻ the batch's
    samples of j's class and of other classes; f(x) unit embedding; s cosine; τ weight of the KL (`tau`); M steps per
    batch (`steps`); σ_min (`sigma_min`); σ̄ the uncertainty of a class. Squares, products, quotients are element-wise.

Algorithm
    0  μ⁰ = 0, σ⁰ = 1, in buffers, so that `groups` does not list them
    1  loss         warm start (μ, σ) = (μ', σ')
    2  loss         M times: p̂ by a fresh ε; Eq. 13 with τ·KL + L_PA on detached embeddings; σ ← max(σ, σ_min)
    3  loss         L_PA of the batch at one more fresh p̂, which moves θ
    4  after_step   (μ', σ') = (μ, σ)
    Without Newton (`newton=False`; SOP, In-Shop) step 2 is M Adam steps on τ·KL + L.

Settings
    τ = 0.01 (CUB, Cars; the text also says 0.001 for Cars), 0.001 (SOP, In-Shop); M = 10, σ_min = 1e-5, α = 32,
    δ = 0.1, AdamW 1e-4 (SOP, In-Shop 6e-4), weight decay 1e-4, batch 180, 512-d, 60 epochs (Cars, SOP 100),
    learning rate halved every 10 (CUB) or 20 epochs, × 0.25 every 20 (In-Shop).

Departures
    H is at least `damping`: with τ → 0 it can vanish. τ = 0 leaves the KL out, and σ then moves by L_PA only.
    ‖p̂‖ is at least 1e-6, as everywhere here: without sampling p̂ = μ⁰ = 0 in the first step.
    `positives="batch"` divides the positive sum by the proxies that have a positive in the batch, as Proxy-Anchor's
    code does, in every equation; "all" is Eq. 4. It replaces that option of the inner loss.
    The paper prints no first-order form. A single gradient step from the warm start would ignore the KL, whose gradient
    is 0 there; hence M steps, with ‖p̂‖ free and Adam's moments kept from batch to batch, at the rate that proxies have
    in Proxy-Anchor's code: the run's, times their `speed` of 100, with its schedule (`lr`: a rate of its own).
    `steps=1` is possible.
    `per_class` > 1: |C| counts proxies. `sigma` is σ⁰; `initial="means"` of the inner loss makes μ⁰ the class means.
    `samples` > 1 averages derivatives and loss over several ε. In eval mode the loss is taken at μ.
    σ̄ is averaged over the proxies of a class; the standard deviation divides by K − 1.

Relations
    `proxy_updates` moves plain proxies as often, without q; `moco` reduces forgetting by a momentum network.
    With `sample=False` and τ = 0 the Newton form is `proxy_updates(order=2)` from μ⁰.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from nearkin import ranks
from nearkin.errors import NearkinError
from nearkin.methods.base import Loss, Step, Strategy
from nearkin.methods.losses.proxy_anchor import ProxyAnchor
from nearkin.methods.strategies.inner_loss import inner_proxies, objective_at, require_proxies
from nearkin.methods.strategies.proxy_steps import NEEDS_RATE, InnerAdam, hold, keep
from nearkin.space import Space

LEAST = 1e-6  # ‖p̂‖, as in `Space.project`
BLOCK = {"cpu": 2**17}  # numbers of [P, D] at a time: fits in a CPU's cache; elsewhere few launches matter more
LARGE_BLOCK = 2**23


class Gaussian(NamedTuple):
    """q: one Gaussian per proxy with independent dimensions."""

    mu: Tensor  # [P, D]
    sigma: Tensor  # [P, D]


class Slopes(NamedTuple):
    """First and second derivatives by μ and σ, [P, D] each; the second are the diagonal of the Hessian."""

    g_mu: Tensor
    g_sigma: Tensor
    H_mu: Tensor
    H_sigma: Tensor


class Batch(NamedTuple):
    """Inputs to the derivatives of L_PA. The row of zeros before the samples is the 1 in 1 + Σ h.

    More rows of zeros follow the samples, none of them in a sum: products are faster if N is a multiple of 8.
    """

    f: Tensor  # [N, D] unit embeddings
    squares: Tensor  # [N, D]
    # [2, P, N] αδ for x in B_j⁺, then in B_j⁻; −inf for the others; 0 for the 1; [N] if no B_j⁺ has any
    offsets: Tensor
    signs: Tensor  # [2, 1, 1] −1, 1
    share: Tensor  # |C| over the divisor of the positive sum
    alpha: float
    proxies: int  # |C|

    def at(self, y: Tensor, labels: Tensor) -> "Batch":
        """For proxies with `labels` [P], some of them of the samples' classes y [B]."""
        same = labels[:, None] == y
        rest = (1, len(self.f) - len(y) - 1)
        inside = torch.nn.functional.pad(torch.stack([same, ~same]), rest, value=True)
        return self._replace(offsets=torch.where(inside, self.offsets, -torch.inf))


def kl(q: Gaussian, last: Gaussian) -> Tensor:
    """KL(q ‖ last), summed over proxies and dimensions."""
    ratio, moved = q.sigma / last.sigma, (q.mu - last.mu) / last.sigma
    return 0.5 * (ratio.square() + moved.square() - 2 * ratio.log() - 1).sum()  # Eq. 15, 16


def draw(q: Gaussian, eps: Tensor) -> Tensor:
    """p̂ [P, D] from noise of N(0, I)."""
    return torch.addcmul(q.mu, q.sigma, eps)  # Eq. 20


def kl_slopes(q: Gaussian, mean: Tensor, precision: Tensor) -> Slopes:
    """Derivatives of the KL to a Gaussian with the given mean and precision 1/σ'²."""
    inverse = q.sigma.reciprocal()
    g_mu, g_sigma = (q.mu - mean) * precision, q.sigma * precision - inverse  # Eq. 21
    return Slopes(g_mu, g_sigma, precision, torch.addcmul(precision, inverse, inverse))  # Eq. 22


def negatives_batch(
    f: Tensor,
    y: Tensor,
    labels: Tensor,
    *,
    alpha: float,
    delta: float,
    positives: Literal["all", "batch"] = "all",
    whole: int = 0,
) -> Batch:
    """The Batch of unit embeddings f [B, D] for those of the proxies with `labels` [P] that have no positive.

    `whole` is the number of proxies on all ranks, if each has only some of them.
    """
    rest = -(len(y) + 1) % 8
    f, P = torch.nn.functional.pad(f, (0, 0, 1, rest)), whole or len(labels)
    offsets = torch.nn.functional.pad(f.new_full((len(y),), alpha * delta), (1, 0))
    offsets = torch.nn.functional.pad(offsets, (0, rest), value=-torch.inf)
    ordered = y.sort().values
    present = ordered[torch.searchsorted(ordered, labels).clamp_max(len(y) - 1)] == labels
    with_positive = present.sum(dtype=f.dtype)
    with_positive = (ranks.total(with_positive) if whole else with_positive).clamp_min(1)
    share = P / with_positive if positives == "batch" else torch.ones_like(with_positive)
    signs = torch.arange(-1, 2, 2, device=f.device, dtype=f.dtype)[:, None, None]
    return Batch(f, f.square(), offsets, signs, share, alpha, P)


def anchor_slopes(p: Tensor, b: Batch) -> tuple[Tensor, Tensor]:
    """Gradient and diagonal Hessian [P, D] of L_PA by proxies p, with their norms held constant."""
    k = b.alpha / vector_norm(p, dim=1, keepdim=True).clamp_min(LEAST)
    if b.offsets.ndim == 1:
        h = torch.softmax(torch.addcmul(b.offsets, k, p @ b.f.T), -1)  # as below with h⁺ = 0 for all samples
        gradient = h @ b.f
        spread = torch.addcmul(h @ b.squares, gradient, gradient, value=-1)
        return k / b.proxies * gradient, k * k / b.proxies * spread
    h = torch.softmax(torch.addcmul(b.offsets, b.signs, k * (p @ b.f.T)), -1)  # Eq. 23, over 1 + Σ h
    G = (h.flatten(0, 1) @ b.f).view(2, *p.shape)  # Eq. 24, G⁺ and G⁻ in one product
    squares = torch.addcmul(h[1], h[0], b.share) @ b.squares
    spread = torch.addcmul(squares, G[1], G[1], value=-1) - b.share * G[0] * G[0]
    gradient = torch.addcmul(G[1], G[0], b.share, value=-1)
    return k / b.proxies * gradient, k * k / b.proxies * spread  # Eq. 24, 25


def slopes(q: Gaussian, mean: Tensor, precision: Tensor, eps: Tensor, b: Batch, *, tau: float) -> Slopes:
    """Derivatives of τ·KL + L_PA, averaged over the samples of eps [S, P, D]."""
    terms = []
    for e in eps:
        g, H = anchor_slopes(draw(q, e), b)
        terms.append((g, e * g, H, e * e * H))  # Eq. 26, 27
    loss = Slopes(
        *(values[0] if len(values) == 1 else torch.stack(values).mean(0) for values in zip(*terms, strict=True))
    )
    if tau == 0:
        return loss
    prior = kl_slopes(q, mean, precision)
    return Slopes(*(torch.add(a, c, alpha=tau) for a, c in zip(loss, prior, strict=True)))  # Eq. 28, 29 times τ


def newton_step(
    q: Gaussian,
    mean: Tensor,
    precision: Tensor,
    eps: Tensor,
    b: Batch,
    *,
    tau: float,
    sigma_min: float,
    damping: float,
) -> Gaussian:
    """One step on τ·KL + L_PA with noise eps [S, P, D]; precision is 1/σ'²."""
    g_mu, g_sigma, H_mu, H_sigma = slopes(q, mean, precision, eps, b, tau=tau)
    mu = torch.addcdiv(q.mu, g_mu, H_mu.clamp_min(damping), value=-1)  # Eq. 13
    sigma = torch.addcdiv(q.sigma, g_sigma, H_sigma.clamp_min(damping), value=-1)
    return Gaussian(mu, sigma.clamp_min(sigma_min))


def check_closed_forms(inner: Loss, strategy: str, *, instead: str) -> None:
    """Refuse a loss whose derivatives are not those of Eq. 24 and 25."""
    if not isinstance(inner, ProxyAnchor):
        raise NearkinError(
            f"The Newton steps of {strategy} are closed forms for proxy_anchor and do not fit "
            f"{inner.spec.name or 'this loss'}: {instead}."
        )


def anchor_batch(inner: Loss, x: Tensor, y: Tensor, space: Space) -> Batch:
    """The Batch of embeddings x [B, D], for Newton steps on the proxies of a proxy_anchor that have no positive."""
    assert isinstance(inner, ProxyAnchor)
    if not space.has_unit_norm:
        raise NearkinError(f"Newton steps are closed forms for cosine similarity, not for {space}: set space=cosine.")
    f = space.project(x.detach()).to(inner.proxies.vectors.dtype)
    options = {"alpha": inner.alpha, "delta": inner.delta}
    proxies = inner.proxies
    return negatives_batch(f, y, proxies.labels, positives=inner.positives, whole=proxies.whole, **options)


@cache
def compiled_step() -> Any:
    """`newton_step`, compiled, for a run that compiles its network."""
    return torch.compile(newton_step, dynamic=False)


@torch.no_grad()
def uncertainty(q: Gaussian, *, samples: int = 1000, seed: int = 0) -> Tensor:
    """σ̄ [P], the spread of the directions of each proxy's samples; all proxies use the same noise.

    With a = ‖μ‖/‖p̂‖ and w = a − 1 a sample is at p̂ a − μ = μ w + σ ε a in units of ‖μ‖. Its moments are products of
    matrices; w is small for narrow Gaussians, and everything float64, since a variance is a difference of moments.
    """
    rng = torch.Generator(q.mu.device).manual_seed(seed)
    shape = samples, q.mu.shape[1]
    eps = torch.randn(shape, generator=rng, device=q.mu.device, dtype=q.mu.dtype).double()
    both, rows = torch.cat([2 * eps, eps.square()], 1), max(1, 2**23 // samples)
    spreads = []
    for mu, sigma in zip(torch.split(q.mu.double(), rows), torch.split(q.sigma.double(), rows), strict=True):
        own = mu.square().sum(1, keepdim=True)
        unit = own.clamp_min(LEAST**2)
        grown = (torch.cat([mu * sigma, sigma.square()], 1) @ both.T + (own - unit)) / unit  # ‖p̂‖²/‖μ‖² − 1
        w = torch.expm1(-0.5 * torch.log1p(grown.clamp_min(1e-12 - 1)))
        a = w + 1
        mean = mu * w.mean(1, keepdim=True) + sigma * (a @ eps / samples)
        cross, squares = (w * a) @ both[:, : eps.shape[1]] / samples, a.square() @ both[:, eps.shape[1] :] / samples
        square = mu.square() * w.square().mean(1, keepdim=True) + mu * sigma * cross + sigma.square() * squares
        variance = (square - mean.square()) / unit * (samples / (samples - 1))
        spreads.append(variance.clamp_min(0).sqrt().sum(1))
    return torch.cat(spreads).to(q.mu.dtype)  # Eq. 30


class VCPA(Strategy):
    """Proxy-Anchor with one Gaussian per proxy, moved by Newton steps; or any loss with proxies, by Adam steps."""

    natural_inner = "proxy_anchor"
    per_proxy: ClassVar = {"sigma": 0}
    proxies = inner_proxies  # their vectors are μ
    sigma: Tensor  # [P, D]

    def __init__(
        self,
        inner: Loss,
        *,
        tau: float = 0.01,
        steps: int = 10,
        newton: bool = True,
        samples: int = 1,
        sample: bool = True,
        sigma_min: float = 1e-5,
        sigma: float = 1.0,
        positives: Literal["all", "batch"] = "all",
        damping: float = 1e-8,
        lr: float = 0.0,
    ) -> None:
        super().__init__(inner)
        proxies = require_proxies(inner, "vcpa")
        if newton:
            check_closed_forms(inner, "vcpa", instead="use newton=False")
        if tau < 0 or steps < 1 or samples < 1 or not 0 < sigma_min <= sigma or damping <= 0 or lr < 0:
            raise NearkinError(
                "vcpa: tau and lr are at least 0, steps and samples at least 1, sigma_min and damping above 0, sigma "
                f"at least sigma_min; got {tau=}, {steps=}, {samples=}, {sigma_min=}, {damping=}, {lr=}, {sigma=}."
            )
        if positives == "batch" and not isinstance(inner, ProxyAnchor):
            raise NearkinError(
                f"vcpa: positives=batch applies only to proxy_anchor, not to {inner.spec.name or 'this loss'}: "
                "leave it out."
            )
        if inner.written.options.get("positives", positives) != positives:
            raise NearkinError(
                f"vcpa has its own option positives, {positives!r} here, and its loss another one: write it as "
                f"vcpa(proxy_anchor, positives={inner.written.options['positives']})."
            )
        if isinstance(inner, ProxyAnchor):
            inner.positives = positives
            inner.spec = inner.spec._replace(options={**inner.spec.options, "positives": positives})
        self.tau, self.steps, self.samples, self.sample = tau, steps, samples if sample else 1, sample
        self.bounds = {"sigma_min": sigma_min, "damping": damping}
        hold(proxies, torch.zeros_like(proxies.vectors.detach()))
        self.register_buffer("sigma", torch.full_like(proxies.vectors, sigma))
        self.adam = None if newton else InnerAdam(2, proxies.vectors.shape, lr=lr, factor=proxies.speed)

    @classmethod
    def id_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that decide the id of a run; Newton steps have no rate, and older ids name what it would be."""
        return super().id_options(options) | ({"lr": 0.01} if options["newton"] else {})

    def class_values(self) -> dict[str, Tensor]:
        values = {}
        if self.sample:  # else σ never moved
            spread = uncertainty(Gaussian(self.proxies.vectors, self.sigma))
            of_class = spread.view(-1, self.proxies.per_class).mean(1)
            values = {"uncertainty": ranks.gather(of_class, self.proxies.classes) if self.proxies.whole else of_class}
        return {**super().class_values(), **values}

    def groups(self, lr: float) -> list[dict[str, Any]]:
        if self.adam is not None:
            self.adam.run_lr = lr
        return super().groups(lr)

    def lacks(self, step: Step) -> str:
        known = self.adam is None or self.adam.knows_rate
        return super().lacks(step) or ("" if known else NEEDS_RATE.format("vcpa(newton=False)"))

    def step_kind(self, size: int) -> Hashable | None:
        kind = super().step_kind(size)
        return kind if self.adam is None or kind is None else (kind, self.adam.rate)

    def loss(self, step: Step) -> Tensor:
        if not self.training:
            return self.inner.loss(step)
        mu, sigma, *more = self._move(step)
        self.note(step, mu, sigma, *more)
        return self._expected(Gaussian(mu, sigma), step, step.x)

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if self.training:
            moved = self.noted(step) or self._move(step)
            keep(moved, [self.proxies.vectors, self.sigma, *([] if self.adam is None else self.adam.held())])

    def _expected(self, q: Gaussian, step: Step, x: Tensor) -> Tensor:
        """E_q of the inner loss, estimated by samples of q."""
        count = self.proxies.whole or len(q.mu)
        points = [draw(q, eps) for eps in self._noise(q.mu, step, count, self.proxies.rows)]
        values = [objective_at(p, self.inner, x, step.y, self.space) for p in points]
        return values[0] if len(values) == 1 else torch.stack(values).mean()

    def _noise(self, like: Tensor, step: Step, count: int, rows: slice | Tensor) -> Tensor:
        """Noise [S, P, D] of these rows, drawn for `count` of them as on one rank; zeros without sampling."""
        if not self.sample:
            return like.new_zeros(self.samples, *like.shape)
        shape = self.samples, count, like.shape[1]
        return torch.randn(shape, generator=step.rng, device=like.device, dtype=like.dtype)[:, rows]

    def _move(self, step: Step) -> list[Tensor]:
        """The state after this batch: M steps from the state after the last one."""
        last = Gaussian(self.proxies.vectors, self.sigma)
        if self.adam is None:
            with torch.no_grad(), torch.autocast(step.x.device.type, enabled=False):
                return self._newton(last, step)

        def objective(mu: Tensor, sigma: Tensor) -> Tensor:
            q = Gaussian(mu, sigma)
            value = self._expected(q, step, step.x.detach())
            return value + self.tau * kl(q, last) if self.tau else value  # Eq. 12 times τ

        def clamp(tensors: list[Tensor]) -> None:
            tensors[1].clamp_min_(self.bounds["sigma_min"])

        tensors, moments = self.adam.move(last, objective, self.steps, clamp)
        return tensors + moments

    def _newton(self, last: Gaussian, step: Step) -> list[Tensor]:
        """μ and σ after M steps. Those of a proxy need no other proxy."""
        b, y, proxies = anchor_batch(self.inner, step.x, step.y, self.space), step.y, self.proxies
        labels, mine, count = proxies.labels, proxies.rows, proxies.whole or len(proxies.labels)
        rows = min(count, max(1, BLOCK.get(y.device.type, LARGE_BLOCK) // last.mu.shape[1]))
        own = (y[:, None] * proxies.per_class + torch.arange(proxies.per_class, device=y.device)).flatten()
        apart = 4 * len(own) <= count  # only proxies of the batch's classes have positives
        q = Gaussian(torch.empty_like(last.mu), torch.empty_like(last.sigma))
        for start in range(0, count, rows):
            # Blocks of one size, for which a step is compiled once: the last begins within the one before.
            start = min(start, count - rows)
            first, end = max(start, mine.start), min(start + rows, mine.stop)  # on this rank, which may have none
            end = max(first, end)
            block, drawn = slice(first - mine.start, end - mine.start), slice(first - start, end - start)
            first_of_block = Gaussian(last.mu[block], last.sigma[block])
            of_block = b if apart else b.at(y, labels[block])
            compiled = self.compiled and not proxies.whole
            moved = self._steps(first_of_block, of_block, step, rows, drawn, compiled=compiled)
            for held, value in zip(q, moved, strict=True):
                held[block] = value
        if apart:
            same = (own[:, None] == own).to(torch.uint8).argmax(0)  # a class that is there twice has the same noise
            at = own
            if proxies.whole:
                here = (own >= mine.start) & (own < mine.stop)
                at, same = own[here] - mine.start, same[here]
            moved = self._steps(Gaussian(last.mu[at], last.sigma[at]), b.at(y, labels[at]), step, len(own), same)
            for held, value in zip(q, moved, strict=True):
                held.index_copy_(0, at, value)
        return list(q)

    def _steps(
        self, first: Gaussian, b: Batch, step: Step, count: int, rows: slice | Tensor, *, compiled: bool = False
    ) -> Gaussian:
        """M Newton steps of some proxies, with noise for these rows of `count`."""
        q, precision, step_of = first, first.sigma.square().reciprocal(), compiled_step() if compiled else newton_step
        for _ in range(self.steps):
            eps = self._noise(q.mu, step, count, rows)
            q = step_of(q, first.mu, precision, eps, b, tau=self.tau, **self.bounds)
        return q
