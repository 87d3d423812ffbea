"""The command line in a process of its own: help, tables, one-sentence errors with exit code 2."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from made import make_images
from PIL import Image

from nearkin.cli import main
from nearkin.data.datasets import DATASETS
from nearkin.training.plan import Plan

TINY = ["--data", "glyphs(classes=48, samples=6)", "--epochs", "1", "--batch", "24", "--dim", "16", "--device", "cpu"]


def nearkin(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "nearkin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def size_of(picture: Path) -> tuple[int, int]:
    with Image.open(picture) as image:
        return image.size


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = nearkin("train", *TINY, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_train_prints_a_table_and_draws_a_picture(run):
    folder, printed = run
    assert "before training" in printed
    assert "MAP@R" in printed
    assert "kept: the last epoch" in printed
    assert size_of(folder / "neighbours.png")[0] > 500


def test_eval_measures_what_train_measured(run):
    folder, _ = run
    done = nearkin("eval", str(folder), "--json", "--metrics", "R@1,MAP@R", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)["scores"]
    known = json.loads((folder / "result.json").read_text())["scores"]
    assert scores == {name: known[name] for name in ("R@1", "MAP@R")}


def test_eval_says_what_chose_the_epoch(run, tmp_path):
    folder, _ = run
    assert "kept: the last epoch" in nearkin("eval", str(folder), "--device", "cpu").stdout
    chosen = tmp_path / "chosen"
    assert nearkin("train", *TINY, "--select", "test", "--out", str(chosen)).returncode == 0
    assert "ON THE TEST SET" in nearkin("eval", str(chosen), "--device", "cpu").stdout
    assert json.loads(nearkin("eval", str(chosen), "--json", "--device", "cpu").stdout)["select"] == "test"
    geometry = nearkin("geometry", str(chosen), str(folder), "--device", "cpu").stdout
    assert geometry.count("ON THE TEST SET") == 1


def test_without_arguments_help_is_printed():
    done = nearkin()
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    assert "  train " in done.stdout


def test_version_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert nearkin("--version").stdout == f"nearkin {project['version']}\n"


def interrupted(*_args, **_settings):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "where", "said"),
    [
        (["train", *TINY], "loop.Training._one_step", "To continue: nearkin train --resume --out runs/glyphs-"),
        (["cv", "--out", "a b", *TINY], "loop.Training._one_step", "To continue: nearkin cv --resume --out 'a b'"),
        (["train", *TINY], "launch.open_images", "Stopped before training began: nothing was written."),
        (["eval", "run"], "measure_run.measure_run", "Run the same command again to continue."),
    ],
)
def test_ctrl_c_says_how_to_continue(arguments, where, said, tmp_path, monkeypatch, capsys):
    module, _, name = where.partition(".")
    target, _, attribute = f"nearkin.training.{module}.{name}".rpartition(".")
    monkeypatch.setattr(f"{target}.{attribute}", interrupted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nearkin", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    printed = capsys.readouterr().err
    assert said in printed
    folders = sorted(Path().glob("runs/*")) or sorted(Path().glob("a b"))
    assert len(folders) == ("--resume" in said)
    assert all(str(folder) in printed for folder in folders)


@pytest.mark.parametrize("command", [[], ["methods"], ["train"]])
def test_help_is_not_cut_in_a_narrow_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["nearkin", *command, "--help"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().out
    assert not [line for line in printed.splitlines() if line.endswith("...") and "Usage" not in line]
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flag", "hint"),
    [("--learning-rate", "Did you mean --lr?"), ("--ephocs", "Did you mean --epochs?"), ("--zzz", "train --help.")],
)
def test_an_unknown_flag_gets_a_hint(flag, hint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nearkin", "train", flag, "3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"{hint}\n")


def test_help_shows_every_setting_with_its_default():
    printed = nearkin("train", "--help").stdout
    for name in vars(Plan()):
        flag = "from" if name == "start" else name.replace("_", "-")  # `from` is no name in Python
        assert f"--{flag}" in printed
    assert "0.0001" in printed
    assert "proxy_anchor" in printed


def test_methods_are_listed_and_shown():
    listed = nearkin("methods").stdout
    assert "proxy_anchor" in listed
    assert "pair loss" in listed
    shown = nearkin("methods", "show", "proxy_anchor").stdout
    for word in ("Symbols", "Settings", "Departures", "Relations", "(4)", "alpha = 32.0"):
        assert word in shown


def test_data_counts_and_draws(tmp_path):
    done = nearkin("data", "glyphs(classes=48, samples=6)", "--out", str(tmp_path / "sheet.png"))
    assert done.returncode == 0, done.stderr
    assert "144" in done.stdout
    assert size_of(tmp_path / "sheet.png")[1] > 200


def test_data_names_truncated_images(tmp_path):
    paths = make_images(tmp_path / "photos", classes=4, each=2)
    paths[0].write_bytes(paths[0].read_bytes()[:-40])
    done = nearkin("data", f"folder:{tmp_path / 'photos'}", "--out", str(tmp_path / "sheet.png"))
    assert done.returncode == 0, done.stderr
    sentence = f"1 training image cannot be read, so left out: {paths[0]} (it is truncated). That leaves fewer than two"
    assert f"{sentence} images of {paths[0].parent.name}." in done.stdout
    assert done.stderr == f"1 image left out:\n  1 because it is truncated: {paths[0]}\n"
    done = nearkin("data", f"folder:{tmp_path / 'photos'}", "--strict", "--out", str(tmp_path / "sheet.png"))
    assert (done.returncode, "strict forbids" in done.stderr) == (2, True)


def test_data_refuses_an_unknown_picture_format_before_reading(tmp_path):
    done = nearkin("data", "glyphs(classes=48, samples=6)", "--out", str(tmp_path / "sheet.gif"))
    assert (done.returncode, done.stdout) == (2, "")


def test_data_sets_are_listed():
    assert "inshop:PATH, DeepFashion In-Shop" in nearkin("data").stdout


def test_help_names_every_data_set():
    printed = nearkin("data", "--help").stdout
    assert [name for name in DATASETS if name not in printed] == []


def test_suites_are_listed():
    assert "smoke" in nearkin("bench").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--method", "proxy_ancor"], "Did you mean 'proxy_anchor'?"),
        (["train", "--method", "proxy_anchor(alfa=3)"], "Did you mean 'alpha'?"),
        (["train", "--method", "soft_triple(lambda=20)"], "no option 'lambda'"),
        (["train", "--size", "7"], "choose another --size"),
        (["train", "--data", "folder:nowhere"], "nowhere"),
        (["train", "--data", "glyps"], "glyphs"),
        (["train", "--epochs", "many"], "--epochs"),
        (["train", "--backbone", "resnet5"], "no backbone"),
        (["train", "--augment", "crops"], "Did you mean 'crop'?"),
        (["eval", "nowhere"], "run folder"),
        (["methods", "show", "nothing"], "There are:"),
        (["bench", "nothing"], "no suite"),
        (["bench", "smoke", "--set", "epochs"], "name=value"),
        (["trian"], "trian"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    """In this process, which takes a tenth of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nearkin", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2, printed
    assert words in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) == 1


def test_wrong_input_in_a_process_of_its_own(tmp_path):
    done = nearkin("train", "--method", "proxy_ancor", cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean 'proxy_anchor'?" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
