"""Scores are called those of unseen classes only if no test class was trained on."""

import sys

import pytest
from made import make_images

from nearkin.cli import main
from nearkin.files import read_json
from nearkin.training.seen_classes import seen_classes

TINY = ["--backbone", "conv4", "--dim", "4", "--batch", "4", "--epochs", "0", "--device", "cpu"]


def printed_by(capsys, *arguments: str) -> str:
    argv, sys.argv = sys.argv, ["nearkin", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = argv
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("tested", "title", "words"),
    [
        ((2, 3), "Unseen classes, percent", "none of them a training class"),
        ((1, 2), "Test classes, 1 of 2 seen in training, percent", "1 of them training classes"),
        ((0, 1), "Test classes, all seen in training, percent", "2 of them training classes"),
    ],
)
def test_a_csv_with_shared_classes_is_not_called_unseen(tmp_path, monkeypatch, capsys, tested, title, words):
    monkeypatch.chdir(tmp_path)
    lines = ["path,label,split"]
    for path in make_images(tmp_path / "photos", classes=4, each=4):
        label, number = int(path.parent.name.split()[1]), int(path.stem)
        if label in tested and (number > 1 or label > 1):
            lines.append(f"photos/{path.parent.name}/{path.name},{label},test")
        elif label < 2:
            lines.append(f"photos/{path.parent.name}/{path.name},{label},train")
    (tmp_path / "table.csv").write_text("\n".join(lines))

    trained = printed_by(capsys, "train", "--data", "csv:table.csv", "--out", "run", *TINY)
    assert title in trained
    assert read_json(tmp_path / "run" / "result.json")["test_classes"]["classes"] == 2
    assert title in printed_by(capsys, "eval", "run", "--device", "cpu")
    printed_by(capsys, "report", "run", "--format", "markdown", "--device", "cpu")
    assert words in (tmp_path / "report.md").read_text()
    if not title.startswith("Unseen"):
        assert "Unseen" not in trained


def test_the_page_of_shared_classes_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = make_images(tmp_path / "photos", classes=2, each=4)
    rows = [f"photos/{p.parent.name}/{p.name},{p.parent.name},{'test' if int(p.stem) > 1 else 'train'}" for p in paths]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    printed_by(capsys, "train", "--data", "csv:table.csv", "--out", "run", *TINY)
    printed_by(capsys, "report", "run", "--device", "cpu")
    page = (tmp_path / "report.html").read_text()
    assert "2 of them training classes" in page
    assert "unseen" not in page.lower()


def test_classes_are_compared_by_name():
    assert seen_classes(("a", "b"), ("b", "c")) == (2, 1)
    assert seen_classes(("a", "b"), ("c",)).title == "Unseen classes"
