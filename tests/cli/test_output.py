"""The output of the command line: in any encoding, into a full disk, to a reader that goes away."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made import make_images, make_run

from nearkin.cli import main


class Output(io.TextIOWrapper):
    """Standard output that is kept."""

    def __init__(self, encoding: str, errors: str) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding=encoding, errors=errors)


def run(*arguments: object, monkeypatch: pytest.MonkeyPatch, encoding: str = "ascii") -> tuple[int, str]:
    """Exit code and output of the command line on a terminal with an encoding, as the locale C has it."""
    out = Output(encoding, "surrogateescape")
    monkeypatch.setattr(sys, "argv", ["nearkin", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    with pytest.raises(SystemExit) as ended:
        main()
    out.flush()
    return int(ended.value.code or 0), out.kept.getvalue().decode(encoding)


def test_any_name_is_printed_in_any_encoding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_run(Path("modèle"))
    make_images(Path("bilder/ü"), classes=1, each=2)
    make_images(Path(os.fsdecode(b"bilder/caf\xe9")), classes=1, each=2)
    (Path("bilder/ü/class 0") / "日本.png").symlink_to("0.png")
    for encoding in ("ascii", "latin-1"):
        code, said = run("index", model, "bilder", "-o", "öffnen", monkeypatch=monkeypatch, encoding=encoding)
        assert (code, "5 images in" in said) == (0, True), said
        code, said = run(
            "search", "öffnen", "bilder", "--html", "gefunden.html", monkeypatch=monkeypatch, encoding=encoding
        )
        assert code == 0, said
        assert "caf\\xe9" in said
        assert "\\u65e5\\u672c.png" in said
    assert "日本.png" in Path("gefunden.html").read_text(encoding="utf-8")
    code, said = run("search", "öffnen", "fehlt é", monkeypatch=monkeypatch)
    assert code == 2
    assert said.startswith("nearkin: There is no file or folder fehlt \\xe9")
    assert run("methods", monkeypatch=monkeypatch)[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="There is no device that is always full.")
def test_output_on_a_full_disk_is_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "nearkin", "--version"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"nearkin: Cannot write (No space left on device); choose another path, or make room.\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has other pipes.")
def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "nearkin", "--version"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
