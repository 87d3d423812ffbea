"""Damaged pictures of every format: pixels, or a sentence that says why not. Nothing else, and in bounded time."""

import io
import random
import time
from pathlib import Path

import numpy as np
from PIL import Image
from torture.campaign import Attack, check_sentence, damage

from nearkin.data.pixels.decode import decode, decode_file, measure
from nearkin.data.pixels.formats import FORMATS
from nearkin.data.pixels.image_bytes import BadImage

SIDE = 16


def pictures() -> dict[str, bytes]:
    """One valid picture per format, and some with alpha, palette, 16 bits, several frames."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    base = Image.fromarray(pixels)
    found = {}
    for name in FORMATS:
        buffer = io.BytesIO()
        try:
            base.save(buffer, format=name)
        except (KeyError, ValueError, OSError):  # this Pillow reads the format and does not write it
            continue
        found[name] = buffer.getvalue()
    for name, image, options in (
        ("progressive", base, {"format": "JPEG", "progressive": True}),
        ("cmyk", base.convert("CMYK"), {"format": "JPEG"}),
        ("alpha", base.convert("RGBA"), {"format": "PNG"}),
        ("palette", base.convert("P"), {"format": "PNG"}),
        ("sixteen", Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), {"format": "PNG"}),
        ("frames", base.convert("P"), {"format": "GIF", "save_all": True, "append_images": [base.convert("P")]}),
        ("deflate", base, {"format": "TIFF", "compression": "tiff_deflate"}),
    ):
        buffer = io.BytesIO()
        image.save(buffer, **options)
        found[name] = buffer.getvalue()
    return found


def mangled(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 5])):
        data = damage(data, rng)
    if rng.random() < 0.2 and len(data) > 40:  # the sizes stand in the header
        changed = bytearray(data)
        changed[rng.randrange(4, 40)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        data = bytes(changed)
    return data


def test_damaged_pictures(tmp_path: Path, attack: Attack):
    """Change bits, bytes, lengths and sizes of pictures of every format (also progressive, palette, 16 bits, frames)"""
    known = pictures()
    assert len(known) >= 12
    path = tmp_path / "picture"
    for rng in attack.cases(150, 10_000):
        data = mangled(known[rng.choice(sorted(known))], rng)
        began = time.process_time()
        try:
            pixels = decode(data, path, short_side=SIDE, channels=rng.choice([1, 3]))
        except BadImage as error:
            check_sentence(f"{error.reason}.")
            attack.saw("refused in a sentence")
        else:
            assert min(pixels.shape[1:]) == SIDE
            attack.saw("read")
        if rng.random() < 0.1:  # from a file, and its header alone
            path.write_bytes(data)
            for look in (lambda: measure(path, short_side=SIDE), lambda: decode_file(path, short_side=SIDE)):
                try:
                    look()
                except BadImage:
                    attack.saw("file refused in a sentence")
                else:
                    attack.saw("file read")
        assert time.process_time() - began < 10
