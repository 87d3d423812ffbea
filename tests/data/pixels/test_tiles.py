"""Tiles hold images of any size."""

import pytest
import torch
from image_helpers import check_pixels

from nearkin.data.pixels.tiles import TILE, Packed, canvas_for, first_tiles, tile_counts, unpack, write_tiles


@pytest.mark.parametrize("channels", [1, 3])
def test_tiles_hold_any_image(channels: int) -> None:
    images = [
        torch.randint(0, 256, (channels, h, w), dtype=torch.uint8) for h, w in [(5, 31), (7, 32), (1, 33), (9, 1)]
    ]
    size = torch.tensor([image.shape[1:] for image in images])
    first, count = first_tiles(size, channels), tile_counts(size, channels)
    tiles = torch.full((int(1 + count.sum()), TILE), 77, dtype=torch.uint8)
    tiles[0] = 0
    for image, a, n in zip(images, first.tolist(), count.tolist(), strict=True):
        write_tiles(image, tiles[a : a + n])
    canvas = canvas_for(size, channels)
    assert canvas == (channels, 16, 48)
    index = torch.tensor([3, 0, 2, 2, 1])
    check_pixels(unpack(Packed(tiles, first, size).rows(index), canvas), [images[n] for n in index.tolist()])
