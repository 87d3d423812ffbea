"""The API returns what the index and the model give, in the documented shape."""

import io
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from nearkin.data.pixels import views
from nearkin.search.index import create_index
from nearkin.search.index.base import NoItem
from nearkin.search.query import Query, search_queries
from nearkin.serve import Limits, make_app


@pytest.fixture(scope="module")
def client(index, model):
    with TestClient(make_app(index, model, name="letters")) as client:
        yield client


def test_about_describes_the_index(client, index, pictures):
    about = client.get("/api/about").json()
    assert about["items"] == len(pictures) == len(index)
    assert [label["name"] for label in about["labels"]] == index.label_names()
    assert sum(label["items"] for label in about["labels"]) == len(pictures)
    assert about["threshold"] == index.meta["threshold"]
    assert about["by_picture"] is True


def test_search_by_item_matches_the_index(client, index, shown):
    item = index.items().ids[7]
    found = client.get("/api/search", params={"id": item, "k": 9}).json()
    expected = index.search(index.embeddings([item]), 9, exclude=[item])[0]
    assert [hit["id"] for hit in found["hits"]] == [shown(hit.id) for hit in expected]
    np.testing.assert_allclose(
        [hit["similarity"] for hit in found["hits"]], [h.similarity for h in expected], rtol=1e-6
    )
    assert found["query"] == {"id": shown(item), "path": shown(item), "label": index.item(item).label}
    assert shown(item) not in {hit["id"] for hit in found["hits"]}


def test_hits_above_the_threshold_are_same_class(client, index):
    answers = [client.get("/api/search", params={"id": item, "k": 50}).json() for item in index.items().ids[:5]]
    hits = [hit for answer in answers for hit in answer["hits"]]
    assert {hit["same"] for hit in hits} == {True, False}
    assert all(hit["same"] == (hit["similarity"] >= index.meta["threshold"]["similarity"]) for hit in hits)


def test_labels_filter(client, index):
    ids, _, labels = index.items()
    wanted = sorted(set(labels))[:2]
    found = client.get("/api/search", params={"id": ids[0], "k": 100, "label": wanted}).json()["hits"]
    assert {hit["label"] for hit in found} == set(wanted)
    assert len(found) == sum(label in wanted for label in labels) - (labels[0] in wanted)
    assert client.get("/api/search", params={"id": ids[0], "label": "nobody"}).json()["hits"] == []


@pytest.mark.parametrize("row", [5, -1])  # a small letter, a large photograph
def test_search_by_upload_matches_its_file(client, index, model, pictures, shown, row):
    path = pictures[row][0]
    answer = client.post("/api/search", params={"k": 5}, content=path.read_bytes())
    expected = index.search(model.embed([path]).numpy(), 5)[0]
    hits = answer.json()["hits"]
    assert [hit["id"] for hit in hits] == [shown(hit.id) for hit in expected]
    np.testing.assert_allclose([h["similarity"] for h in hits], [h.similarity for h in expected], atol=1e-5)
    assert hits[0]["id"] == shown(path)
    assert answer.json()["query"] is None


def test_an_upload_is_decoded_and_cropped_once_and_resized_twice(client, pictures, monkeypatch):
    calls = Counter()

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(Image, "_getdecoder")  # Pillow calls it whenever it decodes pixels
    count(torch.nn.functional, "interpolate")
    count(views, "central")
    photograph = io.BytesIO()
    with Image.open(pictures[-1][0]) as image:
        image.save(photograph, "PNG")
    calls.clear()
    assert client.post("/api/search", content=photograph.getvalue()).status_code == 200
    assert calls == {"_getdecoder": 1, "interpolate": 2, "central": 1}  # to the stored size, and to that of the view


def test_batched_queries_match_single_ones(index, model, pictures):
    torch.manual_seed(0)
    some = [torch.randint(256, (1, 32, 32), dtype=torch.uint8) for _ in range(4)]
    label = pictures[0][1]
    queries = [
        Query(3, pixels=some[0]),
        Query(3, pixels=some[1]),
        Query(5, labels=(label,), pixels=some[2]),
        Query(3, id=str(pictures[9][0])),
        Query(3, id="not there"),
        Query(3, pixels=some[3]),
    ]
    together = search_queries(index, queries, model=model)
    for query, answer in zip(queries, together, strict=True):
        alone = search_queries(index, [query], model=model)[0]
        if isinstance(alone, NoItem):
            assert isinstance(answer, NoItem)
            continue
        assert [hit.id for hit in answer] == [hit.id for hit in alone]
        np.testing.assert_allclose([h.similarity for h in answer], [h.similarity for h in alone], atol=1e-5)
    assert isinstance(together[4], NoItem)
    assert len(together[2]) == 5
    assert {hit.label for hit in together[2]} == {label}


def test_thumbnails_are_small_and_without_metadata(client, pictures):
    photograph, letter = str(pictures[-1][0]), str(pictures[0][0])
    with Image.open(io.BytesIO(client.get("/api/picture", params={"id": photograph, "side": 64}).content)) as image:
        assert image.size == (96, 64)
    large = client.get("/api/picture", params={"id": photograph})
    assert large.headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(large.content)) as image:
        assert image.size == (384, 256)
        assert not image.getexif()
    small = client.get("/api/picture", params={"id": letter})
    assert small.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(small.content)) as image, Image.open(pictures[0][0]) as file:
        assert np.array_equal(np.asarray(image.convert("L")), np.asarray(file))


def test_examples_are_of_many_classes(client, index, shown):
    items = client.get("/api/examples", params={"count": 10}).json()["items"]
    assert len({item["label"] for item in items}) == 10
    many = client.get("/api/examples", params={"count": 60}).json()["items"]
    assert len({item["id"] for item in many}) == 60  # more than there are classes
    wanted = sorted(set(index.items().labels))[:2]
    some = client.get("/api/examples", params={"count": 100, "label": wanted}).json()["items"]
    assert {item["id"] for item in some} == {
        shown(item) for item, label in zip(index.items().ids, index.items().labels, strict=True) if label in wanted
    }


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("/api/search?id=nothing", 404, "no such picture"),
        ("/api/picture?id=nothing", 404, "no such picture"),
        ("/api/search", 422, "parameter id"),
        ("/api/search?id=x&k=0", 422, "parameter k"),
        ("/api/search?id=x&k=100000", 422, "parameter k"),
        ("/api/picture?id=x&side=9999", 422, "parameter side"),
        ("/nothing", 404, "does not exist"),
    ],
)
def test_errors_are_sentences(client, address, status, words):
    answer = client.get(address)
    assert answer.status_code == status
    assert words in answer.json()["error"]
    assert answer.json()["error"].endswith(".")


def test_internal_error_is_a_sentence(index, model, monkeypatch):
    monkeypatch.setattr("nearkin.serve.service.Service.examples", lambda *_: 1 / 0)
    with TestClient(make_app(index, model), raise_server_exceptions=False) as client:
        answer = client.get("/api/examples")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("Something went wrong")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_without_a_model_only_items_can_be_searched(index):
    with TestClient(make_app(index, None, why="The run is gone.")) as client:
        assert client.get("/api/about").json()["by_picture"] is False
        answer = client.post("/api/search", content=b"x")
        assert (answer.status_code, answer.json()["error"]) == (409, "The run is gone.")
        assert client.get("/api/search", params={"id": index.items().ids[0]}).status_code == 200


def test_an_empty_index_is_served(tmp_path):
    empty = create_index(tmp_path / "empty", dim=4, space="cosine")
    with TestClient(make_app(empty, None)) as client:
        assert client.get("/api/about").json()["items"] == 0
        assert client.get("/api/examples").json()["items"] == []
        assert client.get("/api/map").json()["state"] == "none"


def test_openapi_describes_every_answer(client):
    known = client.get("/openapi.json").json()
    for path, methods in known["paths"].items():
        for operation in methods.values():
            assert operation["summary"]
            answer = operation["responses"]["200"]["content"]
            if path != "/api/picture":
                assert "$ref" in answer["application/json"]["schema"]
    body = known["paths"]["/api/search"]["post"]["requestBody"]["content"]
    assert body["image/*"]["schema"]["format"] == "binary"
    codes = known["paths"]["/api/search"]["post"]["responses"]
    assert set(codes) == {"200", "400", "401", "408", "409", "413", "415", "422", "429", "503"}
    assert codes["413"]["content"]["application/json"]["schema"]["$ref"].endswith("Problem")


def test_limits_are_checked():
    with pytest.raises(ValueError, match="above 0"):
        Limits(upload_bytes=0)
