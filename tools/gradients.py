"""One picture per loss: how strongly it pulls a positive and pushes a negative, by their similarity to the sample.

One sample, one positive at similarity s⁺ and one negative at s⁻ lie on the unit sphere; the pull is −∂L/∂s⁺, the push
∂L/∂s⁻.
"""

from pathlib import Path

import torch
from torch import Tensor

from nearkin.methods.base import Loss
from nearkin.methods.catalogue import method
from nearkin.methods.losses import LOSSES
from nearkin.methods.relation import References, relate
from nearkin.space import Space
from nearkin.spec import Call, option_names

GRID = 33
EDGE = 0.995  # at ±1 the direction on the sphere is undefined


def lone_pair(name: str) -> Loss:
    """The loss; with one proxy per class if it has proxies."""
    call = Call(name, (), {"per_class": 1} if "per_class" in option_names(LOSSES[name]) else {})
    built = method(str(call), classes=2, dim=3)
    assert isinstance(built, Loss)
    return built


def gradient_weights(loss: Loss, similarity: Tensor) -> tuple[Tensor, Tensor]:
    """Pull and push [S, S] for similarities [S]: rows are s⁻, columns s⁺."""
    sample, label = torch.tensor([[1.0, 0.0, 0.0]], dtype=similarity.dtype), torch.tensor([0])
    labels = torch.tensor([0, 1])
    pull, push = similarity.new_zeros(2, len(similarity), len(similarity))
    for i, s_neg in enumerate(similarity):
        for j, s_pos in enumerate(similarity):
            s = torch.stack([s_pos, s_neg]).requires_grad_()
            side = (1 - s.square()).sqrt()
            zero = torch.zeros_like(s[0])
            vectors = torch.stack([torch.stack([s[0], side[0], zero]), torch.stack([s[1], zero, side[1]])])
            refs = References(vectors, labels, None, 0 if loss.proxies is None else 1)
            value = loss.objective(relate(sample, label, refs, Space.COSINE))
            gradient = torch.autograd.grad(value, s)[0] if value.requires_grad else torch.zeros_like(s)
            pull[i, j], push[i, j] = -gradient[0], gradient[1]
    return pull, push


def draw(name: str, path: Path) -> Path:
    """Two heat maps side by side, each on its own scale."""
    from matplotlib.figure import Figure

    s = torch.linspace(-EDGE, EDGE, GRID, dtype=torch.float64)
    figure = Figure(figsize=(5.6, 2.5), layout="constrained", dpi=90)
    for axes, values, title in zip(
        figure.subplots(1, 2), gradient_weights(lone_pair(name), s), ("pull", "push"), strict=True
    ):
        reach = float(values.abs().max()) or 1.0
        image = axes.imshow(values, origin="lower", extent=(-1, 1, -1, 1), cmap="RdBu_r", vmin=-reach, vmax=reach)
        figure.colorbar(image, ax=axes, shrink=0.85)
        axes.set(title=f"{name}: {title}", xlabel="s⁺", ylabel="s⁻", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        axes.title.set_fontsize(9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
