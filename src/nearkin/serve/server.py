"""Connections that keep no place for nothing: who neither asks nor takes the answer is shown out.

uvicorn waits for a request's head, and for its answer to be taken, as long as it takes. Some hundreds of silent clients
would then use up the process's open files, and nobody else could connect.
"""
# MERGED: The server process: an index, its model, a socket.

import asyncio
import math
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearkin.errors import NearkinError
from nearkin.search.index import open_index
from nearkin.search.query import model_of
from nearkin.serve.app import make_app
from nearkin.serve.guard import LOOPBACK, Guard, Limits
from nearkin.training.model import Model

SECONDS = 10.0  # for the head of a request to arrive, and between two looks at a connection
LEAST = 16 * 2**10  # bytes of a waiting answer that a client takes between two looks
PLACES = 2000  # connections at once
ACCEPTED = 32  # connections that are let in before those before them are counted
OWN_FILES = ACCEPTED + 96  # that the server itself has open: the index, pictures, libraries


class Punctual(H11Protocol):
    """An HTTP/1.1 connection that is looked at from time to time. When all places are taken, the idlest is closed."""

    look: asyncio.TimerHandle
    idle_since = 0.0
    unsent = math.inf  # bytes of the answer when last looked at

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and wait for a request."""
        if len(self.connections) >= places():
            others = [one for one in self.connections if isinstance(one, Punctual) and one.idle]
            if others:
                idlest = min(others, key=lambda one: one.idle_since)
                idlest.transport.abort()
                self.connections.discard(idlest)  # now: who comes at the same moment takes another's place
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self.look = self.loop.call_later(SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self.look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self.idle_since, self.unsent = time.monotonic(), math.inf

    def _look(self) -> None:
        """Show out who is silent, or takes nothing of what it asked for."""
        unsent = self.transport.get_write_buffer_size()
        silent = self.idle and not unsent and time.monotonic() - self.idle_since >= SECONDS
        if silent or (unsent and self.unsent - unsent < LEAST):
            self.transport.abort()  # closing would wait until what was sent is taken
            return
        self.unsent = unsent or math.inf
        self.look = self.loop.call_later(SECONDS, self._look)


def places() -> int:
    """Connections that there is room for, by the open files that the process may have."""
    try:
        import resource
    except ImportError:  # not a Unix
        return PLACES
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return PLACES if files == resource.RLIM_INFINITY else max(1, min(PLACES, files - OWN_FILES))


def allow_files() -> None:
    """As many open files as the system lets the process have; many systems begin with few."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = hard == resource.RLIM_INFINITY
        wanted = PLACES + OWN_FILES if unlimited else min(PLACES + OWN_FILES, hard)
        if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


SHORTEST_TOKEN = 8
LINE = 2048  # clients that may wait to be let in


def serve(
    where: str,
    *,
    run: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    device: str = "auto",
    limits: Limits | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve an index until stopped. Port 0 takes a free one; the token `auto` is made up here.

    `say` gets a few sentences: the address to open, and what one should know.
    """
    token = secrets.token_urlsafe(24) if token == "auto" else token
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise NearkinError(f"A token of {len(token)} letters can be guessed: give at least {SHORTEST_TOKEN}, or auto.")
    here = host in LOOPBACK
    with open_index(where) as index, listen(host, port) as listener:
        model: Model | None = None
        why: str | None = None
        try:
            model = model_of(index, run=run, device=device)
        except NearkinError as error:
            if run is not None:
                raise
            why = str(error)
            say(f"Pictures of one's own cannot be searched by. {why}")
        name = Path(where).name if "://" not in where else where.partition("?")[0].rsplit("/", 1)[-1]
        hosts = LOOPBACK if here else None
        app = make_app(index, model, name=name, why=why, run=run, token=token, hosts=hosts, limits=limits)
        shown = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?token={quote(token)}"
        if not here and token is None:
            say(f"Everyone who reaches {host} can see the pictures: --token keeps strangers out.")
        say(f"{len(index):,} pictures at http://{shown}:{listener.getsockname()[1]}/{query} (Ctrl-C stops it).")
        run_app(app, listener)


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address, or a sentence on why there is none."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LINE)  # who comes before all is ready waits
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NearkinError(f"Cannot listen at {host}:{port} ({reason}): choose another --port or --host.") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn with a long line and few let in at a time, which asyncio takes to be one number."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(LINE)


def make_server(app: Guard) -> uvicorn.Server:
    """The HTTP server: quiet, without a log of addresses (they hold tokens), trusting no proxy's word."""
    config = uvicorn.Config(
        app,
        http=Punctual,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=PLACES,
        backlog=ACCEPTED,
        timeout_graceful_shutdown=5,
    )
    return Server(config)


def run_app(app: Guard, listener: socket.socket) -> None:
    """Serve until a signal says stop."""
    allow_files()
    with suppress(KeyboardInterrupt):  # uvicorn hands the signal on once it has finished
        make_server(app).run(sockets=[listener])
