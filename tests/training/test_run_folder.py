"""Run folders: whole files, damage that is a sentence, a log that survives a kill."""

import json

import pytest
import torch

from nearkin.errors import NearkinError
from nearkin.files import provenance, read_json, read_tensors, whole_file, write_json, write_tensors
from nearkin.training.run_folder import RunFolder


def test_tensors_and_their_record_come_back(tmp_path):
    path = tmp_path / "deep" / "x.safetensors"
    write_tensors(path, {"a": torch.arange(3), "b": torch.zeros(())}, {"step": 7})
    tensors, about = read_tensors(path)
    assert torch.equal(tensors["a"], torch.arange(3))
    assert tensors["b"].shape == ()
    assert about == {"step": 7}


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def fail() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("keep", [0, 5, 40, -3])
def test_a_truncated_file_is_a_sentence(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.arange(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(NearkinError, match="damaged"):
        read_tensors(path)


def test_json_that_is_missing_or_broken_is_a_sentence(tmp_path):
    with pytest.raises(NearkinError, match=r"is .* a run folder"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(NearkinError, match="damaged"):
        read_json(tmp_path / "config.json")


def test_a_log_line_cut_short_is_passed_over(tmp_path):
    run = RunFolder(tmp_path)
    run.append({"step": 1})
    run.append({"step": 2})
    with run.log.open("a") as file:
        file.write('{"step": 3, "lo')
    assert run.events() == [{"step": 1}, {"step": 2}]
    run.keep_events(1)
    assert run.log.read_text() == json.dumps({"step": 1}) + "\n"


def test_provenance_names_versions_commit_and_hardware(monkeypatch):
    monkeypatch.setenv("NEARKIN_COMMIT", "abc")
    record = provenance()
    assert record["commit"] == "abc"
    assert record["versions"]["torch"].startswith("2.")
    assert "cores" in record["hardware"]
