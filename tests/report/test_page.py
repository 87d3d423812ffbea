"""The report page: its sections for one run and for several, that it loads no other file, and the command."""

import dataclasses
import html
import re
import sys

import numpy as np
import pytest
import torch

from nearkin.cli import main
from nearkin.console import Reporter, latex
from nearkin.report.comparison import run_tables
from nearkin.report.html import Thumbnails
from nearkin.report.measured_runs import by_method, open_runs
from nearkin.report.page import report_page, write_page
from nearkin.report.picture_sections import confusions, neighbours, retrievals
from nearkin.report.retrieval import find_confusions
from nearkin.report.sections import ReportData, ranking, significance, training_classes

SECTIONS = {
    "about", "scores", "curves", "classes", "confusions", "neighbours", "similarities", "map", "configuration",
}  # fmt: skip
LABELS = np.repeat(np.arange(12), 4)


@pytest.fixture(scope="module")
def one(pages):
    return pages["one"].read_text()


@pytest.fixture(scope="module")
def three(pages):
    return pages["three"].read_text()


def ids(page):
    return re.findall(r'<section id="([^"]+)"', page)


def text_of(page):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


def test_one_run_has_all_sections(one):
    assert set(ids(one)) == SECTIONS
    assert re.findall(r'<li><a href="#([^"]+)">', one) == ids(one)


def test_several_runs_have_the_comparison_first(three):
    assert ids(three)[:5] == ["about", "scores", "tests", "ranking", "retrievals"]
    assert set(ids(three)) == SECTIONS | {"tests", "ranking", "retrievals"}


def test_a_page_loads_no_other_file(one, three):
    for page in (one, three):
        urls = set(re.findall(r"https?://[^\"'\s)<]+", page))
        assert urls <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert "default-src 'none'" in page
        sources = re.findall(r'src="([^"]{0,30})', page)
        assert len(sources) > 50
        assert all(source.startswith("data:image/") for source in sources)
        assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|@import|@font-face|url\((?!#)", page)


def test_ids_are_unique(three):
    found = re.findall(r'\sid="([^"]+)"', three)
    assert len(found) == len(set(found))


def test_the_page_states_the_facts_of_the_run(one, runs):
    text = text_of(one)
    assert "the best on held-out training classes (epoch" in text
    assert "144 images of 24 classes, none of them a training class" in text
    assert "108 images of 18 classes, batch 24, adamw" in text
    for words in ("conv4, default weights", "32 px", "16 dimensions, cosine space", "seed", "commit", "hardware"):
        assert words in text
    assert "Scores on held-out classes" in text
    assert "Stars: the 18 proxies of training classes, none of them a test class" in text


def test_nothing_is_called_better_without_a_test(one, three):
    assert "better" not in text_of(one)
    tests_end = three.index('<section id="ranking"')
    assert "better" not in text_of(three[: three.index('<section id="tests"')] + three[tests_end:])
    assert "Paired bootstrap" in text_of(three)


def test_every_query_of_the_comparison_shows_three_of_each_method(three):
    part = three[three.index('<section id="retrievals"') : three.index('<section id="curves"')]
    cases = part.split('<li class="case">')[1:]
    assert len(cases) == 12
    for case in cases:
        assert case.count('class="near"') == 3
        assert len(re.findall(r'<li class="(?:right|wrong)"', case)) == 9


def test_frames_are_told_apart_without_colour(three):
    for kind, sign in (("right", "✓"), ("wrong", "✗")):
        found = re.findall(rf'<li class="{kind}" [^>]*>(?:(?!</li>).)*</li>', three)
        assert found
        assert all(sign in item for item in found)
        assert all(f", {kind}" in item for item in found)  # in the text for screen readers, too


def test_the_same_runs_give_the_same_page(one, runs):
    again = open_runs([runs["anchor"].path], device="cpu")
    assert report_page(again, title="", points=100, reporter=Reporter()) == one


def noisy_run(make_run, noise, **more):
    centres = np.random.default_rng(7).normal(size=(12, 6))
    points = centres[LABELS] + noise * np.random.default_rng(1).normal(size=(48, 6))
    return make_run(points, LABELS, **more)


def report(*runs):
    return ReportData(runs, by_method(runs), Thumbnails(runs[0].images), 20)


def test_names_are_escaped(make_run, tmp_path):
    names = ["<script>alert(1)</script>", '" onload="x', *(f"c{n}" for n in range(10))]
    runs = [noisy_run(make_run, noise, names=names, name=f"<i>{noise}</i>") for noise in (0.5, 1.0)]
    path = write_page(runs, tmp_path / "deep" / "page.html", title="<u>")
    page = path.read_text()
    assert page.count("<script>") == 1
    assert 'onload="x' not in page
    assert "<i>" not in page
    assert "<title>&lt;u&gt;</title>" in page


def test_worst_queries_and_confusions_name_their_files(make_run, tmp_path):
    run = noisy_run(make_run, 3.0)
    files = [tmp_path / f"c{label}" / f"{row}&.jpg" for row, label in enumerate(LABELS)]
    run = dataclasses.replace(run, images=dataclasses.replace(run.images, sources=files))
    worst = int(run.query[run.values["MAP@R"].argmin()])
    shown = neighbours(report(run)).body
    assert f'<code class="file" title="{html.escape(str(files[worst]))}">c{LABELS[worst]}/{worst}&amp;.jpg<' in shown
    assert html.escape(str(files[int(run.nearest[worst, 0])])) in shown
    first = find_confusions(run)[0]
    shown = confusions(report(run)).body
    assert [f"/{row}&amp;.jpg<" in shown for row in (first.query, first.found)] == [True, True]


def test_seeds_of_one_method_are_not_compared(make_run):
    runs = [noisy_run(make_run, 0.5, seed=seed) for seed in (0, 1)]
    assert "nothing to compare" in significance(report(*runs)).body
    page = report_page(runs, title="", points=20, reporter=Reporter())
    assert set(ids(page)) == SECTIONS | {"tests"}
    assert "2 runs of 1 method on the same 48 queries" in text_of(page)


def test_two_methods_have_no_diagram_but_a_reason(make_run):
    runs = [noisy_run(make_run, noise, name=f"m{noise}") for noise in (0.5, 1.0)]
    body = ranking(report(*runs)).body
    assert "No critical-difference diagram is drawn. It needs at least three methods" in body
    assert "<svg" not in body


def test_the_diagram_states_its_scope(make_run):
    runs = [noisy_run(make_run, noise, name=f"m{noise}") for noise in (0.3, 1.0, 2.5)]
    body = text_of(ranking(report(*runs)).body)
    assert "Friedman's test over 12 test classes: p < 0.001." in body
    assert "The blocks are the test classes, and the diagram ranks one trained model of each method" in body
    alike = [noisy_run(make_run, 1.0, name=name) for name in ("a", "b", "c")]
    assert "It is not significant, so no pair is compared" in ranking(report(*alike)).body


def test_methods_disagree_most_on_the_chosen_queries(make_run):
    a, b = (noisy_run(make_run, noise, name=f"m{noise}") for noise in (0.5, 2.0))
    body = retrievals(report(a, b)).body
    shown = re.findall(r'<li class="case"><div class="query"><img[^>]*alt="query: ([^"]+)"', body)
    apart = (a.values["MAP@R"] - b.values["MAP@R"]).abs()
    rng = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:6].tolist()
    rest = [place for place in apart.argsort(descending=True, stable=True).tolist() if place not in rng][:6]
    assert shown == [f"class {LABELS[place]}" for place in [*rng, *rest]]


def test_values_per_training_class_are_a_table(make_run):
    columns = {"sigma": torch.tensor([0.25, 0.5])}
    section = training_classes(report(noisy_run(make_run, 0.5, columns=columns)))
    assert re.findall(r"<t[hd][^>]*>([^<]+)</t[hd]>", section.body) == ["trained 0", "0.25", "trained 1", "0.5"]
    assert "sigma" in section.body
    assert training_classes(report(noisy_run(make_run, 0.5))) is None


def nearkin(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nearkin", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


def test_the_command_writes_tables(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = [run.path for run in runs.values()]
    assert nearkin("report", *paths, "--format", "markdown", "--device", "cpu", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == "Report: report.md\n"
    text = (tmp_path / "report.md").read_text()
    assert "### Scores" in text
    assert "### MAP@R: model against model" in text
    assert "proxy_anchor − contrastive(form=c1)" in text


def test_the_command_writes_a_page(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "page.html"
    options = ("-o", out, "--title", "Mine", "--points", "20", "--device", "cpu")
    assert nearkin("report", runs["soft"].path, *options, monkeypatch=monkeypatch) == 0
    assert "<title>Mine</title>" in out.read_text()


def test_the_command_reports_a_missing_run(tmp_path, monkeypatch, capsys):
    assert nearkin("report", tmp_path / "none", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("nearkin: There is no ")
    assert said.count("\n") == 1


def test_latex_is_written_from_the_same_tables(runs):
    text = latex(run_tables(open_runs([runs["soft"].path], device="cpu")))
    assert text.count(r"\begin{tabular}") == 2
    assert r"soft\_triple" in text


def test_a_run_without_a_log_or_the_main_metrics_has_a_page(make_run):
    one = noisy_run(make_run, 1.0)
    object.__setattr__(one, "events", [])
    for metric in ("R@1", "MAP@R"):
        del one.result["scores"][metric]
    page = report_page([one], title="", points=20, reporter=Reporter())
    part = page[page.index('<section id="curves"') : page.index('<section id="classes"')]
    assert "<svg" not in part
    assert "has no log" in part


def test_style_and_script_are_in_the_package():
    from nearkin.report import page

    folder = page.Path(page.__file__).parent
    project = folder.parents[2] / "pyproject.toml"
    assert (folder / "page.css").exists()
    if project.exists():
        assert '"report/*.css", "report/*.js"' in project.read_text()
