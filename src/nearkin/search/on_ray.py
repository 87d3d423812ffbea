"""Embed a collection in parts on a Ray cluster. A part whose worker dies is embedded by another one."""

import logging
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearkin.console import Reporter
from nearkin.data.image_files import ImageFile
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.errors import NearkinError
from nearkin.search.embed import Filled
from nearkin.search.parts import Part, digest_of, embed_part
from nearkin.training.model import fingerprint, load

IMAGES_PER_PART = 8192


class Worker:
    """Embeds parts in a process of Ray's, one after the other."""

    def __init__(self, run: str, folder: str, digest: str, device: str) -> None:
        self.run, self.folder, self.digest = Path(run), Path(folder), digest
        self.model = load(run, device=device)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The counts of a part, and its images that cannot be read or the error, pickled."""
        part, images = pickle.loads(row["part"])
        try:
            done = embed_part(self.run, lambda: self.model, images, self.folder, part, self.digest)
        except NearkinError as error:
            return {"added": 0, "kept": 0, "bad": pickle.dumps([]), "error": str(error)}
        bad = pickle.dumps([(image.path, image.reason) for image in done.bad])
        return {"added": done.added, "kept": done.kept, "bad": bad, "error": ""}


def embed_on_ray(
    run: Path,
    images: Sequence[ImageFile],
    folder: Path,
    *,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Filled:
    """Embed images into a folder of parts on the cluster that Ray finds, or else on this machine.

    Every machine needs the run, the images and the folder under the same paths. There is one worker per GPU, or per
    core without any.
    """
    ray, reporter = _import_ray(), reporter or Reporter()
    fingerprint(run)  # an error here is plainer than one from a worker
    if not ray.is_initialized():
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    cpus, gpus = (int(ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU"))
    gpus = 0 if device == "cpu" else gpus
    total = -(-len(images) // IMAGES_PER_PART)
    parts = [Part(number, total) for number in range(1, total + 1)]
    rows = ray.data.from_items(
        [{"part": pickle.dumps((part, part.of(images)))} for part in parts], override_num_blocks=total
    ).map(
        Worker,
        fn_constructor_args=(os.path.abspath(run), os.path.abspath(folder), digest_of(images), device),
        compute=ray.data.ActorPoolStrategy(size=min(total, gpus or cpus)),
        num_cpus=max(1, cpus // gpus) if gpus else 1,
        num_gpus=1 if gpus else 0,
    )
    added, kept = 0, 0
    bad: list[BadImage] = []
    with reporter.bar("embedding") as progress:
        for row in rows.iter_rows():
            if row["error"]:
                raise NearkinError(row["error"])
            added, kept = added + row["added"], kept + row["kept"]
            bad += [BadImage(*image) for image in pickle.loads(row["bad"])]
            progress(added + kept + len(bad), len(images))
    reporter.leave_out(image.left_out for image in bad)
    return Filled(added, kept, bad)


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise NearkinError(f"--on ray needs Ray ({error}): pip install 'nearkin[ray]', or use --part.") from None
    return ray
