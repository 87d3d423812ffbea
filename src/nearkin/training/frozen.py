"""A frozen trunk: features of a few views of every image, computed once, on which head and proxies train.

Where training would cut a crop, it draws one of the views of the image. What these show is random, but depends on the
contents of the image alone, not on the seed or on the other images. So features are kept in the cache by content:
another method, seed or split, or a folder with a few new images, computes only what is missing. Features are what the
pooling returns. Those of a module of your own are not kept, because its code may change.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from nearkin.console import Reporter
from nearkin.data.images import Images, counted
from nearkin.data.pixels.cache import DIGEST, digest
from nearkin.data.pixels.image_bytes import read_bytes
from nearkin.data.pixels.open import free_memory
from nearkin.data.pixels.stores import FeatureStore, PixelStore
from nearkin.data.pixels.threads import map_in_threads
from nearkin.data.pixels.tiles import Pixels
from nearkin.data.pixels.views import RandomView
from nearkin.errors import NearkinError
from nearkin.files import Json, cache_dir, provenance, read_tensors, write_tensors
from nearkin.networks.backbones import OWN
from nearkin.networks.embedder import Embedder, pass_images
from nearkin.networks.eval_mode import evaluating
from nearkin.training.images import OpenImages
from nearkin.training.model import Model, autocast

VERSION = 1
"""Of the cache: increase it if what is computed changes."""

BATCH = 256
"""Images whose pixels are there at once."""

PACK = 512
"""Images whose features are written at once, so that an interrupt loses little."""

Show = Callable[[Pixels, Tensor], Tensor]  # pixels and row numbers of a batch → input of the network


class FrozenTrunk:
    """The trunk of a model that trains only its head: replaces the pixels of images by features."""

    def __init__(self, model: Model, augment: RandomView, *, reporter: Reporter) -> None:
        assert isinstance(model.embedder, Embedder)
        self.model, self.reporter = model, reporter
        self.embedder, self.augment, self.view = model.embedder, augment, model.view
        self.views = model.plan.frozen_views if augment.draws else 1  # without chance all views are the same
        pool = self.embedder.head.pool
        if isinstance(pool, nn.Module) and any(True for _ in pool.parameters()):
            raise NearkinError(
                f"The features of a frozen trunk are pooled once, but {model.plan.pool} learns: leave out learn."
            )
        self.cache = None if model.plan.backbone.startswith(OWN) else cache_dir() / f"features-v{VERSION}"
        self.about = _describe(model)

    def drawn(self, opened: OpenImages) -> OpenImages:
        """Return training images with the features of their random views."""
        plan, keys = self.model.plan, _keys(opened.images)
        self.reporter.note(
            f"The trunk is frozen: it embeds {counted(self.views, 'view', 'views')} of "
            f"{counted(len(keys), 'training image', 'training images')} once; then the head trains on these."
        )

        def features(number: int) -> Tensor:
            def show(pixels: Pixels, rows: Tensor) -> Tensor:
                draws = [_uniform(keys[row], number, self.augment.draws) for row in rows.tolist()]
                return self.augment.at(pixels, torch.stack(draws))

            about = {"view": f"{plan.augment}, number {number}", "size": self.model.size}
            return self._features(opened, show, about, f"view {number + 1} of {self.views}", keys)

        return self._replace(opened, torch.stack([features(number) for number in range(self.views)], 1))

    def shown(self, opened: OpenImages) -> OpenImages:
        """Return images with the features of their test view."""
        about = {"view": f"test, {self.model.test_size} of {self.model.short_side}"}
        features = self._features(opened, lambda pixels, _: self.view(pixels), about, "test view")
        return self._replace(opened, features[:, None])

    def draw(self, pixels: Pixels, rng: Generator, count: int | None = None) -> Tensor:  # noqa: ARG002 (one rank)
        """Draw one of the random views of each image, and return its features [B, width]."""
        device = pixels.canvas.device
        number = torch.randint(self.views, (len(pixels.canvas),), generator=rng, device=rng.device)
        return pixels.canvas[torch.arange(len(number), device=device), number.to(device, non_blocking=True), 0]

    def _replace(self, opened: OpenImages, features: Tensor) -> OpenImages:
        device = self.model.device
        fits = features.numel() * features.element_size() <= free_memory(device)
        store = FeatureStore(features.to(device) if fits else features, pixel_store(opened), device=device)
        return opened._replace(store=store)

    def _features(self, opened: OpenImages, show: Show, about: Json, title: str, keys: Sequence[bytes] = ()) -> Tensor:
        """Return features [N, width] of one view, from the cache as far as they are there."""
        keys = keys or _keys(opened.images)
        kind = self.about | about | {"at_most": opened.images.at_most}
        folder = None if self.cache is None else self.cache / hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:16]
        known = {} if folder is None else _read(folder)
        features = torch.empty(len(keys), self.embedder.trunk.width)
        missing = [row for row, key in enumerate(keys) if key not in known]
        if found := [row for row, key in enumerate(keys) if key in known]:
            features[found] = torch.stack([known[keys[row]] for row in found])
        with self.reporter.bar(f"embedding {len(missing):,} images, {title}") as progress:
            for done in range(0, len(missing), PACK):
                rows = missing[done : done + PACK]
                features[rows] = self._compute(pixel_store(opened), rows, show)
                progress(done + len(rows), len(missing))
                if folder is not None:
                    _write(folder, [keys[row] for row in rows], features[rows], kind)
        return features

    @torch.no_grad()
    def _compute(self, store: PixelStore, rows: list[int], show: Show) -> Tensor:
        device = self.model.device
        batches = torch.split(torch.tensor(rows), BATCH)
        with evaluating(self.embedder), autocast(device, self.model.plan.precision):
            found = [
                pass_images(self.embedder.features, show(pixels, index)).float().cpu()
                for index, pixels in store.read_batches(iter(batches), read_ahead=2)
            ]
        return torch.cat(found)


def pixel_store(opened: OpenImages) -> PixelStore:
    """Return the pixels of images that were opened, also if they have features in place of them."""
    return opened.store.pixels if isinstance(opened.store, FeatureStore) else opened.store


def _describe(model: Model) -> Json:
    """What the features of a view depend on, besides the view and the image."""
    plan, trunk = model.plan, model.embedder.trunk
    weights = hashlib.sha256()
    for name, tensor in trunk.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    versions = provenance()["versions"]
    return {
        "backbone": plan.backbone,
        "weights": weights.hexdigest(),
        "built_for": trunk.size,
        "normalise": trunk.normalise,
        "pool": plan.pool,
        "stored": model.storage,
        "precision": plan.precision,
        "device": model.device.type,
        "versions": {name: versions[name] for name in ("torch", "timm")},
    }


def _keys(images: Images) -> list[bytes]:
    """The digests of the contents of images."""
    if isinstance(images.sources, Tensor):
        return [digest(image.cpu().contiguous().numpy().tobytes()) for image in images.sources]
    return map_in_threads(lambda path: digest(read_bytes(path)), list(images.sources))


def _uniform(key: bytes, number: int, count: int) -> Tensor:
    """The uniform draws of a view of an image."""
    seed = hashlib.blake2b(key + number.to_bytes(4), digest_size=4).digest()
    return torch.rand(count, generator=Generator().manual_seed(int.from_bytes(seed)))


def _read(folder: Path) -> dict[bytes, Tensor]:
    known: dict[bytes, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors, _ = read_tensors(path)
        except NearkinError:  # damaged: computed and written again
            path.unlink(missing_ok=True)
            continue
        known |= zip((key.tobytes() for key in tensors["keys"].numpy()), tensors["features"], strict=True)
    return known


def _write(folder: Path, keys: Sequence[bytes], features: Tensor, about: Json) -> None:
    joined = b"".join(keys)
    table = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(-1, DIGEST)
    write_tensors(folder / f"{digest(joined).hex()}.safetensors", {"keys": table, "features": features}, about)
