"""Models loaded from run folders: embeddings, refusals, no code run from files."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from made import make_images, make_run
from PIL import Image

import nearkin as nk
from nearkin.errors import NearkinError
from nearkin.files import read_json, read_tensors, write_json, write_tensors
from nearkin.training.model import fingerprint
from nearkin.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("artefact") / "run", names=("a", "b"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_files_arrays_tensors_and_pillow_images_embed_alike(run, tmp_path):
    paths = make_images(tmp_path)
    arrays = np.stack([np.asarray(Image.open(path)) for path in paths])
    tensor = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    model = nk.load(run)
    known = model.embed(paths)
    assert known.shape == (12, 8)
    assert torch.allclose(known.norm(dim=1), torch.ones(12))
    for given in (
        [str(path) for path in paths],
        arrays,
        tensor,
        list(arrays),
        list(tensor),
        [Image.fromarray(array) for array in arrays],
    ):
        assert torch.equal(model.embed(given), known)


def test_a_list_may_hold_images_of_any_sizes_grey_or_coloured(run):
    rng = np.random.default_rng(0)
    shapes = [(20, 30, 3), (64, 80), (36, 200, 1), (37, 37, 3)]
    images = [rng.integers(256, size=shape, dtype=np.uint8) for shape in shapes]
    model = nk.load(run)
    together = model.embed(images)
    for row, image in enumerate(images):
        assert torch.allclose(model.embed([image])[0], together[row], atol=1e-6)


def test_one_image_a_folder_an_iterator_and_floats_embed_as_the_list_of_them(run, tmp_path, monkeypatch):
    paths = make_images(tmp_path / "pictures")
    model = nk.load(run)
    known = model.embed(paths)
    tensors = [torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths]
    monkeypatch.setattr("nearkin.data.input_images.CHUNK", 5)  # 12 images are three chunks
    for images in (
        tmp_path / "pictures",
        str(tmp_path / "pictures"),
        iter(paths),
        (Image.open(path) for path in paths),
        (tensor for tensor in tensors),
        torch.stack(tensors).float() / 255,
        torch.stack(tensors).permute(0, 2, 3, 1).double().numpy() / 255,
        [tensor.half() / 255 for tensor in tensors],
    ):
        torch.testing.assert_close(model.embed(images), known)
    for image in (paths[0], str(paths[0]), Image.open(paths[0]), tensors[0], tensors[0] / 255):
        torch.testing.assert_close(model.embed(image), known[:1])


def test_load_takes_a_run_and_a_model_says_what_it_is(run):
    model = nk.load(RunFolder(run), device="cpu")
    assert repr(model) == "Model(conv4, 32 px, 8 dimensions, space cosine, trained on 2 classes, on cpu)"


def test_pillow_images_embed_as_their_files(run, tmp_path):
    rng = np.random.default_rng(0)
    colours = Image.fromarray(
        np.kron(rng.integers(256, size=(5, 6, 3), dtype=np.uint8), np.ones((20, 20, 1), np.uint8))
    )
    clear = colours.copy()
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    turned = Image.Exif()
    turned[0x0112] = 6
    saved = {
        "palette.png": (colours.quantize(8), {}),
        "clear.png": (clear, {}),
        "grey and clear.png": (clear.convert("LA"), {}),
        "print.tif": (colours.convert("CMYK"), {}),
        "two tones.png": (colours.convert("1"), {}),
        "deep.png": (Image.fromarray(rng.integers(2**16, size=(80, 90)).astype(np.uint16)), {}),
        "turned.png": (colours, {"exif": turned}),
    }
    model = nk.load(run)
    for name, (image, settings) in saved.items():
        image.save(tmp_path / name, **settings)
        with Image.open(tmp_path / name) as opened:
            assert torch.equal(model.embed([opened]), model.embed([tmp_path / name])), name
    grey, coloured = model.embed([colours.convert("L"), saved["palette.png"][0]])
    assert not torch.allclose(grey, coloured, atol=1e-4)  # the network tells such images apart at all


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "nothing to embed"),
        ("a.png", "no such file"),
        (iter([]), "nothing to embed"),
        (7, "files, pixels or a folder, not int"),
        ([(np.zeros((8, 8), np.uint8), 3)], "pass the images alone"),
        (torch.full((1, 3, 8, 8), 2.0), "Float pixels must be from 0 to 1, not from 2 to 2"),
        ([torch.full((3, 8, 8), torch.nan)], "Float pixels must be from 0 to 1"),
        (["a.png", np.zeros((8, 8), np.uint8)], "not both"),
        ([np.zeros((8, 8), np.uint8), Path("a.png")], "not both"),
        ([Image.new("F", (8, 8))], "in memory: floating-point"),
        (torch.zeros(8, 8, dtype=torch.uint8), r"\[N, C, H, W\]"),
        (np.zeros((2, 8, 8, 3), np.int64), "uint8"),
        ([np.zeros(8, np.uint8)], r"\[H, W\]"),
        ([np.zeros((8, 8, 4), np.uint8)], "4 channels"),
        (["nowhere.png"], "no such file"),
    ],
)
def test_what_cannot_be_embedded_is_refused(run, images, words):
    with pytest.raises(NearkinError, match=words):
        nk.load(run).embed(images)


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -4000])
def test_a_truncated_model_is_refused(tmp_path, keep):
    model = RunFolder(make_run(tmp_path)).model
    model.write_bytes(model.read_bytes()[:keep])
    with pytest.raises(NearkinError, match="damaged"):
        nk.load(tmp_path)


@pytest.mark.parametrize("place", [3, 60, -1, -5000])
def test_one_flipped_bit_of_a_model_is_refused(tmp_path, place):
    model = RunFolder(make_run(tmp_path)).model
    flip(model, place)
    with pytest.raises(NearkinError, match="damaged"):
        nk.load(tmp_path)


def test_a_pickle_instead_of_the_model_is_not_run(tmp_path):
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return Path.touch, (trap,)

    model = RunFolder(make_run(tmp_path / "run")).model
    for data in (pickle.dumps(Trap()), b"PK\x03\x04" + pickle.dumps(Trap())):
        model.write_bytes(data)
        with pytest.raises(NearkinError, match="damaged"):
            nk.load(tmp_path / "run")
    torch.save({"x": torch.ones(2)}, model)
    with pytest.raises(NearkinError, match="damaged"):
        nk.load(tmp_path / "run")
    assert not trap.exists()


def test_weights_of_another_network_are_refused(tmp_path):
    make_run(tmp_path / "wide", dim=16)
    make_run(tmp_path / "run")
    RunFolder(tmp_path / "run").model.write_bytes(RunFolder(tmp_path / "wide").model.read_bytes())
    with pytest.raises(NearkinError, match="does not fit"):
        nk.load(tmp_path / "run")


@pytest.mark.parametrize(("name", "value"), [("pool", "max"), ("space", "ball")])
def test_changed_settings_are_refused_even_if_they_fit_the_weights(tmp_path, name, value):
    run = RunFolder(make_run(tmp_path))
    settings = read_json(run.config)
    (settings if name == "space" else settings["plan"])[name] = value
    write_json(run.config, settings)
    with pytest.raises(NearkinError, match=f"says {name}={value}"):
        nk.load(tmp_path)


@pytest.mark.parametrize("lost", ["plan", "space", "names"])
def test_a_run_with_missing_entries_is_refused(tmp_path, lost):
    run = RunFolder(make_run(tmp_path))
    if lost == "names":
        write_tensors(run.model, read_tensors(run.model)[0])
    else:
        write_json(run.config, {key: value for key, value in read_json(run.config).items() if key != lost})
    with pytest.raises(NearkinError, match=f"has no entry '{lost}'"):
        nk.load(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"plan": ', "", "\x00"])
def test_damaged_settings_are_refused(tmp_path, text):
    RunFolder(make_run(tmp_path)).config.write_text(text)
    with pytest.raises(NearkinError, match="damaged"):
        nk.load(tmp_path)


def test_preprocessing_is_that_of_the_run_if_the_table_changes(tmp_path):
    run = RunFolder(make_run(tmp_path))
    tensors, about = read_tensors(run.model)
    assert about["preprocessing"]["mean"] == [0.5]
    about["preprocessing"] |= {"mean": [0.25], "std": [0.125], "size": 24, "trained_size": 24}
    write_tensors(run.model, tensors, about)
    model = nk.load(tmp_path)
    assert model.embedder.trunk.normalise.mean == (0.25,)
    assert model.size == 24
    seen = []
    model.embedder.trunk.register_forward_hook(lambda _module, given, _result: seen.append(given[0]))
    model.embed(torch.full((1, 1, 40, 40), 51, dtype=torch.uint8))
    assert seen[0].shape[-2:] == (24, 24)
    assert torch.allclose(seen[0], torch.tensor((51 / 255 - 0.25) / 0.125))


def test_a_trained_run_keeps_its_preprocessing_and_names(tmp_path):
    settings = {"data": "glyphs(classes=12, samples=4)", "epochs": 1, "batch": 12, "dim": 8, "device": "cpu"}
    run = nk.train(**settings, metrics=("R@1",), out=tmp_path / "run")
    _, about = read_tensors(run.model)
    model = nk.load(run.path)
    assert about["preprocessing"] == model.preprocessing()
    assert about["architecture"] == model.architecture()
    assert len(model.names) == 6


def test_the_fingerprint_depends_on_the_model_and_not_on_its_path(tmp_path):
    first, again = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert fingerprint(first) == fingerprint(again)
    write_json(again / "config.json", read_json(again / "config.json") | {"note": 1})
    assert fingerprint(first) == fingerprint(again)
    assert fingerprint(first) != fingerprint(make_run(tmp_path / "c", seed=1))
    with pytest.raises(NearkinError, match="run folder"):
        fingerprint(tmp_path)
