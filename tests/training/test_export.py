"""Exported models: the same embeddings for any batch, and a description sufficient for preprocessing."""

import dataclasses
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import nearkin as nk
from nearkin.cli import app
from nearkin.errors import NearkinError
from nearkin.files import write_json, write_tensors
from nearkin.networks.backbones import CAFFE
from nearkin.training.export import WRITERS, describe, export, network_inputs, photographs
from nearkin.training.model import build_embedder
from nearkin.training.plan import Plan
from nearkin.training.run_folder import RunFolder

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

SMALL = {"conv4": {"pool": "avg"}, "lite0": {"size": 96, "stored": 2.0}}


def run_of(folder, backbone, *, space="cosine", **settings):
    """A run folder with random weights, batch norms that matter among them."""
    torch.manual_seed(0)
    plan = Plan(backbone=backbone, weights="none", dim=24, device="cpu", precision="float32", **settings)
    embedder = build_embedder(plan, space)
    for module in embedder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    run = RunFolder(folder)
    write_json(run.config, {"plan": dataclasses.asdict(plan), "space": space})
    write_tensors(run.model, embedder.state_dict(), {"names": ["a", "b"]})
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    top = tmp_path_factory.mktemp("runs")
    return {name: run_of(top / name, name, **settings) for name, settings in SMALL.items()}


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """Each run as ONNX; nothing may be unpickled on the way."""
    top = tmp_path_factory.mktemp("onnx")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
            patch.setattr(module, name, lambda *_, **__: pytest.fail("something was unpickled"))
        return {name: export(run, top / f"{name}.onnx") for name, run in runs.items()}


def session_of(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", SMALL)
def test_onnx_gives_our_embeddings_for_any_batch(runs, files, name):
    model, session = nk.load(runs[name], device="cpu"), session_of(files[name].path)
    images = photographs()
    inputs, ours = network_inputs(model, images), model.embed(images).numpy()
    for count in (1, 3, 8):
        theirs = session.run(["embeddings"], {"images": inputs[:count].numpy()})[0]
        np.testing.assert_allclose(theirs, ours[:count], atol=1e-4)
    assert files[name].difference <= 1e-4
    assert files[name].images == 8
    assert ours.std(0).max() > 1e-3  # the images are told apart, so that equality means something


def by_description(path, about):
    """A picture as the description says, with NumPy and Pillow alone."""
    size, short = about["size"], about["short_side"]
    with Image.open(path) as file:
        image = file.convert("RGB")
    for side in (about["stored_side"] or short, short):
        if side == short or min(image.size) > side:
            scale = side / min(image.size)
            image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float64)
    if about["channel_order"] == "grey":
        pixels = pixels @ [0.299, 0.587, 0.114]
        pixels = pixels[:, :, None]
    x = (pixels / 255 - about["mean"]) / about["std"]
    x = x[:, :, ::-1] if about["channel_order"] == "BGR" else x
    return x.transpose(2, 0, 1)[None].astype(np.float32)


@pytest.mark.parametrize("name", SMALL)
def test_a_picture_can_be_embedded_from_the_description_alone(runs, files, name, tmp_path):
    path = tmp_path / "photograph.png"
    Image.fromarray(photographs()[0].permute(1, 2, 0).numpy()).save(path)
    session = session_of(files[name].path)
    about = json.loads(session.get_modelmeta().custom_metadata_map["nearkin"])
    assert about == files[name].about
    model = nk.load(runs[name], device="cpu")
    x = by_description(path, about)
    ours = network_inputs(model, [path]).numpy()
    assert np.abs(x - ours).max() <= 3 / 255 / min(about["std"])  # Pillow resizes within a few grey levels of torch
    theirs = session.run(["embeddings"], {"images": x})[0]
    assert (theirs * model.embed([path]).numpy()).sum() > 0.999
    assert about["normalised"]
    assert about["output"]["shape"] == ["batch", 24]


def test_the_description_names_bgr(runs):
    model = nk.load(runs["lite0"], device="cpu")
    assert describe(model)["channel_order"] == "RGB"
    model.embedder.trunk.normalise = CAFFE
    assert describe(model)["channel_order"] == "BGR"
    assert describe(model)["mean"] == list(CAFFE.mean)


def test_the_file_is_complete_and_names_no_paths(files, tmp_path):
    path = files["lite0"].path
    assert [p.name for p in path.parent.iterdir() if p.name.startswith("lite0")] == ["lite0.onnx"]
    content = path.read_bytes()
    assert b"/src/" not in content
    assert b"site-packages" not in content
    known = onnx.load(path)
    onnx.checker.check_model(known)
    assert known.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("space", ["ball", "inner"])
def test_other_spaces(tmp_path, space):
    done = export(run_of(tmp_path / space, "conv4", space=space), tmp_path / f"{space}.pt2")
    assert (done.about["space"], done.about["normalised"]) == (space, False)


def test_folds_become_one_file(tmp_path):
    for name in ("one", "two"):
        run_of(tmp_path / "folds" / name, "conv4")
    write_json(tmp_path / "folds" / "config.json", {"parts": ["one", "two"]})
    done = {suffix: export(tmp_path / "folds", tmp_path / f"folds.{suffix}") for suffix in ("pt2", "onnx")}
    assert done["pt2"].about == done["onnx"].about
    assert done["onnx"].about["output"]["shape"] == ["batch", 48]
    model = nk.load(tmp_path / "folds", device="cpu")
    inputs, ours = network_inputs(model, photographs()), model.embed(photographs()).numpy()
    theirs = session_of(done["onnx"].path).run(["embeddings"], {"images": inputs.numpy()})[0]
    np.testing.assert_allclose(theirs, ours, atol=1e-4)


def test_a_torch_program_computes_our_embeddings(runs, tmp_path):
    done = export(runs["conv4"], tmp_path / "model.pt2")
    extra = {"nearkin.json": ""}
    program = torch.export.load(done.path, extra_files=extra)  # torch's own reader; nearkin itself never reads one
    assert json.loads(extra["nearkin.json"]) == done.about
    model = nk.load(runs["conv4"], device="cpu")
    inputs, ours = network_inputs(model, photographs()), model.embed(photographs())
    for count in (1, 5):
        torch.testing.assert_close(program.module()(inputs[:count]), ours[:count], atol=1e-4, rtol=0)


def test_an_export_can_be_checked_on_given_images(tmp_path):
    run = nk.train(data="glyphs(classes=48, samples=6)", epochs=1, batch=24, dim=16, device="cpu", out=tmp_path / "run")
    letters = nk.load_dataset("glyphs(classes=48, samples=6)").test.sources
    paths = [tmp_path / f"{n}.png" for n in range(5)]
    for path, letter in zip(paths, letters, strict=False):
        Image.fromarray(letter[0].numpy()).save(path)
    images = [word for path in paths for word in ("--images", str(path))]
    printed = CliRunner().invoke(app, ["export", str(run.path), "-o", str(tmp_path / "m.pt2"), *images])
    assert printed.exit_code == 0, printed.output
    assert "on 5 images" in printed.output
    assert "['batch', 1, 32, 32] to embeddings ['batch', 16]" in printed.output


def test_a_file_that_differs_is_not_written(runs, tmp_path, monkeypatch):
    def wrong(program, path, about):
        run = WRITERS[".pt2"](program, path, about)
        return lambda x: run(x) + 2e-4

    monkeypatch.setitem(WRITERS, ".onnx", wrong)
    with pytest.raises(NearkinError, match=r"differ from ours by 2.0e-04, and 1e-04 is allowed"):
        export(runs["conv4"], tmp_path / "wrong.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_of_nan_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(
        WRITERS, ".onnx", lambda _program, path, _about: path.touch() or (lambda x: x.flatten(1)[:, :24] * torch.nan)
    )
    with pytest.raises(NearkinError, match="nan"):
        export(runs["conv4"], tmp_path / "wrong.onnx")


def test_wrong_arguments_are_refused(runs, tmp_path, monkeypatch):
    with pytest.raises(NearkinError, match=r"\.onnx or \.pt2"):
        export(runs["conv4"], tmp_path / "model.txt")
    with pytest.raises(NearkinError, match="run folder"):
        export(tmp_path / "nothing", tmp_path / "model.onnx")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(NearkinError, match="not an image"):
        export(runs["conv4"], tmp_path / "model.onnx", images=[tmp_path / "text.png"])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(NearkinError, match=r"onnxruntime.*pip install"):
        export(runs["conv4"], tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
