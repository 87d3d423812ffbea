"""Thumbnails of files that are no pictures."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearkin.serve.guard import Refused
from nearkin.serve.pictures import thumbnail


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="There are no named pipes here.")
def test_a_pipe_in_place_of_a_picture_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(thumbnail, tmp_path / "pipe.png", 64)
        try:
            with pytest.raises(Refused, match="a named pipe"):
                making.result(timeout=10)
        finally:  # let go of a thread that waits for a writer
            if not making.done():
                os.close(os.open(tmp_path / "pipe.png", os.O_WRONLY))
