"""Images in tar and Arrow files: the same images, classes and batches as from files, without opening any."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from image_helpers import SHORT_SIDE, check_pixels, decode_images, files_by_class, make_photos

from nearkin.data import archive_index, load_dataset
from nearkin.data.image_files import list_images
from nearkin.data.image_mark import image_mark
from nearkin.data.images import Images
from nearkin.data.pixels import archives, decode
from nearkin.data.pixels.archives import locate, scan_tar
from nearkin.data.pixels.open import Location, find_unreadable, open_store
from nearkin.errors import NearkinError

CLASSES = ("crow", "jay", "tit", "wren")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    archives._members.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return list(make_photos(tmp_path / "photos").sources)  # type: ignore[arg-type]


def write_tar(path: Path, members: dict[str, bytes], *, form: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5
            tar.addfile(member, io.BytesIO(data))
    return path


def samples(photos: list[Path], label: str = "cls") -> dict[str, bytes]:
    """Eight images, two per class; a folder, a .cls or an entry of .json says which."""
    members = {}
    for n, photo in enumerate(photos):
        name = CLASSES[n % 4]
        key = f"{name}/{n:03d}" if label == "prefix" else f"{n:03d}"
        members[f"{key}{photo.suffix}"] = photo.read_bytes()
        if label == "cls":
            members[f"{key}.cls"] = f"{name}\n".encode()
        elif label != "prefix":
            members[f"{key}.json"] = json.dumps({"id": n, label: name}).encode()
    return members


def write_arrow(
    folder: Path, photos: list[Path], *, labels: pa.Array, names: tuple[str, ...] = (), column: str = "label"
) -> Path:
    """As datasets.Dataset.save_to_disk does: two files, each a stream of record batches."""
    features = {"image": {"_type": "Image"}, column: {"names": list(names), "_type": "ClassLabel"} if names else {}}
    images = [{"bytes": photo.read_bytes(), "path": photo.name} for photo in photos]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", kind), (column, labels.type)], {"huggingface": json.dumps({"info": {"features": features}})}
    )
    folder.mkdir(parents=True)
    half = len(photos) // 2
    for number, part in enumerate((slice(0, half), slice(half, None))):
        file = folder / f"data-{number:05d}-of-00002.arrow"
        with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
            rows = range(len(photos))[part]
            for start in range(rows.start, rows.stop, 3):
                stop = min(start + 3, rows.stop)
                writer.write_batch(
                    pa.record_batch([pa.array(images[start:stop], kind), labels[start:stop]], schema=schema)
                )
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    return folder


def check_images(images: Images, photos: list[Path], rows: list[int]) -> None:
    """Check that images are photographs of these numbers, however they are read."""
    want = decode_images(Images([photos[row] for row in rows], torch.zeros(len(rows), dtype=torch.int64), ("x",)))
    locations: tuple[Location, ...] = ("device", "stream")
    for location in locations:
        store, found, bad = open_store(images, short_side=SHORT_SIDE, device="cpu", location=location)
        assert (len(found), bad) == (len(rows), [])
        check_pixels(store[torch.arange(len(rows))], want)


@pytest.mark.parametrize("label", ["cls", "prefix", "species"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tars_hold_the_images_that_the_files_are(tmp_path: Path, photos: list[Path], label: str, form: int) -> None:
    members = list(samples(photos, label).items())
    for number, part in enumerate((members[: len(members) // 2], members[len(members) // 2 :])):
        write_tar(tmp_path / "birds" / f"birds-{number}.tar", dict(part), form=form)
    call = "tar" if label in ("cls", "prefix") else f"tar(label={label})"
    data = load_dataset(f"{call}:{tmp_path / 'birds'}")
    assert (data.train.names, data.test.names) == (("crow", "jay"), ("tit", "wren"))
    numbers = [int(path.stem) for path in data.train.sources]  # type: ignore[union-attr]
    assert sorted(numbers) == [0, 1, 4, 5]
    assert [CLASSES[n % 4] for n in numbers] == [data.train.names[c] for c in data.train.labels.tolist()]
    check_images(data.train, photos, numbers)
    again = load_dataset(f"{call}:{tmp_path}/birds/birds-{{0..1}}.tar")
    assert again.train.sources == data.train.sources
    assert image_mark(data) == image_mark(again)


def test_an_index_is_made_once(tmp_path: Path, photos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand images: later, no image and no header of a member is read before the first batch."""
    data = [photo.read_bytes() for photo in photos]
    members = {f"{n % 100:02d}/{n:05d}.jpg": data[n % 8] for n in range(10_000)}
    spec = f"tar:{write_tar(tmp_path / 'many.tar', members)}"
    first = load_dataset(spec)
    reads: list[object] = []
    for module, name in ((archive_index, "scan_tar"), (archive_index, "shown_size"), (archives, "scan_tar")):
        monkeypatch.setattr(module, name, lambda *a, name=name: reads.append((name, a)))
    real = decode.read_place
    monkeypatch.setattr(decode, "read_place", lambda *a: reads.append("image") or real(*a))
    second = load_dataset(spec)
    assert second.train.sources == first.train.sources
    assert torch.equal(second.train.labels, first.train.labels)
    sample = len(reads)
    assert sample <= 32  # whether they are small and grey
    store, images, _ = open_store(second.train, short_side=SHORT_SIDE, device="cpu", location="stream")
    assert len(images) == len(first.train)
    assert len(reads) == sample
    store[torch.tensor([5, 4000])]
    assert len(reads) == sample  # batches go through decoders.read_place


def test_members_are_found_by_their_path_alone(tmp_path: Path, photos: list[Path]) -> None:
    tar = write_tar(tmp_path / "birds.tar", samples(photos))
    path = tar / "005.jpg"
    assert torch.equal(
        decode.decode_file(Path(str(path)), short_side=SHORT_SIDE), decode.decode_file(photos[5], short_side=SHORT_SIDE)
    )
    with pytest.raises(decode.BadImage, match="there is no such file"):
        decode.decode_file(tar / "055.jpg", short_side=SHORT_SIDE)
    write_tar(tar, {"055.jpg": photos[3].read_bytes()})  # it has changed
    assert locate(tar / "055.jpg").size == photos[3].stat().st_size
    assert locate(photos[3]) == (str(photos[3]), 0, -1)


def test_a_tar_is_listed_as_its_images(tmp_path: Path, photos: list[Path]) -> None:
    tar = write_tar(tmp_path / "birds.tar", samples(photos))
    found = list_images([tar])
    assert [(Path(image.path).name, image.label) for image in found][:2] == [("000.png", "crow"), ("001.jpg", "jay")]
    assert len(list_images([found[0].path])) == 1
    table = tmp_path / "table.csv"
    table.write_text(
        "path,label\n" + "".join(f"birds.tar/{n:03d}.{'jpg' if n % 2 else 'png'},{n % 4}\n" for n in range(8))
    )
    assert len(load_dataset(f"csv:{table}").train) == 4


@pytest.mark.parametrize("label", ["cls", "prefix"])
def test_members_named_from_the_folder_they_are_in(tmp_path: Path, photos: list[Path], label: str) -> None:
    """`tar -cf birds.tar .` writes ./crow/000.png."""
    members = {f"./{name}": data for name, data in samples(photos, label).items()}
    tar = write_tar(tmp_path / "birds.tar", members)
    assert load_dataset(f"tar:{tar}").train.names == ("crow", "jay")
    for image in list_images([tar]):
        assert image.label in CLASSES
        assert locate(image.path).file == str(tar)


def test_images_without_a_class_are_listed(tmp_path: Path, photos: list[Path]) -> None:
    members = {f"{n}{photo.suffix}": photo.read_bytes() for n, photo in enumerate(photos)}
    tar = write_tar(tmp_path / "birds.tar", {"crow/9.png": photos[0].read_bytes(), **members})
    assert [image.label for image in list_images([tar])] == [None] * 8 + ["crow"]
    folder = write_arrow(tmp_path / "birds", photos, labels=pa.array([1] * 8), column="kind")
    assert [image.label for image in list_images([folder])] == [None] * 8
    with pytest.raises(NearkinError, match="has no column label"):
        load_dataset(f"arrow:{folder}")


def test_a_bad_image_in_a_tar_is_named(tmp_path: Path, photos: list[Path]) -> None:
    tar = write_tar(tmp_path / "birds.tar", samples(photos) | {"004.png": b"no image"})
    data = load_dataset(f"tar:{tar}")
    _, images, bad = open_store(data.train, short_side=SHORT_SIDE, device="cpu", location="stream")
    assert (len(images), [str(image.path) for image in bad]) == (3, [str(tar / "004.png")])
    assert "004.png" in find_unreadable(data)[0]


@pytest.mark.parametrize(
    ("members", "spec", "says"),
    [
        ({"a.jpg": b"x"}, "tar", "neither a file a.cls nor a folder"),
        ({"a.jpg": b"x"}, "tar(label=cls)", "no file a.cls, which label=cls needs"),
        ({"a.jpg": b"x", "a.json": b"{}"}, "tar(label=kind)", "a.json has no entry kind"),
        ({"a.jpg": b"x", "a.png": b"x", "a.cls": b"1"}, "tar", "2 images of one name a"),
        ({"a.txt": b"x"}, "tar", "holds no images"),
        ({"a.jpg": b"x", "a.cls": b" "}, "tar", "the class of a is ''"),
    ],
)
def test_tars_that_cannot_be_used_are_refused_in_a_sentence(
    tmp_path: Path, members: dict[str, bytes], spec: str, says: str
) -> None:
    tar = write_tar(tmp_path / "x.tar", members)
    with pytest.raises(NearkinError, match=says):
        load_dataset(f"{spec}:{tar}")


def test_damaged_tars_are_refused(tmp_path: Path, photos: list[Path]) -> None:
    tar = write_tar(tmp_path / "x.tar", samples(photos))
    whole = tar.read_bytes()
    tar.write_bytes(whole[:3000])
    with pytest.raises(NearkinError, match="is truncated"):
        list(scan_tar(str(tar)))
    tar.write_bytes(b"\x1f\x8b" + whole)
    with pytest.raises(NearkinError, match="no tar file"):
        list(scan_tar(str(tar)))
    with pytest.raises(NearkinError, match="There is no tar file"):
        load_dataset(f"tar:{tmp_path / 'y-*.tar'}")


@pytest.mark.parametrize("kind", ["named", "numbers", "words"])
def test_arrow_data_sets_hold_the_images_that_the_files_are(tmp_path: Path, photos: list[Path], kind: str) -> None:
    numbers = np.arange(8) % 4
    labels = pa.array([CLASSES[n] for n in numbers] if kind == "words" else numbers)
    folder = write_arrow(tmp_path / "birds", photos, labels=labels, names=CLASSES if kind == "named" else ())
    data = load_dataset(f"arrow:{folder}")
    assert data.train.names == (("0", "1") if kind == "numbers" else ("crow", "jay"))
    rows = [int(path.name) + 4 * ("00001-of" in str(path)) for path in data.train.sources]  # type: ignore[union-attr]
    assert rows == [0, 1, 4, 5]
    check_images(data.train, photos, rows)
    path = Path(str(data.train.sources[3]))
    assert locate(path) == locate(data.train.sources[3])  # type: ignore[arg-type]
    assert len(list_images([folder])) == 8


def test_splits_of_arrow_data_sets_and_of_tars_are_kept(tmp_path: Path, photos: list[Path]) -> None:
    labels = pa.array(["a", "b"] * 4)
    for part in ("train", "test"):
        write_arrow(tmp_path / "birds" / part, photos, labels=labels)
        write_tar(tmp_path / "tars" / part / "0.tar", samples(photos))
    for spec in (f"arrow:{tmp_path / 'birds'}", f"tar:{tmp_path / 'tars'}"):
        data = load_dataset(spec)
        assert (len(data.train), len(data.test)) == (8, 8)
    assert len(list_images([tmp_path / "birds"])) == 16
    assert files_by_class(load_dataset(f"tar:{tmp_path / 'tars'}").test)["jay"] == ["001.jpg", "005.jpg"]


def test_arrow_files_that_cannot_be_used_are_refused_in_a_sentence(tmp_path: Path, photos: list[Path]) -> None:
    folder = write_arrow(tmp_path / "birds", photos, labels=pa.array([0, -1] * 4), names=CLASSES)
    with pytest.raises(NearkinError, match="has the class -1, but 4 names"):
        load_dataset(f"arrow:{folder}")
    with pytest.raises(NearkinError, match="has no column species"):
        load_dataset(f"arrow(label=species):{folder}")
    with pytest.raises(NearkinError, match="made by save_to_disk"):
        load_dataset(f"arrow:{tmp_path / 'photos'}")
    (folder / "data-00000-of-00002.arrow").write_bytes(b"no arrow")
    with pytest.raises(NearkinError, match=r"Cannot read .* as an Arrow file"):
        load_dataset(f"arrow:{folder}")
