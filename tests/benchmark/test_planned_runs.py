"""The runs of a suite and their ids."""

import re

import pytest
from benchmark.tiny_suite import TINY, written

from nearkin.benchmark.planned_runs import describe, plan_suite, run_id
from nearkin.benchmark.suite import load_suite, suite_names
from nearkin.cli.benchmark import parse_seeds
from nearkin.errors import NearkinError


def test_a_rate_that_newton_steps_do_not_have_changes_no_id():
    newton, first = (
        describe({"backbone": "conv4", "method": f"vcpa(newton={n})"}, data="glyphs")["method"] for n in (True, False)
    )
    assert "lr=0.01" in newton
    assert "lr=0)" in first


def test_options_that_were_added_later_keep_older_ids_at_their_defaults():
    def of(spec):
        return run_id(describe({"backbone": "conv4", "method": spec}, data="glyphs"))

    for spec, option, on in (("xbm", "reading", "code"), ("profs", "plain_representatives", True)):
        description = describe({"backbone": "conv4", "method": spec}, data="glyphs")
        assert option not in description["method"]
        assert option in describe({"backbone": "conv4", "method": f"{spec}({option}={on})"}, data="glyphs")["method"]
        assert of(spec) != of(f"{spec}({option}={on})")


def test_an_id_is_what_decides_the_outcome():
    base = {"backbone": "conv4", "method": "proxy_anchor", "seed": 0, "epochs": 2, "lr": 1e-4}

    def key(data="glyphs", **more):
        return run_id(describe({**base, **more}, data=data))

    same = [{"device": "auto"}, {"compile": True}, {"evaluate_every": 1}, {"metrics": ("R@1",)}]
    same += [{"tensorboard": True}, {"snapshots": "0,1"}, {"profile": True}, {"graph": True}]
    same += [{"method": "proxy_anchor(alpha=32)"}, {"size": 32}, {"images_per_class": 0}, {"space": "cosine"}]
    same += [{"head_lr": 1e-4}, {"lr": 1e-4}, {"clip_value": 10}]
    assert {key(**more) for more in same} == {key()}
    other = [{"seed": 1}, {"epochs": 3}, {"method": "proxy_anchor(alpha=16)"}, {"size": 64}, {"images_per_class": 2}]
    other += [{"space": "ball"}, {"head_lr": 1e-3}, {"lr": 1e-3}, {"data": "cub"}, {"weights": "none"}]
    assert len({key(), *(key(**more) for more in other)}) == len(other) + 1


def test_a_new_setting_changes_no_older_id():
    ids = {
        name: run_id(describe({"backbone": name, "method": "proxy_anchor"}, data="x")) for name in ("lite0", "conv4")
    }
    assert ids == {"lite0": "09acd086d8e5", "conv4": "52cdd40a01b8"}
    assert run_id({"seed": 1, "rate": 0.0, "kind": "", "flag": False}) == run_id({"seed": 1})
    assert run_id({"seed": 1, "rate": 0.5}) != run_id({"seed": 1}) != run_id({"seed": 0})


def test_an_option_that_came_later_changes_no_older_id():
    def id_of(spec):
        return run_id(describe({"backbone": "conv4", "method": spec}, data="glyphs"))

    assert "swap" not in describe({"backbone": "conv4", "method": "xbm(triplet)"}, data="glyphs")["method"]
    assert id_of("triplet(swap=False)") == id_of("triplet") != id_of("triplet(swap=True)")
    assert id_of("proxy(triplet(smooth=True))") != id_of("proxy(triplet)")


def test_weight_files_are_identified_by_content(tmp_path):
    base = {"backbone": "conv4", "method": "proxy_anchor", "seed": 0}
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "w.pth").write_bytes(content)
    a, b, c = (run_id(describe({**base, "weights": str(tmp_path / f / "w.pth")}, data="glyphs")) for f in "abc")
    assert a == b != c
    with pytest.raises(NearkinError, match="no file"):
        describe({**base, "weights": str(tmp_path / "none.pth")}, data="glyphs")


@pytest.mark.parametrize(("text", "seeds"), [("3", 3), ("0,1,2", [0, 1, 2]), ("5,", [5]), ("0,", [0])])
def test_seeds_are_a_number_or_a_list(text, seeds):
    assert parse_seeds(text) == seeds


TRAINING = {"cub": 5_864, "cars": 8_054, "sop": 59_551, "inshop": 25_882}


def test_what_starts_later_starts_within_the_training_of_its_suite():
    late = {}
    for name in suite_names():
        for cell in plan_suite(load_suite(name), seeds=1).runs:
            start = re.search(r"start=(\d+)", cell.description["method"])
            if start and cell.data in TRAINING:
                folds = cell.description.get("folds", 0)
                images = TRAINING[cell.data] * (1 - 1 / folds if folds else 1)
                steps = cell.description["epochs"] * int(images) // cell.description["batch"]
                late[name, cell.row] = int(start[1]) / steps
    assert len(late) >= 5
    assert all(share < 0.5 for share in late.values()), late


def test_runs_are_ordered_by_seed(tmp_path):
    planned = plan_suite(load_suite(written(tmp_path)))
    assert [(c.seed, c.row) for c in planned.runs] == [(0, "PA"), (0, "C2"), (1, "PA"), (1, "C2")]
    assert planned.missing == {"Later": "not_there_yet"}
    assert [c.seed for c in plan_suite(load_suite(written(tmp_path)), seeds=[7, 3], rows=["C2"]).runs] == [7, 3]
    with pytest.raises(NearkinError, match="Seeds are different"):
        plan_suite(load_suite(written(tmp_path)), seeds=[1, 1])
    with pytest.raises(NearkinError, match=r"no row 'C3'.*'C2'"):
        plan_suite(load_suite(written(tmp_path)), rows=["C3"])
    assert list(plan_suite(load_suite(written(tmp_path)), rows=["C2"]).suite.rows) == ["C2"]


def test_settings_for_all_rows_override_the_suite_but_do_not_merge_its_rows(tmp_path):
    sizes = TINY + '[[row]]\nname = "64"\nmethod = "proxy_anchor"\nsettings = { size = 64 }\n'
    suite = load_suite(written(tmp_path, sizes))
    assert {c.description["epochs"] for c in plan_suite(suite, settings={"epochs": 9}).runs} == {9}
    with pytest.raises(NearkinError, match="With size set for all rows, 'PA' and '64' are the same run"):
        plan_suite(suite, settings={"size": 48})
    with pytest.raises(NearkinError, match="no setting 'epoch'"):
        plan_suite(suite, settings={"epoch": 9})


def test_short_start_is_part_of_a_run_only_for_unnormalised_embeddings():
    def of(method, **more):
        return describe({"backbone": "conv4", "method": method, **more}, data="glyphs")

    assert of("n_pair")["short_start"]
    assert not of("n_pair", short_start=False)["short_start"]
    assert run_id(of("n_pair")) != run_id(of("n_pair", short_start=False))
    assert run_id(of("proxy_anchor")) == run_id(of("proxy_anchor", short_start=False))
