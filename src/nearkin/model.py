"""A trained model as a thing to use: images in, embeddings out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from nearkin.backbones import Embedder, trunk
from nearkin.data.augment import centre, short_side
from nearkin.data.images import Images, Progress
from nearkin.data.pixels import Pixels
from nearkin.data.resident import Resident
from nearkin.data.stores import open_store
from nearkin.data.stream import Stream
from nearkin.errors import NearkinError
from nearkin.plan import Plan, make_plan, resolve_device
from nearkin.runs import RunFolder, read_json, read_tensors

Store = Resident | Stream
View = Callable[[Pixels], Tensor]


def build_embedder(plan: Plan, space: str) -> Embedder:
    """The network of a plan, with the weights it begins with."""
    body = trunk(plan.backbone, weights=plan.weights, size=plan.size or None)
    return Embedder(body, dim=plan.dim, pool=plan.pool, bias=plan.bias, layer_norm=plan.layer_norm, space=space)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The arithmetic of the network: bf16 where the plan says so."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@torch.no_grad()
def embed_store(
    embedder: Embedder,
    store: Store,
    view: View,
    *,
    index: Tensor | None = None,
    precision: str = "float32",
    batch: int = 256,
    progress: Progress = None,
) -> Tensor:
    """Embeddings [N, D] of a store's images, or of those of `index`, in eval mode; the modules' modes are put back."""
    rows = torch.arange(len(store)) if index is None else index.cpu()
    device = next(embedder.parameters()).device
    modes = [(m, m.training) for m in embedder.modules()]
    embedder.eval()
    parts = []
    with autocast(device, precision):
        for done, (_, pixels) in enumerate(store.follow(iter(torch.split(rows, batch)), read_ahead=2), start=1):
            parts.append(embedder(view(pixels)))
            if progress is not None:
                progress(min(done * batch, len(rows)), len(rows))
    for module, mode in modes:
        module.training = mode
    return torch.cat(parts) if parts else torch.empty(0, embedder.dim, device=device)


class Model:
    """A trained embedder with the preprocessing it was trained with: `embed` takes files or pixels."""

    def __init__(self, embedder: Embedder, plan: Plan, names: Sequence[str]) -> None:
        self.embedder, self.plan, self.names = embedder, plan, tuple(names)
        self.size = plan.size or embedder.trunk.size
        self.short = short_side(self.size)
        self.view: View = centre(self.size, embedder.trunk.normalise)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.embedder.parameters()).device

    def embed(self, images: Sequence[str | Path] | Tensor, *, progress: Progress = None) -> Tensor:
        """Embeddings [N, D] of image files, or of pixels uint8 [N, C, H, W]."""
        sources = images if isinstance(images, Tensor) else [Path(p) for p in images]
        count = len(sources)
        given = Images(sources, torch.zeros(count, dtype=torch.int64), ("",)) if count else None
        if given is None:
            raise NearkinError("There is nothing to embed: no image was given.")
        store, _, bad = open_store(
            given, short=self.short, channels=self.embedder.trunk.channels, device=self.device, progress=progress
        )
        if bad:
            raise NearkinError(f"{len(bad)} of {count} images cannot be embedded, the first: {bad[0]}")
        return embed_store(self.embedder, store, self.view, precision=self.plan.precision)


def load(run: str | Path, *, device: str = "auto") -> Model:
    """The model of a run folder: the weights of the epoch that was kept."""
    folder = RunFolder(run)
    settings = read_json(folder.config)
    tensors, about = read_tensors(folder.model)
    on = resolve_device(device)
    plan = make_plan({**settings["plan"], "device": str(on), "precision": "auto", "weights": "none"}, {})
    embedder = build_embedder(plan, settings["space"])
    try:
        embedder.load_state_dict(tensors)
    except RuntimeError as error:
        raise NearkinError(
            f"{folder.model} does not fit {folder.config}: {str(error).splitlines()[-1].strip()}"
        ) from None
    return Model(embedder.to(on).eval(), plan, about["names"])
