"""Processes that decode images for this one.

Threads share Python's lock, of which decoding an image needs about a tenth of a millisecond, and a training loop
much more to launch work on a GPU: on many cores all wait for it. A process here is asked for some images at once and
leaves their tiles in memory that it shares with a thread, which copies them to where the batch is assembled.
"""

import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.data.paths import Place
from nearkin.data.pixels.decode import decode
from nearkin.data.pixels.image_bytes import BadImage, read_place
from nearkin.data.pixels.threads import cores
from nearkin.data.pixels.tiles import TILE, tile_counts, write_tiles

AFTER = 2000
"""Images that are decoded in threads before processes are started, which import PyTorch for some seconds."""

FEWEST = 4
"""Cores from which processes are faster than threads."""

_LENGTH = struct.Struct("<q")


class Request(NamedTuple):
    """An image to decode, and the size that it must have."""

    path: str  # for messages
    place: Place
    size: tuple[int, int]


class SharedMemory:
    """Memory of several processes, which grows as it is needed. It belongs to a file without a name."""

    def __init__(self, number: int) -> None:
        self.number, self.size = number, 0

    def tiles(self, count: int) -> Tensor:
        """The first tiles, once the file is as long."""
        if count > self.size:
            self.memory, self.size = mmap.mmap(self.number, count * TILE), count
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=count * TILE).view(count, TILE)


class Decoder:
    """The connection with one process."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection, self.shared = connection, SharedMemory(number)

    def decode(self, requests: Sequence[Request], tiles: Tensor, **how: Any) -> list[tuple[int, str]]:
        """Decode images one after the other into tiles; return the number and the reason of those that failed.

        An OSError says that the process has ended.
        """
        if len(tiles) > self.shared.size:
            os.ftruncate(self.shared.number, len(tiles) * TILE)
        _send(self.connection, (how, requests, len(tiles)))
        failed: list[tuple[int, str]] = _receive(self.connection)
        tiles.numpy()[:] = self.shared.tiles(len(tiles)).numpy()
        return failed

    def close(self) -> None:
        """Let the process end."""
        self.connection.close()
        os.close(self.shared.number)


class Decoders:
    """One process per core, once they are started."""

    def __init__(self) -> None:
        self.idle: SimpleQueue[Decoder] = SimpleQueue()
        self.started, self.lock, self.ready = False, Lock(), 0
        self.process: subprocess.Popen[bytes] | None = None

    def take(self) -> Decoder | None:
        """Return a decoder for the caller alone, who puts it back into `idle`; None if there is none."""
        with suppress(Empty):
            return self.idle.get_nowait()
        return None

    def start(self) -> None:
        """Start the processes, unless that was done; each is there when it has imported what it needs."""
        with self.lock:
            if self.started or not hasattr(os, "memfd_create") or not sys.executable:
                return
            self.started = True
        pairs = [socket.socketpair() for _ in range(cores())]
        memories = [os.memfd_create("nearkin") for _ in pairs]
        numbers = [(theirs.fileno(), memory) for (_, theirs), memory in zip(pairs, memories, strict=True)]
        # Not by multiprocessing, which would run a user's script again if it has no `if __name__ == "__main__"`.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({numbers})"
        quiet, passed = subprocess.DEVNULL, [number for pair in numbers for number in pair]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=passed, stdin=quiet, stdout=quiet, stderr=quiet
            )
        except OSError:  # threads do the work
            return
        for (ours, theirs), memory in zip(pairs, memories, strict=True):
            theirs.close()
            Thread(target=self._greet, args=(Decoder(ours, memory),), daemon=True).start()

    def close(self) -> None:
        """End the processes, of which none must be in use; they end with this one, too."""
        while decoder := self.take():
            decoder.close()
        if self.process is not None:
            self.process.wait()

    def _greet(self, decoder: Decoder) -> None:
        with suppress(OSError):
            _receive(decoder.connection)
            self.idle.put(decoder)
            with self.lock:
                self.ready += 1


@cache
def decoders() -> Decoders:
    """The processes of this process."""
    return Decoders()


def serve(numbers: Sequence[tuple[int, int]]) -> None:
    """Decode for these sockets with their memories, in a process each, until their other ends are closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other side's affair, which then closes the sockets
    torch.set_num_threads(1)
    for number, memory in numbers:
        if not os.fork():
            for other, _ in numbers:
                if other != number:
                    os.close(other)
            with suppress(OSError):
                _serve(socket.socket(fileno=number), SharedMemory(memory))
            os._exit(0)
    for number, _ in numbers:
        os.close(number)
    for _ in numbers:
        os.wait()


def _serve(connection: socket.socket, shared: SharedMemory) -> None:
    _send(connection, "ready")
    while True:
        how, requests, count = _receive(connection)
        sizes = torch.tensor([request.size for request in requests])
        places = torch.split(shared.tiles(count), tile_counts(sizes, how["channels"]).tolist())
        failed = []
        for number, (request, place) in enumerate(zip(requests, places, strict=True)):
            try:
                write_tiles(decode_request(request, **how), place)
            except BadImage as error:
                failed.append((number, error.reason))
        _send(connection, failed)


def decode_request(request: Request, **how: Any) -> Tensor:
    """Read and decode an image, or raise a BadImage."""
    image = decode(read_place(request.place, request.path), request.path, **how)
    if tuple(image.shape[1:]) != request.size:
        raise BadImage(request.path, "its size has changed since the data were opened")
    return image


def _send(connection: socket.socket, content: Any) -> None:
    data = pickle.dumps(content)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    return pickle.loads(_read(connection, _LENGTH.unpack(_read(connection, _LENGTH.size))[0]))


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while len(view):
        count = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the process has ended")
        view = view[count:]
    return data
