"""docs/results.md: tables from made-up results files, and the page in the tree."""

import re
from pathlib import Path

import pytest
from benchmark.made_results import fill

import nearkin
from nearkin.benchmark.planned_runs import plan_suite, run_id
from nearkin.benchmark.suite import load_suite
from nearkin.cli.benchmark import parse_seeds
from tools.results_page import changed_settings, main, measured_suites, results_page

ROOT = Path(nearkin.__file__).parents[2]
EVERY = "cub_lite0"  # the suite with all methods


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
    fill(tmp_path, EVERY, CUB)
    return results_page(tmp_path)


def rows(page):
    """The first table of a text: row → column → run."""
    lines = page[page.index("\n| ") :].split("\n\n")[0].strip().splitlines()
    header, _, *cells = [[c.strip() for c in x.split("|")[1:-1]] for x in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in cells}


def section(page, title):
    """From a heading of a suite to the next heading."""
    return re.split(r"\n##+ (?!On )", page[page.index(f"\n### {title}") :])[1]


def test_the_table_is_sorted_and_marked_and_timed(page):
    found = rows(section(page, "Every method on CUB"))
    assert list(found) == [
        "mpa, K = 10", "mpa_dw, K = 10", "not trained", "proxy_anchor", "soft_triple, K = 10", "mpa_ap, K = 10",
        "contrastive, C1",
    ]  # fmt: skip
    row = found["mpa, K = 10"]
    assert row["R@1"] == "68.10 ± 0.14 ↑"
    assert row["seeds"] == "4"
    assert row["time"] == "75 s"
    assert row["images/s"] == "8,000"
    assert found["not trained"]["time"] == found["not trained"]["images/s"] == ""
    assert found["mpa_ap, K = 10"]["R@1"].endswith("↓")
    assert "↑" not in "".join(found["mpa_dw, K = 10"].values())
    assert page.count("by a paired t-test over shared seeds, with Holm's correction") == 1


def test_the_page_has_three_layers(tmp_path):
    fill(tmp_path, "claims_glyphs", {"proxy_anchor": ANCHOR})  # before it in the alphabet
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR})
    fill(tmp_path, "vcpa_lite0", {"PA": ANCHOR})
    headings = [x for x in results_page(tmp_path).splitlines() if x.startswith(("## ", "### "))]
    assert [h.split(" ")[1] for h in headings] == ["In", "Tables", "Every", "All", "The", "VCPA"]


def test_a_run_shared_by_two_suites_belongs_to_a_row(tmp_path):
    fill(tmp_path, "proxy_isa_lite0", {"Proxy-ISA, fair": ANCHOR})
    path = tmp_path / "mpa_table7" / "r.jsonl"
    path.parent.mkdir()
    path.write_text((tmp_path / "proxy_isa_lite0" / "results.jsonl").read_text())
    assert "belong to no row of a suite" not in results_page(tmp_path)


def test_a_row_that_is_lower_after_training_is_named(tmp_path):
    before = {"R@1": 65.0, "MAP@R": 15.0}
    values = {"proxy_anchor": (66.0, 66.4, 65.8), "vcpa, tau 0.01": (64.0, 64.5, 63.9), "margin": (60.0, 61.0, 60.5)}
    fill(tmp_path, EVERY, values, more={"before": before})
    text = results_page(tmp_path)
    assert "Lower after training than before: vcpa, tau 0.01; margin" not in text  # by MAP@R, 20 and more


def test_the_table_is_put_into_words(page):
    words = ":** by MAP@R mpa, K = 10 are above and soft_triple, K = 10; mpa_ap, K = 10 are below proxy_anchor"
    assert words.replace(" are above", " is above") in page


def test_an_epoch_chosen_on_the_test_set_is_named(tmp_path):
    fill(tmp_path, "profs_lite0", {"C-PROFS": ANCHOR, "Contrastive-Hard": ANCHOR}, more={"select": "test"})
    text = results_page(tmp_path)
    assert "What chose our epoch: the best ON THE TEST SET." in section(text, "PROFS on CUB")


def test_the_command_of_one_seed_runs_that_seed(tmp_path):
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR[:1]})
    command = next(x for x in results_page(tmp_path).splitlines() if x.startswith("`nearkin bench"))
    assert parse_seeds(command.strip("`").split("--seeds ")[1]) == [0]


def test_notes_and_unmeasured_rows(page):
    page = section(page, "Every method on CUB")
    assert "`nearkin bench cub_lite0 --data cub:PATH --seeds 0,1,2,3`" in page
    assert "Ours: lite0 (default weights); 224 px; 512-d" in page
    assert "What chose our epoch: the last epoch." in page
    assert "Commit 0123456789ab; One GPU, bf16, compiled; torch 2.11." in page
    missing = next(x for x in page.splitlines() if x.startswith("- Not measured: "))
    assert "triplet, all" in missing
    assert "proxy_anchor" not in missing
    assert "| triplet, all |" not in page
    assert "triplet, all: CCP's margin" not in page
    assert "#### On cub\n" in page


# Sections.


def test_changed_settings_are_read_off_the_runs(tmp_path):
    fill(tmp_path, "mpa_table7", {"K = 1": (60.0, 61.0), "K = 4": (62.0, 62.5)}, settings={"backbone": "lite0"})
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR})
    text = results_page(tmp_path)
    assert "`nearkin bench mpa_table7 --data cub:PATH --seeds 0,1 --set backbone=lite0" in text
    assert "Our network (lite0) is not the paper's (bn_inception)" in text
    assert rows(section(text, "MPA, Table 7"))["K = 4"]["R@1 ours"] == "62.25 ± 0.25"


def test_published_numbers_of_another_network_have_a_warning(tmp_path):
    fill(tmp_path, "proxy_isa_lite0", dict.fromkeys(load_suite("proxy_isa_lite0").rows, ANCHOR))
    assert "Our network (lite0) is not the paper's (bn_inception)" in results_page(tmp_path)


def test_files_made_with_other_settings_have_their_own_table(tmp_path):
    for backbone in ("lite0", "lite1"):
        values = {"K = 1": (60.0,), "K = 4": (61.0,)}
        fill(tmp_path, "mpa_table7", values, settings={"backbone": backbone}, file=f"{backbone}.jsonl")
    found = measured_suites(tmp_path)
    assert [f.results.planned.overrides["backbone"] for f in found] == ["lite0", "lite1"]
    assert all(not f.unknown_runs for f in found)
    assert results_page(tmp_path).count("\n### MPA, Table 7") == 2


def test_a_removed_setting_is_not_a_change(tmp_path):
    planned = fill(tmp_path, "mpa_table7", {"K = 1": (60.0,)})
    runs = [{"settings": {**run.description, "gone": 3}, "data": run.data} for run in planned.runs]
    assert changed_settings(load_suite("mpa_table7"), runs) == {}


def test_a_setting_newer_than_a_run_counts_as_off():
    suite = load_suite("ccp_lite0")
    old = [{k: v for k, v in run.description.items() if k != "own_seeds"} for run in plan_suite(suite).runs]
    changed = changed_settings(suite, [{"settings": settings, "data": "cub"} for settings in old])
    assert changed == {"own_seeds": False}
    ids = {run.id for run in plan_suite(suite, settings=changed).runs}
    assert ids == {run_id(settings) for settings in old}
    assert not ids & {run.id for run in plan_suite(suite).runs}


def test_two_files_made_with_the_same_settings_are_one_table(tmp_path):
    fill(tmp_path, "vcpa_lite0", {"PA": (66.0, 66.4)}, file="one.jsonl")
    fill(tmp_path, "vcpa_lite0", {"VCPA, tau 0.01": (66.5, 66.2)}, file="other.jsonl")
    text = results_page(tmp_path)
    found = rows(section(text, "VCPA and Proxy-Anchor"))
    assert list(found) == ["PA", "VCPA, tau 0.01"]
    assert "- Not measured: VCPA, tau 0.001; PA, all positives; VCPA, batch positives;" in text
    runs = 2 * len(load_suite("vcpa_lite0").rows)
    assert f"{runs - 4} of {runs} runs are not finished: not run yet." in text


def recorded(digest):
    return {"images": {"images": 9, "bytes": 3 * 2**20, "digest": digest, "kept": 2.0}}


def test_results_made_with_other_images_have_their_own_table(tmp_path):
    earlier = tmp_path / "cub_256"
    fill(earlier, EVERY, {"proxy_anchor": ANCHOR, "mpa, K = 10": (68.0, 68.5, 67.9, 68.0)})
    (earlier / "data.txt").write_text("CUB at short side 256\n")
    before = results_page(tmp_path)
    assert "Images: CUB at short side 256." in section(before, "Every method")
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR}, file="new.jsonl", more=recorded("abc"))
    now = results_page(tmp_path)
    assert "cub, 9 images in 3 MiB (digest abc), kept at a short side of at most 2 × the" in section(
        now, "Every method"
    )
    assert list(rows(section(now, "Every method"))) == ["not trained", "proxy_anchor"]
    assert "Images: CUB at short side 256." in now[now.index("## Made with earlier images") :]


def test_files_made_with_different_images_are_not_one_table(tmp_path):
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR[:2]}, file="one.jsonl", more=recorded("abc"))
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR}, file="two.jsonl", more=recorded("def"))
    found = [(each.images.split("digest ")[1][:3], len(each.results.runs)) for each in measured_suites(tmp_path)]
    assert found == [("abc", 2), ("def", 4)]


def test_settings_in_which_rows_differ_are_not_a_change():
    suite = load_suite("vcpa_fig3")
    planned = plan_suite(suite, seeds=1)
    one = [run for run in planned.runs if run.row == "PA, 10 %"]
    runs = [{"settings": run.description, "data": run.data} for run in one]
    assert changed_settings(suite, runs) == {}
    assert changed_settings(suite, []) == {}


def test_runs_that_belong_to_no_row_are_counted(tmp_path):
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR})
    path = tmp_path / EVERY / "results.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[0].replace('"id": "', '"id": "x')]) + "\n")
    assert "- 1 runs in the files belong to no row of a suite" in results_page(tmp_path)


def test_suites_with_a_figure_have_it_drawn(tmp_path, monkeypatch):
    import tools.results_page as module

    drawn = [Path("mpa-cub.png"), Path("mpa-cub.svg")]
    monkeypatch.setattr(module, "write_figures", lambda _results, _out: drawn)
    fill(tmp_path, EVERY, {"proxy_anchor": ANCHOR})
    text = results_page(tmp_path, pictures=tmp_path / "pictures", link="pictures/suites/")
    assert text.count("](pictures/suites/mpa-cub.svg)") == 1


def test_the_command_writes_the_page(tmp_path, capsys):
    fill(tmp_path / "results", EVERY, {"proxy_anchor": ANCHOR})
    main(["--results", str(tmp_path / "results"), "-o", str(tmp_path / "docs" / "results.md")])
    assert (tmp_path / "docs" / "results.md").read_text() == results_page(tmp_path / "results")
    assert "No method has been measured on CUB yet." in results_page(tmp_path / "nothing")


def test_the_page_in_the_tree_is_current(tmp_path):
    folder = ROOT / "benchmarks" / "results"
    made = results_page(folder, pictures=tmp_path, link="pictures/suites/")
    assert (ROOT / "docs" / "results.md").read_text() == made, "run python -m tools.results_page"
    drawn = {path.name for path in tmp_path.iterdir()}
    committed = ROOT / "docs" / "pictures" / "suites"
    assert drawn == ({path.name for path in committed.iterdir()} if committed.exists() else set())
