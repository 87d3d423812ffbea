"""Names of items: exact in the index, readable in every answer, and usable in the next request."""

import io
import os
from unittest.mock import Mock

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

from nearkin.errors import NearkinError
from nearkin.search.index import create_index
from nearkin.serve import make_app, server


def everything(client):
    """All JSON answers as one text, and the items among them."""
    items = client.get("/api/examples").json()["items"]
    answers = [client.get(f"/api/{name}") for name in ("about", "examples", "map")]
    answers += [client.get("/api/search", params={"id": item["id"]}) for item in items]
    answers += [client.get("/api/search", params={"id": "nothing"}), client.post("/api/search", content=b"x")]
    return "".join(answer.text for answer in answers), items


def test_answers_show_paths_relative_to_the_index(tmp_path):
    inside, beside = tmp_path / "top" / "index" / "pictures" / "a.png", tmp_path / "top" / "b.png"
    inside.parent.mkdir(parents=True)
    for path in (inside, beside):
        Image.new("RGB", (8, 8)).save(path)
    index = create_index(tmp_path / "top" / "index" / "items", dim=2, space="cosine")
    index.add(
        [[1, 0], [0, 1], [1, 1]],
        paths=[str(inside), str(beside), str(beside)],
        labels=["a", "b", "c"],
        ids=[str(inside), str(beside), "17"],
    )
    for root, shown in (
        (None, ["../pictures/a.png", "../../b.png"]),
        (tmp_path / "top", ["index/pictures/a.png", "b.png"]),
    ):
        with TestClient(make_app(index, None, root=root)) as client:
            text, items = everything(client)
            assert str(tmp_path) not in text
            assert [item["path"] for item in items] == [*shown, shown[1]]
            assert [item["id"] for item in items] == [*shown, "17"]
            for item in items:
                assert client.get("/api/picture", params={"id": item["id"]}).status_code == 200
                assert client.get("/api/search", params={"id": item["id"]}).json()["query"] == item
    assert index.items().paths[0] == str(inside)  # exact


def test_errors_of_the_index_do_not_show_its_folder(tmp_path, monkeypatch):
    index = create_index(tmp_path / "items", dim=2, space="cosine")
    index.add([[1.0, 0.0]], paths=["a"], labels=[None])
    damaged = NearkinError(f"{index.folder / 'graph.faiss'} is damaged.")
    monkeypatch.setattr(index, "search", Mock(side_effect=damaged))
    with TestClient(make_app(index, None, name="photos")) as client:
        answer = client.get("/api/search", params={"id": "a"})
    assert (answer.status_code, answer.json()["error"]) == (400, "photos/graph.faiss is damaged.")


def test_a_missing_run_is_named_in_the_terminal_only(tmp_path, monkeypatch):
    create_index(tmp_path / "items", dim=2, space="cosine").remember(run=str(tmp_path / "gone"))
    apps, said = [], []
    monkeypatch.setattr(server, "run_app", lambda app, _listener: apps.append(app))
    server.serve(str(tmp_path / "items"), port=0, say=said.append)
    assert str(tmp_path / "gone") in said[0]
    with TestClient(apps[0], base_url="http://localhost") as client:
        text, _ = everything(client)
    assert "could not be loaded" in text
    assert str(tmp_path) not in text


def test_names_that_are_not_utf8_are_shown_escaped_and_found(tmp_path):
    folder, name = os.fsdecode(b"caf\xe9"), os.fsdecode(b"\xff\\xe9.png")
    paths = [tmp_path / folder / name, tmp_path / folder / "\\xff\\xe9.png"]  # the second looks like the first escaped
    paths[0].parent.mkdir()
    for path, colour in zip(paths, ("red", "blue"), strict=True):
        Image.new("RGB", (8, 8), colour).save(path)
    index = create_index(tmp_path / folder / folder, dim=2, space="cosine")
    index.add(np.eye(2), paths=[str(path) for path in paths], labels=[folder, "caf\\xe9"])
    with TestClient(make_app(index, None, name=folder, why=f"There is no {folder}.")) as client:
        about = client.get("/api/about").json()
        assert (about["name"], about["by_picture_why"]) == ("caf\\xe9", "There is no caf\\xe9.")
        assert {label["name"] for label in about["labels"]} == {"caf\\xe9", "caf\\x5cxe9"}
        items = client.get("/api/examples").json()["items"]
        assert [item["path"].rpartition("/")[2] for item in items] == ["\\xff\\x5cxe9.png", "\\x5cxff\\x5cxe9.png"]
        assert client.get("/api/map").json()["ids"] == [item["id"] for item in items]
        for item, other, colour in zip(items, items[::-1], ((255, 0, 0), (0, 0, 255)), strict=True):
            found = client.get("/api/search", params={"id": item["id"], "label": other["label"]}).json()
            assert found["query"] == item
            assert [hit["id"] for hit in found["hits"]] == [other["id"]]
            assert client.get("/api/examples", params={"label": item["label"]}).json()["items"] == [item]
            picture = client.get("/api/picture", params={"id": item["id"]})
            with Image.open(io.BytesIO(picture.content)) as image:
                assert image.getpixel((4, 4)) == colour
