"""What the server lets through: limits of size and time, host names, the token; and the headers of every answer."""

import hashlib
import hmac
import ipaddress
import math
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from nearkin.errors import NearkinError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/style.css", "/icon.svg")
"""Served without a token, for the login page."""

FREE_GUESSES = 10  # wrong tokens from one address before it must wait
GUESS_SECONDS = 1.0  # until an address may guess once more


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server accepts. Its memory for uploads and decoding follows from these limits."""

    upload_bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    uploads_bytes: int = 256 * 2**20  # of all uploads in progress
    upload_seconds: float = 30.0  # per upload
    work_seconds: float = 60.0  # per answer
    hits: int = 200
    batch: int = 32  # searches answered together
    waiting: int = 512  # jobs per queue; further ones are refused with 503
    waiting_large: int = 8  # large pictures in the queue, which take seconds each
    threads: int = 2  # for decoding uploads; as many again for thumbnails

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise NearkinError(f"The server's limit {name} must be above 0, not {value}.")


class Refused(Exception):  # noqa: N818 (a refusal is not a failure of ours)
    """A refused request: an HTTP status, a sentence, and the seconds after which to retry."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry_after = status, sentence, retry_after


def busy() -> Refused:
    """The refusal when a queue is full."""
    return Refused(503, "The server is busy: try again in a second.", retry_after=1)


class Guesses:
    """Slows guessing: every wrong token costs its address a second, and who owes more than ten must wait."""

    def __init__(self) -> None:
        self.paid_at: dict[str, float] = {}  # by address: when all its wrong tokens are paid for

    def wait(self, address: str) -> int:
        """Seconds until a token from this address is looked at; 0 for now."""
        debt = self.paid_at.get(address, 0.0) - time.monotonic()
        owed = debt - (FREE_GUESSES - 1) * GUESS_SECONDS
        return max(0, math.ceil(round(owed, 6)))  # ten sums of 1 second to a clock may differ from 10 by rounding

    def count(self, address: str) -> None:
        """Remember a wrong token."""
        now = time.monotonic()
        if len(self.paid_at) > 4096:  # forget the addresses that owe nothing
            self.paid_at = {known: paid for known, paid in self.paid_at.items() if paid > now}
        self.paid_at[address] = max(now, self.paid_at.get(address, 0.0)) + GUESS_SECONDS


class Guard:
    """Middleware that checks host, origin and token, and sets security headers."""

    def __init__(self, app: App, *, token: str | None, hosts: Collection[str] | None, login_page: str) -> None:
        self.app, self.hosts, self.login_page = app, hosts, login_page
        self.token = None if token is None else token.encode()
        self.guesses = Guesses()
        # The cookie is not the token, so a stolen cookie cannot be used as one elsewhere.
        self.ticket = b"" if token is None else hmac.digest(token.encode(), b"nearkin", "sha256").hex().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(scope)
        await (self.app if answer is None else answer)(scope, receive, strict)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a refused request, else None."""
        headers = Headers(scope=scope)
        if self.hosts is not None and _host(headers.get("host", "")) not in self.hosts:
            # DNS rebinding: another site's name may point here, and its pages could then read the answers.
            return JSONResponse({"error": "This server does not answer to that host name."}, 421)
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return JSONResponse({"error": "The API does not answer pages of other sites."}, 403)
        if self.token is None or scope["path"] in OPEN:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = dict(query).get("token")
        offered = bool(token) or "authorization" in headers or _cookie_name(scope) in headers.get("cookie", "")
        if offered and (seconds := self.guesses.wait(_network(scope))):  # even for the right one, which it would reveal
            return self._denied(headers, 429, "There were too many wrong tokens: try again later.", retry_after=seconds)
        if token is not None and hmac.compare_digest(_digest(token.encode()), _digest(self.token)):
            return self._set_cookie(scope, [pair for pair in query if pair[0] != "token"])
        if self._has_access(headers, scope):
            return None
        if offered:
            self.guesses.count(_network(scope))
        error = "The token is wrong." if token or "authorization" in headers else "This server needs a token."
        return self._denied(headers, 401, error)

    def _denied(self, headers: Headers, status: int, error: str, *, retry_after: int | None = None) -> Response:
        """The login page for a browser, else JSON."""
        more = {"WWW-Authenticate": "Bearer"} if retry_after is None else {"Retry-After": str(retry_after)}
        if "text/html" in headers.get("accept", ""):
            return HTMLResponse(self.login_page.replace("{error}", error), status, more)
        return JSONResponse({"error": error}, status, more)

    def _has_access(self, headers: Headers, scope: Scope) -> bool:
        """Whether the request has the token or the cookie. Both are always compared, in constant time."""
        assert self.token is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        ticket = cookie_parser(headers.get("cookie", "")).get(_cookie_name(scope), "").encode()
        by_header = hmac.compare_digest(_digest(bearer), _digest(self.token))
        return hmac.compare_digest(_digest(ticket), _digest(self.ticket)) | by_header

    def _set_cookie(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Redirect to the address without the token, which moves from the browser's history into a cookie."""
        path = "/" + scope["path"].lstrip("/")  # two slashes would redirect to another host
        answer = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), 303)
        answer.set_cookie(
            _cookie_name(scope), self.ticket.decode(), httponly=True, samesite="lax", secure=scope["scheme"] == "https"
        )
        return answer


def _digest(secret: bytes) -> bytes:
    """A digest of fixed length, so that comparing does not reveal the secret's length."""
    return hashlib.sha256(secret).digest()


def _cookie_name(scope: Scope) -> str:
    """One name per port, since browsers share cookies between the ports of a host."""
    return f"nearkin_{(scope.get('server') or ('', 0))[1]}"


def _network(scope: Scope) -> str:
    """The client's address; of an IPv6 address the first half, since one client usually has the whole second half."""
    address = (scope.get("client") or ("", 0))[0]
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return str(address)
    if isinstance(known, ipaddress.IPv4Address) or known.ipv4_mapped:
        return str(address)
    return known.packed[:8].hex()


def _host(header: str) -> str:
    """The host name of a Host header, without port and IPv6 brackets."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return name.strip("[]").lower()
