"""Write docs/claims.md and its figures from the results files: python -m tools.claims_page

One section per suite with claims: what the paper claims, what was run, a forest plot of our differences beside the
paper's, the verdict, why we think so, what could not be run; folded below, the table, and what other suites measured.
A claim without results is shown with the time its runs would take, by the speeds recorded in the results files.
"""

import argparse
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nearkin.benchmark.comparisons import PAIRINGS, Measured, compare
from nearkin.benchmark.costs import images_per_epoch
from nearkin.benchmark.planned_runs import PlannedRun, plan_suite
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import Suite, load_suite, suite_names
from nearkin.benchmark.suite_claims import MOST_SEEDS, Claim
from nearkin.benchmark.tables import LEVEL
from nearkin.benchmark.verdicts import TOO_FEW, TestedClaim, check_claims, in_words
from nearkin.console import NOTHING, duration, markdown_table
from nearkin.data.benchmarks import CUB_COUNTS
from nearkin.evaluation.statistics import p_words
from nearkin.files import Json, atomic_file
from nearkin.networks.backbones import BACKBONES
from nearkin.report.charts import save_figure
from nearkin.report.forest import Effect, draw_forest
from nearkin.training.run_folder import CHOSEN
from tools.results_page import MeasuredSuite, folded, measured_suites, signed

INTRODUCTION = f"""# The papers' claims

`python -m tools.claims_page` writes this page from the suites and the files in `benchmarks/results/`; no score is
typed by hand.

Each of the five papers has a suite in its own setting, with EfficientNet-Lite0 in place of its network: its losses,
batches, optimiser, schedule, protocol, metric, baselines and ablations. Where something is shorter or different, the
section says so. The papers' numbers and ours are of different networks: compare differences with differences.

**The test** is written into the suites before their runs. One comparison per paper is the main one, in bold: a paired
t-test over at least eight seeds, and as many as half the published gain needs for a power of 80 % by the deviation of
the first three, at most {MOST_SEEDS}. With one main comparison per paper there is nothing to correct p for; had a paper
several, Holm's correction over these would apply. It *holds* if p < {LEVEL} and the difference has the sign that the
paper claims, and holds *in part* if the 95 % interval of another claim of the paper lies below zero. It is the
*opposite* if p < {LEVEL} and the sign is the other one. *Not shown* does not mean refuted: the interval says how large
the gain could still be. All other claims have three seeds and are *estimates* without a verdict or correction: of
twenty such intervals one misses the true difference by chance. Where one side is a sweep, its best value stands for it.

`nearkin bench SUITE … --headline --data cub:PATH` runs the main comparisons, one suite without `--headline` all its
rows. The suites are {{suites}}.
[Results](results.md) has the tables of all other suites.
"""


def claims_page(folder: Path, *, pictures: Path | None = None, link: str = "") -> str:
    """The page as text; with `pictures` the figures of what was measured are written there and linked below `link`."""
    measured = measured_suites(folder)
    suites = [suite for suite in map(load_suite, suite_names()) if suite.claims]
    speeds = _speeds(measured)
    others = [each for each in measured if not each.suite.claims]
    sections = [_section(_results_of(suite, measured), speeds, others, pictures, link) for suite in suites]
    overview = [[_link(each), in_words(check_claims(_results_of(each, measured)))] for each in suites]
    return "\n".join(
        [
            INTRODUCTION.replace("{suites}", ", ".join(f"`{suite.name}`" for suite in suites)),
            markdown_table(["paper", "verdict"], overview, text=True),
            "",
            *sections,
        ]
    )


def _paper(suite: Suite) -> str:
    return suite.claims[0].paper


def _link(suite: Suite) -> str:
    return f"[{_paper(suite)}](#{_paper(suite).lower()})"


def _results_of(suite: Suite, measured: Iterable[MeasuredSuite]) -> SuiteResults:
    """The results of a suite as it is, without changed settings; empty if there are none."""
    for each in measured:
        if each.suite.name == suite.name and not each.results.planned.overrides and not each.superseded:
            runs, out = each.results.runs, each.results.out
            return SuiteResults(plan_suite(suite, seeds=MOST_SEEDS), runs, {}, (), "", out)
    return SuiteResults(plan_suite(suite, seeds=MOST_SEEDS), {}, {}, (), "")


def _section(
    results: SuiteResults,
    speeds: Mapping[int, float],
    others: Sequence[MeasuredSuite],
    pictures: Path | None,
    link: str,
) -> str:
    suite, found = results.planned.suite, check_claims(results)
    lines = [f"## {_paper(suite)}", "", f"{suite.source}.", "", f"**Verdict: {in_words(found)}.**", ""]
    if (measured := [each for each in found if each.test.n]) and pictures is not None:
        picture = save_figure(_forest(measured), pictures / f"{suite.name}.svg")
        lines += [f"![Differences and intervals of the claims of {_paper(suite)}]({link}{picture.name})", ""]
    lines += [f"**What was run.** {_run(results)} {suite.note}.", ""]
    lines += [f"**Why we think so.** {suite.why}", ""] if suite.why else []
    lines += [f"**What could not be run.** {suite.missing}", ""] if suite.missing else []
    lines.append(folded("Claim by claim", [_table(results, found, speeds)]))
    if elsewhere := _elsewhere(_paper(suite), others):
        lines.append(folded("In other settings, which decide nothing", elsewhere))
    return "\n".join(lines)


def _run(results: SuiteResults) -> str:
    runs = [results.runs[run.id] for run in results.planned.runs if run.id in results.runs]
    if not runs:
        return "Nothing yet."
    rows = {run.row for run in results.planned.runs if run.id in results.runs}
    return f"{len(runs)} trainings, {len(rows)} of the suite's {len(results.planned.suite.rows)} rows."


def _forest(found: Sequence[TestedClaim]) -> object:
    effects = []
    for each in found:
        test = each.test
        remark = each.outcome if each.outcome != TOO_FEW else f"{test.n} of {each.needed} seeds"
        label = f"{each.claim.words} ({each.claim.metric})"
        effects.append(
            Effect(
                textwrap.fill(label, 60),
                test.difference,
                test.low,
                test.high,
                each.published,
                remark,
                each.claim.headline,
            )
        )
    return draw_forest(effects, unit="difference, percentage points")


def _table(results: SuiteResults, found: Sequence[TestedClaim], speeds: Mapping[int, float]) -> str:
    header = ["claim", "by", "source", "paper", "ours", "95 %", "p", "seeds", "outcome", "still to run"]
    cells = []
    for each in found:
        claim, test = each.claim, each.test
        words = f"**{claim.words}**" if claim.headline else claim.words
        notes = [f"best of {len(claim.bases)}: {each.base}"] * (len(claim.bases) > 1 and test.n > 0)
        notes += [claim.note] * bool(claim.note)
        left = missing_runs(results, claim, each.needed)
        cells.append(
            [
                words + (f" ({'; '.join(notes)})" if notes else ""),
                claim.metric,
                claim.source,
                signed(each.published),
                signed(test.difference),
                NOTHING if math.isnan(test.low) else f"{signed(test.low)} to {signed(test.high)}",
                p_words(test.p) if claim.seeds else "",
                str(test.n or ""),
                each.outcome,
                f"{len(left)} runs, {duration(sum(seconds_of(run, speeds) for run in left))}" if left else "",
            ]
        )
    rates = ", ".join(f"{speed:,.0f} images/s in batches of {batch}" for batch, speed in sorted(speeds.items()))
    cost = f"Times are for one GPU at the speeds recorded in the results: {rates}. Claims share runs."
    return f"{markdown_table(header, cells, text=True)}\n\n{cost}"


def missing_runs(results: SuiteResults, claim: Claim, seeds: int) -> list[PlannedRun]:
    """The runs of the first `seeds` seeds that a claim still needs."""
    runs = [run for run in results.planned.runs if run.row in claim.rows and run.seed < seeds]
    return [run for run in runs if run.id not in results.runs]


def seconds_of(run: PlannedRun, speeds: Mapping[int, float]) -> float:
    """The expected time of a run on a GPU: images to train on and to check, by the speed of the nearest batch size."""
    settings = run.description
    half = "test" if settings["halves"] == "swapped" else "training"
    images = settings["epochs"] * images_per_epoch(settings, CUB_COUNTS[half])
    larger = (settings["size"] / BACKBONES[settings["backbone"]].size) ** 2
    batch = min(speeds, key=lambda size: abs(math.log(size / settings["batch"])))
    return float(images * larger / speeds[batch])


def _speeds(measured: Sequence[MeasuredSuite]) -> dict[int, float]:
    """Batch size → median images per second over the recorded runs on a GPU, newest images first."""
    found: dict[int, list[float]] = {}
    for each in measured:
        for run in _own(each):
            if run.get("images_per_second") and run["settings"]["backbone"] == "lite0":
                found.setdefault(run["settings"]["batch"], []).append(run["images_per_second"])
    return {batch: statistics.median(speeds) for batch, speeds in found.items()}


def _own(each: MeasuredSuite) -> list[Json]:
    ids = {run.id for run in each.results.planned.runs}
    return [run for key, run in each.results.runs.items() if key in ids]


def _elsewhere(paper: str, measured: Sequence[MeasuredSuite]) -> list[str]:
    """What suites without claims measured of a paper's comparisons, one list per comparison."""
    lines = []
    for pairing in PAIRINGS:
        if pairing.paper == paper and (found := compare(pairing, [each.results for each in measured])):
            lines += [f"**{pairing.words}** ({pairing.metric})\n", *(f"- {_sentence(each)}" for each in found), ""]
    return lines


def _sentence(measured: Measured) -> str:
    test = measured.test
    where = f"{measured.row} less {measured.base} ({measured.suite}, {CHOSEN[measured.select]})"
    bounds = f", 95 % {signed(test.low)} to {signed(test.high)}" if not math.isnan(test.low) else ""
    harmed = f" Lower after training than before: {' and '.join(measured.harmed)}." if measured.harmed else ""
    return f"{where}: {signed(test.difference)}{bounds}, {test.n} seed{'s' * (test.n != 1)}.{harmed}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/claims.md from the results files.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/claims.md"))
    options = parser.parse_args(arguments)
    text = claims_page(options.results, pictures=options.out.parent / "pictures" / "claims", link="pictures/claims/")
    with atomic_file(options.out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
