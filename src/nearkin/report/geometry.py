"""The geometry of finished runs: how classes lie before and after training, and how long CCP's sub-problems were."""

import math
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
from nearkin.runs import CHOSEN, RunFolder, read_json, whole_file
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
            cells.append([f"{run}, {when}" if when else f"{run}{_on_test(run)}", *_numbers(embedded)])
    return ["", "MAP@R", "covering radius", "inter-class distance"], cells


def _on_test(run: Path) -> str:
    select = read_json(RunFolder(run).config)["plan"]["select"]
    return f", {CHOSEN[select]}" if select == "test" else ""


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
    config = read_json(folder.config)
    known = method(config["plan"]["method"], classes=2, dim=2)
    if not isinstance(known, CCP):
        return []
    if known.every:  # by count, so that there need be no scores in the log
        length = known.every * config["resolved"]["check_every"]
        return [length] * (read_json(folder.result)["steps"] // length)
    checks = [event for event in folder.events() if event["event"] == "check"]
    over = ends([check["score"] for check in checks], known.patience)
    steps = [0, *(checks[number - 1]["step"] for number in over)]
    return [after - before for before, after in pairwise(steps)]


def draw_sub_problems(lengths: Sequence[int], out: Path) -> str:
    """Write the histogram of steps per sub-problem, and say it in a sentence."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        plot = figure.subplots()
        plot.hist(lengths, bins=_edges(lengths), color=PALETTE[0], edgecolor="white", linewidth=0.8)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        plot.set_xlabel("steps of a sub-problem")
        plot.set_ylabel("sub-problems")
    with whole_file(out) as temporary:
        temporary.write_bytes(rendered(figure, "png"))
    middle = statistics.median(lengths)
    return f"{len(lengths)} sub-problems of {min(lengths)} to {max(lengths)} steps, the median {middle:g}: {out}"


def _edges(lengths: Sequence[int], most: int = 30) -> list[float]:
    """Edges of bars about the lengths, which are multiples of the steps between checks: none falls on an edge."""
    unit = math.gcd(*lengths)
    width = unit * max(1, math.ceil((max(lengths) - min(lengths) + unit) / (most * unit)))
    bars = (max(lengths) - min(lengths)) // width + 1
    return [min(lengths) - unit / 2 + width * number for number in range(bars + 1)]
