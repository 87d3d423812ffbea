"""The content of a file decides what it is, not its name."""

import io
from pathlib import Path

import pytest
import torch
from image_helpers import as_tensor, encoded, opened, photo
from PIL import Image

from nearkin.data.pixels import decode as decoding
from nearkin.data.pixels import formats
from nearkin.data.pixels.decode import decode_file, measure
from nearkin.data.pixels.image_bytes import BadImage


def test_content_decides_and_misleading_names_are_listed(tmp_path: Path) -> None:
    image = photo(24, 24)
    named = {"jpeg.png": "JPEG", "a.jpe": "JPEG", "b.PNG": "PNG", "c.pgm": "PPM", "d.tif": "TIFF", "webp.gif": "WEBP"}
    for name, kind in named.items():
        data = encoded(image, kind)
        want = as_tensor(Image.open(io.BytesIO(data)).convert("RGB"))
        assert torch.equal(opened(data, tmp_path / name, short_side=24), want)
    (tmp_path / "no suffix").write_bytes(encoded(image))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "short.png").write_bytes(b"P")
    assert formats.describe_misnamed([*sorted(tmp_path.iterdir()), tmp_path / "missing.png"]) == [
        f"2 images are read by content, which is of another format than the name says: {tmp_path / 'jpeg.png'} (JPEG), "
        f"{tmp_path / 'webp.gif'} (WEBP)."
    ]
    assert formats.describe_misnamed([tmp_path / "a.jpe"]) == []


needs_heif = pytest.mark.skipif(formats.pillow_heif is None, reason="The extra heif is not installed.")


@pytest.mark.parametrize("kind", ["AVIF", pytest.param("HEIF", marks=needs_heif), "JPEG2000"])
def test_formats_of_phones_and_scanners_are_read(tmp_path: Path, kind: str) -> None:
    file, image = tmp_path / "a.jpg", photo(48, 80)
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif, "quality": 90} if kind == "AVIF" else {}  # in HEIF the tag means nothing
    data = encoded(image, kind, **options)
    got = opened(data, file, short_side=48)
    want = as_tensor(image.transpose(Image.Transpose.ROTATE_270) if kind == "AVIF" else image)
    assert (got.double() - want.double()).abs().mean() < 6
    assert formats.format_of(data[:32]) == kind
    assert formats.looks_like_image(file)
    for length in (60, len(data) // 2):
        file.write_bytes(data[:length])
        with pytest.raises(BadImage, match=r"truncated|damaged|cannot be decoded"):
            decode_file(file, short_side=48)


def test_a_file_of_another_kind_is_named_with_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phone = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)
    files = {"phone.heic": (phone, r"its content is HEIF.*'nearkin\[heif\]'"), "x.jxl": (b"\xff\x0a\0", "JPEG XL")}
    files["camera.NEF"] = (encoded(photo(20, 20), "TIFF"), "raw file of a camera: export it")
    without = tuple(name for name in formats.FORMATS if name != "HEIF")
    for module in (formats, decoding):
        monkeypatch.setattr(module, "FORMATS", without)
    for name, (data, words) in files.items():
        (tmp_path / name).write_bytes(data)
        assert formats.looks_like_image(tmp_path / name)
        for look in (decode_file, measure):
            with pytest.raises(BadImage, match=words):
                look(tmp_path / name, short_side=24)
