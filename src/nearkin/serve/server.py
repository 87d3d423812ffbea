"""The server process: an index, its model, a socket."""

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import uvicorn

from nearkin.errors import NearkinError
from nearkin.index import open_index
from nearkin.model import Model
from nearkin.search import model_of
from nearkin.serve.app import make_app
from nearkin.serve.connection import ACCEPTED, PLACES, Punctual, allow_files
from nearkin.serve.guard import LOOPBACK, Guard
from nearkin.serve.limits import Limits

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
