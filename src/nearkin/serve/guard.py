"""What the server lets through: limits of size and time, host names, the token; and the headers of every answer."""

import hashlib
import hmac
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


class Guard:
    """Middleware that checks host, origin and token, and sets security headers."""

    def __init__(self, app: App, *, token: str | None, hosts: Collection[str] | None, login_page: str) -> None:
        self.app, self.hosts, self.login_page = app, hosts, login_page
        self.token = None if token is None else token.encode()
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
        if token is not None and hmac.compare_digest(_digest(token.encode()), _digest(self.token)):
            return self._set_cookie(scope, [pair for pair in query if pair[0] != "token"])
        if self._has_access(headers, scope):
            return None
        error = "The token is wrong." if token or "authorization" in headers else "This server needs a token."
        if "text/html" in headers.get("accept", ""):
            return HTMLResponse(self.login_page.replace("{error}", error), 401)
        return JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})

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


def _host(header: str) -> str:
    """The host name of a Host header, without port and IPv6 brackets."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return name.strip("[]").lower()
