"""The log of a run folder after a kill."""

import pytest

from nearkin.errors import NearkinError
from nearkin.training.run_folder import RunFolder


def test_an_incomplete_log_line_is_ignored(tmp_path):
    run = RunFolder(tmp_path)
    events = [{"event": "epoch", "step": step} for step in (1, 2)]
    for event in events:
        run.append(event)
    with run.log.open("a") as file:
        file.write('{"step": 3, "lo')
    assert run.events() == events
    run.keep_events(1)
    assert run.events() == events[:1]
    assert run.log.read_bytes().count(b"\n") == 1
    with pytest.raises(NearkinError, match="has 1 of the 2 lines"):
        run.keep_events(2)


def test_a_changed_number_in_the_log_is_found(tmp_path):
    run = RunFolder(tmp_path)
    run.append({"event": "epoch", "step": 8, "loss": 0.25})
    run.log.write_text(run.log.read_text().replace("0.25", "0.35"))
    with pytest.raises(NearkinError, match="damaged in line 1"):
        run.events()


def test_the_log_of_the_first_version_has_no_digests(tmp_path):
    run = RunFolder(tmp_path)
    run.log.write_text('{"event": "epoch", "step": 8}\n')
    assert run.events() == [{"event": "epoch", "step": 8}]


@pytest.mark.parametrize("line", [b"{", b"[]", b"7", b'{"step": 1}', b"\xff", b""])
def test_a_damaged_log_line_is_named(tmp_path, line):
    run = RunFolder(tmp_path)
    run.log.write_bytes(b'{"event": "epoch", "step": 1}\n' + line + b"\n")
    with pytest.raises(NearkinError, match=r"log\.jsonl is damaged in line 2"):
        run.events()
