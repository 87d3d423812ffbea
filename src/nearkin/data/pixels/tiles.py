"""Pack images of different sizes into one row of tiles, and unpack a batch of them onto canvases of one size.

A canvas per image would be mostly padding (a 256 × 340 photograph on 512 × 512: two thirds). Instead, each row of an
image is cut into tiles of 16 bytes, and all tiles are stored one after the other. A batch is then one `index_select` of
tiles, on any device; tile 0 is blank and fills the space outside an image.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16  # bytes: a row of an image wastes 8 on average, and a GPU thread reads at most 16 at once
ROWS = 8  # canvas heights are a multiple of this, as matrix products in half precision require


class Pixels(NamedTuple):
    """A batch of images of different sizes."""

    canvas: Tensor  # uint8 [B, C, H, W]; image b fills [:, :h, :w] of its canvas, zeros elsewhere; or features
    size: Tensor  # int64 [B, 2]: h, w
    sides: "Sides | None" = None  # of all images of the store; None: all are at the scale of the views


class Sides(NamedTuple):
    """What the short sides of a store's images are, known on the host so that views need not ask the device."""

    least: int
    most: int
    near_enough: bool  # images from memory are shown as they are if they are close to the network's size


class Packed(NamedTuple):
    """Images as tiles."""

    tiles: Tensor  # uint8 [M, TILE]; tile 0 is blank
    first: Tensor  # int64 [N] the first tile of each image
    size: Tensor  # int64 [N, 2]: h, w

    def rows(self, index: Tensor) -> "Packed":
        """Select images by number; the tiles are shared."""
        return Packed(self.tiles, self.first[index], self.size[index])

    def to(self, device: torch.device) -> "Packed":
        """Copy to a device."""
        return Packed(*(tensor.to(device, non_blocking=True) for tensor in self))


class Canvas(NamedTuple):
    """The shape of every canvas of a store."""

    channels: int
    height: int
    width: int


def tile_counts(size: Tensor, channels: int) -> Tensor:
    """Return the number of tiles per image, [N] for sizes [N, 2]."""
    return channels * size[:, 0] * ((size[:, 1] + TILE - 1) // TILE)


def first_tiles(size: Tensor, channels: int) -> Tensor:
    """Return the first tile of each image if all follow each other after the blank tile."""
    counts = tile_counts(size, channels)
    return 1 + counts.cumsum(0) - counts


def canvas_for(size: Tensor, channels: int) -> Canvas:
    """Return the smallest canvas that holds every image, in whole tiles and groups of rows."""
    height, width = (int(side) for side in size.amax(0))
    return Canvas(channels, -(-height // ROWS) * ROWS, -(-width // TILE) * TILE)  # rounded up


def sides_of(size: Tensor, *, near_enough: bool) -> Sides:
    """Return the range of the short sides of images of sizes [N, 2]."""
    short = size.amin(1)
    return Sides(int(short.min()), int(short.max()), near_enough)


def write_tiles(image: Tensor, tiles: Tensor) -> None:
    """Write an image [C, h, w] into its tiles [tile_count, TILE]."""
    write_rows(image, tiles.view(*image.shape[:2], -1))


def write_rows(image: Tensor, rows: Tensor) -> None:
    """Write an image [C, h, w] into rows [C, H, W] that may be more and longer; the rest becomes zero."""
    (height, width), target = image.shape[1:], rows.numpy()  # NumPy copies in one thread; many threads do this at once
    if image.stride()[::2] == (1, 4):  # three of four bytes per pixel: half the time if they are taken as one number
        four = torch.as_strided(image, (height, width, 4), (image.stride(1), 4, 1)).numpy().view("<u4")[:, :, 0]
        for channel in target[:, :height, :width]:
            channel[:] = four  # its lowest byte
            four = four >> 8
    else:
        target[:, :height, :width] = image.numpy()
    target[:, :height, width:] = 0
    target[:, height:] = 0


def unpack(packed: Packed, canvas: Canvas, sides: Sides | None = None) -> Pixels:
    """Place all images of `packed` on canvases, without synchronising with the host."""
    channels, height, width = canvas
    device = packed.tiles.device
    # 32-bit tile numbers halve the arithmetic and suffice for 32 GiB of images.
    dtype = torch.int32 if len(packed.tiles) < 2**31 else torch.int64
    c = torch.arange(channels, device=device, dtype=dtype)[:, None, None]
    y = torch.arange(height, device=device, dtype=dtype)[:, None]
    column = torch.arange(width // TILE, device=device, dtype=dtype)
    h, w = packed.size.to(dtype).view(-1, 2, 1, 1, 1).unbind(1)
    across = (w + TILE - 1) // TILE
    tile = packed.first.to(dtype).view(-1, 1, 1, 1) + (c * h + y) * across + column  # [B, C, H, W / TILE]
    tile = torch.where((y < h) & (column < across), tile, 0)
    # Gather tiles as single 16-byte numbers: sixteen times as fast on a GPU as rows of bytes.
    found = packed.tiles.view(torch.complex128).flatten().index_select(0, tile.flatten())
    return Pixels(found.view(torch.uint8).view(-1, channels, height, width), packed.size, sides)


def concatenate(parts: Sequence[Packed], channels: int) -> Packed:
    """Join packed images: all their tiles after one blank tile."""
    size = torch.cat([packed.size for packed in parts])
    tiles = torch.cat([parts[0].tiles[:1], *(packed.tiles[1:] for packed in parts)])
    return Packed(tiles, first_tiles(size, channels), size)
