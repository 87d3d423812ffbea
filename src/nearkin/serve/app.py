"""The application: a page, and the JSON it and others ask for."""

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

from nearkin.files import VERSION
from nearkin.errors import NearkinError
from nearkin.search.index import Index
from nearkin.search.index.base import NoItem
from nearkin.serve.guard import Guard, Limits, Refused
from nearkin.serve.map import Map
from nearkin.serve.pictures import THUMBNAILS
from nearkin.serve.service import About, Examples, Found, Service
from nearkin.training.model import Model

ASSETS = {  # every file there is: nothing is looked up by a path from outside
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
    409: "The index has no model to see pictures with.",
    413: "The picture has too many bytes or pixels.",
    415: "It is no picture of a known kind.",
    422: "A parameter is missing or out of range.",
    503: "All places are taken: come again after Retry-After seconds.",
}


class Problem(BaseModel):
    """Why there is no answer, in a sentence."""

    error: str


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """What may go wrong, for the description of the API."""
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
    token: str | None = None,
    hosts: Collection[str] | None = None,
    limits: Limits | None = None,
) -> Guard:
    """The application of one index, guarded. Without a model, `why` says why pictures cannot be searched by.

    `run` is where the model's run is now, if it has moved; `hosts` are the names it answers to (None: any).
    """
    service = Service(index, model, name=name, why=why, run=run, limits=limits or Limits())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="nearkin", version=VERSION, description=DESCRIPTION, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    _add_errors(app)
    _add_pages(app)
    _add_api(app, service)
    return Guard(app, token=token, hosts=hosts, login_page=_asset("login.html").decode())


def _add_api(app: FastAPI, service: Service) -> None:
    k = Annotated[int, Query(ge=1, le=service.limits.hits, description="How many hits.")]
    labels = Annotated[list[str] | None, Query(description="Only items of these labels; repeatable.")]
    item = Annotated[str, Query(description="An item's id.")]

    @app.get("/api/about", responses=problems(401), summary="What the index is")
    async def about() -> About:
        return service.about

    @app.get("/api/examples", responses=problems(401, 422), summary="Pictures to begin with")
    async def examples(
        count: Annotated[int, Query(ge=1, le=service.limits.hits, description="How many.")] = 20, label: labels = None
    ) -> Examples:
        return await asyncio.to_thread(service.examples, count, label)

    @app.get("/api/search", responses=problems(401, 404, 422, 503), summary="The kin of an item")
    async def search_by_item(id: item, k: k = 20, label: labels = None) -> Found:  # noqa: A002
        return await service.by_item(id, k=k, labels=label)

    @app.post(
        "/api/search",
        responses=problems(400, 401, 408, 409, 413, 415, 422, 503),
        openapi_extra=IMAGE_BODY,
        summary="The kin of a picture of one's own",
    )
    async def search_by_picture(request: Request, k: k = 20, label: labels = None) -> Found:
        with service.budget.share() as take:
            data = await _body(request, service.limits, take)
            return await service.by_picture(data, k=k, labels=label)

    @app.get(
        "/api/picture",
        response_class=Response,
        responses={**problems(401, 404, 422, 503), 200: PICTURE},
        summary="An item's picture",
    )
    async def picture(
        id: item,  # noqa: A002
        side: Annotated[
            int, Query(ge=1, le=THUMBNAILS[-1], description="Its short side; rounded up to what is kept.")
        ] = 256,
    ) -> Response:
        kept = next(known for known in THUMBNAILS if known >= side)
        data, kind = await service.picture(id, kept)
        return Response(data, media_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    @app.get("/api/map", response_model=Map, responses=problems(401), summary="The whole index in the plane")
    async def whole_map() -> Response:
        return Response(await service.map(), media_type="application/json")


async def _body(request: Request, limits: Limits, take: Callable[[int], None]) -> bytes:
    """The bytes of an upload, within the limits of size and time."""
    too_large = Refused(413, f"A picture may have {limits.upload_bytes / 2**20:.3g} MB, and this one has more.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limits.upload_bytes):
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.upload_bytes:
                    raise too_large
                take(len(part))
                parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "The picture did not arrive whole.") from None
    except TimeoutError:
        raise Refused(408, f"The picture did not arrive within {limits.upload_seconds:g} seconds.") from None
    if not size:
        raise Refused(400, "There is no picture in the request: send the bytes of an image file as its body.")
    return b"".join(parts)


def _add_pages(app: FastAPI) -> None:
    for path, (name, kind) in ASSETS.items():
        content = _asset(name)

        async def page(_request: Request, content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

        app.add_route(path, page)


def _asset(name: str) -> bytes:
    return files("nearkin.serve").joinpath("static", name).read_bytes()


def _add_errors(app: FastAPI) -> None:
    """Every error is a sentence in the same JSON."""

    @app.exception_handler(Refused)
    async def refused(_request: Request, error: Refused) -> JSONResponse:
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return JSONResponse({"error": error.sentence}, error.status, headers)

    @app.exception_handler(NoItem)
    async def no_item(_request: Request, _error: NoItem) -> JSONResponse:
        return JSONResponse({"error": "There is no such picture in the index."}, 404)

    @app.exception_handler(NearkinError)
    async def wrong(_request: Request, error: NearkinError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"The parameter {first['loc'][-1]}: {first['msg']}."}, 422)

    @app.exception_handler(HTTPException)
    async def missing(_request: Request, error: HTTPException) -> JSONResponse:
        sentence = "There is nothing here." if error.status_code == 404 else f"{error.detail}."
        return JSONResponse({"error": sentence}, error.status_code)

    @app.exception_handler(Exception)
    async def broken(_request: Request, _error: Exception) -> JSONResponse:
        return JSONResponse({"error": "Something went wrong in the server; its terminal says more."}, 500)
