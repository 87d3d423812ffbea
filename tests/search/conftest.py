"""A run with an index of its images, and the command line."""

import sys
from collections.abc import Callable

import pytest
from made import make_images, make_run

from nearkin import cli
from nearkin.data.image_files import list_images
from nearkin.search.build import index_images
from nearkin.search.calibrate import calibrate


@pytest.fixture(scope="session")
def collection(tmp_path_factory):
    """A folder with a run, 12 pictures of 3 classes, and their index with a threshold."""
    top = tmp_path_factory.mktemp("search")
    run = make_run(top / "run", names=("x", "y"))
    make_images(top / "pictures")
    make_images(top / "others", classes=6, each=5, seed=3)
    calibrate(run, data=f"folder:{top / 'others'}", precision=0.9)
    index_images(run, list_images([top / "pictures"]), top / "index")
    return top


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """A function that runs the command line in this process and returns exit code, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nearkin", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
