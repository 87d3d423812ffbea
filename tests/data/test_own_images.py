"""Folders of images and csv tables as data sets."""

from pathlib import Path

import pytest
from image_helpers import files_by_class, save_picture

from nearkin.data import describe, load_dataset
from nearkin.errors import NearkinError


@pytest.fixture
def birds(tmp_path) -> Path:
    for c, count in {"wren": 3, "crow": 2, "tit": 1, "jay": 2}.items():
        for n in range(count):
            save_picture(tmp_path / "birds" / c / f"{n}.png")
    return tmp_path / "birds"


def test_folder_is_split_in_halves_by_name(birds):
    dataset = load_dataset(f"folder:{birds}")
    assert dataset.train.names == ("crow", "jay")
    assert dataset.test.names == ("tit", "wren")
    assert files_by_class(dataset.test) == {"tit": ["0.png"], "wren": ["0.png", "1.png", "2.png"]}
    assert all(path.is_file() for path in dataset.train.sources)
    assert any("first 2 classes by name (crow … jay) train" in note for note in dataset.notes)
    assert any(
        "1 class in test whose queries have no relevant image" in note and "tit" in note for note in dataset.notes
    )
    other = load_dataset(f"folder:{birds}", halves="swapped")
    assert (other.train.names, other.test.names) == (dataset.test.names, dataset.train.names)
    assert any("with one image in train, kept" in note and "tit" in note for note in other.notes)


def test_an_odd_class_goes_to_training(birds):
    save_picture(birds / "owl" / "a.png")
    dataset = load_dataset(f"folder:{birds}")
    assert dataset.train.names == ("crow", "jay", "owl")


def test_numbered_folders_sort_as_numbers(tmp_path):
    for c in range(1, 13):
        save_picture(tmp_path / str(c) / "a.png")
    assert load_dataset(f"folder:{tmp_path}").train.names == ("1", "2", "3", "4", "5", "6")


def test_folder_uses_train_and_test_if_both_exist(tmp_path):
    for part, c in [("train", "a"), ("train", "b"), ("test", "b"), ("test", "c"), ("val", "d")]:
        save_picture(tmp_path / part / c / "deeper" / "x.JPG")
        save_picture(tmp_path / part / c / "y.png")
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
    save_picture(birds / "loose.png")
    dataset = load_dataset(f"folder:{birds}")
    assert len(dataset.train) + len(dataset.test) == 8
    notes = " ".join(dataset.notes)
    assert "1 class without images left out: empty." in notes
    assert "1 empty image file skipped: crow/zero.jpg." in notes
    assert "1 file that is not an image left out: crow/notes.txt." in notes
    assert "1 image file outside the class folders left out: loose.png." in notes
    assert "hidden" not in notes
    assert [(path.name, reason) for path, reason in dataset.left_out] == [
        ("loose.png", "it is outside the class folders"),
        ("zero.jpg", "it is empty"),
    ]


def test_a_class_with_only_empty_files_is_named(birds):
    save_picture(birds / "owl" / "a.png")
    for file in (birds / "jay").iterdir():
        file.write_bytes(b"")
    dataset = load_dataset(f"folder:{birds}")
    assert dataset.train.names == ("crow", "owl")
    assert any("2 empty image files skipped" in note for note in dataset.notes)
    assert any("without images left out: jay" in note for note in dataset.notes)


def test_folder_refuses_too_few_classes_and_no_images(tmp_path):
    with pytest.raises(NearkinError, match="no image in"):
        load_dataset(f"folder:{tmp_path}")
    save_picture(tmp_path / "a" / "x.png")
    save_picture(tmp_path / "b" / "x.png")
    with pytest.raises(NearkinError, match=r"2 classes \(a, b\) with at most 1 image each: at least 2 classes of 2"):
        load_dataset(f"folder:{tmp_path}")


@pytest.mark.parametrize("counts", [(4, 3), (2, 1, 5)])
def test_two_or_three_classes_are_split_by_their_images(tmp_path, counts):
    for name, count in zip("abc", counts, strict=False):
        for n in range(count):
            save_picture(tmp_path / name / f"{n}.png")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.train.counts.tolist() == [(count + 1) // 2 for count in counts]
    assert len(dataset.test) == sum(count // 2 for count in counts)
    assert not {*dataset.train.sources} & {*dataset.test.sources}
    assert any("nothing about unseen classes" in note for note in dataset.notes)


def test_one_training_class_is_refused(tmp_path):
    save_picture(tmp_path / "train" / "a" / "x.png")
    save_picture(tmp_path / "test" / "b" / "x.png")
    with pytest.raises(NearkinError, match="1 training class"):
        load_dataset(f"folder:{tmp_path}")


def table(folder: Path, text: str, *, pictures: bool = True) -> str:
    if pictures:
        for line in text.strip().splitlines()[1:]:
            save_picture(folder / line.split(",")[0].strip())
    (folder / "list.csv").write_text(text, encoding="utf-8-sig")
    return f"csv:{folder / 'list.csv'}"


def test_csv_without_split_is_split_in_halves(tmp_path):
    dataset = load_dataset(table(tmp_path, "Path, Label\nx/1.png, b\nx/2.png, a\nx/3.png, c\nx/4.png, d\nx/5.png, a\n"))
    assert dataset.train.names == ("a", "b")
    assert files_by_class(dataset.train) == {"a": ["2.png", "5.png"], "b": ["1.png"]}
    assert dataset.test.query is None


def test_csv_with_split_and_role(tmp_path):
    rows = ["b,1.png,train,", "a,2.png,train,", "c,3.png,test,query", "c,4.png,test,gallery", "d,5.png,test,query"]
    text = "\n".join(["label,path,split,role", *rows])
    for n in range(1, 6):
        save_picture(tmp_path / f"{n}.png")
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


def test_csv_with_only_roles_trains_on_the_rest(tmp_path):
    text = "path,label,role\n1.png,a,\n2.png,b,\n3.png,c,query\n4.png,c,gallery\n"
    dataset = load_dataset(table(tmp_path, text))
    assert (dataset.train.names, dataset.test.names) == (("a", "b"), ("c",))


def test_csv_skips_missing_files_and_repeats_by_name(tmp_path):
    spec = table(tmp_path, "path,label\n1.png,a\n1.png,a\n2.png,b\n3.png,c\n4.png,d\n5.png,e\n")
    (tmp_path / "4.png").unlink()
    dataset = load_dataset(spec)
    notes = " ".join(dataset.notes)
    assert "1 missing image file skipped: 4.png." in notes
    assert "1 class without images left out: d." in notes
    assert "1 row that repeats an earlier one skipped." in notes
    assert len(dataset.train) + len(dataset.test) == 4


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
def test_csv_errors_name_the_line(tmp_path, text, says):
    for n in range(1, 4):
        save_picture(tmp_path / f"{n}.png")
    with pytest.raises(NearkinError, match=says):
        load_dataset(table(tmp_path, text, pictures=False))


def test_csv_that_is_not_text(tmp_path):
    (tmp_path / "list.csv").write_bytes(b"\xff\xfe\x00path")
    with pytest.raises(NearkinError, match="not UTF-8"):
        load_dataset(f"csv:{tmp_path / 'list.csv'}")
