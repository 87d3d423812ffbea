"""docs/results.md from the results files: python -m nearkin.report.results_page

A folder of benchmarks/results/ that bears a suite's name holds files *.jsonl as `nearkin bench` and `nearkin merge`
write them; it becomes a section with the suite's table. What a file was run with besides the suite's own settings
(another backbone, say) is read off its runs. The claims of the papers are tested on the suite that says so below.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.bench import Board, needs_path
from nearkin.evaluate.statistics import Comparison, holm, paired_t
from nearkin.report.benchmarks import LEVEL, finished, suite_tables
from nearkin.report.claims import CLAIMS, Claim
from nearkin.report.figures import write_figures
from nearkin.report.formats import PrintedTable, markdown, p_words
from nearkin.results import read_results
from nearkin.runs import Json, whole_file
from nearkin.sheet import NEUTRAL, Sheet, expand
from nearkin.spec import parse
from nearkin.suites import Suite, load_suite, suite_names

CLAIMED_ON = "cub_lite0"
"""The suite on which the papers' claims are tested; it comes first."""

INTRODUCTION = """# Results

Written by `python -m nearkin.report.results_page` from the files in `benchmarks/results/`; nothing here is typed by
hand. Scores are percent, means over seeds ± their standard error. Time is that of one run from its first image read to
its last score (of its training alone where it was made in several sittings); images/s that of its training steps.
"""


class Found(NamedTuple):
    """The runs of one suite, made with the same settings."""

    board: Board
    strangers: int  # runs in the files that are no row of the suite


def results_page(results: Path, *, pictures: Path | None = None, link: str = "") -> str:
    """The page as text; with `pictures` the figures of suites are written there and linked below `link`."""
    every = list(boards(results))
    parts = [_claims_section(found.board) for found in every if found.board.sheet.suite.name == CLAIMED_ON]
    parts += [_section(found, pictures, link) for found in every]
    return "\n".join([INTRODUCTION, *(parts or ["No suite has been run yet.\n"])])


def boards(results: Path) -> Iterator[Found]:
    """Every suite that has results, the one with the claims first, with the files that were made alike."""
    folders = [results / name for name in sorted(suite_names(), key=lambda name: (name != CLAIMED_ON, name))]
    files = {folder: sorted(folder.glob("*.jsonl")) for folder in folders}
    known = {key: run for own in files.values() for file in own for key, run in read_results(file).items()}
    for folder, own in files.items():
        suite = load_suite(folder.name)
        alike: dict[str, tuple[Json, dict[str, Json]]] = {}
        for file in own:
            runs = read_results(file)
            changed = changed_settings(suite, list(runs.values()))
            alike.setdefault(str(changed), (changed, {}))[1].update(runs)
        for changed, runs in alike.values():
            sheet = expand(suite, seeds=sorted({run["seed"] for run in runs.values()}), settings=changed)
            strangers = len(runs.keys() - {cell.id for cell in sheet.cells})
            yield Found(Board(sheet, known, {}, (), "not run yet"), strangers)


def changed_settings(suite: Suite, runs: Sequence[Json]) -> Json:
    """Settings that all runs share and that are not the suite's own, where its rows agree on one."""
    plain = expand(suite, seeds=1).cells
    changed: Json = {}
    for name in runs[0]["settings"] if runs else ():
        values = {repr(run["settings"].get(name)) for run in runs}
        if name in ("data", "method", "seed", *NEUTRAL) or len(values) > 1:
            continue
        value = runs[0]["settings"][name]
        for data in {run["data"] for run in runs}:
            own = {repr(cell.description.get(name)) for cell in plain if cell.data == data}
            if len(own) == 1 and own != {repr(value)}:
                changed[name] = value
    return changed


def _section(found: Found, pictures: Path | None, link: str) -> str:
    board = found.board
    suite, cells = board.sheet.suite, board.sheet.cells
    there = {cell.data for cell in cells if cell.id in board.results}
    lines = [f"## {suite.title}", "", f"`{_command(board.sheet, sorted(there))}`", ""]
    for part, table in zip(suite.parts, suite_tables(board), strict=True):
        if part in there:
            lines.append(markdown([_only_measured(board, part, table)], level=3))
    if found.strangers:
        lines.append(f"- {found.strangers} runs in the files are no row of this suite any more and are not shown.\n")
    if pictures is not None:
        drawn = [picture.name for picture in write_figures(board, pictures) if picture.suffix == ".svg"]
        lines += [f"![{suite.title}]({link}{name})\n" for name in drawn]
    return "\n".join(lines)


def _command(sheet: Sheet, data: Sequence[str]) -> str:
    places = "".join(f" --data {name}:PATH" for name in data if needs_path(sheet.suite.parts[name]))
    settings = "".join(f" --set {name}={value}" for name, value in sheet.overrides.items())
    seeds = ",".join(map(str, sheet.seeds))
    return f"nearkin bench {sheet.suite.name}{places} --seeds {seeds}{settings}"


def _only_measured(board: Board, part: str, table: PrintedTable) -> PrintedTable:
    """The table without rows of which there is no number at all; a note lists them."""
    suite = board.sheet.suite
    empty = [
        row.name
        for row in suite.rows.values()
        if part in row.methods and part not in row.paper and not finished(board, row, suite.parts[part]).runs
    ]
    notes = [note for note in table.notes if not note.startswith(tuple(f"{name}: " for name in empty))]
    known = [name for name in empty if name not in board.sheet.missing]
    if known:
        notes.append(f"Not measured: {'; '.join(known)}.")
    cells = [row for row in table.cells if row[0] not in empty]
    return PrintedTable(f"On {part}", table.header, cells, notes)


# Claims.


class Tested(NamedTuple):
    """A claim about two rows; p is Holm's over all claims that could be tested."""

    claim: Claim
    row: str
    base: str
    test: Comparison | None  # None: one of the two was not measured


def check_claims(board: Board, claims: Sequence[Claim] = CLAIMS) -> list[Tested]:
    """Every claim on every pair of rows it is about, by a paired t-test over the seeds both have."""
    found = [tested for claim in claims for tested in _pairs(board, claim)]
    adjusted = holm([math.nan if t.test is None else t.test.p for t in found])
    return [
        t if t.test is None else t._replace(test=t.test._replace(p=float(p)))
        for t, p in zip(found, adjusted, strict=True)
    ]


def _pairs(board: Board, claim: Claim) -> Iterator[Tested]:
    specs = {cell.row: parse(cell.description["method"]) for cell in board.sheet.cells}
    rows = [row for row, spec in specs.items() if spec.name == claim.method]
    if not rows:
        yield Tested(claim, claim.method, claim.base or "its inner loss", None)
    for row in rows:
        inner = specs[row].args[0] if specs[row].args else None
        bases = [
            other
            for other, spec in specs.items()
            if (spec.name == claim.base if claim.base else inner is not None and str(spec) == str(inner))
        ]
        if not bases:
            yield Tested(claim, row, claim.base or str(inner), None)
        for base in bases:
            yield Tested(claim, row, base, _compare(board, row, base, claim.metric))


def _compare(board: Board, row: str, base: str, metric: str) -> Comparison | None:
    suite = board.sheet.suite
    part = next(iter(suite.parts.values()))
    ours, theirs = (finished(board, suite.rows[name], part).values(metric) for name in (row, base))
    shared = sorted(ours.keys() & theirs.keys())
    return paired_t([ours[s] for s in shared], [theirs[s] for s in shared]) if len(shared) > 1 else None


def _claims_section(board: Board) -> str:
    tested = check_claims(board)
    lines = [
        "## Which of the papers' claims hold here",
        "",
        f"On {board.sheet.suite.title[0].lower()}{board.sheet.suite.title[1:]}; the papers have other networks and "
        "settings. Each claim is tested by the metric its paper makes it by, with a paired t-test over the seeds both "
        f"rows have; p is Holm's over all claims tested. A claim holds here where p < {LEVEL} and the difference has "
        "its sign; “no difference seen” says no more than that: see the interval.",
        "",
    ]
    for paper in dict.fromkeys(t.claim.paper for t in tested):
        lines += [f"- **{paper}**", *(f"  - {_sentence(t)}" for t in tested if t.claim.paper == paper)]
    return "\n".join([*lines, ""])


def _sentence(tested: Tested) -> str:
    claim, test = tested.claim, tested.test
    said = f"“{claim.words}” ({tested.row} against {tested.base}, {claim.metric})"
    if test is None:
        return f"{said}: not measured."
    numbers = f"{_signed(test.difference)}, 95 % {_signed(test.low)} to {_signed(test.high)}, {test.n} seeds"
    if math.isnan(test.p):
        return f"{said}: cannot be tested, all seeds differ by the same {_signed(test.difference)}."
    if test.p >= LEVEL:
        return f"{said}: no difference seen (p {p_words(test.p)}; {numbers})."
    return f"{said}: {'holds here' if test.difference > 0 else 'the opposite'} (p {p_words(test.p)}; {numbers})."


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
    with whole_file(given.out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
