"""Files that cannot be read safely: named pipes, devices, too large ones."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from image_helpers import encoded, photo

from nearkin.data.pixels import image_bytes
from nearkin.data.pixels.decode import decode_file, measure
from nearkin.data.pixels.image_bytes import BadImage


def refusal(work: Callable[[], object]) -> str:
    """Return why an image was refused, or fail if the work does not end."""
    reasons: list[str] = []

    def run() -> None:
        try:
            work()
        except BadImage as error:
            reasons.append(error.reason)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "It hangs."
    return reasons[0]


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="There are no named pipes here.")


@needs_pipes
def test_pipes_and_devices_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to(os.devnull)
    for name, kind in (("pipe.png", "a named pipe"), ("device.png", "a device")):
        path = tmp_path / name
        for look in (
            lambda path=path: decode_file(path, short_side=24),
            lambda path=path: measure(path, short_side=24),
        ):
            assert refusal(look) == f"it cannot be read, because it is {kind} and not a file"


@needs_pipes
def test_a_pipe_that_replaces_a_file_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(encoded(photo(24, 24)))
    before = os.stat(file)
    file.unlink()
    os.mkfifo(file)
    with monkeypatch.context() as patch:
        patch.setattr(image_bytes.os, "stat", lambda *_, **__: before)
        assert "a named pipe" in refusal(lambda: image_bytes.read_bytes(file))


def test_large_files_are_not_read(tmp_path: Path) -> None:
    sparse = tmp_path / "big.png"
    sparse.write_bytes(encoded(photo(24, 24)))
    os.truncate(sparse, image_bytes.FILE_LIMIT)
    with image_bytes.open_regular(sparse) as opened_file:
        assert opened_file.read(4) == b"\x89PNG"
    os.truncate(sparse, image_bytes.FILE_LIMIT + 1)
    for look in (decode_file, measure):
        with pytest.raises(BadImage, match="1,073,741,825 bytes are over the limit of 1,073,741,824"):
            look(sparse, short_side=24)
