"""The commands and code of the README run, and its tables are up to date."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import against_pml
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.data.datasets import DATASETS
from nearkin.data.pixels.views import AUGMENTS
from nearkin.files import read_json
from nearkin.methods.losses import LOSSES
from nearkin.methods.strategies import STRATEGIES
from nearkin.networks.backbones import BACKBONES
from tools import docs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
QUICK = ["--epochs", "1", "--size", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder photos/ with one folder per class."""
    place = tmp_path_factory.mktemp("readme")
    rng = torch.Generator().manual_seed(0)
    for label in range(8):
        (place / "photos" / f"class{label}").mkdir(parents=True)
        for number in range(4):
            pixels = torch.randint(256, (40, 48, 3), generator=rng, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(place / "photos" / f"class{label}" / f"{number}.png")
    return place


def expand(word: str, cwd: Path) -> list[str]:
    """Expand a star as a shell does."""
    return sorted(str(p.relative_to(cwd)) for p in cwd.glob(word)) if "*" in word else [word]


def run(words: list[str], cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_shows_these_commands():
    assert [" ".join(c.split()[:2]) for c in COMMANDS if not c.startswith("python -m pip ")] == [
        *("make demo", "make test"),
        *("nearkin data", "nearkin train", "nearkin eval"),
        *("nearkin train", "nearkin report"),
        *("nearkin index", "nearkin search", "nearkin serve"),
    ]


def test_the_commands_on_your_own_images_run_in_order(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        words = [name for word in shlex.split(command) for name in expand(word, folder)]
        if words[0] == "nearkin" and words[1] != "serve":  # tested with the tutorial
            done = CliRunner().invoke(app, words[1:] + (QUICK if words[1] == "train" else []))
            assert done.exit_code == 0, f"{command}: {done.output}"
    assert (folder / "photos.png").exists()
    assert (folder / "runs" / "photos" / "result.json").exists()
    assert (folder / "compare.html").exists()
    assert (folder / "found.html").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_is_the_command_the_makefile_runs(folder):
    plan = ["make", "-n", "--no-print-directory", "demo"]
    recipe = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = next(shlex.split(line) for line in recipe.splitlines() if "bin/nearkin" in line)
    quick = ["--data", "glyphs(classes=48, samples=6)", "--epochs", "1", "--batch", "24", "--device", "cpu"]
    run(["nearkin", *command[1:], *quick], folder)
    assert (folder / "runs" / "demo" / "neighbours.png").exists()


def test_the_python_lines_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    if not Path("runs/demo").exists():
        nk.train(data="glyphs(classes=48, samples=6)", epochs=1, batch=24, device="cpu", out="runs/demo")
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    paths = ["photos/class0/0.png", "photos/class1/0.png"]
    names = {"embeddings": torch.randn(40, 512), "labels": torch.arange(40) % 10, "paths": paths}
    exec(block, names)
    assert names["loss"].ndim == 0
    assert len(names["vectors"]) == 2
    assert set(names["scores"]) == {"R@1", "MAP@R"}


def test_both_libraries_compute_the_same_values_in_the_comparison():
    record = {
        name: read_json(ROOT / "benchmarks" / "results" / f"{name}.json") for name in ("evaluate_speed", "against_pml")
    }
    triple, evaluation = record["against_pml"]["soft_triple"], record["evaluate_speed"]
    assert triple["ours"]["loss"] == pytest.approx(triple["pml"]["loss"], rel=1e-5)
    for metric, score in evaluation["pml"]["scores"].items():
        assert score == pytest.approx(evaluation["ours"]["scores"][metric], abs=0.01)


def test_the_comparison_with_pml_can_be_repeated():
    resumed = against_pml.resume(steps=5, batch=8, dim=4, size=16)
    assert resumed["ours"]["steps_that_differ"] == 0
    assert resumed["pml"]["steps_that_differ"] > 0
    triple = against_pml.soft_triple(300, 2, dim=8, batch=4)
    assert triple["ours"]["loss"] == pytest.approx(triple["pml"]["loss"], rel=1e-4)
    assert triple["ours"]["peak_mb"] < triple["pml"]["peak_mb"]


def test_the_readme_counts_the_methods():
    assert f"{len(LOSSES) + len(STRATEGIES)} losses and strategies" in README


@pytest.mark.parametrize(
    ("page", "file", "quoted"),
    [
        ("vcpa", "vcpa_cost_cpu", lambda rows: [rows[1]["ratio"]]),
        ("vcpa", "vcpa_cost_cuda", lambda rows: [rows[1]["ratio"]]),
        ("proxy_isa", "isa_cost_cpu", lambda rows: [rows["methods alone"]["ratio"]]),
        ("proxy_isa", "isa_cost_cuda", lambda rows: [rows["training steps"]["ratio"]]),
        ("ccp", "ccp_cost_cpu", lambda rows: [rows["step"]["ratio"], rows["redraw"]["ratio"]]),
        ("ccp", "ccp_cost_cuda", lambda rows: [rows["step"]["ratio"], rows["redraw"]["ratio"]]),
        ("profs", "hncm_cost", lambda rows: [row["ratio"] for row in rows]),
    ],
)
def test_pages_quote_the_costs_in_the_result_files(page, file, quoted):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = read_json(ROOT / "benchmarks" / "results" / f"{file}.json")
    assert f"{file}.json" in text
    assert all(re.search(rf"\b{ratio:.2f}\b", text) for ratio in quoted(found["rows"]))


def test_the_ccp_page_quotes_the_file_on_heads():
    text = (ROOT / "docs" / "ccp.md").read_text()
    for name, test in read_json(ROOT / "benchmarks" / "results" / "ccp_heads.json")["tests"].items():
        assert re.search(rf"\b{test['difference']:.2f}\b", text), name
        if name.endswith("128-d"):
            assert f"{test['low']:.2f} to {test['high']:.2f}, p {test['p']:.3f}" in text, name


def test_the_csv_example_of_the_data_page_loads(tmp_path):
    table = re.search(r"```text\n(path,.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)[1]
    (tmp_path / "images.csv").write_text(table)
    for line in table.splitlines()[1:]:
        path = tmp_path / line.split(",")[0]
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 40)).save(path)
    data = nk.load_dataset(f"csv:{tmp_path / 'images.csv'}")
    assert (len(data.train), data.train.classes) == (3, 2)
    assert (data.test.query.tolist(), data.test.gallery.tolist()) == ([True, False], [False, True])


def test_the_generated_parts_are_up_to_date():
    assert docs.readme(README, ROOT) == README
    assert docs.methods_page() == (ROOT / "docs" / "methods.md").read_text()
    page = (ROOT / "docs" / "data.md").read_text()
    assert docs.data_page(page, ROOT) == page
    for name in (*DATASETS, *AUGMENTS, *BACKBONES):
        assert re.search(rf"\| `{name}[`:]", page), name
    assert {p.stem for p in (ROOT / docs.PICTURES).glob("*.png")} == set(LOSSES)
