"""The comparisons of the five papers wherever a suite happens to make them: on letters, or beside all other methods.

They are not in a paper's own setting, so they decide nothing: `verdicts` does that for the claims of a suite. Compared
are rows that differ only in the method. If several rows could be the other side, the row's baseline is taken if it is
one of them. Suites with a figure or with claims of their own and rows that are variants are left out.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nearkin.benchmark.planned_runs import PlannedRun
from nearkin.benchmark.runner import SuiteResults
from nearkin.benchmark.suite import SuiteData
from nearkin.benchmark.tables import below_start, row_runs
from nearkin.evaluation.statistics import Comparison, paired_t
from nearkin.files import Json
from nearkin.spec import Call, parse


class Pairing(NamedTuple):
    """What a paper compares: rows of `method` with rows of `base`, by the paper's metric."""

    paper: str
    method: str  # the outermost method of a row
    base: str  # a method's name; empty: the inner loss of the row
    metric: str
    words: str
    option: str = ""  # an option of `method`: on in the row, off in the base, which is otherwise the same
    around: bool = False  # whether the base is a strategy with the same inner loss as the row


PAIRINGS = (
    Pairing("VCPA", "vcpa", "proxy_anchor", "R@1", "VCPA and Proxy-Anchor"),
    Pairing("VCPA", "vcpa", "moco", "R@1", "VCPA and a momentum network with a queue"),
    Pairing("Proxy-ISA", "proxy_isa", "", "R@1", "Proxy-ISA and the loss that it weights"),
    Pairing("CCP", "ccp", "", "MAP@R", "alternating sub-problems and the pair loss they use"),
    Pairing("CCP", "ccp", "", "MAP@R 512-d", "the same with the joint embeddings of four folds"),
    Pairing("CCP", "ccp", "proxy", "MAP@R", "alternating sub-problems and a single one", around=True),
    Pairing("CCP", "ccp", "xbm", "MAP@R", "alternating sub-problems and a memory", around=True),
    Pairing("MPA", "mpa", "soft_triple", "R@1", "MPA and SoftTriple"),
    Pairing("MPA", "mpa", "proxy_anchor", "R@1", "MPA and Proxy-Anchor"),
    Pairing("MPA", "mpa_ap", "soft_triple", "R@1", "MPA-AP and SoftTriple"),
    Pairing("MPA", "mpa_ap", "proxy_anchor", "R@1", "MPA-AP and Proxy-Anchor"),
    Pairing("MPA", "mpa_ap", "mpa", "R@1", "MPA-AP and MPA"),
    Pairing("PROFS", "profs", "", "R@1", "alternating projections and the loss they use"),
    Pairing("PROFS", "profs", "", "R@1", "mining hard classes and not mining them", option="hard_classes"),
)


class Measured(NamedTuple):
    """The two sides of a comparison in one suite."""

    suite: str
    data: str
    row: str
    base: str
    select: str  # what chose the epoch of the row
    harmed: tuple[str, ...]  # those of the two rows that score lower after training than before
    test: Comparison


def compare(pairing: Pairing, suites: Iterable[SuiteResults]) -> list[Measured]:
    """The differences of all pairs of rows with common seeds, over these."""
    return [measured for results in suites if _applies(results) for measured in _measured(pairing, results)]


def _applies(results: SuiteResults) -> bool:
    return results.planned.suite.figure is None and not results.planned.suite.claims


def _measured(pairing: Pairing, results: SuiteResults) -> Iterator[Measured]:
    suite = results.planned.suite
    for dataset in suite.data.values():
        for row, base in pairs(pairing, results, dataset):
            done = {name: row_runs(results, suite.rows[name], dataset) for name in (row, base)}
            ours, theirs = (runs.values(pairing.metric) for runs in done.values())
            shared = sorted(ours.keys() & theirs.keys())
            if shared:
                test = paired_t([ours[s] for s in shared], [theirs[s] for s in shared])
                harmed = tuple(name for name, runs in done.items() if below_start(runs, pairing.metric))
                yield Measured(suite.name, dataset.name, row, base, done[row].runs[shared[0]]["select"], harmed, test)


def pairs(pairing: Pairing, results: SuiteResults, dataset: SuiteData) -> Iterator[tuple[str, str]]:
    """The pairs (row, base) that are compared, measured or not."""
    suite = results.planned.suite
    first_seed = results.planned.seeds[0]
    runs = {
        run.row: run
        for run in results.planned.runs
        if run.data == dataset.name and run.seed == first_seed and suite.rows[run.row].scores == "after"
    }
    specs = {row: parse(run.description["method"]) for row, run in runs.items()}
    for row, spec in specs.items():
        if spec.name == pairing.method and not suite.rows[row].variant:
            bases = [
                other
                for other, base in specs.items()
                if _is_base(pairing, spec, base) and _settings(runs[other]) == _settings(runs[row])
            ]
            named = suite.baselines.get(row)
            yield from ((row, base) for base in ([named] if named in bases else bases))


def _settings(run: PlannedRun) -> Json:
    return {name: value for name, value in run.settings.items() if name != "method"}


def _is_base(pairing: Pairing, spec: Call, base: Call) -> bool:
    """Whether a row of this spec is compared with `base`."""
    if pairing.option:
        varied = spec.options[pairing.option] and not base.options.get(pairing.option)
        return bool(varied) and _without(spec, pairing.option) == _without(base, pairing.option)
    if pairing.base:
        return base.name == pairing.base and (not pairing.around or base.args == spec.args)
    return base in spec.args


def _without(spec: Call, option: str) -> Call:
    return spec._replace(options={name: value for name, value in spec.options.items() if name != option})
