"""Small images and data sets for tests, and checks of their pixels."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from nearkin.data.images import Images
from nearkin.data.pixels.decode import PIXEL_LIMIT, decode_file, measure
from nearkin.data.pixels.tiles import Pixels

SHORT_SIDE = 24
SIZES = [(24, 24), (30, 50), (64, 40), (20, 90), (100, 33), (24, 47), (12, 10), (40, 40)]


def save_picture(path: Path) -> str:
    """Write a small picture; return the name of its file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (200, 40, 10)).save(path)
    return path.name


def numbered_images(counts: list[int], *, first: int = 0) -> Images:
    """counts[c] images of class c, rows mixed, sources numbered."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    paths = [Path(f"{n}.png") for n in range(len(labels))]
    return Images(paths, labels[order], tuple(f"c{first + c}" for c in range(len(counts))))


def files_by_class(images: Images) -> dict[str, list[str]]:
    """File names by the name of the class."""
    rows = zip(images.sources, images.labels.tolist(), strict=True)
    found: dict[str, list[str]] = {name: [] for name in images.names}
    for path, label in rows:
        found[images.names[label]].append(Path(str(path)).name)
    return found


def save_noise(path: Path, height: int, width: int, *, seed: int = 0) -> Path:
    """Write a picture of random pixels."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


def make_photos(folder: Path) -> Images:
    """Eight images in two classes; every second one a JPEG."""
    names = [f"{n}.{'jpg' if n % 2 else 'png'}" for n in range(len(SIZES))]
    paths = [save_noise(folder / name, *size, seed=n) for n, (name, size) in enumerate(zip(names, SIZES, strict=True))]
    return Images(paths, torch.arange(len(SIZES)) % 2, ("even", "odd"))


def check_pixels(pixels: Pixels, want: list[Tensor]) -> None:
    """Check that each image is in the corner of its canvas, which is blank elsewhere."""
    assert pixels.canvas.dtype == torch.uint8
    assert pixels.size.tolist() == [list(image.shape[1:]) for image in want]
    for canvas, image in zip(pixels.canvas, want, strict=True):
        expected = torch.zeros_like(canvas)
        expected[:, : image.shape[1], : image.shape[2]] = image
        assert torch.equal(canvas, expected)


def decode_images(images: Images, *, channels: int = 3) -> list[Tensor]:
    """Decode all images at SHORT_SIDE."""
    paths = [Path(str(source)) for source in images.sources]
    return [decode_file(path, short_side=SHORT_SIDE, channels=channels) for path in paths]


def add_bad_files(images: Images, folder: Path) -> Images:
    """Add a text file (row 1), a truncated JPEG (row 4) and a missing file (the last row, a class of its own)."""
    jpeg = Path(str(images.sources[1])).read_bytes()
    (folder / "text.jpg").write_text("hello")
    (folder / "half.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    paths = [Path(str(source)) for source in images.sources]
    paths = [paths[0], folder / "text.jpg", *paths[1:3], folder / "half.jpg", *paths[3:], folder / "gone.jpg"]
    labels = [0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 2]
    return Images(paths, torch.tensor(labels), ("even", "odd", "lost"))


def photo(height: int, width: int, *, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [127 + 100 * np.sin(a * y / height + b * x / width + c) for a, b, c in rng.uniform(1, 6, (3, 3))]
    return Image.fromarray((np.stack(waves, 2) + rng.uniform(-9, 9, (height, width, 3))).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a file of this format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes, path: Path, *, short_side: int, channels: int = 3, limit: int = PIXEL_LIMIT) -> Tensor:
    """Decode a file and check that its header gives the same size."""
    path.write_bytes(data)
    pixels = decode_file(path, short_side=short_side, channels=channels, limit=limit)
    assert pixels.dtype == torch.uint8
    assert tuple(pixels.shape) == (channels, *measure(path, short_side=short_side, limit=limit))
    return pixels


def as_tensor(image: Image.Image) -> Tensor:
    """The pixels of an image [C, h, w]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def random_pixels(
    sizes: list[tuple[int, int]], *, channels: int = 3, canvas: tuple[int, int] = (64, 64), seed: int = 0
) -> Pixels:
    """Random pixels of several sizes, each in the corner of its canvas."""
    rng = Generator().manual_seed(seed)
    pixels = torch.zeros(len(sizes), channels, *canvas, dtype=torch.uint8)
    for image, (h, w) in zip(pixels, sizes, strict=True):
        image[:, :h, :w] = torch.randint(0, 256, (channels, h, w), generator=rng, dtype=torch.uint8)
    return Pixels(pixels, torch.tensor(sizes))
