"""Suite files: what is checked, bases and repeated rows, and the numbers of the papers."""

import re
from pathlib import Path

import pytest
from benchmark.tiny_suite import TINY, written

import nearkin as nk
from nearkin.benchmark.planned_runs import plan_suite
from nearkin.benchmark.suite import FOLDER, load_suite, suite_names
from nearkin.errors import NearkinError


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('title = "Tiny"', 'titel = "Tiny"'), "no 'titel'.*'title'"),
        (('source = "made up"\n', ""), "source is missing"),
        (("seeds = 2", 'seeds = "two"'), "seeds must be a whole number"),
        (("seeds = 2", "seeds = 0"), "at least 1"),
        (("epochs = 1", "epoch = 1"), "row 'PA', data glyphs: There is no setting 'epoch'.*'epochs'"),
        (("epochs = 1", 'epochs = "one"'), "epochs must be a whole number"),
        (("epochs = 1", "epochs = 1\nseed = 3"), "seed is not a setting"),
        (('"MAP@R"]', '"MAP@r"]'), "no metric 'MAP@r'.*'MAP@R'"),
        (("form=c2", "form=c9"), "row 'C2'.*form must be one of c1, c2"),
        (("form=c2", "shape=c2"), "row 'C2'.*no option 'shape'"),
        (('"contrastive(form=c2)"', '"contrastive(form=c2"'), "Cannot read"),
        (('name = "C2"', 'name = "PA"'), "two rows are called 'PA'"),
        (('name = "C2"', 'nane = "C2"'), "no 'nane'.*'name'"),
        (('baseline = "PA"', 'baseline = "PB"'), "baseline 'PB' is not a row.*'PA'"),
        (('name = "C2"', 'name = "C2"\nbaseline = "PB"'), "baseline 'PB' is not a row.*'PA'"),
        (('paper.glyphs = { "R@1" = 99.9', 'paper.glyph = { "R@1" = 99.9'), "paper.glyph names no data set.*'glyphs'"),
        (("[50.0, 0.1]", '"fifty"'), "R@1 must be a percentage"),
        (('spread = "standard error"\n', ""), "numbers have a spread"),
        (("[data.glyphs]", "[data.glyphs"), "cannot be read"),
        (("[data.glyphs]", "[figure]\nx = 'n'\nmetric = 'R@1'\n[data.glyphs]"), "no row has x"),
        (('name = "C2"', 'name = "C2"\nx = 3'), r"row 'C2' has x or series without a \[figure\]"),
        (('name = "C2"', 'name = "C2"\nx = "3"'), "x must be a number"),
    ],
)
def test_a_wrong_suite_is_one_sentence(tmp_path, change, sentence):
    assert change[0] in TINY
    with pytest.raises(NearkinError, match=sentence):
        plan_suite(load_suite(written(tmp_path, TINY.replace(*change))))


CURVE = TINY.replace("[data.glyphs]", '[figure]\nx = "margin"\nmetric = "R@1"\nscale = "log"\n[data.glyphs]').replace(
    'name = "C2"', 'name = "C2"\nx = 0.5\nseries = "C"'
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('metric = "R@1"', 'metric = "R@2"'), "figure data.glyphs has no 'R@2'"),
        (('metric = "R@1"\n', ""), "metric is missing"),
        (('x = "margin"\n', ""), "figure x is missing"),
        (('"log"', '"square"'), "scale must be one of log, linear"),
        (("x = 0.5", "x = 0"), "row 'C2' cannot be drawn at x = 0"),
        (("x = 0.5", "x = inf"), "row 'C2' cannot be drawn at x = inf"),
        (("x = 0.5\n", ""), "row 'C2' has a series but no x"),
        (
            ('name = "Oracle"', 'name = "Oracle"\nx = 0.5\nseries = "C"'),
            "rows 'C2' and 'Oracle' have the same x",
        ),
    ],
)
def test_a_wrong_figure_is_one_sentence(tmp_path, change, sentence):
    assert change[0] in CURVE
    with pytest.raises(NearkinError, match=sentence):
        load_suite(written(tmp_path, CURVE.replace(*change)))


def test_a_figure_is_read(tmp_path):
    suite = load_suite(written(tmp_path, CURVE))
    assert suite.figure == ("margin", "R@1", "log")
    assert [(row.x, row.series) for row in suite.rows.values()] == [(None, ""), (0.5, "C"), (None, ""), (None, "")]
    assert load_suite(written(tmp_path, CURVE.replace('scale = "log"\n', ""))).figure.scale == "linear"
    assert load_suite(written(tmp_path)).figure is None


BASE = """
backbone = "conv4"
seeds = 3
[settings]
dim = 16
epochs = 1
[define]
C2 = "contrastive(form=c2)"
loss.glyphs = "proxy_anchor"
[data.glyphs]
read = "glyphs(classes=48, samples=6)"
metrics = ["R@1"]
settings = { batch = 24 }
[data.unused]
metrics = ["R@1"]
"""


SWEEP = """
base = "base.toml"
title = "Sweep"
source = "made up"
seeds = 2
[figure]
x = "alpha"
metric = "R@1"
[settings]
epochs = 2
[data.glyphs]
[[row]]
name = "plain"
method = "{C2}"
[[row]]
each.alpha = ["4", "1e1"]
each.batch = [12, 24]
name = "alpha {alpha}, batch {batch}"
series = "batch {batch}"
x = "{alpha}"
method = "{loss}(alpha={alpha})"
settings = { batch = "{batch}" }
"""


def test_a_suite_completes_itself_from_its_base_and_repeats_rows(tmp_path):
    written(tmp_path, BASE, "base")
    suite = load_suite(written(tmp_path, SWEEP, "sweep"))
    assert (suite.backbone, suite.seeds, list(suite.data)) == ("conv4", 2, ["glyphs"])
    assert suite.settings == {"backbone": "conv4", "dim": 16, "epochs": 2}
    assert suite.data["glyphs"].settings == {"batch": 24}
    assert suite.rows["plain"].methods == {"glyphs": "contrastive(form=c2)"}
    names = ["alpha 4, batch 12", "alpha 4, batch 24", "alpha 1e1, batch 12", "alpha 1e1, batch 24"]
    assert list(suite.rows) == ["plain", *names]
    last = suite.rows[names[-1]]
    assert (last.methods, last.settings) == ({"glyphs": "proxy_anchor(alpha=1e1)"}, {"batch": 24})
    assert (last.x, last.series) == (10.0, "batch 24")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("{C2}", "{C3}"), r"row 'plain' nothing defines \{C3\}"),
        (('each.alpha = ["4", "1e1"]', "each.alpha = 4"), "each must be a table of lists"),
        (('"base.toml"', '"nowhere.toml"'), "nowhere.toml cannot be read"),
    ],
)
def test_a_wrong_base_or_repetition_is_one_sentence(tmp_path, change, sentence):
    written(tmp_path, BASE, "base")
    with pytest.raises(NearkinError, match=sentence):
        load_suite(written(tmp_path, SWEEP.replace(*change), "sweep"))


def test_an_unknown_suite_names_the_nearest():
    with pytest.raises(NearkinError, match=r"no suite 'vcpa_table'.*Did you mean 'vcpa_table"):
        load_suite("vcpa_table")


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_of_the_package_can_be_planned(name):
    """Settings are fields of Plan, known methods build with their options; a method to come is listed as missing."""
    suite = load_suite(name)
    planned = plan_suite(suite)
    runnable = {row.name for row in suite.rows.values() if row.methods}
    assert runnable
    assert {cell.row for cell in planned.runs} == runnable - set(planned.missing)
    assert not set(planned.missing.values()) & {*nk.LOSSES, *nk.STRATEGIES}
    assert all(row.methods or row.paper for row in suite.rows.values())
    assert len(planned.runs) == len({(c.row, c.data, c.seed) for c in planned.runs})


def test_the_package_has_a_suite_for_every_table():
    wanted = {f"vcpa_table{n}" for n in range(1, 5)} | {f"vcpa_fig{n}" for n in range(3, 9)}
    wanted |= {"vcpa_glyphs", "vcpa_why", "vcpa_lite0", "claims_glyphs"}
    wanted |= {f"proxy_isa_table{n}" for n in range(1, 5)} | {f"ccp_table{n}" for n in range(2, 5)}
    wanted |= {f"mpa_table{n}" for n in range(4, 9)} | {"smoke", "cub_lite0"}
    wanted |= {f"profs_{name}" for name in ("table1", "fig1", "glyphs", "lite0")}
    wanted |= {f"proxy_isa_{name}" for name in ("fig9", "fig10a", "fig10b", "fig11", "lite0")}
    wanted |= {f"ccp_fig{n}" for n in range(4, 9)} | {"ccp_lite0"}
    wanted |= {f"{paper}_claims" for paper in ("vcpa", "proxy_isa", "ccp", "mpa", "profs")}
    assert set(suite_names()) == wanted
    project = FOLDER.parents[3] / "pyproject.toml"
    if project.exists():
        assert "suites/*/*.toml" in project.read_text()


# Typed from the papers by hand, not from the files: (suite, row, data set, metric, value, spread).
PUBLISHED = [
    ("vcpa_table1", "VCPA", "cub", "R@1", 69.9, None),
    ("vcpa_table1", "VCPA", "inshop", "R@40", 99.1, None),
    ("vcpa_table1", "PA", "sop", "R@1000", 98.7, None),
    ("vcpa_table1", "HDC", "cars", "R@8", 93.8, None),
    ("vcpa_table1", "DR-MS", "inshop", "R@1", 91.7, None),
    ("vcpa_table1", "RLL-H", "sop", "R@100", 95.4, None),
    ("vcpa_table2", "PA", "cub", "R@1", 68.04, 0.08),
    ("vcpa_table2", "VCPA", "cars", "R@1", 86.58, 0.09),
    ("vcpa_table3", "PA, 448 px", "cub", "R@1", 77.3, None),
    ("vcpa_table3", "VCPA, 324 px", "cub", "R@1", 74.9, None),
    ("vcpa_table4", "VCPA", "cub", "R@8", 92.15, 0.04),
    ("vcpa_table4", "PA", "cars", "R@2", 91.71, 0.18),
    ("vcpa_fig3", "VCPA, 10 %", "cub", "R@1", 58.6, None),
    ("vcpa_fig3", "RandHead", "cars", "R@1", 43.3, None),
    ("vcpa_fig3", "IncepFeat", "cub", "R@1", 54.7, None),
    ("proxy_isa_table1", "Proxy-ISA", "inshop", "R@1", 92.3, None),
    ("proxy_isa_table1", "Proxy-Anchor", "cub", "R@1", 66.6, None),
    ("proxy_isa_table2", "Proxy-ISA", "cars", "MAP@R", 29.3, 0.2),
    ("proxy_isa_table2", "CosFace", "cub", "MAP@R", 26.7, 0.2),
    ("proxy_isa_table3", "1/E both", "cars", "R@1", 71.4, None),
    ("proxy_isa_table3", "sigma and 1/E", "cars", "MAP@R", 29.3, None),
    ("proxy_isa_table4", "Proxy-ISA", "sop", "R@1", 79.3, None),
    ("ccp_table2", "C2-CCP-L", "cub", "MAP@R", 22.67, None),
    ("ccp_table2", "C2-CCP-L", "cub", "MAP@R 512-d", 28.02, None),
    ("ccp_table2", "C1", "sop", "P@1", 64.96, None),
    ("ccp_table2", "C2-XBM-L", "inshop", "P@R", 59.78, None),
    ("ccp_table2", "MS-CCP-L", "cars", "P@R 512-d", 38.97, None),
    ("ccp_lite0", "MS", "cub", "MAP@R", 19.64, None),
    ("ccp_lite0", "SoftTriple", "cub", "P@R 512-d", 36.98, None),
    ("ccp_table2", "MS-CCP-L", "inshop", "MAP@R 512-d", 63.59, None),
    ("ccp_table2", "ProxyAnchor", "cars", "P@1 512-d", 85.29, None),
    ("ccp_table3", "C2-CCP-L", "sop", "R@1", 80.01, None),
    ("ccp_table3", "Margin-S2SD", "cars", "R@1", 87.3, None),
    ("ccp_table4", "MS-CCP-L", "cars", "R@1", 89.02, None),
    ("ccp_table4", "C1-XBM", "inshop", "R@1", 91.3, None),
    ("mpa_table4", "MPA", "cub", "nDCG@8", 61.3, None),
    ("mpa_table4", "ProxyAnchor (retrained)", "cub", "MAP@R", 26.7, None),
    ("mpa_table5", "MPA-AP", "cars", "R@1", 87.1, None),
    ("mpa_table6", "SoftTriple (retrained)", "sop", "nDCG@100", 70.7, None),
    ("mpa_table7", "K = 12", "cub", "R@1", 69.3, None),
    ("mpa_table8", "K = 16", "cars", "nDCG@8", 78.0, None),
    ("profs_table1", "M-PROFS-HNCM", "sop", "R@1", 76.3, None),
    ("profs_table1", "N-PROFS", "cub", "R@8", 87.7, None),
    ("profs_table1", "C-PROFS", "cars", "F1", 39.0, None),
    ("profs_table1", "Proxy-NCA", "cub", "NMI", 64.2, None),
    ("profs_lite0", "L-PROFS-HNCM", "cub", "R@4", 76.7, None),
    ("profs_lite0", "Triplet-Semi", "cub", "F1", 27.8, None),
]  # fmt: skip


@pytest.mark.parametrize(("suite", "row", "data", "metric", "value", "spread"), PUBLISHED)
def test_published_numbers_are_the_papers(suite, row, data, metric, value, spread):
    assert load_suite(suite).rows[row].paper[data][metric] == (value, spread)


def test_numbers_that_no_text_prints_are_absent():
    for name in ("vcpa_fig4", "vcpa_fig5", "vcpa_fig6", "vcpa_fig7", "vcpa_fig8"):
        assert not any(row.paper for row in load_suite(name).rows.values())
    printed = {row.name for row in load_suite("vcpa_fig3").rows.values() if row.paper}
    assert printed == {"IncepFeat", "RandHead", "PA, 10 %", "VCPA, 10 %"}
    assert "inshop" not in load_suite("vcpa_table1").rows["Margin"].paper


@pytest.mark.parametrize("name", ["smoke", "cub_lite0"])
def test_every_method_has_a_row(name):
    planned = plan_suite(load_suite(name))
    assert {c.description["method"].split("(")[0] for c in planned.runs} == {*nk.LOSSES, *nk.STRATEGIES}


def test_a_data_set_without_metrics_is_refused(tmp_path):
    none = re.sub(r"metrics = \[.*?\]", "metrics = []", TINY)
    with pytest.raises(NearkinError, match="metrics is empty"):
        load_suite(written(tmp_path, none))


def test_a_suite_file_is_not_python(tmp_path):
    assert all(path.suffix in (".toml", ".py") or path.is_dir() for path in Path(FOLDER).iterdir())
