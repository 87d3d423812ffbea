"""The public benchmarks in their original layout, in miniature."""

from pathlib import Path

import numpy as np
import pytest
from image_helpers import files_by_class, save_picture
from scipy.io import savemat

from nearkin.data import load_dataset
from nearkin.data.benchmarks import (
    CARS_COUNTS,
    CUB_COUNTS,
    INSHOP_COUNTS,
    SOP_COUNTS,
    read_cars,
    read_cub,
    read_inshop,
    read_sop,
)
from nearkin.data.splits import swapped
from nearkin.errors import NearkinError


def cub(top: Path, counts: tuple[int, ...] = (2, 3, 1, 2)) -> Path:
    root = top / "CUB_200_2011"
    labels = [c for c, count in enumerate(counts, start=1) for _ in range(count)]
    names = [f"{c:03}.Bird_{c}" for c in range(1, len(counts) + 1)]
    for n, c in enumerate(labels, start=1):
        save_picture(root / "images" / names[c - 1] / f"Bird_{n:04}.jpg")
    files = [f"{names[c - 1]}/Bird_{n:04}.jpg" for n, c in enumerate(labels, start=1)]
    (root / "classes.txt").write_text("".join(f"{c} {name}\n" for c, name in enumerate(names, start=1)))
    (root / "images.txt").write_text("".join(f"{n} {file}\n" for n, file in enumerate(files, start=1)))
    (root / "image_class_labels.txt").write_text("".join(f"{n} {c}\n" for n, c in enumerate(labels, start=1)))
    return root


def test_cub(tmp_path):
    root = cub(tmp_path)
    for path in (root, tmp_path):  # the folder itself or the one around it
        dataset = read_cub(path, expect={"training": 5, "test": 3})
        assert dataset.train.names == ("001.Bird_1", "002.Bird_2")
        assert dataset.train.labels.tolist() == [0, 0, 1, 1, 1]
        assert dataset.test.labels.tolist() == [0, 1, 1]
        assert all(file.is_file() for file in [*dataset.train.sources, *dataset.test.sources])


def test_cub_says_how_large_its_test_images_usually_are(tmp_path):
    dataset = read_cub(cub(tmp_path), expect=None)
    assert dataset.test_short_side == 256
    assert swapped(dataset).test_short_side == 0, "the other half is kept larger"


def test_the_counts_of_the_papers_are_checked(tmp_path):
    assert (CUB_COUNTS["training"], CUB_COUNTS["test"]) == (5_864, 5_924)
    assert (CARS_COUNTS["training"], CARS_COUNTS["test"]) == (8_054, 8_131)
    assert (SOP_COUNTS["training"], SOP_COUNTS["test"]) == (59_551, 60_502)
    assert tuple(INSHOP_COUNTS.values()) == (25_882, 14_218, 12_612)
    makers = {"cub": cub, "cars": cars, "sop": sop, "inshop": inshop}
    wrong = {
        "cub": "instead of 5,864",
        "cars": "instead of 8,131",
        "sop": "instead of 60,502",
        "inshop": "instead of 14,218",
    }
    for name, make in makers.items():
        with pytest.raises(NearkinError, match=f"{wrong[name]}.* Get .*https://"):
            load_dataset(f"{name}:{make(tmp_path / name)}")


def test_cub_refuses_inconsistent_lists(tmp_path):
    root = cub(tmp_path)
    labels = (root / "image_class_labels.txt").read_text()
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", "3 9\n"))
    with pytest.raises(
        NearkinError, match=r"1 label is not in the list of 4 classes: 002.Bird_2/Bird_0003.jpg \(class 9\)"
    ):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", ""))
    with pytest.raises(NearkinError, match="only in one: image 3"):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", "3 two\n"))
    with pytest.raises(NearkinError, match="line 3: a whole number is expected, not 'two'"):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", "3\n"))
    with pytest.raises(NearkinError, match="line 3: 2 fields are expected"):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").unlink()
    with pytest.raises(NearkinError, match=r"has no image_class_labels.txt. Get Caltech"):
        read_cub(root, expect=None)


def test_cub_refuses_missing_and_empty_files_by_name(tmp_path):
    root = cub(tmp_path)
    (root / "images/001.Bird_1/Bird_0001.jpg").unlink()
    (root / "images/002.Bird_2/Bird_0003.jpg").write_bytes(b"")
    with pytest.raises(NearkinError, match=r"2 of 5 .*Bird_0001.jpg \(missing\), .*Bird_0003.jpg \(empty\)"):
        read_cub(root, expect=None)


def test_cub_names_a_listed_class_without_images(tmp_path):
    dataset = read_cub(cub(tmp_path, (2, 0, 1, 2)), expect=None)
    assert dataset.train.names == ("001.Bird_1",)  # classes 1 and 2 of 4 are the training half, full or not
    assert dataset.notes == ("1 listed class without images left out: 002.Bird_2.",)


def cars(top: Path, labels: tuple[int, ...] = (3, 1, 4, 2, 1)) -> Path:
    for n in range(1, len(labels) + 1):
        save_picture(top / "car_ims" / f"{n:06}.jpg")
    kinds = [("relative_im_path", object), ("bbox_x1", object), ("class", object), ("test", object)]
    rows = [(f"car_ims/{n:06}.jpg", 1, c, 0) for n, c in enumerate(labels, start=1)]
    annotations = np.array([rows], dtype=kinds) if len(rows) > 1 else np.array(rows, dtype=kinds)
    names = np.array([["AM General Hummer", "Acura RL", "Acura TL", "Audi V8"]], dtype=object)
    savemat(top / "cars_annos.mat", {"annotations": annotations, "class_names": names})
    return top


def test_cars(tmp_path):
    dataset = read_cars(cars(tmp_path), expect={"training": 3, "test": 2})
    assert dataset.train.names == ("AM General Hummer", "Acura RL")
    assert files_by_class(dataset.train) == {
        "AM General Hummer": ["000002.jpg", "000005.jpg"],
        "Acura RL": ["000004.jpg"],
    }
    assert files_by_class(dataset.test) == {"Acura TL": ["000001.jpg"], "Audi V8": ["000003.jpg"]}


def test_cars_refuses_unknown_labels_and_damaged_annotations(tmp_path):
    with pytest.raises(NearkinError, match=r"not in the list of 4 classes: car_ims/000002.jpg \(class 7\)"):
        read_cars(cars(tmp_path, (1, 7, 4)), expect=None)
    (tmp_path / "cars_annos.mat").write_bytes(b"not a mat file")
    with pytest.raises(NearkinError, match=r"Cannot read .*cars_annos.mat"):
        read_cars(tmp_path, expect=None)
    savemat(tmp_path / "cars_annos.mat", {"something": 1})
    with pytest.raises(NearkinError, match="should contain annotations"):
        read_cars(tmp_path, expect=None)
    (tmp_path / "cars_annos.mat").unlink()
    with pytest.raises(NearkinError, match=r"has no cars_annos.mat. Get the Cars dataset"):
        read_cars(tmp_path, expect=None)


def sop(top: Path) -> Path:
    header = "image_id class_id super_class_id path\n"
    train = ["1 1 1 bicycle_final/111_0.JPG", "2 1 1 bicycle_final/111_1.JPG", "3 2 1 bicycle_final/222_0.JPG"]
    test = ["4 11 2 chair_final/333_0.JPG", "5 11 2 chair_final/333_1.JPG"]
    for line in train + test:
        save_picture(top / line.split()[-1])
    (top / "Ebay_train.txt").write_text(header + "\n".join(train) + "\n")
    (top / "Ebay_test.txt").write_text(header + "\n".join(test) + "\n")
    return top


def test_sop(tmp_path):
    root = sop(tmp_path / "Stanford_Online_Products")
    for path in (root, tmp_path):
        dataset = read_sop(path, expect={"training": 3, "test": 2})
        assert files_by_class(dataset.train) == {"bicycle 1": ["111_0.JPG", "111_1.JPG"], "bicycle 2": ["222_0.JPG"]}
        assert files_by_class(dataset.test) == {"chair 11": ["333_0.JPG", "333_1.JPG"]}
    (root / "chair_final/333_1.JPG").unlink()
    with pytest.raises(NearkinError, match=r"1 of 2 .*chair_final/333_1.JPG \(missing\)"):
        read_sop(root, expect=None)


PARTITION = [
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/WOMEN/Tees/id_00000003/01_1_front.jpg", "id_00000003", "train"),
    ("img/MEN/Denim/id_00000001/01_1_front.jpg", "id_00000001", "query"),
    ("img/MEN/Denim/id_00000001/01_2_side.jpg", "id_00000001", "gallery"),
    ("img/MEN/Denim/id_00000004/01_1_front.jpg", "id_00000004", "query"),
]


def inshop(top: Path, *, lists: str = "Eval", images: str = "Img") -> Path:
    for file, _, _ in PARTITION:
        save_picture(top / images / file)
    lines = [f"{file}    {item} {part}" for file, item, part in PARTITION]
    text = "\n".join([str(len(lines)), "image_name item_id evaluation_status", *lines])
    (top / lists).mkdir(parents=True, exist_ok=True)
    (top / lists / "list_eval_partition.txt").write_text(text + "\n")
    return top


@pytest.mark.parametrize(("lists", "images"), [("Eval", "Img"), (".", "."), ("Eval", ".")])
def test_inshop(tmp_path, lists, images):
    dataset = read_inshop(
        inshop(tmp_path, lists=lists, images=images), expect={"training": 3, "query": 2, "gallery": 1}
    )
    assert dataset.train.names == ("id_00000002", "id_00000003")
    assert dataset.train.query is None
    assert dataset.test.names == ("id_00000001", "id_00000004")
    assert dataset.test.query.tolist() == [True, True, False]
    assert dataset.test.gallery.tolist() == [False, False, True]
    assert files_by_class(dataset.test) == {
        "id_00000001": ["01_1_front.jpg", "01_2_side.jpg"],
        "id_00000004": ["01_1_front.jpg"],
    }
    assert all(file.is_file() for file in [*dataset.train.sources, *dataset.test.sources])


def test_inshop_refuses_a_truncated_list_and_an_unknown_status(tmp_path):
    root = inshop(tmp_path)
    partition = root / "Eval/list_eval_partition.txt"
    text = partition.read_text()
    partition.write_text("\n".join(text.splitlines()[:-1]))
    with pytest.raises(NearkinError, match="announces 6 images but lists 5"):
        read_inshop(root, expect=None)
    partition.write_text(text.replace("gallery", "galery"))
    with pytest.raises(NearkinError, match=r"01_2_side.jpg has the status 'galery'"):
        read_inshop(root, expect=None)
    partition.write_text("image_name item_id evaluation_status\n")
    with pytest.raises(NearkinError, match="line 1: a whole number"):
        read_inshop(root, expect=None)
    partition.unlink()
    with pytest.raises(NearkinError, match=r"no Eval/list_eval_partition.txt.*DeepFashion"):
        read_inshop(root, expect=None)
