"""Continue from a run: start from its network, or add epochs to it; take its file as weights."""

import io
import json
import sys

import pytest
import torch
from made import make_images
from rich.console import Console

import nearkin as nk
from nearkin.benchmark.planned_runs import describe
from nearkin.cli import main
from nearkin.console import Reporter
from nearkin.files import read_json, read_tensors
from nearkin.networks.backbones import build_trunk
from nearkin.training.measure_run import measure_run
from nearkin.training.model import load_untrained
from nearkin.training.run_folder import RunFolder

TINY = {"backbone": "conv4", "dim": 4, "batch": 4, "device": "cpu", "metrics": ("R@1", "MAP@R")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continue")
    make_images(folder / "photos", classes=4, each=4)
    make_images(folder / "others", classes=6, each=4, seed=3)
    for path in sorted((folder / "others").iterdir()):
        path.rename(path.with_name(f"other {path.name}"))
    return folder


@pytest.fixture(scope="module")
def first(place):
    return nk.train(data=f"folder:{place / 'photos'}", out=place / "first", epochs=2, schedule="constant", **TINY)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return read_tensors(run.model)[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_starts_from_the_network_of_another(first, place):
    said = io.StringIO()
    run = nk.train(
        start=first,
        data=f"folder:{place / 'others'}",
        method="contrastive",
        out=place / "tuned",
        epochs=0,
        device="cpu",
        reporter=Reporter(Console(file=said, width=300)),
    )
    assert same(weights(run), weights(first)), "without a step the network is that of the run"
    config = read_json(run.config)
    assert (config["plan"]["method"], config["plan"]["dim"], config["plan"]["weights"]) == ("contrastive", 4, "none")
    assert config["start"]["run"] == "first"
    assert f"Starts from the network of {first.path}." in said.getvalue()
    assert same(load_untrained(run.path, device="cpu").embedder.state_dict(), weights(first))
    assert len(nk.load(run.path).names) == 3


def test_another_dimension_gets_a_new_head_and_says_so(first, place):
    said = io.StringIO()
    reporter = Reporter(Console(file=said, width=300))
    run = nk.train(start=str(first.path), dim=6, out=place / "wider", epochs=0, device="cpu", reporter=reporter)
    assert "with a new head, because the embeddings have 6 dimensions here" in said.getvalue()
    ours, theirs = weights(run), weights(first)
    trunk = [name for name in theirs if name.startswith("trunk.")]
    assert all(torch.equal(ours[name], theirs[name]) for name in trunk)
    assert nk.load(run.path).embedder.dim == 6


def test_data_and_method_are_those_of_the_run(first, place):
    run = nk.train(start=first.path, out=place / "same", epochs=0, halves="swapped", device="cpu")
    plan = read_json(run.config)["plan"]
    assert plan["data"] == f"folder:{place / 'photos'}"
    result = read_json(run.result)
    assert result["test_classes"] == {"classes": 2, "seen": 2}, "the first run trained on what is tested here"
    assert measure_run(run.path, device="cpu").tested == (2, 2)


def test_an_interrupted_run_resumes_without_the_one_it_started_from(first, place, monkeypatch):
    source = place / "source"
    nk.load(first.path).save(source)
    settings = {"start": source, "data": f"folder:{place / 'others'}", "epochs": 3, "device": "cpu", "batch": 4}
    whole = nk.train(out=place / "whole", **settings)
    training = sys.modules["nearkin.training.loop"].Training
    step, done = training._one_step, []

    def one_step(self, *batch):
        done.append(1)
        if len(done) > 4:
            raise KeyboardInterrupt
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_one_step", one_step)
        patch.setattr(sys.modules["nearkin.training.loop"], "SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            nk.train(out=place / "cut", **settings)
    source.rename(place / "source-moved")
    resumed = nk.train(out=place / "cut", resume=True)
    assert same(weights(whole), weights(resumed))
    assert read_tensors(resumed.model)[1]["seen_before"] == sorted(nk.load(first.path).names)


def test_a_run_without_a_checkpoint_needs_the_same_start(first, place):
    run = nk.train(start=first.path, out=place / "late", epochs=0, device="cpu")
    run.result.unlink()
    run.checkpoint.unlink()
    config = read_json(run.config)
    config["start"]["model"] = "0" * 64
    run.config.write_text(json.dumps({name: value for name, value in config.items() if name != "sha256"}))
    with pytest.raises(nk.NearkinError, match=r"is not the run that .* started from"):
        nk.train(out=run.path, resume=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backbone": "lite0"}, "has the backbone conv4, not lite0"),
        ({"weights": "w.pth"}, "leave out --weights or --from"),
        ({"start": "nowhere"}, "There is no .*nowhere/config.json"),
    ],
)
def test_what_does_not_fit_is_refused(first, settings, words, tmp_path):
    with pytest.raises(nk.NearkinError, match=words):
        nk.train(**{"start": first.path, "out": tmp_path / "run", **settings})
    assert not (tmp_path / "run").exists()


def test_a_start_is_named_on_the_command_line_and_decides_the_id(first, place, monkeypatch, capsys):
    arguments = ["train", "--from", str(first.path), "--epochs", "0", "--out", str(place / "by-flag")]
    monkeypatch.setattr(sys, "argv", ["nearkin", *arguments, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "Starts from the network of" in " ".join(capsys.readouterr().out.split())
    settings = {"method": "triplet", "backbone": "conv4"}
    assert describe(settings | {"start": str(first.path)}, data="glyphs")["start"]
    assert describe(settings, data="glyphs")["start"] == ""


def test_the_model_of_a_run_is_taken_as_weights(first, tmp_path):
    trunk = build_trunk("conv4", weights=first.model)
    theirs = {name.removeprefix("trunk."): t for name, t in weights(first).items() if name.startswith("trunk.")}
    assert same(trunk.state_dict(), theirs)
    with pytest.raises(nk.NearkinError, match="holds the weights of another network"):
        build_trunk("googlenet", weights=first.model)


def test_epochs_are_added_as_if_there_had_been_more(first, place):
    settings = {"data": f"folder:{place / 'photos'}", "schedule": "constant", **TINY}
    longer = nk.train(out=place / "longer", epochs=2, **settings)
    nk.train(out=longer.path, resume=True, epochs=4)
    whole = nk.train(out=place / "four", epochs=4, **settings)
    assert same(weights(longer), weights(whole))
    events = [[{k: v for k, v in e.items() if k != "seconds"} for e in run.events()] for run in (longer, whole)]
    assert events[0] == events[1]
    assert read_json(longer.result)["scores"] == read_json(whole.result)["scores"]
    with pytest.raises(nk.NearkinError, match="trains 4 epochs already"):
        nk.train(out=longer.path, resume=True, epochs=3)
    longer.checkpoint.unlink()
    with pytest.raises(nk.NearkinError, match=r"no checkpoint any more.*--from"):
        nk.train(out=longer.path, resume=True, epochs=5)
    assert longer.result.exists()


def test_a_schedule_that_depends_on_the_epochs_is_named(place):
    said = io.StringIO()
    run = nk.train(data=f"folder:{place / 'photos'}", out=place / "cosine", epochs=2, **TINY)
    nk.train(out=run.path, resume=True, epochs=3, reporter=Reporter(Console(file=said, width=300)))
    assert "epoch 2 was 0.5 of the initial one; from the start with 3 epochs it would have been 0.75" in said.getvalue()
    assert read_json(run.result)["steps"] == 6
