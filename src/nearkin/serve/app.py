"""The web application: the search page and the JSON API."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nearkin.errors import NearkinError
from nearkin.files import VERSION
from nearkin.search.index import Index
from nearkin.search.index.base import NoItem
from nearkin.search.names import escape_name
from nearkin.serve.guard import Guard, Limits, Refused
from nearkin.serve.map import Map
from nearkin.serve.pictures import THUMBNAILS
from nearkin.serve.service import About, Examples, Found, Service
from nearkin.training.model import Model

ASSETS = {  # all files that are served: no path from outside is looked up on disk
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/colours.js": ("colours.js", "text/javascript; charset=utf-8"),
    "/map.js": ("map.js", "text/javascript; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

PROBLEMS = {
    400: "The picture is damaged.",
    401: "The token is missing or wrong.",
    404: "There is no such item.",
    408: "The upload took too long.",
    409: "The index has no model to embed pictures with.",
    413: "The picture has too many bytes or pixels.",
    415: "The upload is not a picture of a known format.",
    422: "A parameter is missing or out of range.",
    429: "There were too many wrong tokens from this address: try again after Retry-After seconds.",
    503: "The server is busy: try again after Retry-After seconds.",
}


class Problem(BaseModel):
    """An error, in a sentence."""

    error: str


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of an operation, for the API description."""
    return {code: {"model": Problem, "description": PROBLEMS[code]} for code in codes}


IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "The bytes of an image file, as curl --data-binary @picture.jpg sends them.",
        "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
    }
}
PICTURE = {"description": "The picture.", "content": {"image/jpeg": {}, "image/png": {}}}
DESCRIPTION = "Search an index of images by a picture, or by an item of the index."


def make_app(
    index: Index,
    model: Model | None,
    *,
    name: str = "index",
    why: str | None = None,
    run: str | Path | None = None,
    root: str | Path | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    limits: Limits | None = None,
) -> Guard:
    """Make the guarded application of one index. Without a model, `why` says why uploads cannot be searched.

    `run` is the run's folder if it has moved; `root` is the folder that paths are shown relative to (None: that of the
    index); `hosts` are the host names it answers to (None: any).
    """
    service = Service(index, model, name=name, why=why, run=run, root=root, limits=limits or Limits())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="nearkin", version=VERSION, description=DESCRIPTION, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    _add_errors(app, service)
    _add_pages(app)
    _add_api(app, service)
    return Guard(app, token=token, hosts=hosts, login_page=_asset("login.html").decode())


def _add_api(app: FastAPI, service: Service) -> None:
    k = Annotated[int, Query(ge=1, le=service.limits.hits, description="Number of hits.")]
    labels = Annotated[list[str] | None, Query(description="Only items of these labels; repeatable.")]
    item = Annotated[str, Query(description="The id of an item.")]

    @app.get("/api/about", responses=problems(401, 429), summary="Describe the index")
    async def about() -> About:
        return service.about

    @app.get("/api/examples", responses=problems(401, 422, 429), summary="List some pictures of many classes")
    async def examples(
        count: Annotated[int, Query(ge=1, le=service.limits.hits, description="Number of pictures.")] = 20,
        label: labels = None,
    ) -> Examples:
        return await asyncio.to_thread(service.examples, count, label)

    @app.get("/api/search", responses=problems(401, 404, 422, 429, 503), summary="Find the nearest pictures of an item")
    async def search_by_item(id: item, k: k = 20, label: labels = None) -> Found:  # noqa: A002
        return await service.by_item(id, k=k, labels=label)

    @app.post(
        "/api/search",
        responses=problems(400, 401, 408, 409, 413, 415, 422, 429, 503),
        openapi_extra=IMAGE_BODY,
        summary="Find the nearest pictures of an uploaded picture",
    )
    async def search_by_picture(request: Request, k: k = 20, label: labels = None) -> Found:
        with service.budget.share() as take:
            data = await _body(request, service.limits, take)
            return await service.by_picture(data, k=k, labels=label)

    @app.get(
        "/api/picture",
        response_class=Response,
        responses={**problems(401, 404, 422, 429, 503), 200: PICTURE},
        summary="Show the picture of an item",
    )
    async def picture(
        id: item,  # noqa: A002
        side: Annotated[
            int, Query(ge=1, le=THUMBNAILS[-1], description="Its short side in pixels, rounded up to 64, 256 or 768.")
        ] = 256,
    ) -> Response:
        data, kind = await service.picture(id, next(known for known in THUMBNAILS if known >= side))
        return Response(data, media_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    @app.get("/api/map", response_model=Map, responses=problems(401, 429), summary="Map the whole index into the plane")
    async def whole_map() -> Response:
        return Response(await service.map(), media_type="application/json")


async def _body(request: Request, limits: Limits, take: Callable[[int], None]) -> bytes:
    """Read the bytes of an upload, within the limits of size and time."""
    too_large = Refused(413, f"This picture is larger than the limit of {limits.upload_bytes / 2**20:.3g} MB.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limits.upload_bytes):
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.upload_bytes:
                    raise too_large
                take(len(chunk))
                chunks.append(chunk)
    except ClientDisconnect:
        raise Refused(400, "The upload is incomplete.") from None
    except TimeoutError:
        raise Refused(408, f"The upload took longer than {limits.upload_seconds:g} seconds.") from None
    if not size:
        raise Refused(400, "The request has no picture: send the bytes of an image file as its body.")
    return b"".join(chunks)


def _add_pages(app: FastAPI) -> None:
    for path, (name, kind) in ASSETS.items():
        content = _asset(name)

        async def page(_request: Request, content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

        app.add_route(path, page)


def _asset(name: str) -> bytes:
    return files("nearkin.serve").joinpath("static", name).read_bytes()


def _add_errors(app: FastAPI, service: Service) -> None:
    """Answer every error with a sentence in the same JSON."""

    @app.exception_handler(Refused)
    async def refused(_request: Request, error: Refused) -> JSONResponse:
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return JSONResponse({"error": error.sentence}, error.status, headers)

    @app.exception_handler(NoItem)
    async def no_item(_request: Request, _error: NoItem) -> JSONResponse:
        return JSONResponse({"error": "There is no such picture in the index."}, 404)

    @app.exception_handler(NearkinError)
    async def wrong(_request: Request, error: NearkinError) -> JSONResponse:
        return JSONResponse({"error": escape_name(str(error).replace(service.root, service.about.name))}, 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"The parameter {first['loc'][-1]}: {first['msg']}."}, 422)

    @app.exception_handler(HTTPException)
    async def missing(_request: Request, error: HTTPException) -> JSONResponse:
        sentence = "This page does not exist." if error.status_code == 404 else f"{error.detail}."
        return JSONResponse({"error": sentence}, error.status_code)

    @app.exception_handler(Exception)
    async def broken(_request: Request, _error: Exception) -> JSONResponse:
        return JSONResponse({"error": "Something went wrong in the server; see its terminal."}, 500)
