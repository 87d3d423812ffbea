"""Listing the images in files, folders and tables."""

import os
from pathlib import Path

import pytest
from made import make_images

from nearkin.data.image_files import list_images
from nearkin.errors import NearkinError


@pytest.fixture
def pictures(tmp_path):
    """One folder per class, 12 images."""
    make_images(tmp_path / "pictures")
    return tmp_path / "pictures"


def labelled(places) -> list[tuple[str, str | None]]:
    return [(Path(image.path).name, image.label) for image in list_images(places)]


def test_folders_name_the_labels(pictures, tmp_path, monkeypatch):
    classes = sorted(pictures.iterdir())
    expected = [(f"{n}.png", f"class {c}") for c in range(3) for n in range(4)]
    assert labelled([pictures]) == expected
    assert labelled(classes) == expected  # as a shell's pictures/* gives them
    assert labelled([classes[0]]) == [(f"{n}.png", None) for n in range(4)]
    (pictures / "loose.JPG").write_bytes(b"x")
    (pictures / "notes.txt").write_text("no image")
    (pictures / ".hidden").mkdir()
    assert labelled([pictures]) == [("loose.JPG", None), *expected]
    assert labelled([classes[1] / "2.png", pictures])[0] == ("2.png", None)
    assert len(labelled([pictures, pictures])) == 13
    monkeypatch.chdir(pictures)
    assert list_images(["class 0/1.png"])[0].path == str(pictures / "class 0" / "1.png")


def test_train_and_test_folders_are_looked_into(tmp_path):
    make_images(tmp_path / "train", classes=2, each=1)
    make_images(tmp_path / "test", classes=1, each=2)
    expected = [("0.png", "class 0"), ("0.png", "class 1"), ("0.png", "class 0"), ("1.png", "class 0")]
    assert labelled([tmp_path]) == expected


def test_a_table_has_paths_and_optional_labels(pictures):
    table = pictures / "list.csv"
    table.write_text('Path, Label\nclass 0/1.png, "a, b"\nclass 1/0.png,\n')
    assert labelled([table]) == [("1.png", "a, b"), ("0.png", None)]
    assert list_images([table])[0].path == str(pictures / "class 0" / "1.png")
    table.write_text("path\nclass 0/1.png\nnowhere.png\n")
    assert labelled([table]) == [("1.png", None), ("nowhere.png", None)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file\nx.png\n", "no column 'path'"),
        ("path,label\n", "no images"),
        ("path,label\na.png,b,c\n", "line 2: 3 fields"),
        ("", "no column 'path'"),
    ],
)
def test_bad_tables_are_refused(tmp_path, text, words):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(NearkinError, match=words):
        list_images([tmp_path / "list.csv"])


def test_places_without_images_are_refused(tmp_path):
    with pytest.raises(NearkinError, match="no file or folder"):
        list_images([tmp_path / "nowhere"])
    with pytest.raises(NearkinError, match="There is no image"):
        list_images([tmp_path])


def test_every_image_is_listed_or_passed_over_with_a_reason(pictures):
    top, photo = pictures, (pictures / "class 0" / "0.png").read_bytes()
    (top / "class 0" / "no suffix").write_bytes(photo)
    (top / "class 0" / "photo.HEIC").write_bytes(b"damaged")
    (top / "class 0" / "drawing.psd").write_bytes(b"8BPS")
    (top / "class 0" / "labels.txt").write_text("P5 and BM and GIF8 are words here")
    (top / "class 0" / "video.mp4").write_bytes(b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41")
    (top / "class 0" / "._0.png").write_bytes(b"\0\5\x16\7 resource fork")
    (top / "class 0" / ".hidden.png").write_bytes(photo)
    (top / "class 0" / ".cache").mkdir()
    (top / "class 0" / ".cache" / "thumbnail.png").write_bytes(photo)
    (top / "class 1" / "link").symlink_to(top / "class 2")
    passed = []
    names = [Path(image.path).name for image in list_images([top], passed.extend)]
    assert {"no suffix", "photo.HEIC", "drawing.psd"} <= set(names)
    assert len(names) == 12 + 3
    assert [(path.name, reason) for path, reason in passed] == [
        (".hidden.png", "its name begins with a dot"),
        ("link", "it is a link to a folder, which is not followed"),
    ]


def test_images_beside_train_and_test_are_passed_over_by_name(tmp_path):
    for part in ("train", "test", "val"):
        make_images(tmp_path / part, classes=2, each=1)
    (tmp_path / "loose.jpg").write_bytes(b"x")
    passed = []
    assert len(list_images([tmp_path], passed.extend)) == 4
    assert [path.name for path, _ in passed] == ["loose.jpg", "val"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="There are no named pipes here.")
def test_pipes_and_devices_are_refused_by_what_they_are(tmp_path):
    for name in ("pipe.png", "pipe.csv"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(NearkinError, match=f"{name} is a pipe or a device: name image files"):
            list_images([tmp_path / name])
    with pytest.raises(NearkinError, match="is a pipe or a device"):
        list_images([os.devnull])
