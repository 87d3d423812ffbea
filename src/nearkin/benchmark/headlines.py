"""Run the headline claims of several suites in one process, pair by pair, with as many seeds as they need."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkin.benchmark.budget import Budget
from nearkin.benchmark.planned_runs import PlannedSuite, plan_suite
from nearkin.benchmark.runner import Job, Runner, SuiteResults, open_runner
from nearkin.benchmark.suite import Suite, load_suite
from nearkin.benchmark.suite_claims import MOST_SEEDS, PILOT, Claim, best_base, published_gain, seeds_needed
from nearkin.console import Reporter, duration
from nearkin.errors import NearkinError
from nearkin.evaluation.statistics import summary

Paths = Sequence[str] | Mapping[str, str | Path]


def bench_headlines(
    suites: Sequence[str | Path],
    *,
    data: Paths = (),
    seeds: int | Sequence[int] | None = None,
    budget: str | float | None = None,
    out: str | Path = "bench",
    settings: Mapping[str, Any] | None = None,
    speed: float = 0.0,
    reporter: Reporter | None = None,
) -> list[SuiteResults]:
    """Run the headline of each suite: with the first seed both rows of all, then with the next seed, and so on.

    So a stop leaves whole pairs; none is started that is unlikely to finish within the budget. Without `seeds` their
    number is the claim's, until the first three pairs say how many are needed to find half the published gain. The
    other arguments are those of `bench`.
    """
    time_left, found = Budget(budget), []
    for suite in map(load_suite, suites):
        if suite.headline is None:
            raise NearkinError(f"{suite.name} has no headline: mark one of its claims with headline = true.")
        found.append((suite, suite.headline))
    with open_runner(out, queries=False, speed=speed, reporter=reporter) as runner:
        headlines = [_Headline(suite, claim, data, seeds, settings or {}, runner) for suite, claim in found]
        _note_costs(headlines, runner)
        made = runner.make(_in_turn(headlines), lambda: _total(headlines), time_left)
        return [runner.suite_results(headline.planned(), made, data) for headline in headlines]


def needed_seeds(suite: Suite, claim: Claim, scores: Mapping[str, Mapping[int, float]]) -> int:
    """How many seeds a claim needs, by the deviation over its first `PILOT` pairs; `scores` is row → seed → score."""
    data = next(iter(suite.data))
    base = best_base(claim, scores)
    ours, theirs = scores.get(claim.row, {}), scores.get(base, {})
    first = sorted(ours.keys() & theirs.keys())[:PILOT]
    deviation = summary([ours[seed] - theirs[seed] for seed in first]).deviation if len(first) == PILOT else math.nan
    return seeds_needed(claim, published_gain(claim, suite.rows, data), deviation)


class _Headline:
    """The pairs of rows of one headline that are still to be made, by seed."""

    def __init__(
        self,
        suite: Suite,
        claim: Claim,
        data: Paths,
        seeds: int | Sequence[int] | None,
        settings: Mapping[str, Any],
        runner: Runner,
    ) -> None:
        self.suite, self.claim, self.settings, self.runner = suite, claim, settings, runner
        self.given = seeds
        self.all = self._plan(max(MOST_SEEDS, claim.seeds) if seeds is None else seeds)
        jobs = runner.jobs(self.all, data)
        self.pairs: dict[int, list[Job]] = {
            seed: [job for name in claim.rows for job in jobs if (job.run.row, job.run.seed) == (name, seed)]
            for seed in self.all.seeds
        }

    def wanted(self) -> dict[int, list[Job]]:
        """The pairs that the results so far ask for."""
        needed = self._needed()
        return {seed: pair for seed, pair in self.pairs.items() if self.given is not None or seed < needed}

    @property
    def failed(self) -> bool:
        """Whether one of its runs failed."""
        return any(run.id in self.runner.failed for run in self.all.runs)

    def planned(self) -> PlannedSuite:
        """The two rows with the seeds that are asked for."""
        return self._plan(sorted(self.wanted()))

    def _needed(self) -> int:
        metric, results = self.claim.metric, self.runner.results
        scores: dict[str, dict[int, float]] = {name: {} for name in self.claim.rows}
        for run in self.all.runs:
            if run.id in results and metric in results[run.id]["scores"]:
                scores[run.row][run.seed] = results[run.id]["scores"][metric]
        return needed_seeds(self.suite, self.claim, scores)

    def _plan(self, seeds: int | Sequence[int]) -> PlannedSuite:
        return plan_suite(self.suite, seeds=seeds, rows=self.claim.rows, settings=self.settings)


def _total(headlines: Sequence[_Headline]) -> int:
    """The number of runs that the results so far ask for; more once the first pairs ask for more seeds."""
    return sum(len(pair) for headline in headlines for pair in headline.wanted().values())


def _in_turn(headlines: Sequence[_Headline]) -> Iterator[list[Job]]:
    """One pair of each headline after the other; which seeds are wanted is asked again before each pair.

    A headline with a failed run is left alone: its other seeds would fail as well, and take time from the others.
    """
    for seed in sorted({seed for headline in headlines for seed in headline.pairs}):
        for headline in headlines:
            if not headline.failed and (pair := headline.wanted().get(seed)):
                yield pair


def _note_costs(headlines: Sequence[_Headline], runner: Runner) -> None:
    """Print the expected seconds of each row before the first run."""
    total = 0.0
    for headline in headlines:
        jobs = [job for pair in headline.wanted().values() for job in pair]
        for name in headline.claim.rows:
            own = [job for job in jobs if job.run.row == name]
            seconds = sum(map(runner.expected_seconds, own))
            total += seconds
            cost = f"about {duration(seconds / len(own))} each, {duration(seconds)} together" if seconds else "unknown"
            runner.reporter.note(f"{headline.suite.name}: {name}, {len(own)} runs, {cost if own else 'nothing to do'}")
    if total:
        runner.reporter.note(f"Together {duration(total)}, the first run of each kind longer.")
    else:
        runner.reporter.note("Together unknown: give --speed, the images per second that this machine trains.")
