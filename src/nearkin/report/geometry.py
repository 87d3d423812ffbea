"""The geometry of finished runs: how classes lie before and after training, and how long CCP's sub-problems were."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from nearkin.data.shared import SharedStores
from nearkin.evaluate import evaluate_under, protocol_of
from nearkin.evaluate.geometry import geometry
from nearkin.measure import Embedded, embed_test, untrained
from nearkin.method import method
from nearkin.report.charts import PALETTE, STYLE, rendered
from nearkin.report.progress import Reporter
from nearkin.runs import RunFolder, read_json, whole_file
from nearkin.strategies.ccp import CCP, ends


def geometry_rows(
    runs: Sequence[Path], *, data: str | None = None, device: str = "auto", reporter: Reporter | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table: each run's test embeddings before training and after."""
    opener = SharedStores()
    cells = []
    for run in runs:
        for when, model in (("before training", untrained(run, device=device)), ("", None)):
            embedded = embed_test(run, data=data, device=device, reporter=reporter, opener=opener, model=model)
            cells.append([f"{run}, {when}" if when else str(run), *_numbers(embedded)])
    return ["", "MAP@R", "covering radius", "inter-class distance"], cells


def _numbers(embedded: Embedded) -> list[str]:
    x, images, model = embedded
    space, labels = model.embedder.space, images.labels.to(x.device)
    score = evaluate_under(protocol_of(images), x, labels, metrics=("MAP@R",), space=space)["MAP@R"]
    found = geometry(x, labels, space=space)
    return [f"{score:.2f}", f"{found.radius:.4f}", f"{found.between:.4f}"]


def sub_problems(run: str | Path) -> list[int]:
    """The steps of every sub-problem that ended in a run of CCP, in all its folds; none of another method."""
    folder = RunFolder(run)
    if parts := folder.parts():
        return [length for part in parts for length in sub_problems(part.path)]
    known = method(read_json(folder.config)["plan"]["method"], classes=2, dim=2)
    if not isinstance(known, CCP):
        return []
    checks = [event for event in folder.events() if event["event"] == "check"]
    if known.every:
        over = list(range(known.every, len(checks) + 1, known.every))
    else:
        over = ends([check["score"] for check in checks], known.patience)
    steps = [0, *(checks[number - 1]["step"] for number in over)]
    return [after - before for before, after in pairwise(steps)]


def draw_sub_problems(lengths: Sequence[int], out: Path) -> str:
    """Write the histogram of steps per sub-problem, and say it in a sentence."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        plot = figure.subplots()
        plot.hist(lengths, bins=min(30, max(5, len(set(lengths)))), color=PALETTE[0])
        plot.set_xlabel("steps of a sub-problem")
        plot.set_ylabel("sub-problems")
    with whole_file(out) as temporary:
        temporary.write_bytes(rendered(figure, "png"))
    middle = statistics.median(lengths)
    return f"{len(lengths)} sub-problems of {min(lengths)} to {max(lengths)} steps, the median {middle:g}: {out}"
