"""docs/results.md: tables from made results files, claims tested and put into words, and the page in the tree."""

import json
from pathlib import Path

import pytest
from scipy import stats

import nearkin
from nearkin.bench import Board
from nearkin.report.claims import CLAIMS, Claim
from nearkin.report.results_page import CLAIMED_ON, boards, changed_settings, check_claims, main, results_page
from nearkin.sheet import expand
from nearkin.strategies import STRATEGIES
from nearkin.suites import load_suite

ROOT = Path(nearkin.__file__).parents[2]


def line(cell, scores, **more):
    record = {
        "id": cell.id, "data": cell.data, "method": cell.description["method"], "seed": cell.seed, "scores": scores,
        "before": scores, "select": "last", "seconds": 70.0, "wall": 75.0, "images_per_second": 8000.0,
        "commit": "0123456789abcdef", "hardware": "One GPU", "precision": "bf16", "versions": {"torch": "2.11"},
        "settings": cell.description,
    }  # fmt: skip
    return json.dumps(record | more) + "\n"


def fill(folder, suite, values, *, settings=None, metrics=("R@1", "MAP@R"), file="results.jsonl", data=None):
    """Results of rows (row → scores by seed) as a suite's file."""
    seeds = max(len(v) for v in values.values())
    sheet = expand(load_suite(suite), seeds=seeds, settings=settings)
    path = folder / suite / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for cell in sheet.cells:
            own = values.get(cell.row, ())
            if cell.seed < len(own) and data in (None, cell.data):
                out.write(line(cell, {m: own[cell.seed] - (40 if m == "MAP@R" else 0) for m in metrics}))
    return sheet


ANCHOR = (66.0, 66.4, 65.8, 66.2)
CUB = {
    "proxy_anchor": ANCHOR,
    "mpa, K = 10": (68.0, 68.5, 67.9, 68.0),
    "mpa_dw, K = 10": (66.2, 66.1, 66.0, 66.3),
    "mpa_ap, K = 10": (60.0, 60.4, 60.1, 60.2),
    "soft_triple, K = 10": (64.0, 64.1, 63.9, 64.3),
    "contrastive, C1": (50.0,),
}


@pytest.fixture
def page(tmp_path):
    fill(tmp_path, CLAIMED_ON, CUB)
    return results_page(tmp_path)


def rows(page):
    lines = [x for x in page.splitlines() if x.startswith("| ")]
    return {cells[1].strip(): [c.strip() for c in cells[2:-1]] for cells in (x.split("|") for x in lines)}


def test_the_table_is_sorted_and_marked_and_timed(page):
    found = rows(page)
    names = [name for name in found if name and name != "---"]
    assert names[:6] == [
        "mpa, K = 10", "mpa_dw, K = 10", "proxy_anchor", "soft_triple, K = 10", "mpa_ap, K = 10", "contrastive, C1",
    ]  # fmt: skip
    header = found[""]
    row = dict(zip(header, found["mpa, K = 10"], strict=True))
    assert row["R@1"] == "68.10 ± 0.14 ↑"
    assert row["seeds"] == "4"
    assert row["time"] == "75 s"
    assert row["images/s"] == "8,000"
    assert dict(zip(header, found["mpa_ap, K = 10"], strict=True))["R@1"].endswith("↓")
    assert "↑" not in "".join(found["mpa_dw, K = 10"])
    assert "paired t-test over shared seeds, with Holm's correction" in page


def test_honesty_lines_and_what_is_missing(page):
    assert "`nearkin bench cub_lite0 --data cub:PATH --seeds 0,1,2,3`" in page
    assert "Ours: lite0 (default weights); 224 px; 512-d" in page
    assert "What chose our epoch: the last epoch." in page
    assert "Commit 0123456789ab; One GPU, bf16; torch 2.11." in page
    missing = next(x for x in page.splitlines() if x.startswith("- Not measured: "))
    assert "triplet, all" in missing
    assert "proxy_anchor" not in missing
    assert "| triplet, all |" not in page
    assert "triplet, all: CCP's margin" not in page
    assert page.count("## Every method on CUB") == 1
    assert "### On cub\n" in page


def test_claims_are_tested_and_put_into_words(page, tmp_path):
    text = page[page.index("## Which of the papers' claims") : page.index("## Every method")]
    lines = {x.split(": ")[0]: x for x in text.splitlines() if x.startswith("  - ")}

    def said(row, base):
        return next(x for x in lines.values() if f"({row} against {base}, " in x)

    assert ": holds here (p " in said("mpa, K = 10", "proxy_anchor")
    assert ": no difference seen (p " in said("mpa_dw, K = 10", "proxy_anchor")
    assert ": the opposite (p < 0.001; −5.93" in said("mpa_ap, K = 10", "proxy_anchor")
    assert ": holds here" in said("mpa_dw, K = 10", "soft_triple, K = 10")
    assert "4 seeds" in said("mpa, K = 10", "proxy_anchor")
    for paper in ("VCPA", "Proxy-ISA", "CCP", "PROFS"):
        own = text[text.index(f"**{paper}**") :].split("- **")[0]
        assert "not measured." in own


def test_p_values_are_holms_over_all_claims(tmp_path):
    fill(tmp_path, CLAIMED_ON, CUB)
    (found,) = boards(tmp_path)
    tested = check_claims(found.board)
    raw = {}
    for t in tested:
        if t.test is not None:
            raw[t.row, t.base] = stats.ttest_rel(CUB[t.row], CUB[t.base]).pvalue
    assert len(raw) == 6
    ordered, largest = sorted(raw, key=raw.get), 0.0
    for place, pair in enumerate(ordered):
        largest = max(largest, raw[pair] * (6 - place))
        p = next(t.test.p for t in tested if (t.row, t.base) == pair)
        assert p == pytest.approx(min(1.0, largest))


def test_the_base_of_a_strategy_is_its_inner_loss(tmp_path):
    values = {"xbm, C1": (52.0, 53.0, 52.5), "contrastive, C1": (50.0, 50.5, 50.1), "proxy_anchor": ANCHOR[:3]}
    fill(tmp_path, CLAIMED_ON, values)
    (found,) = boards(tmp_path)
    (tested,) = check_claims(found.board, [Claim("XBM", "xbm", "", "R@1", "a memory helps")])
    assert (tested.row, tested.base) == ("xbm, C1", "contrastive, C1")
    assert tested.test.difference == pytest.approx(52.5 - 50.2)


def test_one_seed_tests_nothing(tmp_path):
    fill(tmp_path, CLAIMED_ON, {"proxy_anchor": (66.0,), "mpa, K = 10": (70.0,)})
    text = results_page(tmp_path)
    assert "holds here (" not in text
    assert "↑" not in "".join(x for x in text.splitlines() if x.startswith("| "))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c.method} {c.base or 'inner'}")
def test_every_claim_has_rows_to_test_it_on(claim):
    """Where the method is there, the suite must have it and what it is compared with."""
    if claim.method not in {**nearkin.LOSSES, **STRATEGIES}:
        pytest.skip(f"{claim.method} is not there yet")
    board = Board(expand(load_suite(CLAIMED_ON), seeds=1), {}, {}, (), "")
    pairs = check_claims(board, [claim])
    assert pairs
    assert all(t.row in board.sheet.suite.rows and t.base in board.sheet.suite.rows for t in pairs), pairs
    assert claim.metric in board.sheet.suite.parts["cub"].metrics


def test_a_section_a_suite_with_another_backbone_read_off_the_runs(tmp_path):
    fill(tmp_path, "mpa_table7", {"K = 1": (60.0, 61.0), "K = 4": (62.0, 62.5)}, settings={"backbone": "lite0"})
    fill(tmp_path, CLAIMED_ON, {"proxy_anchor": ANCHOR})
    text = results_page(tmp_path)
    assert text.index("## Every method on CUB") < text.index("## MPA, Table 7")
    assert "`nearkin bench mpa_table7 --data cub:PATH --seeds 0,1 --set backbone=lite0" in text
    assert "Our network (lite0) is not the paper's (bn_inception)" in text
    assert rows(text)["K = 4"][2] == "62.25 ± 0.25"


def test_files_made_differently_are_tables_of_their_own(tmp_path):
    for backbone in ("lite0", "lite1"):
        values = {"K = 1": (60.0,), "K = 4": (61.0,)}
        fill(tmp_path, "mpa_table7", values, settings={"backbone": backbone}, file=f"{backbone}.jsonl")
    found = list(boards(tmp_path))
    assert [f.board.sheet.overrides["backbone"] for f in found] == ["lite0", "lite1"]
    assert all(not f.strangers for f in found)
    assert results_page(tmp_path).count("\n## MPA, Table 7") == 2


def test_what_rows_differ_in_is_not_taken_for_a_change():
    suite = load_suite("vcpa_fig3")
    sheet = expand(suite, seeds=1)
    one = [cell for cell in sheet.cells if cell.row == "PA, 10 %"]
    runs = [{"settings": cell.description, "data": cell.data} for cell in one]
    assert changed_settings(suite, runs) == {}
    assert changed_settings(suite, []) == {}


def test_runs_of_no_row_are_counted(tmp_path):
    fill(tmp_path, CLAIMED_ON, {"proxy_anchor": ANCHOR})
    path = tmp_path / CLAIMED_ON / "results.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[0].replace('"id": "', '"id": "x')]) + "\n")
    assert "- 1 runs in the files are no row of this suite any more" in results_page(tmp_path)


def test_suites_with_a_figure_have_it_drawn(tmp_path, monkeypatch):
    import nearkin.report.results_page as module

    drawn = [Path("mpa-cub.png"), Path("mpa-cub.svg")]
    monkeypatch.setattr(module, "write_figures", lambda _board, _out: drawn)
    fill(tmp_path, CLAIMED_ON, {"proxy_anchor": ANCHOR})
    text = results_page(tmp_path, pictures=tmp_path / "pictures", link="pictures/suites/")
    assert text.count("](pictures/suites/mpa-cub.svg)") == 1


def test_the_command_writes_the_page(tmp_path, capsys):
    fill(tmp_path / "results", CLAIMED_ON, {"proxy_anchor": ANCHOR})
    main(["--results", str(tmp_path / "results"), "-o", str(tmp_path / "docs" / "results.md")])
    assert (tmp_path / "docs" / "results.md").read_text() == results_page(tmp_path / "results")
    assert results_page(tmp_path / "nothing").endswith("No suite has been run yet.\n")


def test_the_page_in_the_tree_is_what_the_results_say(tmp_path):
    results = ROOT / "benchmarks" / "results"
    if not any(results.glob("*/*.jsonl")):
        pytest.skip("no suite has been run yet")
    made = results_page(results, pictures=tmp_path, link="pictures/suites/")
    assert (ROOT / "docs" / "results.md").read_text() == made, "run python -m nearkin.report.results_page"
