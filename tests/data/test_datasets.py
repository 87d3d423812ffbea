"""Readers on tiny data in each layout, splits, and the sentences on what is wrong with the data."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from nearkin.data import DATASETS, Dataset, Images, describe, held_out, load_dataset, sample_fraction
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
from nearkin.errors import NearkinError


def picture(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (200, 40, 10)).save(path)
    return path.name


def made_up(counts: list[int], *, first: int = 0) -> Images:
    """counts[c] images of class c, rows mixed, sources numbered."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    paths = [Path(f"{n}.png") for n in range(len(labels))]
    return Images(paths, labels[order], tuple(f"c{first + c}" for c in range(len(counts))))


def files_by_name(images: Images) -> dict[str, list[str]]:
    rows = zip(images.sources, images.labels.tolist(), strict=True)
    found: dict[str, list[str]] = {name: [] for name in images.names}
    for path, label in rows:
        found[images.names[label]].append(Path(str(path)).name)
    return found


# Images


def test_take_relabels_densely_and_keeps_the_order_of_the_names():
    images = Images(
        torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.tensor([0, 1, 2, 2, 1, 3]), tuple("abcd")
    )
    some = images.take([5, 2, 4])
    assert some.names == ("b", "c", "d")
    assert some.labels.tolist() == [2, 1, 0]
    assert some.sources.flatten().tolist() == [5, 2, 4]
    assert images.of_classes([2, 0]).sources.flatten().tolist() == [0, 2, 3]
    assert images.of_classes([2, 0]).names == ("a", "c")
    assert images.counts.tolist() == [1, 2, 2, 1]
    assert len(images.take([])) == 0


def test_without_drops_rows_and_a_class_that_vanishes():
    paths = [Path(f"{n}.png") for n in range(4)]
    query = torch.tensor([True, False, True, False])
    images = Images(paths, torch.tensor([0, 1, 1, 2]), ("a", "b", "c"), query, ~query)
    left = images.without([0])
    assert left.names == ("b", "c")
    assert left.labels.tolist() == [0, 0, 1]
    assert left.sources == paths[1:]
    assert left.query.tolist() == [False, True, False]
    assert left.gallery.tolist() == [True, False, True]
    assert len(images.without([])) == 4


@pytest.mark.parametrize(
    ("labels", "names", "says"),
    [
        (torch.tensor([0, 2]), ("a", "b"), "0 … 1"),
        (torch.tensor([0, 0]), ("a", "b"), "each at least once"),
        (torch.tensor([0, -1]), ("a", "b"), "0 … 1"),
        (torch.tensor([0.0, 1.0]), ("a", "b"), "int64"),
        (torch.tensor([0]), ("a",), "2 images need 2 labels"),
    ],
)
def test_wrong_labels_are_refused(labels, names, says):
    with pytest.raises(NearkinError, match=says):
        Images([Path("x"), Path("y")], labels, names)


# Splits


def test_held_out_takes_the_last_classes_or_a_block():
    images = made_up([2, 3, 1, 4, 2, 2, 5, 1])
    train, validation = held_out(images, fraction=0.25)
    assert train.names == tuple(f"c{n}" for n in range(6))
    assert validation.names == ("c6", "c7")
    assert (len(train), len(validation)) == (14, 6)
    assert files_by_name(validation).items() <= files_by_name(images).items()
    train, validation = held_out(images, fold=(1, 4))
    assert validation.names == ("c2", "c3")
    assert train.names == ("c0", "c1", "c4", "c5", "c6", "c7")


def test_folds_cut_all_classes_once():
    images = made_up([1] * 11)
    blocks = [held_out(images, fold=(i, 4))[1].names for i in range(4)]
    assert [name for block in blocks for name in block] == list(images.names)
    assert {len(block) for block in blocks} == {2, 3}


@pytest.mark.parametrize(
    "how", [{"fraction": 0.0}, {"fraction": 1.0}, {"fold": (4, 4)}, {"fold": (0, 1)}, {"fraction": 0.1}]
)
def test_held_out_refuses_what_leaves_too_little(how):
    with pytest.raises(NearkinError):
        held_out(made_up([2] * 5), **how)


def test_sample_fraction_is_per_class_and_leaves_at_least_one():
    images = made_up([1, 10, 100, 7])
    part = sample_fraction(images, 0.1, seed=5)
    assert part.counts.tolist() == [1, 1, 10, 1]
    whole = files_by_name(images)
    assert all(set(files) <= set(whole[name]) for name, files in files_by_name(part).items())
    assert part.sources == sample_fraction(images, 0.1, seed=5).sources
    assert part.sources != sample_fraction(images, 0.1, seed=6).sources
    assert sample_fraction(images, 1.0, seed=5).sources == images.sources
    with pytest.raises(NearkinError, match="fraction"):
        sample_fraction(images, 0.0, seed=0)


# Specs


def test_the_table_says_how_each_is_written():
    assert set(DATASETS) == {"glyphs", "folder", "csv", "cub", "cars", "sop", "inshop"}
    assert all(reader.help for reader in DATASETS.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("club:/data", "Did you mean 'cub'"),
        ("cub", "needs a path: write cub:PATH"),
        ("cub:", "needs a path"),
        ("glyphs:/data", "takes no path"),
        ("glyphs(clases=5)", "Did you mean 'classes'"),
        ("cub(expect=None):/data", "no option 'expect'"),
        ("glyphs(x)", "key=value"),
        ("/no/such/place", "write one of glyphs, folder:PATH"),
        ("", "write one of"),
        ("folder:/no/such/place", "no folder /no/such/place"),
        ("csv:/no/such/place", "no file /no/such/place"),
        ("inshop:/no/such/place", "list_eval_partition.txt"),
        ("sop:/no/such/place", "lifted_struct"),
    ],
)
def test_wrong_specs_get_a_sentence(text, says):
    with pytest.raises(NearkinError, match=says.replace("(", r"\(")):
        load_dataset(text)


def test_a_bare_folder_is_told_how_to_be_written(tmp_path):
    with pytest.raises(NearkinError, match=f"folder:{tmp_path}"):
        load_dataset(str(tmp_path))


def test_halves_is_one_of_two(tmp_path):
    with pytest.raises(NearkinError, match="'first' or 'swapped'"):
        load_dataset("glyphs", halves="second")


# folder


@pytest.fixture
def birds(tmp_path) -> Path:
    for c, count in {"wren": 3, "crow": 2, "tit": 1, "jay": 2}.items():
        for n in range(count):
            picture(tmp_path / "birds" / c / f"{n}.png")
    return tmp_path / "birds"


def test_folder_is_halved_by_name_either_way_round(birds):
    dataset = load_dataset(f"folder:{birds}")
    assert dataset.train.names == ("crow", "jay")
    assert dataset.test.names == ("tit", "wren")
    assert files_by_name(dataset.test) == {"tit": ["0.png"], "wren": ["0.png", "1.png", "2.png"]}
    assert all(path.is_file() for path in dataset.train.sources)
    assert any("first 2 classes by name (crow … jay) train" in note for note in dataset.notes)
    assert any(
        "1 class in test whose queries have no relevant image" in note and "tit" in note for note in dataset.notes
    )
    other = load_dataset(f"folder:{birds}", halves="swapped")
    assert (other.train.names, other.test.names) == (dataset.test.names, dataset.train.names)
    assert any("of one image in train, kept" in note and "tit" in note for note in other.notes)


def test_an_odd_class_trains(birds):
    picture(birds / "owl" / "a.png")
    dataset = load_dataset(f"folder:{birds}")
    assert dataset.train.names == ("crow", "jay", "owl")


def test_numbered_folders_sort_as_numbers(tmp_path):
    for c in range(1, 13):
        picture(tmp_path / str(c) / "a.png")
    assert load_dataset(f"folder:{tmp_path}").train.names == ("1", "2", "3", "4", "5", "6")


def test_folder_uses_train_and_test_where_both_are_there(tmp_path):
    for part, c in [("train", "a"), ("train", "b"), ("test", "b"), ("test", "c"), ("val", "d")]:
        picture(tmp_path / part / c / "deeper" / "x.JPG")
        picture(tmp_path / part / c / "y.png")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert (dataset.train.names, dataset.test.names) == (("a", "b"), ("b", "c"))
    assert (len(dataset.train), len(dataset.test)) == (4, 4)
    assert any("left out: val" in note for note in dataset.notes)
    assert any("1 class in both train and test" in note for note in dataset.notes)


def test_folder_names_what_it_leaves_out(birds):
    (birds / "empty").mkdir()
    (birds / "crow" / "zero.jpg").touch()
    (birds / "crow" / "notes.txt").write_text("x")
    (birds / "crow" / ".hidden").write_text("x")
    picture(birds / "loose.png")
    dataset = load_dataset(f"folder:{birds}")
    assert len(dataset.train) + len(dataset.test) == 8
    notes = " ".join(dataset.notes)
    assert "1 class without images left out: empty." in notes
    assert "1 empty image file skipped: crow/zero.jpg." in notes
    assert "1 file that is not an image left out: crow/notes.txt." in notes
    assert "1 image file outside the class folders left out: loose.png." in notes
    assert "hidden" not in notes


def test_a_class_of_empty_files_alone_is_named(birds):
    for file in (birds / "jay").iterdir():
        file.write_bytes(b"")
    dataset = load_dataset(f"folder:{birds}")
    assert dataset.train.names == ("crow", "tit")
    assert any("2 empty image files skipped" in note for note in dataset.notes)
    assert any("without images left out: jay" in note for note in dataset.notes)


def test_folder_refuses_too_few_classes_and_no_images(tmp_path):
    with pytest.raises(NearkinError, match="no image in"):
        load_dataset(f"folder:{tmp_path}")
    picture(tmp_path / "a" / "x.png")
    picture(tmp_path / "b" / "x.png")
    with pytest.raises(NearkinError, match=r"2 classes \(a, b\).*at least 3"):
        load_dataset(f"folder:{tmp_path}")


def test_one_training_class_is_refused(tmp_path):
    picture(tmp_path / "train" / "a" / "x.png")
    picture(tmp_path / "test" / "b" / "x.png")
    with pytest.raises(NearkinError, match="1 training class"):
        load_dataset(f"folder:{tmp_path}")


# csv


def table(folder: Path, text: str, *, pictures: bool = True) -> str:
    if pictures:
        for line in text.strip().splitlines()[1:]:
            picture(folder / line.split(",")[0].strip())
    (folder / "list.csv").write_text(text, encoding="utf-8-sig")
    return f"csv:{folder / 'list.csv'}"


def test_csv_without_split_is_halved(tmp_path):
    dataset = load_dataset(table(tmp_path, "Path, Label\nx/1.png, b\nx/2.png, a\nx/3.png, c\nx/4.png, d\nx/5.png, a\n"))
    assert dataset.train.names == ("a", "b")
    assert files_by_name(dataset.train) == {"a": ["2.png", "5.png"], "b": ["1.png"]}
    assert dataset.test.query is None


def test_csv_with_split_and_role(tmp_path):
    rows = ["b,1.png,train,", "a,2.png,train,", "c,3.png,test,query", "c,4.png,test,gallery", "d,5.png,test,query"]
    text = "\n".join(["label,path,split,role", *rows])
    for n in range(1, 6):
        picture(tmp_path / f"{n}.png")
    dataset = load_dataset(table(tmp_path, text, pictures=False))
    assert dataset.train.names == ("a", "b")
    assert dataset.test.query.tolist() == [True, False, True]
    assert dataset.test.gallery.tolist() == [False, True, False]
    assert any("no relevant image" in note and note.endswith("d.") for note in dataset.notes)
    assert [(part.part, part.images, part.classes) for part in describe(dataset)] == [
        ("train", 2, 2),
        ("test", 3, 2),
        ("query", 2, 2),
        ("gallery", 1, 1),
    ]
    with pytest.raises(NearkinError, match="cannot be swapped"):
        load_dataset(f"csv:{tmp_path / 'list.csv'}", halves="swapped")


def test_csv_with_role_alone_trains_on_the_rest(tmp_path):
    text = "path,label,role\n1.png,a,\n2.png,b,\n3.png,c,query\n4.png,c,gallery\n"
    dataset = load_dataset(table(tmp_path, text))
    assert (dataset.train.names, dataset.test.names) == (("a", "b"), ("c",))


def test_csv_skips_missing_files_and_repeats_by_name(tmp_path):
    spec = table(tmp_path, "path,label\n1.png,a\n1.png,a\n2.png,b\n3.png,c\n4.png,d\n")
    (tmp_path / "4.png").unlink()
    dataset = load_dataset(spec)
    notes = " ".join(dataset.notes)
    assert "1 missing image file skipped: 4.png." in notes
    assert "1 class without images left out: d." in notes
    assert "1 row that repeats an earlier one skipped." in notes
    assert len(dataset.train) + len(dataset.test) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file,label\n1.png,a\n", "no column 'path'"),
        ("path;label\n1.png;a\n", "no column 'path'"),
        ("path,class\n1.png,a\n", "no column 'label'"),
        ("path,label\n", "no images"),
        ("", "no column 'path'"),
        ("path,label\n\n1.png,\n", "line 3: the label is empty"),
        ("path,label\n,a\n", "line 2: the path is empty"),
        ("path,label\n1.png,a,b\n", "3 fields under 2 columns"),
        ("path,label,split\n1.png,a,val\n", "line 2: the split is 'val'"),
        ("path,label,role\n1.png,a,probe\n", "line 2: the role is 'probe'"),
        ("path,label,split,role\n1.png,a,train,query\n", "a training image has the role"),
        ("path,label,split\n1.png,a,train\n2.png,b,train\n", "no test images"),
        ("path,label\n1.png,a\n1.png,b\n", "twice"),
        ("path,label,split,role\n1.png,a,train,\n2.png,b,test,query\n3.png,b,test,\n", "3.png has no role"),
        ("path,label,split,role\n1.png,a,train,\n2.png,b,test,query\n", "both query and gallery"),
    ],
)
def test_csv_mistakes_are_named(tmp_path, text, says):
    for n in range(1, 4):
        picture(tmp_path / f"{n}.png")
    with pytest.raises(NearkinError, match=says):
        load_dataset(table(tmp_path, text, pictures=False))


def test_csv_that_is_not_text(tmp_path):
    (tmp_path / "list.csv").write_bytes(b"\xff\xfe\x00path")
    with pytest.raises(NearkinError, match="not UTF-8"):
        load_dataset(f"csv:{tmp_path / 'list.csv'}")


# The public benchmarks, in their authors' layouts


def cub(top: Path, counts: tuple[int, ...] = (2, 3, 1, 2)) -> Path:
    root = top / "CUB_200_2011"
    labels = [c for c, count in enumerate(counts, start=1) for _ in range(count)]
    names = [f"{c:03}.Bird_{c}" for c in range(1, len(counts) + 1)]
    for n, c in enumerate(labels, start=1):
        picture(root / "images" / names[c - 1] / f"Bird_{n:04}.jpg")
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


def test_cub_refuses_what_does_not_fit_together(tmp_path):
    root = cub(tmp_path)
    labels = (root / "image_class_labels.txt").read_text()
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", "3 9\n"))
    with pytest.raises(
        NearkinError, match=r"1 label is not in the list of 4 classes: 002.Bird_2/Bird_0003.jpg \(class 9\)"
    ):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", ""))
    with pytest.raises(NearkinError, match="in one only: image 3"):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", "3 two\n"))
    with pytest.raises(NearkinError, match="line 3: a whole number belongs there, not 'two'"):
        read_cub(root, expect=None)
    (root / "image_class_labels.txt").write_text(labels.replace("3 2\n", "3\n"))
    with pytest.raises(NearkinError, match="line 3: 2 fields belong there"):
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
        picture(top / "car_ims" / f"{n:06}.jpg")
    kinds = [("relative_im_path", object), ("bbox_x1", object), ("class", object), ("test", object)]
    rows = [(f"car_ims/{n:06}.jpg", 1, c, 0) for n, c in enumerate(labels, start=1)]
    annotations = np.array([rows], dtype=kinds) if len(rows) > 1 else np.array(rows, dtype=kinds)
    names = np.array([["AM General Hummer", "Acura RL", "Acura TL", "Audi V8"]], dtype=object)
    savemat(top / "cars_annos.mat", {"annotations": annotations, "class_names": names})
    return top


def test_cars(tmp_path):
    dataset = read_cars(cars(tmp_path), expect={"training": 3, "test": 2})
    assert dataset.train.names == ("AM General Hummer", "Acura RL")
    assert files_by_name(dataset.train) == {
        "AM General Hummer": ["000002.jpg", "000005.jpg"],
        "Acura RL": ["000004.jpg"],
    }
    assert files_by_name(dataset.test) == {"Acura TL": ["000001.jpg"], "Audi V8": ["000003.jpg"]}


def test_cars_refuses_a_label_not_in_the_list_and_a_file_that_is_none(tmp_path):
    with pytest.raises(NearkinError, match=r"not in the list of 4 classes: car_ims/000002.jpg \(class 7\)"):
        read_cars(cars(tmp_path, (1, 7, 4)), expect=None)
    (tmp_path / "cars_annos.mat").write_bytes(b"not a mat file")
    with pytest.raises(NearkinError, match=r"Cannot read .*cars_annos.mat"):
        read_cars(tmp_path, expect=None)
    savemat(tmp_path / "cars_annos.mat", {"something": 1})
    with pytest.raises(NearkinError, match="should hold annotations"):
        read_cars(tmp_path, expect=None)
    (tmp_path / "cars_annos.mat").unlink()
    with pytest.raises(NearkinError, match=r"has no cars_annos.mat. Get the Cars dataset"):
        read_cars(tmp_path, expect=None)


def sop(top: Path) -> Path:
    header = "image_id class_id super_class_id path\n"
    train = ["1 1 1 bicycle_final/111_0.JPG", "2 1 1 bicycle_final/111_1.JPG", "3 2 1 bicycle_final/222_0.JPG"]
    test = ["4 11 2 chair_final/333_0.JPG", "5 11 2 chair_final/333_1.JPG"]
    for line in train + test:
        picture(top / line.split()[-1])
    (top / "Ebay_train.txt").write_text(header + "\n".join(train) + "\n")
    (top / "Ebay_test.txt").write_text(header + "\n".join(test) + "\n")
    return top


def test_sop(tmp_path):
    root = sop(tmp_path / "Stanford_Online_Products")
    for path in (root, tmp_path):
        dataset = read_sop(path, expect={"training": 3, "test": 2})
        assert files_by_name(dataset.train) == {"bicycle 1": ["111_0.JPG", "111_1.JPG"], "bicycle 2": ["222_0.JPG"]}
        assert files_by_name(dataset.test) == {"chair 11": ["333_0.JPG", "333_1.JPG"]}
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
        picture(top / images / file)
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
    assert files_by_name(dataset.test) == {
        "id_00000001": ["01_1_front.jpg", "01_2_side.jpg"],
        "id_00000004": ["01_1_front.jpg"],
    }
    assert all(file.is_file() for file in [*dataset.train.sources, *dataset.test.sources])


def test_inshop_refuses_a_list_cut_short_and_a_word_it_does_not_know(tmp_path):
    root = inshop(tmp_path)
    partition = root / "Eval/list_eval_partition.txt"
    text = partition.read_text()
    partition.write_text("\n".join(text.splitlines()[:-1]))
    with pytest.raises(NearkinError, match="announces 6 images but lists 5"):
        read_inshop(root, expect=None)
    partition.write_text(text.replace("gallery", "galery"))
    with pytest.raises(NearkinError, match=r"01_2_side.jpg is 'galery'"):
        read_inshop(root, expect=None)
    partition.write_text("image_name item_id evaluation_status\n")
    with pytest.raises(NearkinError, match="line 1: a whole number"):
        read_inshop(root, expect=None)
    partition.unlink()
    with pytest.raises(NearkinError, match=r"no Eval/list_eval_partition.txt.*DeepFashion"):
        read_inshop(root, expect=None)


# describe


def test_describe_counts_images_per_class():
    dataset = Dataset("made", made_up([1, 4, 3]), made_up([2, 2], first=3))
    train, test = describe(dataset)
    assert train == ("train", 8, 3, 1, 3.0, 4)
    assert test == ("test", 4, 2, 2, 2.0, 2)
