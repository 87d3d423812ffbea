"""Write docs/results.md and its figures from the results files: python -m tools.results_page

A folder of benchmarks/results/ with a suite's name holds files *.jsonl as `nearkin bench` and `nearkin merge` write
them. Results made with other images than today's are in a folder of their own, whose data.txt says which images these
are; once a suite has results with recorded images, its older ones are no longer used for the claims. Settings that a
file was run with besides the suite's own (another backbone, say) are read off its runs. The page has three layers: the
reading in words, the main table (every method in one setting), and everything else folded. The papers' claims have a
page of their own, by `tools.claims_page`.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.benchmark.planned_runs import NEUTRAL, PlannedSuite, plan_suite
from nearkin.benchmark.results import images_of, read_results
from nearkin.benchmark.runner import SuiteResults, needs_path
from nearkin.benchmark.suite import Suite, load_suite, suite_names
from nearkin.benchmark.tables import below_start, row_runs, suite_tables
from nearkin.console import NOTHING, PrintedTable, markdown
from nearkin.files import Json, atomic_file
from nearkin.report.suite_figures import ranking, write_figures

FIRST = "cub_lite0"
"""The suite of the first table: every method on photographs, in one setting."""

INTRODUCTION = """# Results

`python -m tools.results_page` writes this page from the files in `benchmarks/results/`; no score is typed by hand.
[The benchmark](benchmark.md) explains the tables and the tests; [the papers' claims](claims.md) have their own page.

## In words
"""

TABLES = """## Tables

Scores are percent, means over seeds ± their standard error. Time is the median over seeds of one run, from its first
image read to its last score (its training alone, if the run was interrupted and resumed); images/s is the speed of the
training steps.
"""


class MeasuredSuite(NamedTuple):
    """The runs of one suite, made with the same settings on the same images."""

    results: SuiteResults
    unknown_runs: int  # runs in its files that belong to no row of any suite
    images: str  # which images they were made with, in words
    superseded: bool = False  # whether there are runs with today's images

    @property
    def suite(self) -> Suite:
        """The suite itself."""
        return self.results.planned.suite


def results_page(folder: Path, *, pictures: Path | None = None, link: str = "") -> str:
    """The page as text; with `pictures` the figures of suites are written there and linked below `link`."""
    measured = measured_suites(folder)
    current = [each for each in measured if not each.superseded]
    first = [each for each in current if each.suite.name == FIRST]
    others = [each for each in current if each.suite.name != FIRST]
    earlier = [each for each in measured if each.superseded]
    readings = [reading for each in first + others for reading in _readings(each.results)]
    return "\n".join(
        [
            INTRODUCTION,
            *(readings or ["- No method has been measured on CUB yet."]),
            "",
            TABLES,
            *(_section(each, pictures, link, fold_all=False) for each in first),
            "## All other suites\n",
            *(_section(each, pictures, link, fold_all=True) for each in others),
            *(["## Made with earlier images\n"] if earlier else []),
            *(_section(each, None, link, fold_all=True) for each in earlier),
        ]
    )


def measured_suites(folder: Path) -> list[MeasuredSuite]:
    """Every suite with results; files made with different settings or images are separate entries."""
    places = [folder, *sorted(path.parent for path in folder.glob("*/data.txt"))]
    found = sorted((each for place in places for each in _measured_in(place)), key=lambda each: each.suite.name)
    recorded = {each.suite.name for each in found if _is_recorded(each)}
    return [each._replace(superseded=each.suite.name in recorded and not _is_recorded(each)) for each in found]


def _measured_in(folder: Path) -> list[MeasuredSuite]:
    files = {name: sorted((folder / name).glob("*.jsonl")) for name in suite_names()}
    every = [run for paths in files.values() for path in paths for run in read_results(path).values()]
    found: list[tuple[SuiteResults, set[str], str]] = []
    for name, paths in files.items():
        suite = load_suite(name)
        groups: list[tuple[Json, dict[str, Json]]] = []
        for path in paths:
            runs = read_results(path)
            changed = changed_settings(suite, list(runs.values()))
            fitting = (own for same, own in groups if same == changed and _same_images([*own.values(), *runs.values()]))
            if (group := next(fitting, None)) is None:
                groups.append((changed, runs))
            else:
                group.update(runs)
        for changed, runs in groups:
            known = {run["id"]: run for run in every if _same_images([*runs.values(), run])}
            planned = plan_suite(suite, seeds=sorted({run["seed"] for run in runs.values()}), settings=changed)
            results = SuiteResults(planned, known, {}, (), "not run yet", folder / name)
            found.append((results, set(runs), _images_in_words(runs.values(), folder)))
    ids = {run.id for results, *_ in found for run in results.planned.runs}
    return [MeasuredSuite(results, len(keys - ids), images) for results, keys, images in found]


def _same_images(runs: Sequence[Json]) -> bool:
    """Whether all runs on a data set were made with the same images of it."""
    digests = {(run["data"], images_of(run)) for run in runs}
    return len(digests) == len({data for data, _ in digests})


def _images_in_words(runs: Iterable[Json], folder: Path) -> str:
    """Which images the runs were made with: as they recorded it, or as data.txt in their folder says."""
    marks = {f"{run['data']} {images_of(run)}": run for run in runs if images_of(run)}
    words = [
        f"{run['data']}, {mark['images']:,} images in {mark['bytes'] / 2**20:,.0f} MiB (digest {mark['digest']}), kept "
        f"at a short side of at most {mark['kept']:.3g} × the network's size"
        for run in dict(sorted(marks.items())).values()
        for mark in [run["images"]]
    ]
    if words:
        return "; ".join(words)
    said = folder / "data.txt"
    return (
        said.read_text(encoding="utf-8").strip() if said.exists() else "not recorded; those of the commits named below"
    )


def _is_recorded(measured: MeasuredSuite) -> bool:
    runs = measured.results.runs
    return any(images_of(runs[run.id]) for run in measured.results.planned.runs if run.id in runs)


def changed_settings(suite: Suite, runs: Sequence[Json]) -> Json:
    """Settings that all runs share and that differ from the suite's, if its rows agree on one value."""
    if not runs:
        return {}
    planned = plan_suite(suite, seeds=1).runs
    changed: Json = {}
    for name in dict.fromkeys(name for run in planned for name in run.description):
        values = {repr(run["settings"].get(name)) for run in runs}
        if name in ("data", "method", "seed", *NEUTRAL) or len(values) > 1:
            continue
        for data in {run["data"] for run in runs}:
            defaults = {repr(run.description[name]): run.description[name] for run in planned if run.data == data}
            if len(defaults) == 1:
                (default,) = defaults.values()
                value = runs[0]["settings"].get(name, type(default)())  # a setting newer than the run was off in it
                if repr(value) != repr(default):
                    changed[name] = value
    return changed


def _section(measured: MeasuredSuite, pictures: Path | None, link: str, *, fold_all: bool) -> str:
    """A suite with its tables, notes and figures; the notes are folded, or all of it."""
    results, suite = measured.results, measured.suite
    with_runs = {run.data for run in results.planned.runs if run.id in results.runs}
    shown, notes = [], []
    for name, table in zip(suite.data, suite_tables(results), strict=True):
        if name in with_runs:
            full = _only_measured(results, name, table)
            shown.append(markdown([full._replace(notes=[])], level=4).rstrip() + "\n")
            notes += [f"- {note}" for note in full.notes]
    if measured.unknown_runs:
        notes.append(f"- {measured.unknown_runs} runs in the files belong to no row of a suite and are not shown.")
    if pictures is not None:
        drawn = [picture.name for picture in write_figures(results, pictures) if picture.suffix == ".svg"]
        shown += [f"![{suite.title}]({link}{name})\n" for name in drawn]
    body = [folded("Table and notes", [*shown, *notes])] if fold_all else [*shown, folded("Notes", notes)]
    command = f"`{_command(results.planned, sorted(with_runs))}`"
    return "\n".join([f"### {suite.title}", "", command, "", f"Images: {measured.images}.", "", *body])


def folded(summary: str, lines: Sequence[str]) -> str:
    """Markdown that is shown when its summary is clicked."""
    text = "\n".join(lines).rstrip()
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>\n'


def _readings(results: SuiteResults) -> list[str]:
    """What the sorted tables of a suite show, a few sentences per data set."""
    suite, sentences = results.planned.suite, []
    for dataset in suite.data.values():
        if suite.sort not in dataset.metrics or not suite.baseline or not ranking(results, dataset).rows:
            continue
        rows = ranking(results, dataset).rows
        above, below = ([row.name for row in rows if row.mark.strip() == mark] for mark in "↑↓")
        words = [
            f"{'; '.join(names)} {'is' if len(names) == 1 else 'are'} {where}"
            for names, where in ((above, "above"), (below, "below"))
            if names
        ] or ["no row differs significantly from"]
        text = f"- **{suite.title}:** by {suite.sort} {' and '.join(words)} {suite.baseline}"
        text += "; no other difference is significant." if above or below else "."
        runs = {row.name: row_runs(results, suite.rows[row.name], dataset) for row in rows}
        if harmed := [name for name, found in runs.items() if below_start(found, suite.sort)]:
            text += f" Lower after training than before: {'; '.join(harmed)}."
        sentences.append(text)
    return sentences


def _command(planned: PlannedSuite, data: Sequence[str]) -> str:
    paths = "".join(f" --data {name}:PATH" for name in data if needs_path(planned.suite.data[name]))
    settings = "".join(f" --set {name}={value}" for name, value in planned.overrides.items())
    seeds = ",".join(map(str, planned.seeds)) + ("," if len(planned.seeds) == 1 else "")  # "3" would be three seeds
    return f"nearkin bench {planned.suite.name}{paths} --seeds {seeds}{settings}"


def _only_measured(results: SuiteResults, dataset: str, table: PrintedTable) -> PrintedTable:
    """The table without rows that have no number at all; a note lists them."""
    suite = results.planned.suite
    empty = [
        row.name
        for row in suite.rows.values()
        if dataset in row.methods and dataset not in row.paper and not row_runs(results, row, suite.data[dataset]).runs
    ]
    notes = [note for note in table.notes if not note.startswith(tuple(f"{name}: " for name in empty))]
    known = [name for name in empty if name not in results.planned.missing]
    if known:
        notes.append(f"Not measured: {'; '.join(known)}.")
    cells = [row for row in table.cells if row[0] not in empty]
    return PrintedTable(f"On {dataset}", table.header, cells, notes)


def signed(value: float) -> str:
    """A difference with its sign; a dash if there is none."""
    return NOTHING if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/results.md from the results files.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args(arguments)
    pictures = options.out.parent / "pictures" / "suites"
    text = results_page(options.results, pictures=pictures, link="pictures/suites/")
    with atomic_file(options.out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
