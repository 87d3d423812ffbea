"""Names of items: exact in the index, readable in every answer, and usable in the next request."""

import io
import os

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

from nearkin.search.index import create_index
from nearkin.serve import make_app


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
