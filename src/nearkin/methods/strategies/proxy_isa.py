"""Proxy-ISA. Li, Sato, Ishikawa, Kawakami, Yokota: Informative Sample-Aware Proxy for Deep Metric Learning.
MMAsia 2022.

Each proxy weights its samples by how well its class is learnt, to ignore those too easy and outliers.

    E_n     = (1 − βⁿ)/(1 − β),  β = (V − 1)/V                                                              (8)
    E_n     → 1/(1 − β) = V  as  n → ∞                                                                      (9)
    S_learned = h·S_avg,  S_avg = 1/T_c Σ_{i∈M, y_i=c} S_ic                                                 (10)
    max_Q α Σ_i ω_ic Q(i)(δ ∓ S_ic) + H(Q)  =  log(1 + Σ_i exp(ω_ic·α(δ ∓ S_ic)))                           (11, 12)
    L       = 1/Σ_{c∈C⁺} ω̄⁺_c Σ_{c∈C⁺} log(1 + Σ_{i:y_i=c} exp(ω⁺_ic·α(δ − S_ic)))
            + 1/Σ_c ω̄⁻_c      Σ_c      log(1 + Σ_{i:y_i≠c} exp(ω⁻_ic·α(δ + S_ic)))                          (13)
    ν_n     = 1/(1 + log(1 + E_n))                                                                          (14)
    η_c     = (1 + k(1 − h·S_avg))·ν_n + λ                                                                  (15)
    ω⁺_ic   = 1 + σ_n  where  h·S_avg − η_c ≤ S_ic ≤ h·S_avg,  else σ_n
    ω⁻_ic   = 1/max(1, E_n)  where  S_ic < h·S_avg − η_c,  else 1                                           (16)
    σ_n     = 1 + (1 + e^−τ)(ν_n − 1)/(1 + e^(V − E_n − τ))                                                 (17)

Symbols
    S_ic similarity of sample i and the proxy of class c; C⁺ the classes of the batch; n how many samples of class c
    have been seen before this batch (`count="batches"`: in how many batches it appeared); E_n their effective number,
    at most V (`volume`); M the queue of the last T (`size`) clean embeddings, T_c of them of class c; h (`hardness`)
    scales how well a class is learnt; η_c the search length, k (`sensitivity`), λ (`margin`); ν_n the lowest positive
    weight; σ_n decays from 1 to ν_n, at a time set by τ (`tau`); ω̄⁺_c, ω̄⁻_c means over the batch's samples of c, or
    of other classes. E_n, ν_n, σ_n, S_avg are values per class. A sample with S_ic < S_learned − η_c at its own class
    is an outlier.
    `penalty`, Table 3: the factor in place of σ_n in ω⁺, and 1/E_n in ω⁻:
    none (ω⁺ = ω⁻ = 1: the inner loss), negative (ω⁺ = 1), effective (1/max(1, E_n)), bounded (ν_n), decayed (σ_n).
    `reading="code"`: as the authors' public code computes it, where that differs from the text; see Departures.

Algorithm
    1  loss         E_n, ν_n, η_c and σ_n of every class
    2  loss         from epoch `filter_from` on: ω⁺ by Eq. 16, and outliers into the filter; before that, ω⁺ = 1
    3  loss         ω⁻ by Eq. 16, always
    4  loss         Eq. 13
    5  after_step   from epoch `queue_from` on: enqueue the batch without outliers, in place of the oldest
    6  after_step   then recompute S_avg of the batch's classes from M and the current proxies
    7  after_step   add the batch to n
    Epochs are counted from 1. An epoch is the number of whole batches in the training set, whose size comes from
    `at_check`; a loop of your own calls that, or sets `steps_per_epoch`.

Settings
    V = 100, h = 0.15, k = 0.9, λ = 0.1, τ = 1.5, α = 32, δ = 0.1; queue from epoch 2, filter from epoch 3; T not
    stated; 512-d, batch 128, Adam 1e-4, average pooling, no warm-up (CUB, Cars); AdamW 6e-4, 1 warm-up epoch (SOP,
    In-Shop).

Departures
    T = 1024, which the text does not state, and n does not count the current batch, which is weighted before it is
    learnt. S_avg is 0 until a class has been in a batch with the queue on; if all samples of a class were filtered, it
    stays. ω̄⁻_c of a class without a negative in the batch is 1.
    Table 3 does not say whether a penalty replaces σ_n in both lines of ω⁺: here it does, and "1 (no penalty)" is
    ω⁺ = 1 throughout, since that column's scores are Proxy-Anchor's.
    With a loss other than proxy_anchor the weights are in its exponents, and its means do not change (Fig. 11b).
    The authors' code (github.com/rioyokotalab/ProxyISA), `reading="code"`, differs from the text: S_learned is 1 until
    the queue has a class, so η_c = ν_n + λ; queue and filter start one epoch later; n counts only samples that are not
    filtered; S_avg is taken by the proxies before the optimiser's step. It has T = 55,000 (`size=55000`), k = 0.4 on
    Cars and 0.1 on In-Shop (`sensitivity`), and where the queue is full it overwrites the last entries once before it
    starts from the front, which is not copied here.
    All weights are constants of the gradient. The averages over the weights replace those of Eq. 4 line by line, so
    `positives="all"` of the inner loss keeps its meaning.
    Also stored, for reports: how often each training image was filtered, and S_avg at every check (with very many
    classes at fewer of them).

Relations
    With weights of 1 this is `proxy_anchor`. Proposition 1 (Eq. 6): its log-sums are maxima over distributions, of
    which Eq. 11 is the weighted form. `xbm` compares with its memory; here it only measures how well a class is learnt.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nearkin import ranks
from nearkin.errors import NearkinError, above_zero, zero_or_more
from nearkin.methods.base import Embed, Loss, Step, Strategy
from nearkin.methods.losses.proxy_anchor import ProxyAnchor
from nearkin.methods.memory import Memory
from nearkin.methods.relation import EMPTY, Relation, at_own_classes, count, mean_of_columns, total
from nearkin.methods.strategies.inner_loss import inner_proxies, require_proxies
from nearkin.space import Space

Penalty = Literal["none", "negative", "effective", "bounded", "decayed"]

HISTORY = 2**24
"""Numbers of S_avg that are kept for reports; when there are more, every other check is left out."""

NEEDS = "proxy_isa counts epochs: call at_check before the first step, or set steps_per_epoch."


class Progress(NamedTuple):
    """How well each class is learnt, [C] each."""

    E: Tensor
    nu: Tensor
    sigma: Tensor
    learned: Tensor  # h·S_avg: above it a sample is too easy
    outlier: Tensor  # h·S_avg − η_c: below it a sample is too hard


def effective_number(n: Tensor, *, V: float) -> Tensor:
    """The volume that n samples cover out of V: 0, 1, … towards V."""
    return -V * torch.expm1(n * math.log1p(-1 / V))  # Eq. 8


def rowwise_similarity(x: Tensor, v: Tensor, space: Space) -> Tensor:
    """Similarity [N] of each sample with the vector of the same row."""
    return space.rowwise(space.project(x), space.project(v))


def average_similarity(s: Tensor, y: Tensor, *, classes: int) -> tuple[Tensor, Tensor]:
    """S_avg [C] over the entries of each class, and their number; entries with label EMPTY are ignored."""
    filled = (y != EMPTY).to(s.dtype)
    both = s.new_zeros(2, classes).index_add_(1, y.clamp_min(0), torch.stack([s * filled, filled]))
    return both[0] / both[1].clamp_min(1), both[1]  # Eq. 10


def lower_bound(E: Tensor) -> Tensor:
    """The lowest weight of a positive."""
    return 1 / (1 + torch.log1p(E))  # Eq. 14


def search_length(S_avg: Tensor, nu: Tensor, *, h: float, k: float, margin: float) -> Tensor:
    """How far below S_learned samples are still informative; more for a harder class."""
    return (1 + k * (1 - h * S_avg)) * nu + margin  # Eq. 15


def positive_weights(s: Tensor, penalty: Tensor, *, learned: Tensor, outlier: Tensor) -> Tensor:
    """ω⁺ [B] of samples with similarity s [B] to their own proxies."""
    return penalty + ((outlier <= s) & (s <= learned))  # Eq. 16, first part


def negative_weights(S: Tensor, E: Tensor, *, outlier: Tensor) -> Tensor:
    """ω⁻ [B, C] from the similarities S [B, C]."""
    return torch.where(S.lt(outlier), 1 / E.clamp_min(1), 1.0)  # Eq. 16, second part


def decay(E: Tensor, nu: Tensor, *, V: float, tau: float) -> Tensor:
    """σ_n, which decays from 1 to ν_n."""
    return 1 + (1 + math.exp(-tau)) * (nu - 1) * torch.sigmoid(E + tau - V)  # Eq. 17


def progress(n: Tensor, S_avg: Tensor, *, V: float, h: float, k: float, margin: float, tau: float) -> Progress:
    """The values per class that Eq. 16 needs."""
    E = effective_number(n.to(S_avg.dtype), V=V)
    nu = lower_bound(E)
    learned = h * S_avg
    outlier = learned - search_length(S_avg, nu, h=h, k=k, margin=margin)
    return Progress(E, nu, decay(E, nu, V=V, tau=tau), learned, outlier)


def averages(weights: Tensor, r: Relation) -> tuple[Tensor, Tensor]:
    """Mean over C⁺ of ω̄⁺_c, and over all classes of ω̄⁻_c."""
    own, of_own = at_own_classes(r, weights)
    assert of_own is not None
    positives, negatives = count(own.pos, by="column"), count(r.neg, by="column")
    positive = total(of_own, own.pos, by="column") / positives.clamp_min(1)
    negative = total(weights, r.neg, by="column") / negatives.clamp_min(1)
    found = mean_of_columns(r, positive, positives > 0)
    return found, mean_of_columns(r, torch.where(negatives > 0, negative, 1))


def balanced(pull: Tensor, push: Tensor, weights: Tensor, r: Relation) -> Tensor:
    """The two terms of Proxy-Anchor, means over classes, with 1/Σ ω̄_c instead of 1/Σ 1."""
    positive, negative = averages(weights, r)
    return pull / positive + push / negative  # Eq. 13


class ProxyISA(Strategy):
    """A loss with one proxy per class, with exponents weighted by how well each class is learnt."""

    natural_inner = "proxy_anchor"
    later_options = ("reading",)
    has_sample_losses = True
    proxies = inner_proxies
    steps: Tensor
    seen: Tensor  # [C] n
    average: Tensor  # [C] S_avg
    filtered: Tensor  # [N] how often each training image was an outlier; N is known from at_check on
    history: Tensor  # [checks, C] S_avg at the checks
    checks: Tensor  # [checks] the number of steps at each

    def __init__(
        self,
        inner: Loss,
        *,
        dim: int,
        volume: float = 100.0,
        hardness: float = 0.15,
        sensitivity: float = 0.9,
        margin: float = 0.1,
        tau: float = 1.5,
        size: int = 1024,
        penalty: Penalty = "decayed",
        count: Literal["samples", "batches"] = "samples",
        queue_from: int = 2,
        filter_from: int = 3,
        steps_per_epoch: int = 0,
        reading: Literal["text", "code"] = "text",
    ) -> None:
        super().__init__(inner)
        proxies = require_proxies(inner, "proxy_isa")
        above_zero("proxy_isa", hardness=hardness)
        zero_or_more("proxy_isa", sensitivity=sensitivity, margin=margin, tau=tau)
        if min(queue_from, filter_from) < 1 or steps_per_epoch < 0:
            raise NearkinError(
                "proxy_isa: queue_from and filter_from are epochs from 1 on, and steps_per_epoch is at least 0; got "
                f"{queue_from=}, {filter_from=}, {steps_per_epoch=}."
            )
        if proxies.per_class != 1:
            raise NearkinError(f"proxy_isa needs a loss with one proxy per class; this one has {proxies.per_class}.")
        if volume <= 1:
            raise NearkinError(f"proxy_isa: volume, the upper limit of E, is a number above 1, not {volume}.")
        self.settings = {"V": volume, "h": hardness, "k": sensitivity, "margin": margin, "tau": tau}
        self.penalty, self.count, self.as_code = penalty, count, reading == "code"
        self.queue_from, self.filter_from = queue_from + self.as_code, filter_from + self.as_code
        self.steps_per_epoch = steps_per_epoch
        classes = proxies.classes
        self.memory = Memory(size, dim)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("average", torch.full((classes,), 1 / hardness if self.as_code else 0.0))
        self.register_buffer("filtered", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("history", torch.zeros(0, classes))
        self.register_buffer("checks", torch.zeros(0, dtype=torch.int64))

    def class_values(self) -> dict[str, Tensor]:
        return super().class_values() | {"hardness": 1 - self.settings["h"] * self.average}

    def image_values(self) -> dict[str, Tensor]:
        return super().image_values() | {"times filtered": self.filtered}

    def at_check(self, model: torch.nn.Module, embed: Embed, labels: Tensor, score: float | None = None) -> None:
        super().at_check(model, embed, labels, score)
        if not self.training:
            return
        if len(self.filtered) != len(labels):
            self.filtered = self.filtered.new_zeros(len(labels))
        if self.history.numel() >= HISTORY:
            self.history, self.checks = self.history[::2], self.checks[::2]
        self.history = torch.cat([self.history, self.average[None]])
        self.checks = torch.cat([self.checks, self.steps[None]])

    def loss(self, step: Step) -> Tensor:
        r = self.relation(step, self.inner.references(step.x, step.y))
        with torch.no_grad():
            weights, outliers = self._weigh(r)
        if self.training:
            self.note(step, outliers, *([self.proxies.vectors.detach().clone()] if self.as_code else []))
        if isinstance(self.inner, ProxyAnchor):
            return balanced(*self.inner.pull_and_push(r, weights), weights, r)
        return self.inner.objective(r, weights)

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if self.training:
            self._learn(step)

    def lacks(self, step: Step) -> str:
        return super().lacks(step) or ("" if self._knows_epochs else NEEDS)

    @property
    def _knows_epochs(self) -> bool:
        return bool(self.steps_per_epoch or len(self.filtered))

    def join(self, steps: Sequence[Step]) -> Step:
        outliers = torch.cat([step.notes[0] for step in steps])
        return replace(super().join(steps), notes=(outliers, *steps[-1].notes[1:]))

    def _weigh(self, r: Relation) -> tuple[Tensor, Tensor]:
        """ω [B, C], and which samples are outliers [B]."""
        state = self._progress()
        own, _ = at_own_classes(r, None)
        s = total(own.s, own.pos, by="row")  # there is one proxy per class
        ones = torch.ones_like(s)
        positive, negative = ones, ones[:, None]
        if self.penalty in ("effective", "bounded", "decayed"):
            penalty = {"effective": 1 / state.E.clamp_min(1), "bounded": state.nu, "decayed": state.sigma}[self.penalty]
            y, on = r.rows, self._since(self.filter_from, len(s))
            weights = positive_weights(s, penalty[y], learned=state.learned[y], outlier=state.outlier[y])
            positive = torch.where(on, weights, ones)
        if self.penalty != "none":
            negative = negative_weights(r.s, state.E[r.columns], outlier=state.outlier[r.columns])
        return torch.where(r.pos, positive[:, None], negative), self._outliers(s, r.rows, state)

    @torch.no_grad()
    def _learn(self, step: Step) -> None:
        """Update the queue, S_avg, n and the filter counts after a batch."""
        if not self._knows_epochs:
            raise NearkinError(NEEDS)
        y, classes, proxies = step.y, len(self.seen), self.proxies.vectors
        size = len(y) // step.batches  # of the batches of an epoch, which `loss` gets one by one
        if noted := self.noted(step):
            outliers, proxies = (*noted, proxies)[:2]  # with `as_code` the proxies of the loss
        else:
            s = self._own_similarity(step.x, y, proxies)
            outliers = self._outliers(s, y, self._progress())
        on = self._since(self.queue_from, size)
        self.memory.enqueue(step.x.detach(), y, keep=on & ~outliers)
        labels = self.memory.labels
        s = self._own_similarity(self.memory.vectors, labels.clamp_min(0), proxies)
        average, entries = average_similarity(s, labels, classes=classes)
        ones = torch.ones_like(y)
        times = self.seen.new_zeros(classes).index_add_(0, y, ones)
        self.average.copy_(torch.where(on & (times > 0) & (entries > 0), average, self.average))
        if self.as_code:
            times = torch.zeros_like(times).index_add_(0, y, ones * ~outliers)
        self.seen += times if self.count == "samples" else times.clamp_max(1)
        if step.index is not None and len(self.filtered):
            self.filtered.index_add_(0, step.index, outliers.to(torch.int64))
        self.steps += step.batches

    def _own_similarity(self, x: Tensor, y: Tensor, proxies: Tensor) -> Tensor:
        """Similarity [N] of samples x [N, D] with the proxies of their classes y, on whichever rank these are."""
        if not self.proxies.whole:
            return rowwise_similarity(x, proxies[y], self.space)
        row = y - self.proxies.held.start
        here = (row >= 0) & (row < len(proxies))
        s = rowwise_similarity(x, proxies[row.clamp(0, len(proxies) - 1)], self.space)
        return ranks.total(torch.where(here, s, 0))

    def _progress(self) -> Progress:
        return progress(self.seen, self.average, **self.settings)

    def _outliers(self, s: Tensor, y: Tensor, state: Progress) -> Tensor:
        return self._since(self.filter_from, len(y)) & (s < state.outlier[y])

    def _since(self, epoch: int, size: int) -> Tensor:
        """Whether that epoch has started, as a tensor, without a host sync."""
        per_epoch = self.steps_per_epoch or max(len(self.filtered) // size, 1)
        return self.steps >= (epoch - 1) * per_epoch

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The length of these depends on data and run, which a new method does not know.
        for name in ("filtered", "history", "checks"):
            if (found := state_dict.get(prefix + name)) is not None:
                setattr(self, name, getattr(self, name).new_zeros(found.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)
