"""Atomic files, clear errors for damaged ones, provenance."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import nearkin
from nearkin.errors import NearkinError
from nearkin.files import (
    append_line,
    atomic_file,
    provenance,
    read_json,
    read_tensors,
    write_json,
    write_lock,
    write_tensors,
)


def test_tensors_and_their_record_are_read_back(tmp_path):
    path = tmp_path / "deep" / "x.safetensors"
    write_tensors(path, {"a": torch.arange(3), "b": torch.zeros(())}, {"step": 7})
    tensors, about = read_tensors(path)
    assert torch.equal(tensors["a"], torch.arange(3))
    assert tensors["b"].shape == ()
    assert about == {"step": 7}


def test_a_failed_write_keeps_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def fail() -> None:
        with atomic_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("keep", [0, 5, 40, -3])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.arange(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(NearkinError, match="damaged"):
        read_tensors(path)


def test_missing_or_broken_json_is_refused(tmp_path):
    with pytest.raises(NearkinError, match=r"is .* a run folder"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(NearkinError, match="damaged"):
        read_json(tmp_path / "config.json")


def test_a_changed_value_in_json_is_refused_and_the_first_version_had_no_digest(tmp_path):
    path = tmp_path / "x.json"
    content = {"steps": 800, "rows": [{"a": 0.1}], "names": ["é", "\udce9"], "none": None, "nan": float("inf")}
    write_json(path, content | {"tuple": (1, 2)})
    assert read_json(path) == content | {"tuple": [1, 2]}
    path.write_text(path.read_text().replace("800", "900"))
    with pytest.raises(NearkinError, match=r"x\.json is damaged .*not what was written"):
        read_json(path)
    path.write_text('{"steps": 800}')
    assert read_json(path) == {"steps": 800}


@pytest.mark.parametrize("text", ["[]", "7", "null", "[" * 100_000, '{"steps": "800"}', '{"step": 800}'])
def test_json_of_another_kind_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(NearkinError, match="damaged"):
        read_json(tmp_path / "x.json", needs={"steps": int})


def test_tensors_without_a_needed_entry_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.arange(3)}, {"step": 3})
    assert read_tensors(path, needs={"step": int})[1] == {"step": 3}
    with pytest.raises(NearkinError, match="'images' is missing"):
        read_tensors(path, needs={"images": int})


def test_a_written_file_is_synced_before_and_its_folder_after_the_rename(tmp_path, monkeypatch):
    seen = []
    for name in ("fsync", "replace"):
        act = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, act=act: (seen.append(name), act(*a))[1])
    write_json(tmp_path / "x.json", {})
    assert seen == ["fsync", "replace", "fsync"][: 2 if os.name == "nt" else 3]
    seen.clear()
    append_line(tmp_path / "x.jsonl", {"a": 1})
    assert seen == ["fsync"]


def test_provenance_names_versions_commit_and_hardware(monkeypatch):
    monkeypatch.setenv("NEARKIN_COMMIT", "abc")
    record = provenance()
    assert record["commit"] == "abc"
    assert record["versions"]["torch"].startswith("2.")
    assert "cores" in record["hardware"]


def test_the_version_is_that_of_the_project_file():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert nearkin.__version__ == project["version"]


def test_the_same_tensors_are_the_same_bytes(tmp_path):
    about = {"names": ["Ärztin", 'a "quoted" one', "\x01"], "step": 3}
    for number in range(8):  # the library's own order of two entries differs in half of the cases
        write_tensors(tmp_path / str(number), {"b": torch.arange(3), "a": torch.ones(2)}, about)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert read_tensors(tmp_path / "0")[1] == about


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(tmp_path, umask):
    code = "import sys, torch; from pathlib import Path; from nearkin.files import write_json, write_tensors; "
    code += "write_tensors(Path('t'), {'a': torch.ones(1)}); write_json(Path('j'), {})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, umask=umask, check=True)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_temporary_files_of_killed_writers_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    keep = [".hidden.txt", f".other.{os.getpid()}", "x.json"]
    for name in (*keep, f".model.safetensors.{dead.pid}"):
        (tmp_path / name).touch()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / f".epoch.safetensors.{dead.pid}").touch()
    with write_lock(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*keep, ".lock", "snapshots"])


@pytest.mark.parametrize("count", [10, 70_000])
def test_long_lists_in_a_record_are_no_part_of_the_header(count, tmp_path):
    """Class names come back in order; the header, of which safetensors allows 100 MB, does not grow with them."""
    names = [f"{number} \N{LATIN SMALL LETTER SHARP S}\n" for number in range(count)]
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"w": torch.zeros(2)}, {"names": tuple(names), "step": 3})
    tensors, about = read_tensors(path, needs={"step": int})
    assert about == {"names": names, "step": 3}
    assert list(tensors) == ["w"]
    assert int.from_bytes(path.read_bytes()[:8], "little") < 1000
    changed = bytearray(path.read_bytes())
    changed[-100 if count > 10 else -1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(NearkinError, match="damaged"):
        read_tensors(path)
