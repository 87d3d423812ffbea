"""The server process: open an index and its model, listen, and close idle and slow connections.

uvicorn alone waits without limit for a request's head and for a client to read its answer. A few hundred silent clients
would use up the process's open files, and nobody else could connect.
"""

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
from nearkin.search.index.engines import is_url
from nearkin.search.query import model_of
from nearkin.serve.app import make_app
from nearkin.serve.guard import LOOPBACK, Guard, Limits
from nearkin.training.model import Model

CHECK_SECONDS = 10.0  # between two checks of a connection, and for the head of a request to arrive
MIN_BYTES = 16 * 2**10  # of a waiting answer that a client must read between two checks
MAX_CONNECTIONS = 2000
ACCEPTED = 32  # connections accepted before the earlier ones are counted
OWN_FILES = ACCEPTED + 96  # open files of the server itself: the index, pictures, libraries
MIN_TOKEN = 8
BACKLOG = 2048  # clients that may wait to be accepted


class TimedProtocol(H11Protocol):
    """An HTTP/1.1 connection that is checked regularly. At the limit, a new one closes the longest idle one."""

    timer: asyncio.TimerHandle
    idle_since = 0.0
    unsent = math.inf  # bytes of the answer at the last check

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection and start its timer."""
        if len(self.connections) >= connection_limit():
            idle = [one for one in self.connections if isinstance(one, TimedProtocol) and one.idle]
            if idle:
                oldest = min(idle, key=lambda one: one.idle_since)
                oldest.transport.abort()
                self.connections.discard(oldest)  # now, so that the next new connection closes another one
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self.timer = self.loop.call_later(CHECK_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self.timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Mark the connection idle."""
        super().on_response_complete()
        self.idle_since, self.unsent = time.monotonic(), math.inf

    def _check(self) -> None:
        """Close the connection if the client is silent or does not read its answer."""
        unsent = self.transport.get_write_buffer_size()
        silent = self.idle and not unsent and time.monotonic() - self.idle_since >= CHECK_SECONDS
        if silent or (unsent and self.unsent - unsent < MIN_BYTES):
            self.transport.abort()  # close() would wait until the client has read everything
            return
        self.unsent = unsent or math.inf
        self.timer = self.loop.call_later(CHECK_SECONDS, self._check)


def connection_limit() -> int:
    """Maximum number of connections, given the process's limit of open files."""
    try:
        import resource
    except ImportError:  # not a Unix
        return MAX_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files - OWN_FILES))


def raise_file_limit() -> None:
    """Raise the process's limit of open files as far as needed and allowed."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = hard == resource.RLIM_INFINITY
        wanted = MAX_CONNECTIONS + OWN_FILES if unlimited else min(MAX_CONNECTIONS + OWN_FILES, hard)
        if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
    """Serve an index until interrupted. Port 0 takes a free one; the token `auto` is generated.

    `say` receives the address to open, and warnings.
    """
    token = secrets.token_urlsafe(24) if token == "auto" else token
    if token is not None and len(token) < MIN_TOKEN:
        raise NearkinError(f"A token of {len(token)} characters can be guessed: use at least {MIN_TOKEN}, or auto.")
    local = host in LOOPBACK
    with open_index(where) as index, listen(host, port) as listener:
        model: Model | None = None
        why: str | None = None
        try:
            model = model_of(index, run=run, device=device)
        except NearkinError as error:
            if run is not None:
                raise
            why = "The model of this index could not be loaded: see the server's terminal."
            say(f"Uploaded pictures cannot be searched. {error}")
        name = Path(where).name if "://" not in where else where.partition("?")[0].rsplit("/", 1)[-1]
        hosts = LOOPBACK if local else None
        root = None if is_url(where) else where
        app = make_app(index, model, name=name, why=why, run=run, root=root, token=token, hosts=hosts, limits=limits)
        shown = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?token={quote(token)}"
        if not local and token is None:
            say(f"Everyone who can reach {host} can see the pictures: set --token to restrict access.")
        say(f"{len(index):,} pictures at http://{shown}:{listener.getsockname()[1]}/{query} (Ctrl-C stops it).")
        run_app(app, listener)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at an address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # clients may wait until the server is ready
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NearkinError(f"Cannot listen at {host}:{port} ({reason}): choose another --port or --host.") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn with a long backlog but few accepted at a time; asyncio uses one number for both."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def make_server(app: Guard) -> uvicorn.Server:
    """The HTTP server. It logs no addresses, which may contain tokens, and trusts no proxy headers."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS + ACCEPTED,  # above what connection_made keeps
        backlog=ACCEPTED,
        timeout_graceful_shutdown=5,
    )
    return Server(config)


def run_app(app: Guard, listener: socket.socket) -> None:
    """Serve until a signal stops the process."""
    raise_file_limit()
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has finished
        make_server(app).run(sockets=[listener])
