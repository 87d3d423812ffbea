"""Claims in a suite's file, and the command that runs only the headline of several suites."""

import math
import sys
from itertools import pairwise

import pytest
from benchmark.tiny_suite import TINY, written

from nearkin.benchmark import runner as module
from nearkin.benchmark.costs import images_per_epoch
from nearkin.benchmark.headlines import bench_headlines, needed_seeds
from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.results import read_results
from nearkin.benchmark.runner import bench, merge_suite
from nearkin.benchmark.suite import FOLDER, load_suite, suite_names
from nearkin.benchmark.suite_claims import PILOT, best_base, published_gain
from nearkin.cli import main
from nearkin.console import Reporter
from nearkin.errors import NearkinError
from nearkin.files import append_line
from nearkin.spec import parse

CLAIM = """
[[claim]]
paper = "A paper"
words = "C2 is above PA"
row = "C2"
base = "PA"
metric = "R@1"
seeds = 8
headline = true
"""
CLAIMED = TINY.replace('"R@1" = [50.0, 0.1] }', '"R@1" = 50.0 }').replace(
    'method = "contrastive(form=c2)"', 'method = "contrastive(form=c2)"\npaper.glyphs = { "R@1" = 52.0 }'
)
PAPERS = ("vcpa_claims", "proxy_isa_claims", "ccp_claims", "mpa_claims", "profs_claims")


@pytest.fixture
def suites(tmp_path):
    other = (CLAIMED + CLAIM).replace("form=c2", "form=c1").replace("proxy_anchor", "soft_triple")
    return [written(tmp_path, CLAIMED + CLAIM, "one"), written(tmp_path, other, "two")]


@pytest.fixture
def begun(monkeypatch):
    """Runs that were asked for, in order; each scores 50, C2 more by a little noise, within no time."""
    runs = []

    def pretend(self, job):
        runs.append((job.run.description["method"].partition("(")[0], job.run.seed))
        more = (2.0 + (job.run.seed % 3) * 0.1) if job.run.row == "C2" else 0.0
        self.results[job.run.id] = {
            "seed": job.run.seed, "scores": {"R@1": 50.0 + more, "MAP@R": 9.0}, "settings": job.run.description,
            "hardware": self.hardware, "wall": 100.0,
        }  # fmt: skip

    monkeypatch.setattr(module.Runner, "run", pretend)
    return runs


def test_headlines_run_in_turn_pair_by_pair(suites, begun, tmp_path):
    found = bench_headlines(suites, out=tmp_path / "out")
    pair = ["proxy_anchor", "contrastive", "soft_triple", "contrastive"]
    assert begun == [(name, seed) for seed in range(8) for name in pair]
    assert [results.planned.seeds for results in found] == [tuple(range(8))] * 2
    assert [list(results.planned.suite.rows) for results in found] == [["PA", "C2"]] * 2


def test_a_stop_leaves_whole_pairs(suites, begun, tmp_path):
    one = bench_headlines(suites[:1], out=tmp_path / "out", budget=150)[0]  # two of a pair need 200, once it is known
    assert begun == [("proxy_anchor", 0), ("contrastive", 0)]
    assert one.stopped == "the budget is too short for another run; 14 are left"
    begun.clear()
    assert bench_headlines(suites[:1], out=tmp_path / "out2", budget=150, speed=0.01)[0].stopped
    assert not begun, "at this speed not even the first pair would finish"


@pytest.mark.parametrize("error", [NearkinError("no"), RuntimeError("CUDA error: no\nmore"), RuntimeError()])
def test_a_failed_run_ends_its_headline_and_no_other(suites, begun, tmp_path, monkeypatch, error):
    pretend = module.Runner.run

    def failing(self, job):
        pretend(self, job)
        if job.run.description["method"].startswith("proxy_anchor") and job.run.seed == 1:
            del self.results[job.run.id]
            raise error

    monkeypatch.setattr(module.Runner, "run", failing)
    one, two = bench_headlines(suites, out=tmp_path / "out")
    (message,) = one.failed.values()
    assert message in ("no", "CUDA error: no", "RuntimeError")
    first = [("proxy_anchor", 0), ("contrastive", 0), ("soft_triple", 0), ("contrastive", 0), ("proxy_anchor", 1)]
    assert begun[:5] == first
    assert begun[5:] == [(name, seed) for seed in range(1, 8) for name in ("soft_triple", "contrastive")]
    assert [results.stopped for results in (one, two)] == ["", ""]


def test_as_many_seeds_as_half_the_published_gain_needs(tmp_path):
    suite = load_suite(written(tmp_path, CLAIMED + CLAIM))
    (claim,) = suite.claims
    assert published_gain(claim, suite.rows, "glyphs") == 2.0

    def needed(*differences):
        scores = {"PA": dict.fromkeys(range(9), 50.0), "C2": {s: 50.0 + d for s, d in enumerate(differences)}}
        return needed_seeds(suite, claim, scores)

    assert needed() == needed(1.0, 2.0) == 8, "too few pairs to know: as the claim says"
    assert needed(1.0, 1.1, 0.9) == 8, "never fewer"
    assert needed(0.0, 1.2, 2.4) == 14, "a deviation of 1.2 and half a gain of 2 points"
    assert needed(0.0, 1.2, 2.4, 90.0, -90.0) == 14, "only the first pairs decide"
    assert needed(-5.0, 0.0, 5.0) == 16, "never more"
    silent = load_suite(written(tmp_path, TINY.replace("[50.0, 0.1]", "50.0") + CLAIM, "silent"))
    assert math.isnan(published_gain(claim, silent.rows, "glyphs"))
    assert needed_seeds(silent, claim, {}) == 8


def test_more_seeds_are_run_once_the_deviation_is_known(suites, begun, tmp_path, monkeypatch, capsys):
    from rich.console import Console

    pretend = module.Runner.run

    def noisy(self, job):
        pretend(self, job)
        self.results[job.run.id]["scores"]["R@1"] += 1.2 * job.run.seed if job.run.row == "C2" else 0.0

    monkeypatch.setattr(module.Runner, "run", noisy)
    (found,) = bench_headlines(suites[:1], out=tmp_path / "out", reporter=Reporter(Console(width=200)))
    assert found.planned.seeds == tuple(range(len(begun) // 2))
    assert 8 < len(begun) // 2 < 17
    said, runs = capsys.readouterr().out, len(begun)
    assert "[6/16]" in said
    assert f"[7/{runs}]" in said, "counted again"
    assert f"[{runs}/{runs}]" in said
    begun.clear()
    bench_headlines(suites[:1], out=tmp_path / "few", seeds=[4, 5])
    assert [seed for _, seed in begun] == [4, 4, 5, 5], "seeds that are given are the seeds"


def test_costs_are_noted_before_the_first_run(suites, begun, tmp_path, capsys):
    from rich.console import Console

    bench_headlines(suites[:1], out=tmp_path / "out", reporter=Reporter(Console(width=200)))
    bench_headlines(suites, out=tmp_path / "out2", speed=14.4, reporter=Reporter(Console(width=200)))
    said = capsys.readouterr().out
    assert "one: C2, 8 runs, unknown" in said
    assert "Together unknown: give --speed" in said.split("[1/16]")[0]
    assert "two: C2, 8 runs, about 10 s each, 80 s together" in said
    assert "Together 5.3 min, the first run of each kind longer." in said


def test_the_work_of_an_epoch():
    base = {"folds": 0, "held_out": 0.25, "select": "last", "patience": 0, "schedule": "step", "fraction": 1.0}
    base |= {"batch": 10, "check_every": 0}
    assert images_per_epoch(base, 1200) == 1200
    assert images_per_epoch(base | {"fraction": 0.5}, 1200) == 600
    held_out = base | {"select": "validation"}
    assert images_per_epoch(held_out, 1200) == 900 + 300 / 3
    assert images_per_epoch(held_out | {"check_every": 30}, 1200) == 900 + 3 * 300 / 3
    assert images_per_epoch(held_out | {"folds": 4}, 1200) == 4 * (900 + 300 / 3)


def test_the_best_of_a_sweep_is_the_other_side(tmp_path):
    text = CLAIMED + CLAIM.replace('base = "PA"', 'base = ["PA", "Oracle"]')
    (claim,) = load_suite(written(tmp_path, text)).claims
    scores = {"C2": {0: 60.0, 1: 60.0}, "PA": {0: 50.0, 1: 52.0, 2: 99.0}, "Oracle": {0: 51.0, 1: 51.5}}
    assert best_base(claim, scores) == "Oracle", "over common seeds only"
    assert best_base(claim, {}) == "PA"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (('row = "C2"', 'row = "C3"'), r"claim 'C2 is above PA' 'C3' is not a row.*'C2'"),
        (('base = "PA"', 'base = "C2"'), "base must name another row"),
        (('base = "PA"', "base = []"), "base must name another row"),
        (('metric = "R@1"', 'metric = "R@"'), "R@"),
        (("seeds = 8", "seeds = 3"), "a headline needs seeds, more than 3"),
        (("headline = true", 'headline = true\nverdict = "holds"'), "there is no 'verdict'"),
        (('paper = "A paper"', ""), "paper is missing"),
    ],
)
def test_a_wrong_claim_is_refused(tmp_path, changed, error):
    with pytest.raises(NearkinError, match=error):
        load_suite(written(tmp_path, CLAIMED + CLAIM.replace(*changed)))


def test_a_suite_has_one_headline_or_none(tmp_path):
    with pytest.raises(NearkinError, match="two claims have headline"):
        load_suite(written(tmp_path, CLAIMED + CLAIM + CLAIM))
    with pytest.raises(NearkinError, match="tiny has no headline"):
        bench_headlines([written(tmp_path, CLAIMED)], out=tmp_path / "out")


def test_the_command_runs_headlines(suites, tmp_path, monkeypatch, capsys, begun):
    out = ["--out", str(tmp_path / "out")]

    def code(*words):
        monkeypatch.setattr(sys, "argv", ["nearkin", "bench", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code

    assert code(*map(str, suites), *out) != 0
    assert "Several suites run together only with --headline" in capsys.readouterr().err
    assert code(str(suites[0]), "--headline", "--rows", "PA", *out) != 0
    assert "leave out --rows and --show" in capsys.readouterr().err
    monkeypatch.setattr("nearkin.benchmark.tables.suite_tables", lambda _: [])
    assert code(*map(str, suites), "--headline", "--seeds", "1", "--budget", "1h", *out) == 0
    assert len(begun) == 4


# The suites of the papers' claims.


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_has_a_suite_with_its_claims(name):
    suite = load_suite(name)
    (headline,) = [claim for claim in suite.claims if claim.seeds]
    assert headline is suite.headline
    assert headline.seeds == 8
    assert published_gain(headline, suite.rows, "cub") > 0
    assert all(claim.metric in suite.data["cub"].metrics for claim in suite.claims)
    runs = {run.row: run.id for run in plan_suite(suite, seeds=1).runs}
    assert len(set(runs.values())) == len(runs), "no row is another under a new name"
    assert suite.seeds == PILOT
    assert {row.methods["cub"] != "" for row in suite.rows.values()} == {True}
    sides = [next(r for r in plan_suite(suite, seeds=1).runs if r.row == row) for row in headline.rows]
    assert {k for k in sides[0].description if sides[0].description[k] != sides[1].description[k]} == {"method"}


def test_ccp_has_the_authors_head_and_batch_norm():
    for name in suite_names():
        if name.startswith("ccp_") and name != "ccp_lite0":
            for run in plan_suite(load_suite(name), seeds=1).runs:
                assert (run.description["head_init"], run.description["batch_norm"]) == ("glorot", "freeze"), run.row


def test_each_loss_of_profs_has_its_own_batches():
    runs = {run.row: run.description for run in plan_suite(load_suite("profs_claims"), seeds=1).runs}
    assert (runs["Margin-Hard"]["images_per_class"], runs["Margin-Hard"]["batch"]) == (5, 125)
    assert runs["Contrastive-Hard"]["images_per_class"] == 2
    assert runs["C-PROFS-HNCM, four images per class"]["images_per_class"] == 4, "mining can act"
    assert runs["N-pair"]["method"].startswith("profs(n_pair")
    assert "steps=1" in runs["N-pair"]["method"]
    for row in ("Triplet-Hard", "M-PROFS"):
        assert "over='all'" in runs[row]["method"]
    assert "plain_representatives=True" in runs["C-PROFS, plain representatives"]["method"]


def claims_by(suite):
    return {(claim.row, claim.bases): claim for claim in load_suite(suite).claims}


def test_vcpa_is_compared_with_a_sweep_of_momentum_and_with_more_updates():
    sweep = tuple(f"MoCo-PA, momentum {momentum}" for momentum in ("0.999", "0.99", "0.9"))
    updates, found = ("PA-1st", "PA-2nd"), claims_by("vcpa_claims")
    for bases, source in ((sweep, "Fig. 8"), (updates, "Fig. 5")):
        assert found["VCPA", bases].source == source
    moco = [claim for claim in found.values() if any(base.startswith("MoCo") for base in claim.bases)]
    assert {claim.bases for claim in moco} == {sweep}, "one momentum is no baseline"


def test_vcpa_has_the_papers_batches_where_they_can_be_drawn():
    runs = {run.row: run.description for run in plan_suite(load_suite("vcpa_claims"), seeds=1).runs}
    for method in ("Proxy-Anchor", "VCPA"):
        sizes = {part: runs[f"{method}, {part} % of the data"]["batch"] for part in (2, 5, 10)}
        assert sizes == {2: 90, 5: 180, 10: 180}, "2 % are about 100 images"


@pytest.mark.parametrize("name", ["proxy_isa_claims", "proxy_isa_fig11"])
def test_proxy_isa_over_proxy_nca_is_compared_with_that(name):
    assert load_suite(name).baselines["Proxy-ISA over Proxy-NCA"] == "Proxy-NCA"


def test_table_3_of_proxy_isa_is_claimed_in_its_order():
    rows = [claim.rows for claim in load_suite("proxy_isa_claims").claims if claim.source.startswith("Table 3")]
    order = ["1/E both", "no penalty", "negatives only", "nu and 1/E", "Proxy-ISA"]
    assert sorted(rows) == sorted(pairwise(order)), "each above the one before"


def test_mpa_claims_only_what_its_paper_does():
    suite, found = load_suite("mpa_claims"), claims_by("mpa_claims")
    assert not [claim for claim in found.values() if claim.row == "MPA-DW"], "the paper has it below MPA"
    for base in ("MPA", "MPA-DW"):
        claim = found["MPA-AP", (base,)]
        assert "or more" in claim.words
        assert abs(published_gain(claim, suite.rows, "cub")) < 0.4


def test_the_short_training_of_ccp_is_as_long_in_rate_times_steps():
    runs = {run.row: run.description for run in plan_suite(load_suite("ccp_claims"), seeds=1).runs}
    short, whole = runs["C2-CCP"], runs["C2-CCP, four folds"]
    assert (whole["lr"], whole["check_every"], whole["patience"], whole["folds"]) == (1e-5, 25, 60, 4)
    for steps in ("epochs", "check_every"):
        assert short["lr"] * short[steps] == pytest.approx(whole["lr"] * whole[steps]), steps
    assert short["patience"] == whole["patience"], "in checks"
    for row in ("C2-XBM", "C2-XBM, the authors' code"):
        assert parse(runs[row]["method"]).options["start"] * runs[row]["lr"] == pytest.approx(1000 * 1e-5)


def test_the_whole_program_of_two_papers(tmp_path):
    """On letters with a small network, all else as in the suites."""
    suites, metrics = [], '["MAP@R", "R@1", "R@1 at 40 of 44"]'
    for name in ("ccp_claims", "profs_claims"):
        base = next(FOLDER.glob(f"*/{name}.toml")).as_posix()
        letters = f'[data.cub]\nread = "glyphs(classes=48, samples=6)"\nmetrics = {metrics}\n'
        suites.append(written(tmp_path, f'base = "{base}"\nbackbone = "conv4"\n{letters}', name))
    changed, out = {"size": 32, "epochs": 1, "batch": 16, "device": "cpu"}, tmp_path / "out"
    found = bench_headlines(suites, seeds=1, settings=changed, out=out)
    for results in found:
        headline = results.planned.suite.headline
        runs = [results.runs[run.id] for run in results.planned.runs]
        assert len(runs) == len(headline.rows) == 2
        assert all({headline.metric, "R@1 at 40 of 44"} <= run["scores"].keys() for run in runs)
        assert all(run["images"]["digest"] for run in runs)
        assert not results.failed
        assert not results.stopped
    assert len(read_results(out / "results.jsonl")) == 4
    assert not list(out.glob("queries/*"))


def test_the_runs_of_a_suite_are_merged_into_its_file(suites, begun, tmp_path, monkeypatch):
    keep = module.Runner.run

    def kept(self, job):
        keep(self, job)
        append_line(self.file, {"id": job.run.id, "data": job.run.data, **self.results[job.run.id]})

    monkeypatch.setattr(module.Runner, "run", kept)
    here, there = tmp_path / "here", tmp_path / "there"
    bench_headlines(suites, seeds=[0, 1], out=here)
    bench_headlines(suites[:1], seeds=[2], out=there)
    monkeypatch.setattr(module, "load_suite", lambda name: load_suite(tmp_path / f"{name}.toml"))

    def merged(name, *folders):
        merge_suite([folder / "results.jsonl" for folder in folders], name, tmp_path / "results")
        return read_results(tmp_path / "results" / name / "results.jsonl").values()

    methods = {run["settings"]["method"].partition("(")[0] for run in merged("one", here)}
    assert methods == {"proxy_anchor", "contrastive"}, "not those of the other suite"
    assert sorted(run["seed"] for run in merged("one", there)) == [0, 0, 1, 1, 2, 2], "with those that are there"
    assert len(merged("two", here)) == 4
    with pytest.raises(NearkinError, match="no run of two with its own settings"):
        merged("two", there)
    with pytest.raises(NearkinError, match="There is no results file"):
        merged("two", tmp_path / "nowhere")


def test_a_plain_bench_does_not_heed_claims(suites, begun, tmp_path):
    bench(suites[0], out=tmp_path / "out")
    assert begun == [("proxy_anchor", 0), ("contrastive", 0), ("proxy_anchor", 1), ("contrastive", 1)]
