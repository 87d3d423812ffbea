"""A trained model as a thing to use: images in, embeddings out."""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from nearkin.data.images import Progress
from nearkin.data.pixels.open import ImageInputs, open_inputs
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import Normalise, centre, short_side_for
from nearkin.errors import NearkinError
from nearkin.files import Json, content_digest, read_json, read_tensors
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import Trunk, build_trunk
from nearkin.networks.embedder import Embedder
from nearkin.networks.timm_models import set_drop_path
from nearkin.training.optimiser import set_training
from nearkin.training.plan import Plan, make_plan, resolve_device
from nearkin.training.run_folder import RunFolder

View = Callable[[Pixels], Tensor]


def build_embedder(plan: Plan, space: str) -> Embedder:
    """The network of a plan, with the weights it begins with."""
    body = build_trunk(plan.backbone, weights=plan.weights, size=plan.size or None)
    if plan.drop_path:
        set_drop_path(body, plan.drop_path)
    return Embedder(
        body,
        dim=plan.dim,
        pool=plan.pool,
        bias=plan.bias,
        layer_norm=plan.layer_norm,
        space=space,
    )


def embedding_dim(plan: Plan) -> int:
    """How many numbers an embedding of a plan's network has: where there is no head, the trunk's width."""
    return plan.dim or build_trunk(plan.backbone, weights="none", size=plan.size or None).width


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The arithmetic of the network: bf16 where the plan says so."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


class Ensemble(nn.Module):
    """Several embedders of one kind as one: their embeddings side by side, together a point of their space."""

    def __init__(self, parts: Sequence[Embedder]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.space, self.dim = parts[0].space, sum(part.dim for part in parts)

    @property
    def build_trunk(self) -> Trunk:
        """The first trunk, which stands for all of them: what images must be like."""
        return cast("Trunk", self.parts[0].trunk)

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings [B, dim]."""
        return self.space.project(torch.cat([part(x) for part in self.parts], dim=1))


@torch.no_grad()
def embed_store(
    embedder: Embedder | Ensemble,
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
        for done, (_, pixels) in enumerate(store.read_batches(iter(torch.split(rows, batch)), read_ahead=2), start=1):
            parts.append(embedder(view(pixels)))
            if progress is not None:
                progress(min(done * batch, len(rows)), len(rows))
    for module, mode in modes:
        module.training = mode
    return torch.cat(parts) if parts else torch.empty(0, embedder.dim, device=device)


class Model:
    """A trained embedder with the preprocessing it was trained with: `embed` takes files or pixels."""

    def __init__(
        self, embedder: Embedder | Ensemble, plan: Plan, names: Sequence[str], *, space: str | None = None
    ) -> None:
        self.embedder, self.plan, self.names = embedder, plan, tuple(names)
        self.space = space or embedder.space  # to be measured and searched in; one in training may have another
        self.size = plan.size or embedder.trunk.size
        self.short_side = short_side_for(self.size)
        self.view: View = centre(self.size, embedder.trunk.normalise)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.embedder.parameters()).device

    def embed(self, images: ImageInputs, *, progress: Progress = None) -> Tensor:
        """Embeddings [N, D] of image files, or of uint8 pixels: a tensor [N, C, H, W], an array [N, H, W, C], or lists.

        A list may hold files, tensors [C, H, W], arrays [H, W, C] or Pillow's images, of any sizes. Pixels are resized
        as files are, unless they are near the network's size already.
        """
        channels = self.embedder.trunk.channels
        store = open_inputs(
            images, short_side=self.short_side, channels=channels, device=self.device, progress=progress
        )
        return self.embed_store(store)

    def embed_store(self, store: Store, *, progress: Progress = None) -> Tensor:
        """Embeddings [N, D] of images whose pixels are at hand."""
        return embed_store(self.embedder, store, self.view, precision=self.plan.precision, progress=progress)

    def architecture(self) -> Json:
        """What the network is, beside its weights: kept with them, since other settings may fit them as well."""
        names = ("backbone", "dim", "pool", "bias", "layer_norm")
        return {**{name: getattr(self.plan, name) for name in names}, "space": self.space}

    def preprocessing(self) -> Json:
        """What turns a picture into the network's input: kept with the weights, whatever becomes of the tables."""
        trunk = self.embedder.trunk
        mean, std, bgr = trunk.normalise
        return {
            "size": self.size,
            "short": self.short_side,
            "channels": trunk.channels,
            "mean": list(mean),
            "std": list(std),
            "bgr": bgr,
        }


@torch.no_grad()
def begin_short(model: Model, store: Store) -> float:
    """Scale the head of a new network so that embeddings of training images are SHORT; says by how much.

    As the head comes, those of a pretrained network may be over a hundred long and their inner products in the
    thousands: a loss shrinks them fastest by silencing features, and the network is dead within an epoch. From a length
    of 1 or 2 `lifted` learns little; so does `n_pair` from 11, where a network learns from nothing.
    """
    embedder, plan = model.embedder, model.plan
    wanted = embedder.space.initial_norm
    if wanted is None or not plan.short_start or isinstance(embedder, Ensemble) or embedder.head.linear is None:
        return 1.0
    rows = torch.linspace(0, len(store) - 1, min(plan.batch, len(store))).long()  # from all over
    (_, pixels), *_ = store.read_batches(iter([rows]), read_ahead=0)
    twin = copy.deepcopy(embedder)  # in train mode its batch norms count these images
    set_training(twin, twin.trunk, plan, warming_up=False)
    length = float(twin(model.view(pixels)).norm(dim=1).mean())
    scale = wanted / length if length else 1.0
    embedder.head.linear.weight *= scale
    return scale


def load(run: str | Path, *, device: str = "auto") -> Model:
    """The model of a run folder: the weights of the epoch that was kept; all its folds as one, where it has some."""
    folder = RunFolder(run)
    if parts := folder.parts():
        return joined([load(part.path, device=device) for part in parts])
    settings = read_json(folder.config)
    tensors, about = read_tensors(folder.model)
    for path, content, keys in ((folder.config, settings, ("plan", "space")), (folder.model, about, ("names",))):
        if lost := [key for key in keys if key not in content]:
            raise NearkinError(f"{path} does not say the {lost[0]}: restore it, or train anew.")
    on = resolve_device(device)
    plan = make_plan({**settings["plan"], "device": str(on), "precision": "auto", "weights": "none"}, {})
    embedder = build_embedder(plan, settings["space"])
    try:
        embedder.load_state_dict(tensors)
    except RuntimeError as error:
        raise NearkinError(
            f"{folder.model} does not fit {folder.config}: {str(error).splitlines()[-1].strip()}"
        ) from None
    model = Model(embedder, plan, about["names"])
    for name, value in model.architecture().items():
        if (trained := about.get("architecture", {}).get(name, value)) != value:
            raise NearkinError(
                f"{folder.config} says {name}={value}, the model was trained with {trained}: restore it."
            )
    if "preprocessing" in about:  # as it was trained with, whatever the backbone's row says today
        known = about["preprocessing"]
        embedder.trunk.normalise = Normalise(tuple(known["mean"]), tuple(known["std"]), known["bgr"])
        plan = dataclasses.replace(plan, size=known["size"])
    return Model(embedder.to(on).eval(), plan, about["names"])


def load_untrained(run: str | Path, *, device: str = "auto") -> Model:
    """The model that a run began with; of folds, all of them as one."""
    folder = RunFolder(run)
    if parts := folder.parts():
        return joined([load_untrained(part.path, device=device) for part in parts])
    config, (_, about) = read_json(folder.config), read_tensors(folder.model)
    plan = make_plan({**config["plan"], "device": device, "precision": "auto"}, {})
    with torch.random.fork_rng():
        torch.manual_seed(plan.own_seed)
        method(plan.method, classes=len(about["names"]), dim=plan.dim)  # draws before the network does
        embedder = build_embedder(plan, config["space"])
    if embedder.head.linear is not None:
        with torch.no_grad():
            embedder.head.linear.weight *= config.get("resolved", {}).get("head_scale", 1.0)  # older runs have none
    return Model(embedder.to(plan.device).eval(), plan, about["names"])


def joined(models: Sequence[Model]) -> Model:
    """Models of folds as one."""
    embedder = Ensemble([model.embedder for model in models if isinstance(model.embedder, Embedder)])
    in_order = [models[-1], *models[:-1]]  # only the last fold knows all but the last classes
    names = dict.fromkeys(name for model in in_order for name in model.names)
    return Model(embedder.eval(), dataclasses.replace(models[0].plan, dim=embedder.dim), tuple(names))


def fingerprint(run: str | Path) -> str:
    """Digits that stand for the model of a run folder, of all its parts where it has several: its files' content."""
    digest = hashlib.sha256()
    for part in RunFolder(run).parts() or [RunFolder(run)]:
        if not part.model.exists():
            raise NearkinError(f"There is no model in {part.path}: is it a run folder made by nearkin train?")
        digest.update(content_digest(part.model).encode())
    return digest.hexdigest()[:16]
