"""All pictures of a run's proxies with one call: `nearkin proxies RUN`."""

from collections.abc import Sequence
from pathlib import Path

from nearkin.console import Reporter
from nearkin.data.pixels.open import keep_images_open
from nearkin.files import read_json
from nearkin.spec import parse
from nearkin.studies.outliers import isa_pictures
from nearkin.studies.proxy_pictures import draw_cosines, draw_maps, draw_scores, open_training, views_of
from nearkin.training.checkpoint import kept_epochs, open_snapshot
from nearkin.training.run_folder import RunFolder


@keep_images_open()
def draw_run(
    run: str | Path,
    *,
    out: str | Path | None = None,
    baseline: str | Path | None = None,
    epochs: Sequence[int] | None = None,
    points: int = 1000,
    data: str | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> list[Path]:
    """Write the pictures of a run, beside a baseline where one is given, into a folder (default: the run's own)."""
    reporter = reporter or Reporter()
    folder = RunFolder(run)
    where = Path(out) if out else folder.path / "pictures"
    runs = _named([folder] if baseline is None else [folder, RunFolder(baseline)])
    views = {
        name: views_of(each, epochs=epochs, points=points, data=data, device=device, reporter=reporter)
        for name, each in runs.items()
    }
    written = [draw_maps(views, where / "tsne.png"), draw_cosines(views, where / "cosines.png")]
    if scores := draw_scores(runs, where / "scores.png"):
        written.append(scores)
    last = open_snapshot(folder, max(kept_epochs(folder)), data=data, device=device)
    part = open_training(last.model, reporter=reporter)
    per_epoch = read_json(folder.config)["resolved"]["steps_per_epoch"]
    return written + isa_pictures(last, part, where, per_epoch=per_epoch)


def _named(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Runs by the bare name of their method, with the folder's where that is not enough."""
    names = [parse(read_json(run.config)["plan"]["method"]).name for run in runs]
    alike = len(set(names)) < len(names)
    return {f"{name}, {run.path.name}" if alike else name: run for name, run in zip(names, runs, strict=True)}
