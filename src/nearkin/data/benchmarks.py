"""Read the four public benchmarks in their original layout, with the splits of the papers.

Every reader checks that the lists have as many images as the papers state and that each file exists. `expect` sets
other counts, or None for no check. To read a part of a benchmark, use `folder:`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from nearkin.data.image_files import file_size, lines, missing_or_empty, relative
from nearkin.data.images import Dataset, Images, counted, from_keys, listed
from nearkin.errors import NearkinError

Counts = Mapping[str, int]

CUB_COUNTS: Counts = {"training": 5_864, "test": 5_924}
CARS_COUNTS: Counts = {"training": 8_054, "test": 8_131}
SOP_COUNTS: Counts = {"training": 59_551, "test": 60_502}
INSHOP_COUNTS: Counts = {"training": 25_882, "query": 14_218, "gallery": 12_612}

CUB = (
    "Caltech-UCSD Birds-200-2011 (Wah, Branson, Welinder, Perona, Belongie), "
    "https://www.vision.caltech.edu/datasets/cub_200_2011/"
)
CARS = (
    "the Cars dataset of 196 classes (Krause, Stark, Deng, Fei-Fei), files car_ims.tgz and cars_annos.mat, "
    "https://ai.stanford.edu/~jkrause/cars/car_dataset.html"
)
SOP = "Stanford Online Products (Oh Song, Xiang, Jegelka, Savarese), https://cvgl.stanford.edu/projects/lifted_struct/"
INSHOP = (
    "DeepFashion, In-shop Clothes Retrieval Benchmark (Liu, Luo, Qiu, Wang, Tang), "
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion.html"
)


def read_cub(path: Path, *, expect: Counts | None = CUB_COUNTS) -> Dataset:
    """Read CUB-200-2011: classes 1–100 train, 101–200 test. `path` is the folder CUB_200_2011 or the one around it."""
    root = _root(
        path, "CUB_200_2011", needs=("images.txt", "image_class_labels.txt", "classes.txt", "images"), source=CUB
    )
    names: dict[int, str] = dict(_fields(root / "classes.txt", (int, str)))
    files: dict[int, str] = dict(_fields(root / "images.txt", (int, str)))
    labels: dict[int, int] = dict(_fields(root / "image_class_labels.txt", (int, int)))
    _check_same_images(files, labels, root)
    _check_labels(labels, names, files, root)
    folder = root / "images"
    paths = [folder / file for file in files.values()]
    halves = _halves("cub", paths, [labels[image] for image in files], names, root=root, source=CUB, expect=expect)
    return replace(halves, test_short_side=256)  # the papers show 224 pixels of 256


def read_cars(path: Path, *, expect: Counts | None = CARS_COUNTS) -> Dataset:
    """Read Cars196: classes 1–98 train, 99–196 test, from cars_annos.mat (not the train/test lists of the devkit)."""
    root = _root(path, "cars196", needs=("cars_annos.mat", "car_ims"), source=CARS)
    files, labels, names = _annotations(root / "cars_annos.mat")
    _check_labels(dict(enumerate(labels)), names, dict(enumerate(files)), root)
    return _halves("cars", [root / file for file in files], labels, names, root=root, source=CARS, expect=expect)


def _annotations(path: Path) -> tuple[list[str], list[int], dict[int, str]]:
    from scipy.io import loadmat  # only this reader needs scipy

    try:
        content: dict[str, Any] = loadmat(str(path), squeeze_me=True)
        notes = content["annotations"].reshape(-1)
        files = [str(file) for file in notes["relative_im_path"]]
        labels = [int(label) for label in notes["class"]]
        names = {c: str(name) for c, name in enumerate(content["class_names"].reshape(-1), start=1)}
    except Exception as error:  # scipy raises many kinds of errors for a damaged file
        raise NearkinError(
            f"Cannot read {path} ({type(error).__name__}): it should contain annotations with relative_im_path "
            f"and class, and class_names. Get {CARS}."
        ) from None
    return files, labels, names


def read_sop(path: Path, *, expect: Counts | None = SOP_COUNTS) -> Dataset:
    """Read Stanford Online Products: Ebay_train.txt trains, Ebay_test.txt tests."""
    root = _root(path, "Stanford_Online_Products", needs=("Ebay_train.txt", "Ebay_test.txt"), source=SOP)
    train, test = (_products(root / f"Ebay_{part}.txt", root=root) for part in ("train", "test"))
    return _complete(Dataset("sop", train, test), expect, root=root, source=SOP)


def _products(path: Path, *, root: Path) -> Images:
    rows = list(_fields(path, (int, int, int, str), header="image_id class_id super_class_id path"))
    names = {c: f"{file.split('/')[0].removesuffix('_final')} {c}" for _, c, _, file in rows}
    return from_keys([root / file for *_, file in rows], [c for _, c, _, _ in rows], names=names)


def read_inshop(path: Path, *, expect: Counts | None = INSHOP_COUNTS) -> Dataset:
    """Read In-Shop Clothes Retrieval: train, query and gallery by list_eval_partition.txt; items are classes."""
    places = [path / folder / "list_eval_partition.txt" for folder in ("Eval", "Anno", ".")]
    partition = next((file for file in places if os.path.isfile(file)), None)
    if partition is None:
        raise NearkinError(f"{path} has no Eval/list_eval_partition.txt (nor one beside it). Get {INSHOP}.")
    top = next((path / folder for folder in ("Img", ".") if os.path.isdir(path / folder / "img")), None)
    if top is None:
        raise NearkinError(f"{path} has no folder Img/img or img: unpack img.zip there. Get {INSHOP}.")
    rows = _partition(partition)
    splits = {split: [row for row in rows if row[2] == split] for split in ("train", "query", "gallery")}
    tested = splits["query"] + splits["gallery"]
    train = from_keys([top / row[0] for row in splits["train"]], [row[1] for row in splits["train"]])
    test = from_keys([top / row[0] for row in tested], [row[1] for row in tested])
    query = torch.arange(len(tested)) < len(splits["query"])
    test = Images(test.sources, test.labels, test.names, query, ~query)
    return _complete(Dataset("inshop", train, test), expect, root=path, source=INSHOP)


def _partition(path: Path) -> list[tuple[Any, ...]]:
    """Return image, item and split of every line after the count and the header."""
    numbered = lines(path)
    number, first = next(numbered, (1, ""))
    announced = _convert(first, int, path, number)
    rows = list(_fields(path, (str, str, str), header="image_name item_id evaluation_status", skip=number))
    if len(rows) != announced:
        raise NearkinError(
            f"{path} announces {announced:,} images but lists {len(rows):,}: the file is incomplete. Get {INSHOP}."
        )
    for image, _, split in rows:
        if split not in ("train", "query", "gallery"):
            raise NearkinError(f"{path}: {image} has the status {split!r}, not train, query or gallery. Get {INSHOP}.")
    return rows


def _root(path: Path, usual: str, *, needs: Sequence[str], source: str) -> Path:
    """Return the folder with the needed files: `path`, or the usual folder inside it."""
    tried = [folder for folder in (path, path / usual) if os.path.isdir(folder)]
    if not tried:
        raise NearkinError(f"There is no folder {path}. Get {source}.")
    missing = {folder: [name for name in needs if not os.path.exists(folder / name)] for folder in tried}
    best = min(tried, key=lambda folder: len(missing[folder]))
    if missing[best]:
        raise NearkinError(f"{best} has no {' and no '.join(missing[best])}. Get {source}.")
    return best


def _fields(
    path: Path, kinds: Sequence[Callable[[str], Any]], *, header: str = "", skip: int = 0
) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of each line; the last one may contain spaces. A header line is skipped."""
    for number, line in lines(path):
        if number <= skip or (header and line.split() == header.split()):
            continue
        fields = line.split(maxsplit=len(kinds) - 1)
        if len(fields) != len(kinds):
            raise NearkinError(f"{path}, line {number}: {len(kinds)} fields are expected, but the line is {line!r}.")
        yield tuple(_convert(field, kind, path, number) for field, kind in zip(fields, kinds, strict=True))


def _convert(text: str, kind: Callable[[str], Any], path: Path, number: int) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise NearkinError(f"{path}, line {number}: a whole number is expected, not {text!r}.") from None


def _check_same_images(files: Mapping[int, str], labels: Mapping[int, int], root: Path) -> None:
    odd = sorted(files.keys() ^ labels.keys())
    if odd:
        raise NearkinError(
            f"{root}: images.txt and image_class_labels.txt do not list the same images; only in one: "
            f"{listed([f'image {image}' for image in odd])}. Get {CUB}."
        )


def _check_labels(labels: Mapping[int, int], names: Mapping[int, str], files: Mapping[int, str], root: Path) -> None:
    """Refuse labels that are not in the list of classes."""
    unknown = [f"{files[image]} (class {c})" for image, c in labels.items() if c not in names]
    if unknown:
        labels_are = counted(len(unknown), "label is", "labels are")
        raise NearkinError(f"{root}: {labels_are} not in the list of {len(names)} classes: {listed(unknown)}.")


def _halves(
    name: str,
    paths: list[Path],
    labels: list[int],
    names: Mapping[int, str],
    *,
    root: Path,
    source: str,
    expect: Counts | None,
) -> Dataset:
    """Use the first half of the listed classes for training, the second for testing."""
    order = sorted(names)
    first = set(order[: (len(order) + 1) // 2])
    rows = range(len(labels))
    train, test = (
        from_keys([paths[row] for row in half], [labels[row] for row in half], names=names)
        for half in ([row for row in rows if labels[row] in first], [row for row in rows if labels[row] not in first])
    )
    used = set(labels)
    empty = [names[c] for c in order if c not in used]
    count = counted(len(empty), "listed class", "listed classes")
    notes = (f"{count} without images left out: {listed(empty)}.",) if empty else ()
    return _complete(Dataset(name, train, test, notes), expect, root=root, source=source)


def _complete(dataset: Dataset, expect: Counts | None, *, root: Path, source: str) -> Dataset:
    """Return the data set, or refuse it if images are missing: its scores could not be compared."""
    name, test = dataset.name, dataset.test
    found = {"training": len(dataset.train), "test": len(test)}
    if test.query is not None and test.gallery is not None:
        found |= {"query": int(test.query.sum()), "gallery": int(test.gallery.sum())}
    wrong = [
        f"{found[split]:,} {split} images instead of {count:,}"
        for split, count in (expect or {}).items()
        if found[split] != count
    ]
    if wrong:
        raise NearkinError(
            f"{name}: the lists in {root} have {' and '.join(wrong)}. Get {source}; read a part of it with folder:PATH."
        )
    for images in (dataset.train, test):
        paths = cast("list[Path]", images.sources)
        if bad := missing_or_empty(map(file_size, paths)):
            first = [f"{relative(paths[row], root=root)} ({why})" for row, why in bad.items()]
            raise NearkinError(
                f"{name}: {len(bad):,} of {len(paths):,} images are missing or empty in {root}: {listed(first)}. "
                f"Unpack it again; get {source}."
            )
    return dataset
