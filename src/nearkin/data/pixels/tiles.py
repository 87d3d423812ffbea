"""How pixels are held: images of different sizes packed into one row of tiles, and unpacked into a batch of canvases.

A canvas for every image of a data set would be mostly padding (a 256 × 340 photograph on 512 × 512: two thirds), so an
image is stored as its rows, each cut into tiles of 16 bytes, one after the other. A batch is then one `index_select` of
tiles wherever the tiles are; the tile with number 0 is blank and fills what lies outside an image.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16  # bytes; a row of an image wastes 8 on average, and 16 are the most that a GPU's thread reads at once
ROWS = 8  # canvas heights are a multiple of this, which matrix products in half precision ask for


class Pixels(NamedTuple):
    """A batch of images of different sizes."""

    canvas: Tensor  # uint8 [B, C, H, W]; image b fills [:, :h, :w] of its canvas, zeros elsewhere
    size: Tensor  # int64 [B, 2]: h, w


class Packed(NamedTuple):
    """Images as tiles."""

    tiles: Tensor  # uint8 [M, TILE]; tile 0 is blank
    first: Tensor  # int64 [N] the first tile of each image
    size: Tensor  # int64 [N, 2]: h, w

    def rows(self, index: Tensor) -> "Packed":
        """Some of the images, by number; the tiles stay where they are."""
        return Packed(self.tiles, self.first[index], self.size[index])


class Canvas(NamedTuple):
    """The shape of every canvas of a store."""

    channels: int
    height: int
    width: int


def tile_counts(size: Tensor, channels: int) -> Tensor:
    """How many tiles each image takes, [N] for sizes [N, 2]."""
    return channels * size[:, 0] * ((size[:, 1] + TILE - 1) // TILE)


def first_tiles(size: Tensor, channels: int) -> Tensor:
    """Where each image begins when all are laid one after the other behind the blank tile."""
    counts = tile_counts(size, channels)
    return 1 + counts.cumsum(0) - counts


def canvas_for(size: Tensor, channels: int) -> Canvas:
    """The smallest canvas that holds every image, in whole tiles and groups of rows."""
    height, width = (int(side) for side in size.amax(0))
    return Canvas(channels, -(-height // ROWS) * ROWS, -(-width // TILE) * TILE)  # rounded up


def write_tiles(image: Tensor, slot: Tensor) -> None:
    """Write an image [C, h, w] into the tiles [tile_count, TILE] that are meant for it."""
    channels, height, width = image.shape
    rows = slot.numpy().reshape(channels, height, -1)  # NumPy's copy keeps to one thread: many threads do this at once
    rows[:, :, :width] = image.numpy()
    rows[:, :, width:] = 0


def unpack(packed: Packed, canvas: Canvas) -> Pixels:
    """All images of `packed`, each on its canvas. Reads no value back to the host."""
    channels, height, width = canvas
    device = packed.tiles.device
    # Half as wide numbers of tiles halve the arithmetic, where they suffice: up to 32 GiB of images.
    dtype = torch.int32 if len(packed.tiles) < 2**31 else torch.int64
    c = torch.arange(channels, device=device, dtype=dtype)[:, None, None]
    y = torch.arange(height, device=device, dtype=dtype)[:, None]
    column = torch.arange(width // TILE, device=device, dtype=dtype)
    h, w = packed.size.to(dtype).view(-1, 2, 1, 1, 1).unbind(1)
    across = (w + TILE - 1) // TILE
    tile = packed.first.to(dtype).view(-1, 1, 1, 1) + (c * h + y) * across + column  # [B, C, H, W / TILE]
    tile = torch.where((y < h) & (column < across), tile, 0)
    # A tile as one number of 16 bytes: the same gather of rows of bytes takes sixteen times as long on a GPU.
    found = packed.tiles.view(torch.complex128).flatten().index_select(0, tile.flatten())
    return Pixels(found.view(torch.uint8).view(-1, channels, height, width), packed.size)
