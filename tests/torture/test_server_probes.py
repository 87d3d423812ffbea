"""The search page under random requests: an answer with a sentence, never an internal error."""

import json
import random
import string
from collections.abc import Iterator

import numpy as np
import pytest
from made import make_images, make_run
from torture.campaign import Attack

from nearkin.data.image_files import list_images
from nearkin.search.build import index_images
from nearkin.search.index import open_index
from nearkin.search.query import model_of

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from nearkin.serve import make_app


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The page of a small index."""
    top = tmp_path_factory.mktemp("probes")
    run = make_run(top / "run", names=("x", "y"))
    make_images(top / "pictures")
    index_images(run, list_images([top / "pictures"]), top / "index")
    index = open_index(top / "index")
    app = make_app(index, model_of(index), name="probes")
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


ODD = (
    "",
    "../../etc/passwd",
    "%00",
    "%2e%2e%2f",
    "a" * 5000,
    "'; --",
    "<script>",
    "\u202e",
    "😀",
    "-1",
    "1e999",
    "NaN",
    "[]",
)


def value(rng: random.Random) -> str:
    return rng.choice([*ODD, "".join(rng.choices(string.printable, k=rng.randrange(30))), str(rng.randrange(100))])


def test_random_requests(client, attack: Attack):
    """Random methods, addresses, parameters, headers and bodies (damaged pictures, JSON) to the server"""
    schema = client.get("/openapi.json").json()
    routes = [(path, verb) for path, verbs in schema["paths"].items() for verb in verbs]
    assert len(routes) > 4
    for rng in attack.cases(60, 4000):
        path, verb = rng.choice([*routes, ("/" + value(rng), "get"), ("/static/" + value(rng), "get")])
        if rng.random() < 0.2:
            verb = rng.choice(["get", "post", "put", "delete", "patch", "options", "head"])
        names = [p["name"] for p in schema["paths"].get(path, {}).get(verb, {}).get("parameters", [])]
        asked = {name: value(rng) for name in (*names, "x") if rng.random() < 0.7}
        body = rng.choice([None, b"", rng.randbytes(200), b"\x89PNG\r\n\x1a\n" + rng.randbytes(50), b"{}", b"[" * 9000])
        headers = {"content-type": rng.choice(["image/png", "application/json", "multipart/form-data", "x" * 200])}
        if rng.random() < 0.3:
            headers["origin" if rng.random() < 0.5 else "cookie"] = "http://elsewhere.example"
        try:
            answer = client.request(verb.upper(), path, params=asked, content=body, headers=headers)
        except Exception as error:
            if type(error).__name__ != "InvalidURL" and not isinstance(error, UnicodeError):
                raise  # else the client itself refuses the address
            attack.saw("no valid address")
            continue
        assert answer.status_code != 500, (verb, path, asked)
        assert "Traceback" not in answer.text
        assert "default-src" in answer.headers["content-security-policy"]
        if answer.status_code >= 400 and "json" in answer.headers.get("content-type", ""):
            assert json.loads(answer.text or "{}") is not None
        attack.saw("answered" if answer.status_code < 400 else "refused")
    assert client.get("/api/about").status_code == 200
    assert np.isfinite(client.get("/api/about").json()["items"])
