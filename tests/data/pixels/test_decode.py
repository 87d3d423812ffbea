"""Decoding every kind of file, and the errors for bad ones."""

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from image_helpers import as_tensor, encoded, opened, photo
from PIL import EpsImagePlugin, Image, ImageOps
from torch.nn import functional as F

from nearkin.data.pixels import decode as decoding
from nearkin.data.pixels.decode import as_channels, decode, decode_file, measure, resize, stored_size
from nearkin.data.pixels.image_bytes import BadImage
from nearkin.errors import NearkinError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.jpg"


@pytest.mark.parametrize(("height", "width"), [(48, 64), (64, 48), (48, 48), (31, 37), (20, 30), (48, 96)])
def test_short_side_and_antialiasing(file: Path, height: int, width: int) -> None:
    image = photo(height, width)
    side = min(height, width)
    size = (height * 24 // side, width * 24 // side)
    got = opened(encoded(image), file, short_side=24)
    want = F.interpolate(as_tensor(image)[None].double(), size=size, mode="bilinear", antialias=True)[0]
    assert (got.double() - want).abs().max() <= 1
    pillow = image.resize(size[::-1], Image.Resampling.BILINEAR)
    assert (got.int() - as_tensor(pillow).int()).abs().max() <= 2


def test_an_image_of_the_stored_size_is_unchanged(file: Path) -> None:
    image = photo(32, 50)
    assert torch.equal(opened(encoded(image), file, short_side=32), as_tensor(image))


@pytest.mark.parametrize(("height", "width"), [(20, 90), (101, 25)])
def test_long_images_are_cut_first(file: Path, height: int, width: int) -> None:
    image = photo(height, width)
    side = min(height, width)
    top, left = max(0, height - 2 * side) // 2, max(0, width - 2 * side) // 2
    middle = image.crop((left, top, left + min(width, 2 * side), top + min(height, 2 * side)))
    got = opened(encoded(image), file, short_side=16)
    assert torch.equal(got, opened(encoded(middle), file, short_side=16))
    assert max(got.shape) == 32


def test_an_extremely_long_image_takes_no_more_memory() -> None:
    assert stored_size(1, 1_000_000, 256) == (256, 512)
    assert resize(torch.zeros(3, 1, 1_000_000, dtype=torch.uint8), 256).shape == (3, 256, 512)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(file: Path, orientation: int, kind: str) -> None:
    image = photo(24, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert torch.equal(opened(data, file, short_side=24), as_tensor(upright))


def test_orientation_after_the_pixels_of_a_png_is_applied(file: Path) -> None:
    image = photo(24, 40)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(image, exif=exif)
    start = data.index(b"eXIf") - 4
    length = 12 + int.from_bytes(data[start : start + 4])
    chunk, rest = data[start : start + length], data[:start] + data[start + length :]
    end = rest.index(b"IEND") - 4
    got = opened(rest[:end] + chunk + rest[end:], file, short_side=24)
    assert torch.equal(got, as_tensor(image.transpose(Image.Transpose.ROTATE_270)))


def test_invalid_orientation_is_ignored(file: Path) -> None:
    image = photo(24, 40)
    exif = Image.Exif()
    exif[0x0112] = 77
    assert torch.equal(opened(encoded(image, exif=exif), file, short_side=24), as_tensor(image))


def test_transparency_is_blended_with_white(file: Path) -> None:
    image = photo(24, 24).convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 24).astype(np.uint8), (24, 1))))
    got = opened(encoded(image), file, short_side=24).double()
    rgba = torch.from_numpy(np.array(image)).permute(2, 0, 1).double()
    alpha = rgba[3] / 255
    assert (got - (rgba[:3] * alpha + 255 * (1 - alpha))).abs().max() <= 1


def test_palettes_with_and_without_transparency(file: Path) -> None:
    image = photo(24, 24).quantize(16)
    assert torch.equal(opened(encoded(image), file, short_side=24), as_tensor(image.convert("RGB")))
    got = opened(encoded(image, transparency=0), file, short_side=24)
    clear = torch.from_numpy(np.array(image) == 0)
    assert clear.any()
    assert (got[:, clear] == 255).all()
    assert torch.equal(got[:, ~clear], as_tensor(image.convert("RGB"))[:, ~clear])
    alphas = encoded(image, transparency=bytes([0, 128] + [255] * 14))  # Pillow warns about these
    assert (opened(alphas, file, short_side=24)[:, clear] == 255).all()


def test_cmyk_becomes_rgb(file: Path) -> None:
    image = photo(24, 24).convert("CMYK")
    data = encoded(image, "JPEG", quality=95)
    want = as_tensor(Image.open(io.BytesIO(data)).convert("RGB"))
    assert torch.equal(opened(data, file, short_side=24), want)
    assert (want.double() - as_tensor(photo(24, 24)).double()).abs().mean() < 12  # and not its negative


def test_sixteen_bits_become_eight(file: Path) -> None:
    deep = np.linspace(0, 65535, 24 * 24).astype(np.uint16).reshape(24, 24)
    want = torch.from_numpy(np.rint(deep / 257).astype(np.uint8))
    for kind in ("PNG", "TIFF"):
        got = opened(encoded(Image.fromarray(deep), kind), file, short_side=24)
        assert (got.int() - want.int()).abs().max() <= 1
        assert torch.equal(got[0], got[2])
        assert got.min() == 0
        assert got.max() == 255


def test_grey_in_and_grey_out(file: Path) -> None:
    colour, grey = photo(24, 30), photo(24, 30).convert("L")
    plain = torch.from_numpy(np.array(grey))
    for kind in ("PNG", "BMP"):
        assert torch.equal(opened(encoded(grey, kind), file, short_side=24, channels=1)[0], plain)
        assert torch.equal(opened(encoded(grey, kind), file, short_side=24), plain.expand(3, -1, -1))
        assert torch.equal(opened(encoded(colour, kind), file, short_side=24, channels=1)[0], plain)
    black_and_white = grey.convert("1")
    assert set(opened(encoded(black_and_white), file, short_side=24).unique().tolist()) == {0, 255}
    with pytest.raises(NearkinError, match="cannot become images of 2"):
        as_channels(plain[None], 2)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_both_jpeg_decoders_give_the_same_pixels(
    file: Path, monkeypatch: pytest.MonkeyPatch, mode: str, options: dict[str, object]
) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(photo(50, 71).convert(mode), "JPEG", **options)
    fast = opened(data, file, short_side=50)
    monkeypatch.setattr(decoding, "simplejpeg", None)
    assert torch.equal(fast, opened(data, file, short_side=50))


def test_simplejpeg_decodes_jpegs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    monkeypatch.setattr(decoding, "_pillow", lambda *_: pytest.fail("Pillow was asked"))
    opened(encoded(photo(24, 24), "JPEG"), file, short_side=24)


def test_an_animation_gives_its_first_frame(file: Path) -> None:
    one, two = (photo(24, 24, seed=seed).quantize(8) for seed in (0, 1))
    got = opened(encoded(one, "GIF", save_all=True, append_images=[two]), file, short_side=24)
    assert torch.equal(got, as_tensor(one.convert("RGB")))


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Bad files, and a part of the error message of each."""
    jpeg, png = encoded(photo(40, 60), "JPEG"), encoded(photo(40, 60))
    bomb = bytearray(png)
    bomb[16:24] = (20_000).to_bytes(4) * 2  # a PNG that claims 400 million pixels
    files = {
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "truncated.png": (png[: len(png) // 2], "truncated"),
        "header.jpg": (jpeg[:20], "known format|header is damaged|truncated"),
        "empty.jpg": (b"", "it is empty"),
        "text.jpg": (b"this is not an image\n" * 20, "not an image of a known format"),
        "bomb.png": (bytes(bomb), "bomb"),
        "float.tif": (encoded(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), "floating-point"),
    }
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    (folder / "folder.jpg").mkdir()
    named = {name: (folder / name, word) for name, (_, word) in files.items()}
    return named | {
        "folder.jpg": (folder / "folder.jpg", "cannot be read"),
        "missing.jpg": (folder / "missing.jpg", "no such file"),
    }


@pytest.mark.parametrize("fast", [True, False])
def test_bad_files_are_named_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    if not fast:
        monkeypatch.setattr(decoding, "simplejpeg", None)
    for name, (path, word) in bad_files(tmp_path).items():
        with pytest.raises(BadImage, match=word) as caught:
            decode_file(path, short_side=24)
        message = str(caught.value)
        assert name in message
        assert "\n" not in message
        assert caught.value.__cause__ is None
        assert caught.value.path == path


def test_bad_headers_are_found_without_decoding(tmp_path: Path) -> None:
    for name, (path, word) in bad_files(tmp_path).items():
        if not name.startswith(("truncated", "float")):
            with pytest.raises(BadImage, match=word):
                measure(path, short_side=24)


def test_limit_of_pixels(file: Path) -> None:
    data = encoded(photo(40, 50))
    assert opened(data, file, short_side=24, limit=2000).shape == (3, 24, 30)
    for look in (
        lambda: decode(data, file, short_side=24, limit=1999),
        lambda: measure(file, short_side=24, limit=1999),
    ):
        with pytest.raises(BadImage, match="50 × 40 pixels are over the limit of 1,999"):
            look()


def test_no_file_reaches_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1))
    photo(24, 24).save(tmp_path / "photo.eps")
    path = (tmp_path / "photo.eps").rename(tmp_path / "photo.png")
    for look in (decode_file, measure):
        with pytest.raises(
            BadImage, match=r"photo\.png: its content is EPS; the formats read are AVIF, BMP, GIF, JPEG, JPEG2000, P"
        ):
            look(path, short_side=24)
    assert not started


def test_no_warning_reaches_the_user(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)  # Pillow warns above this and refuses above twice as much
    data = encoded(photo(40, 50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Image.DecompressionBombWarning):
            Image.open(io.BytesIO(data))
        assert opened(data, file, short_side=24).shape == (3, 24, 30)
    broken_exif = encoded(photo(24, 24), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\0\x12\x01\x03\0\x01\0")
    opened(broken_exif, file, short_side=24)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900)
    with pytest.raises(BadImage, match="bomb"):
        decode(data, file, short_side=24)
