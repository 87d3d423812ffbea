"""docs/results.md from the results files: python -m nearkin.report.results_page

A folder of benchmarks/results/ that bears a suite's name holds files *.jsonl as `nearkin bench` and `nearkin merge`
write them; it becomes a section with the suite's table. What a file was run with besides the suite's own settings
(another backbone, say) is read off its runs. First comes the suite with every method in one setting, then the claims of
the papers, each tested on all suites that can tell, then the other suites.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.benchmark.claims import CLAIMS, HOLDS, NOT_SHOWN, OPPOSITE, UNTESTED, Outcome, check_claim, in_words
from nearkin.benchmark.planned_runs import NEUTRAL, PlannedSuite, plan_suite
from nearkin.benchmark.results import read_results
from nearkin.benchmark.runner import SuiteResults, needs_path
from nearkin.benchmark.suite import Suite, SuiteData, load_suite, suite_names
from nearkin.benchmark.tables import LEVEL, below_start, row_runs, suite_tables
from nearkin.console import PrintedTable, markdown, markdown_table
from nearkin.evaluation.statistics import p_words
from nearkin.files import Json, atomic_file
from nearkin.report.suite_figures import ranking, write_figures
from nearkin.training.run_folder import CHOSEN

FIRST = "cub_lite0"
"""The suite that the page begins with: every method on photographs, in one setting."""

INTRODUCTION = """# Results

Written by `python -m nearkin.report.results_page` from the files in `benchmarks/results/`; no score here is typed by
hand. Scores are percent, means over seeds ± their standard error. Time is that of one run, the median over
seeds, from its first image read to its last score (of its training alone where it was made in several sittings);
images/s that of its training steps. How these tables are made, and why by these tests: [The benchmark](benchmark.md).
"""

CLAIMED = f"""## Which of the papers' claims hold here

The papers have other networks and often other settings; what is read here is our own numbers. Each claim is tested by
the metric its paper makes it by, with a paired t-test over the seeds that both rows have, on rows that differ in
nothing but the method; p is Holm's over the pairs of a claim, the interval that of the pair alone. (In a suite's table
p is Holm's over its rows: what is told apart here need not be there, nor the other way round.) A claim holds here where
p < {LEVEL} and the difference has its sign. “Not shown” is no more than that: the interval tells what the difference
may be, and with three seeds it is wide. More on each paper's method, and what else was measured:
[VCPA](vcpa.md), [Proxy-ISA](proxy_isa.md), [CCP](ccp.md), [MPA](methods.md#mpa), [PROFS](profs.md).
"""


COUNTED = {"yes": HOLDS, "not shown": NOT_SHOWN, "opposite": OPPOSITE, "untested": UNTESTED}
COUNTS = "\nThe last four columns count pairs of rows; a pair with one seed in common cannot be tested.\n"


class Found(NamedTuple):
    """The runs of one suite, made with the same settings."""

    results: SuiteResults
    strangers: int  # runs in its files that are no row of any suite here


def results_page(results: Path, *, pictures: Path | None = None, link: str = "") -> str:
    """The page as text; with `pictures` the figures of suites are written there and linked below `link`."""
    every = boards(results)
    sections = [(found.board.planned.suite.name == FIRST, _section(found, pictures, link)) for found in every]
    first = [text for is_first, text in sections if is_first] or ["No method has been measured on CUB yet.\n"]
    rest = [text for is_first, text in sections if not is_first]
    return "\n".join([INTRODUCTION, *first, _claims([found.board for found in every]), *rest])


def boards(results: Path) -> list[Found]:
    """Every suite that has results, each time with the files that were made alike."""
    files = {name: sorted((results / name).glob("*.jsonl")) for name in suite_names()}
    known = {key: run for own in files.values() for file in own for key, run in read_results(file).items()}
    made: list[tuple[SuiteResults, set[str]]] = []
    for name, own in ((name, own) for name, own in files.items() if own):
        suite = load_suite(name)
        alike: dict[str, tuple[Json, dict[str, Json]]] = {}
        for file in own:
            runs = read_results(file)
            changed = changed_settings(suite, list(runs.values()))
            alike.setdefault(str(changed), (changed, {}))[1].update(runs)
        for changed, runs in alike.values():
            planned = plan_suite(suite, seeds=sorted({run["seed"] for run in runs.values()}), settings=changed)
            made.append((SuiteResults(planned, known, {}, (), "not run yet", results / name), set(runs)))
    rows = {cell.id for results, _ in made for cell in results.planned.runs}
    return [Found(results, len(ids - rows)) for results, ids in made]


def changed_settings(suite: Suite, runs: Sequence[Json]) -> Json:
    """Settings that all runs share and that are not the suite's own, where its rows agree on one."""
    if not runs:
        return {}
    plain = plan_suite(suite, seeds=1).cells
    changed: Json = {}
    for name in dict.fromkeys(name for cell in plain for name in cell.description):
        values = {repr(run["settings"].get(name)) for run in runs}
        if name in ("data", "method", "seed", *NEUTRAL) or len(values) > 1:
            continue
        for data in {run["data"] for run in runs}:
            own = {repr(value): value for cell in plain if cell.data == data for value in [cell.description[name]]}
            if len(own) == 1:
                (default,) = own.values()
                value = runs[0]["settings"].get(name, type(default)())  # what is younger than a run was off in it
                if repr(value) != repr(default):
                    changed[name] = value
    return changed


def _section(found: Found, pictures: Path | None, link: str) -> str:
    results = found.board
    suite, cells = results.planned.suite, results.planned.runs
    there = {cell.data for cell in cells if cell.id in results.runs}
    lines = [f"## {suite.title}", "", f"`{_command(results.planned, sorted(there))}`", ""]
    for dataset, table in zip(suite.data, suite_tables(results), strict=True):
        if dataset in there:
            lines += [
                markdown([_only_measured(results, dataset, table)], level=3),
                *_reading(results, suite.data[dataset]),
            ]
    if found.strangers:
        lines.append(f"- {found.strangers} runs in the files are no row of a suite any more and are not shown.\n")
    if pictures is not None:
        drawn = [picture.name for picture in write_figures(results, pictures) if picture.suffix == ".svg"]
        lines += [f"![{suite.title}]({link}{name})\n" for name in drawn]
    return "\n".join(lines)


def _reading(results: SuiteResults, dataset: SuiteData) -> list[str]:
    """What a sorted table says, in a sentence or two."""
    suite = results.planned.suite
    if suite.sort not in dataset.metrics or not suite.baseline:
        return []
    rows = ranking(results, dataset).rows
    above, below = ([row.name for row in rows if row.mark.strip() == mark] for mark in "↑↓")
    words = [
        f"{'; '.join(names)} {'is' if len(names) == 1 else 'are'} {where}"
        for names, where in ((above, "above"), (below, "below"))
        if names
    ] or ["no row is shown to differ from"]
    harmed = [row.name for row in rows if below_start(row_runs(results, suite.rows[row.name], dataset), suite.sort)]
    sentences = [f"In words: by {suite.sort} {' and '.join(words)} {suite.baseline}; nothing more is shown."]
    if harmed:
        sentences.append(f"Training left below the network as it began: {'; '.join(harmed)}.")
    return [" ".join(sentences) + "\n"]


def _command(planned: PlannedSuite, data: Sequence[str]) -> str:
    places = "".join(f" --data {name}:PATH" for name in data if needs_path(planned.suite.data[name]))
    settings = "".join(f" --set {name}={value}" for name, value in planned.overrides.items())
    seeds = ",".join(map(str, planned.seeds)) + ("," if len(planned.seeds) == 1 else "")  # without it, how many
    return f"nearkin bench {planned.suite.name}{places} --seeds {seeds}{settings}"


def _only_measured(results: SuiteResults, dataset: str, table: PrintedTable) -> PrintedTable:
    """The table without rows of which there is no number at all; a note lists them."""
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


def _claims(boards: Sequence[SuiteResults]) -> str:
    tested = {claim: check_claim(claim, boards) for claim in CLAIMS}
    header = ["paper", "claim", "by", "here", *COUNTED]
    cells = [[c.paper, c.words, c.metric, in_words(found), *_counts(found)] for c, found in tested.items()]
    lines = [CLAIMED, markdown_table(header, cells, text=True), COUNTS, "### Pair by pair\n"]
    for claim, found in tested.items():
        if found:
            lines.append(f"**{claim.paper}: {claim.words}** ({claim.metric})\n")
            lines += [*(f"- {_sentence(each)}" for each in found), ""]
    return "\n".join(lines)


def _counts(tested: Sequence[Outcome]) -> list[str]:
    """How many pairs came out each way; nothing where none was measured."""
    return [str(sum(each.verdict == verdict for each in tested)) if tested else "" for verdict in COUNTED.values()]


def _sentence(tested: Outcome) -> str:
    test = tested.test
    where = f"{tested.row} against {tested.base} ({tested.suite}, {tested.data}, {CHOSEN[tested.select]})"
    where += f": {_signed(test.difference)}"
    if tested.verdict == UNTESTED:
        why = "one seed in common" if test.n < 2 else "all seeds differ alike"
        return f"{where}; cannot be tested, {why}."
    bounds = f"95 % {_signed(test.low)} to {_signed(test.high)}, p {p_words(test.p)}, {test.n} seeds"
    harmed = f" Training left {' and '.join(tested.harmed)} below the untrained network." if tested.harmed else ""
    return f"{where} ({bounds}): {tested.verdict}.{harmed}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/results.md from the results files.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results.md"))
    given = parser.parse_args(arguments)
    pictures = given.out.parent / "pictures" / "suites"
    text = results_page(given.results, pictures=pictures, link="pictures/suites/")
    with atomic_file(given.out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
