"""Cases of the contract tests: every loss in several settings, batches, and a small training loop."""

import inspect
from typing import NamedTuple

import oracles
import torch

from nearkin import ranks
from nearkin.methods import cut_proxies
from nearkin.methods.base import Method, Step
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.relation import References
from nearkin.methods.strategies import STRATEGIES
from nearkin.training.optimiser import clip_norm

CLASSES, DIM = 5, 4

# Settings in which a strategy acts within a few steps of a small batch.
QUICK = {
    "ccp": (
        "ccp(contrastive(negative=1), per_class=2, pool=3, every=1)",
        "ccp(multi_similarity, per_class=1, pool=2, pair_weight=0.5, every=1)",
    ),
    "moco": ("moco(momentum=0.5, queue=20)", "moco(soft_triple(per_class=2), momentum=0, queue=5)"),
    "profs": (
        "profs(steps=2, weight=0.1)",
        "profs(n_pair, hard_classes=False, weight=0.0)",
        "profs(margin(sampling=hard, learn=True), forget=True)",
    ),
    "proxy": ("proxy(contrastive(negative=1), per_class=2, pool=1)", "proxy(triplet, initial=means, pair_weight=0.5)"),
    "proxy_isa": (
        "proxy_isa(steps_per_epoch=1, size=20, volume=8, hardness=0.9, margin=0)",
        "proxy_isa(proxy_nca(scale=4), steps_per_epoch=1, size=7, volume=8, hardness=0.9, penalty=bounded)",
        "proxy_isa(steps_per_epoch=1, size=20, volume=8, hardness=0.9, margin=0, reading=code)",
    ),
    "proxy_updates": (
        "proxy_updates(steps=2, lr=0.1)",
        "proxy_updates(norm_softmax(per_class=2), steps=1, lr=0.01)",
        "proxy_updates(proxy_anchor(alpha=4, per_class=2), steps=2, order=2)",
    ),
    "vcpa": (
        "vcpa",
        "vcpa(proxy_anchor(per_class=2), tau=0.1, steps=2, samples=3, positives=batch)",
        "vcpa(proxy_anchor(alpha=4), sample=False, tau=0, steps=3)",
        "vcpa(soft_triple(per_class=2), newton=False, lr=0.1, steps=3, samples=2)",
    ),
    "xbm": (
        "xbm(start=0, size=20)",
        "xbm(contrastive(positive=0.1), size=7, start=2, weight=0.5)",
        "xbm(contrastive(positive=0.1), size=20, start=2, reading=code)",
    ),
}


def spec_of(name, options=None):
    inside = ", ".join(f"{key}={value!r}" for key, value in (options or {}).items())
    return f"{name}({inside})" if inside else name


LOSS_SPECS = [spec_of(name, options) for name in LOSSES for options in ({}, *oracles.SETTINGS.get(name, ()))]
LARGE_SPECS = [spec_of(name, oracles.LARGE[name]) for name in LOSSES if oracles.LARGE.get(name)]
STRATEGY_SPECS = [spec for name in STRATEGIES for spec in QUICK.get(name, (name,))]
# Losses that draw at random have no fixed value; tests that need one leave them out.
DETERMINISTIC_SPECS = [spec for spec in LOSS_SPECS if "drawn=True" not in spec]
METHOD_SPECS = LOSS_SPECS + STRATEGY_SPECS
SAMPLED_SPECS = ["proxy_anchor(sample_rate=0.5)", "arcface(per_class=2, sample_rate=0.5)"]
# Trained for many steps: every method with its defaults, and those with more state or randomness than that.
RUN_SPECS = [s for s in METHOD_SPECS if s in LOSSES or s in STRATEGY_SPECS or "learn=True" in s or "drawn=True" in s]
RUN_SPECS += SAMPLED_SPECS


def signature_of(entry):
    """The keyword-only arguments of a loss or strategy, by name."""
    return {p.name: p for p in inspect.signature(entry).parameters.values() if p.kind is p.KEYWORD_ONLY}


class Scale(torch.nn.Module):
    """A model for images that are embeddings already."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.factor * x


MODEL = Scale()


def step_of(x, y) -> Step:
    """A step with model and images, as in the loop."""
    return Step(x, y, model=MODEL, images=x.detach())


def build(spec, *, classes=CLASSES, dim=DIM, space=None, seed=0) -> Method:
    """A method with seeded proxies, its other parameters moved away from their common start."""
    torch.manual_seed(seed)
    m = method(spec, classes=classes, dim=dim, space=space)
    m.bind(MODEL)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if not name.endswith("proxies.vectors"):
                p += 0.1 * torch.randn(p.shape)
    return m


def has_proxies(spec):
    return getattr(build(spec), "proxies", None) is not None


PAIR_SPECS = [spec for spec in DETERMINISTIC_SPECS if not has_proxies(spec)]
PROXY_SPECS = [spec for spec in DETERMINISTIC_SPECS if has_proxies(spec)]


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def batch(size=8, *, classes=CLASSES, dim=DIM, seed=0, dtype=torch.float64) -> Batch:
    """Random embeddings of random norm; the first two share a class, so that there is a positive pair."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=rng, dtype=torch.float64)
    y = torch.randint(classes, (size,), generator=rng)
    y[:2] = y[0]
    return Batch(x.to(dtype), y)


def other_references(batch_, *, size=11, dim=DIM, classes=CLASSES, seed=1) -> References:
    """References that are not the batch: other vectors, some batch rows out of order, some empty slots."""
    x, y = batch_
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(size, dim, generator=rng, dtype=x.dtype)
    labels = torch.randint(classes, (size,), generator=rng)
    rows = torch.full((size,), -1)
    for j, i in ((1, 3), (4, 0), (6, len(y) - 1)):
        v[j], labels[j], rows[j] = x[i], y[i], i
    v[5], labels[5] = 0, oracles.EMPTY
    v[-1], labels[-1] = 0, oracles.EMPTY
    return References(v, labels, rows)


def oracle(m, x, y, refs: References, **more):
    """The naive value of a loss on any references, with the options it was built with."""
    options = {k: v for k, v in m.spec.options.items() if k not in ("speed", "initial", "sample_rate")}
    rows = [-1] * len(refs.labels) if refs.rows is None else refs.rows.tolist()
    state = getattr(oracles, "STATE", {}).get(m.spec.name, lambda _: {})(m)
    vectors = refs.vectors.detach().tolist()
    return oracles.ORACLES[m.spec.name](
        x.detach().tolist(), y.tolist(), vectors, refs.labels.tolist(), rows, space=m.space, **options, **state, **more
    )


def value(m, x, y):
    """The loss, always with the same random draw."""
    torch.manual_seed(0)
    return m(x, y)


def gradients(m, x, y):
    """Loss, gradient of the embeddings, gradients of the method's parameters by name."""
    x = x.detach().clone().requires_grad_()
    m.zero_grad()
    loss = value(m, x, y)
    loss.backward()
    return loss.detach(), x.grad, {name: p.grad for name, p in m.named_parameters()}


class Blobs(NamedTuple):
    """Gaussian classes in a few dimensions, with noise in the others."""

    points: torch.Tensor
    labels: torch.Tensor

    @staticmethod
    def make(*, classes=8, each=8, signal=4, noise=12, seed=0):
        rng = torch.Generator().manual_seed(seed)
        labels = torch.arange(classes).repeat_interleave(each)
        centres = torch.nn.functional.normalize(torch.randn(classes, signal, generator=rng), dim=1)
        close = centres[labels] + 0.1 * torch.randn(len(labels), signal, generator=rng)
        return Blobs(torch.cat([close, 0.6 * torch.randn(len(labels), noise, generator=rng)], dim=1), labels)


class Run:
    """The loop of a training run on blobs with all six verbs; `state` is all it needs to resume."""

    def __init__(self, spec, *, seed=0, lr=0.05, dtype=torch.float32, cut=False, clip=0.0):
        torch.manual_seed(seed)
        blobs = Blobs.make()
        self.blobs = blobs._replace(points=blobs.points.to(dtype))
        self.model = torch.nn.Linear(self.blobs.points.shape[1], 8).to(dtype)
        self.method = method(spec, classes=8, dim=8).to(dtype)
        self.method.bind(self.model)
        if cut:
            cut_proxies.cut(self.method)
        self.cut, self.clip = {id(p) for p in cut_proxies.cut_parameters(self.method)}, clip
        groups = [{"params": list(self.model.parameters()), "lr": lr}, *self.method.groups(lr / 50)]
        self.optimiser = torch.optim.Adam(groups)
        self.size = 8 * (self.method.images_per_class or 4)
        self.rng, self.done, self.losses = torch.Generator().manual_seed(9), 0, []

    def embed(self, index=None, *, augment=False):  # noqa: ARG002
        with torch.no_grad():
            return self.model(self.blobs.points if index is None else self.blobs.points[index])

    def steps(self, count):
        if not self.done:
            self.method.at_check(self.model, self.embed, self.blobs.labels)
        batches = self.method.batches(self.blobs.labels, self.size, seed=3, start=self.done)
        for _ in range(count):
            index = next(batches)
            images, y = self.blobs.points[index[ranks.share(len(index))]], self.blobs.labels[index]
            x = ranks.gather(self.model(images), len(index))
            step = Step(x, y, model=self.model, images=images, index=index, rng=self.rng)
            loss = self.method.loss(step)
            self.optimiser.zero_grad()
            loss.backward()
            parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
            ranks.average(p.grad for p in parameters if p.grad is not None and id(p) not in self.cut)
            self.method.after_backward(self.model)
            if self.clip:
                clip_norm(parameters, self.clip, self.cut)
            self.optimiser.step()
            self.method.after_step(step)
            self.losses.append(float(loss.detach()))
            self.done += 1
        return self

    def state(self):
        parts = {"model": self.model, "method": self.method, "optimiser": self.optimiser}
        state = {name: part.state_dict() for name, part in parts.items()}
        return {**state, "rng": self.rng.get_state(), "done": self.done}

    def load(self, state):
        for name in ("model", "method", "optimiser"):
            getattr(self, name).load_state_dict(state[name])
        self.rng.set_state(state["rng"])
        self.done = state["done"]
        return self

    def neighbours(self):
        """Percent of points whose nearest other point is of the same class, by cosine."""
        x = torch.nn.functional.normalize(self.embed(), dim=1)
        s = (x @ x.T).fill_diagonal_(-2)
        return 100 * float((self.blobs.labels[s.argmax(1)] == self.blobs.labels).float().mean())
