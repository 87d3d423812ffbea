"""The model of a run: built from its plan, loaded from its folder, used to embed images."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from nearkin import ranks
from nearkin.data.images import Progress
from nearkin.data.input_images import AnyImages, in_chunks
from nearkin.data.pixels.decode import Storage
from nearkin.data.pixels.open import ImageInputs, open_inputs
from nearkin.data.pixels.stores import FeatureStore, Store, first_view
from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import Normalise, centre, short_side_for
from nearkin.errors import NearkinError
from nearkin.files import Json, content_digest, read_json, read_tensors, write_lock, write_tensors
from nearkin.methods.catalogue import method
from nearkin.networks.backbones import Trunk, add_own_backbone, build_trunk
from nearkin.networks.embedder import Embedder, pass_images
from nearkin.networks.eval_mode import evaluating
from nearkin.networks.timm_models import set_drop_path
from nearkin.space import Space
from nearkin.training.model_card import write_card
from nearkin.training.moved_data import find_data
from nearkin.training.plan import Plan, make_plan, resolve_device
from nearkin.training.random_streams import drawing_from
from nearkin.training.run_config import write_config
from nearkin.training.run_folder import RunFolder
from nearkin.training.start import load_start

View = Callable[[Pixels], Tensor]


def build_embedder(plan: Plan, space: str) -> Embedder:
    """Build the network of a plan with its initial weights."""
    trunk = build_trunk(plan.backbone, weights=plan.weights, size=plan.size or None)
    if plan.drop_path:
        set_drop_path(trunk, plan.drop_path)
    embedder = Embedder(
        trunk,
        dim=plan.dim,
        pool=plan.pool,
        bias=plan.bias,
        layer_norm=plan.layer_norm,
        head_init=plan.head_init,
        space=space,
    )
    if plan.start:
        load_start(embedder, plan.start)
    return embedder


def embedding_dim(plan: Plan) -> int:
    """Return the dimension of a plan's embeddings: without a head, the width of the trunk."""
    return plan.dim or build_trunk(plan.backbone, weights="none", size=plan.size or None).width


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context that runs the network in bf16 if the plan says so."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


class Ensemble(nn.Module):
    """Several embedders as one: their embeddings side by side, projected into their space."""

    def __init__(self, parts: Sequence[Embedder]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.space, self.dim = parts[0].space, sum(part.dim for part in parts)

    @property
    def trunk(self) -> Trunk:
        """The first trunk; all need the same images."""
        return cast("Trunk", self.parts[0].trunk)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings [B, dim]."""
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
    over_ranks: bool = False,
) -> Tensor:
    """Embed the images of a store [N, D], or the rows in `index`, in eval mode; restore the modules' modes.

    With `over_ranks` the processes of a group share the batches; all of them call this, and each gets all embeddings.
    """
    rows = torch.arange(len(store)) if index is None else index.cpu()
    weight = next(embedder.parameters())
    parts, batches = [], torch.split(rows, batch)
    if over_ranks:  # whole batches, since another size of them may change the last digits
        batches = batches[ranks.share(len(batches))]
    count = sum(map(len, batches))
    with evaluating(embedder), autocast(weight.device, precision):
        for done, (_, pixels) in enumerate(store.read_batches(iter(batches), read_ahead=2), start=1):
            parts.append(pass_images(embedder, view(pixels)))
            if progress is not None:
                progress(min(done * batch, count), count)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    x = torch.cat(parts) if parts else torch.empty(0, embedder.dim, dtype=dtype, device=weight.device)
    return ranks.gather(x) if over_ranks else x


def storage_of(plan: Plan, size: int) -> Storage:
    """Return how the images of a run are kept; its plan says so.

    The first version, whose plans do not say it, brought all images to the short side of the test view.
    """
    return Storage(round(plan.stored * size), enlarge=False) if plan.stored else Storage(short_side_for(size))


class Model:
    """A trained embedder with the preprocessing it was trained with: `embed` takes files or pixels."""

    def __init__(
        self,
        embedder: Embedder | Ensemble,
        plan: Plan,
        names: Sequence[str],
        *,
        space: Space | None = None,
        seen_before: Sequence[str] = (),
    ) -> None:
        self.embedder, self.plan, self.names = embedder, plan, tuple(names)
        self.seen_before = tuple(seen_before)  # classes of the runs it was started from
        self.space = space or embedder.space  # for evaluation and search; during training the embedder's may differ
        self.size = plan.size or embedder.trunk.size  # of training crops
        self.storage = storage_of(plan, self.size)
        self._set_view()

    def _set_view(self) -> None:
        self.test_size = self.plan.test_size or self.size
        self.short_side = short_side_for(self.test_size, share=self.plan.test_crop)  # of the image that is shown
        self.view: View = centre(self.test_size, self.embedder.trunk.normalise, short_side=self.short_side)

    def show(self, *, test_size: int, test_crop: float) -> None:
        """Show test images from now on as these settings say."""
        self.plan = dataclasses.replace(self.plan, test_view="given", test_size=test_size, test_crop=test_crop)
        self._set_view()

    @property
    def seen(self) -> frozenset[str]:
        """The names of all classes it was trained on, also in the runs it was started from."""
        return frozenset(self.names) | frozenset(self.seen_before)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.embedder.parameters()).device

    def __repr__(self) -> str:
        network = f"{self.plan.backbone}, {self.size} px, {self.embedder.dim} dimensions, space {self.space.value}"
        return f"Model({network}, trained on {len(self.names):,} classes, on {self.device})"

    def embed(self, images: AnyImages, *, near_enough: bool = True, progress: Progress = None) -> Tensor:
        """Embed [N, D] images: files, or pixels as a tensor [N, C, H, W], an array [N, H, W, C], or a list.

        A list or an iterator may hold files, tensors [C, H, W], arrays [H, W, C] or Pillow images, of any size. One
        file, tensor [C, H, W] or Pillow image gives [1, D]; a folder gives all images in it, in the order of their
        names. Pixels are uint8, or floats from 0 to 1. They are resized as files are, unless they are close to the
        network's size already (not with `near_enough=False`).
        """
        return torch.cat([self._embed_inputs(some, near_enough, progress) for some in in_chunks(images)])

    def _embed_inputs(self, images: ImageInputs, near_enough: bool, progress: Progress) -> Tensor:
        channels = self.embedder.trunk.channels
        how = self.storage._asdict()
        store = open_inputs(
            images, **how, channels=channels, device=self.device, near_enough=near_enough, progress=progress
        )
        return self.embed_store(store)

    def embed_store(
        self, store: Store, *, index: Tensor | None = None, progress: Progress = None, over_ranks: bool = False
    ) -> Tensor:
        """Embed [N, D] the images of a store, or the rows in `index`; `over_ranks`: see the function `embed_store`."""
        return embed_store(
            self.embedder,
            store,
            self.view_of(store),
            index=index,
            precision=self.plan.precision,
            progress=progress,
            over_ranks=over_ranks,
        )

    def view_of(self, store: Store) -> View:
        """Return the test view of what a store holds; features of a frozen trunk are of that view already."""
        return first_view if isinstance(store, FeatureStore) else self.view

    def save(self, folder: str | Path) -> Path:
        """Write the model, perhaps changed by hand, as a run folder that every command takes; return its path."""
        run = RunFolder(folder)
        if found := run.leftovers():
            raise NearkinError(f"{run.path} holds a run already ({', '.join(found)}): choose another folder.")
        run.path.mkdir(parents=True, exist_ok=True)
        with write_lock(run.path):
            self._write(run)
        return run.path

    def _write(self, run: RunFolder) -> None:
        config: Json = {"method": self.plan.method, "space": self.space.value, "saved": True}
        if isinstance(self.embedder, Ensemble):
            for number, part in enumerate(self.embedder.parts, start=1):
                plan = dataclasses.replace(self.plan, dim=cast("Embedder", part).dim)
                model = Model(cast("Embedder", part), plan, self.names, seen_before=self.seen_before)
                model._write(RunFolder(run.path / f"fold-{number}"))
            config |= {"parts": [f"fold-{number + 1}" for number in range(len(self.embedder.parts))]}
            plan = dataclasses.replace(self.plan, dim=self.embedder.dim // len(self.embedder.parts))
        else:
            plan = self._own_plan()
            state = self.embedder.state_dict()
            load_state(build_embedder(plan, self.space), state, "The changed network", "its own settings")
            model = Model(self.embedder, plan, self.names, space=self.space, seen_before=self.seen_before)
            write_tensors(run.model, state, model.record() | {"step": 0, "epoch": 0})
        write_config(run, plan, **config)
        write_card(run, {})

    def _own_plan(self) -> Plan:
        """Return the plan with the size, and the dimension of the head, that the network has now."""
        assert isinstance(self.embedder, Embedder)
        plan = dataclasses.replace(self.plan, size=self.size, weights="none", start="")
        linear = self.embedder.head.linear
        if linear is None:
            return dataclasses.replace(plan, dim=0)
        return dataclasses.replace(plan, dim=linear.out_features, bias=linear.bias is not None)

    def record(self) -> Json:
        """Describe the model for the file of its weights."""
        about: Json = {"names": self.names, "preprocessing": self.preprocessing(), "architecture": self.architecture()}
        return about | ({"seen_before": self.seen_before} if self.seen_before else {})

    def architecture(self) -> Json:
        """Describe the network; saved with the weights, because other settings may fit them too."""
        names = ("backbone", "dim", "pool", "bias", "layer_norm")
        return {**{name: getattr(self.plan, name) for name in names}, "space": self.space}

    def preprocessing(self) -> Json:
        """Describe how an image becomes the network's input; saved with the weights, as the tables may change."""
        trunk = self.embedder.trunk
        mean, std, bgr = trunk.normalise
        return {
            "size": self.test_size,
            "trained_size": self.size,
            "short": self.short_side,
            "stored": 0 if self.storage.enlarge else self.storage.short_side,
            "channels": trunk.channels,
            "mean": list(mean),
            "std": list(std),
            "bgr": bgr,
        }


def load(run: str | Path | RunFolder, *, device: str = "auto", backbone: nn.Module | None = None) -> Model:
    """Load the model of a run, as `train` returns it, or of its folder; the models of all folds are joined.

    `backbone` is the module that was passed to `train`, if one was; its weights are those of the run.
    """
    if backbone is not None:
        add_own_backbone(backbone)
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    if parts := folder.parts():
        return join_models([load(part.path, device=device) for part in parts])
    settings = read_json(folder.config)
    tensors, about = read_tensors(folder.model)
    for path, content, keys in ((folder.config, settings, ("plan", "space")), (folder.model, about, ("names",))):
        if missing := [key for key in keys if key not in content]:
            raise NearkinError(f"{path} has no entry {missing[0]!r}: restore it, or train again.")
    target = resolve_device(device)
    plan = make_plan(
        {**settings["plan"], "device": str(target), "precision": "auto", "weights": "none", "start": ""}, {}
    )
    with suppress(NearkinError):  # a model embeds other images without its data
        plan = dataclasses.replace(plan, data=find_data(folder))
    embedder = build_embedder(plan, settings["space"])
    load_state(embedder, tensors, folder.model, folder.config)
    model = Model(embedder, plan, about["names"])
    for name, value in model.architecture().items():
        if (trained := about.get("architecture", {}).get(name, value)) != value:
            raise NearkinError(
                f"{folder.config} says {name}={value}, the model was trained with {trained}: restore it."
            )
    if "preprocessing" in about:  # of the training, even if the table of backbones has changed
        saved = about["preprocessing"]
        embedder.trunk.normalise = Normalise(tuple(saved["mean"]), tuple(saved["std"]), saved["bgr"])
        plan = dataclasses.replace(plan, **_saved_sizes(saved))
    return Model(embedder.to(target).eval(), plan, about["names"], seen_before=about.get("seen_before", ()))


def _saved_sizes(preprocessing: Json) -> Json:
    """Return the settings of a plan that lead to this preprocessing."""
    shown, short = preprocessing["size"], preprocessing["short"]
    size = preprocessing.get("trained_size", shown)  # in models of older versions both are the same
    stored = preprocessing.get("stored", 0) / size
    test_crop = 0.0 if short == short_side_for(shown) else shown / short
    test_size = 0 if shown == size else shown
    return {"size": size, "test_view": "given", "test_size": test_size, "test_crop": test_crop, "stored": stored}


def load_untrained(run: str | Path, *, device: str = "auto") -> Model:
    """Rebuild the model a run started with; the models of all folds are joined."""
    folder = RunFolder(run)
    if parts := folder.parts():
        return join_models([load_untrained(part.path, device=device) for part in parts])
    config, (_, about) = read_json(folder.config), read_tensors(folder.model)
    plan = make_plan({**config["plan"], "device": device, "precision": "auto"}, {})
    if "preprocessing" in about:
        plan = dataclasses.replace(plan, **_saved_sizes(about["preprocessing"]))
    resolved = config.get("resolved", {})
    with drawing_from(plan.model_seed, "network"):
        if not resolved.get("own_streams"):  # in older versions the method drew first, from one stream for both
            torch.default_generator.manual_seed(plan.model_seed)
            method(plan.method, classes=len(about["names"]), dim=embedding_dim(plan))
        embedder = build_embedder(plan, config["space"])
    if embedder.head.linear is not None:
        with torch.no_grad():
            for parameter in embedder.head.linear.parameters():
                parameter.mul_(resolved.get("head_scale", 1.0))
    return Model(embedder.to(plan.device).eval(), plan, about["names"])


def load_state(module: nn.Module, state: Mapping[str, Tensor], what: str | Path, settings: str | Path) -> None:
    """Load a state dict, or raise an error that says what does not fit which settings."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise NearkinError(f"{what} does not fit {settings}: {str(error).splitlines()[-1].strip()}") from None


def join_models(models: Sequence[Model]) -> Model:
    """Join the models of folds into one."""
    embedder = Ensemble([model.embedder for model in models if isinstance(model.embedder, Embedder)])
    in_order = [models[-1], *models[:-1]]  # the last fold holds out the last classes, so its names come first
    names = dict.fromkeys(name for model in in_order for name in model.names)
    plan = dataclasses.replace(models[0].plan, dim=embedder.dim)
    seen_before = dict.fromkeys(name for model in models for name in model.seen_before)
    return Model(embedder.eval(), plan, tuple(names), seen_before=tuple(seen_before))


def fingerprint(run: str | Path) -> str:
    """Return a digest of the model files of a run folder."""
    digest = hashlib.sha256()
    for part in RunFolder(run).parts() or [RunFolder(run)]:
        if not part.model.exists():
            raise NearkinError(f"There is no model in {part.path}: is it a run folder made by nearkin train?")
        digest.update(content_digest(part.model).encode())
    return digest.hexdigest()[:16]
