"""The log of a run folder after a kill."""

import json

from nearkin.training.run_folder import RunFolder


def test_an_incomplete_log_line_is_ignored(tmp_path):
    run = RunFolder(tmp_path)
    run.append({"step": 1})
    run.append({"step": 2})
    with run.log.open("a") as file:
        file.write('{"step": 3, "lo')
    assert run.events() == [{"step": 1}, {"step": 2}]
    run.keep_events(1)
    assert run.log.read_text() == json.dumps({"step": 1}) + "\n"
