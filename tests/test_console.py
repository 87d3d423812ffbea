"""What a long job tells: bars in a terminal, lines elsewhere, nothing where nobody asked."""

import io

from rich.console import Console

from nearkin.console import Reporter


def printed(terminal: bool, tell) -> str:
    file = io.StringIO()
    tell(Reporter(Console(file=file, force_terminal=terminal, width=100)))
    return file.getvalue()


def work(reporter: Reporter) -> None:
    reporter.note("begun")
    with reporter.training(10) as status:
        status(3, "epoch 1/2 · loss 0.500")
        with reporter.bar("inside") as advance:  # one bar at a time: rich refuses two
            advance(1, 2)
    with reporter.bar("after") as advance:
        advance(2, 2)
    reporter.epoch("epoch 1/2  loss 0.5")


def test_a_terminal_has_bars_and_no_epoch_lines():
    text = printed(True, work)
    assert "begun" in text
    assert "loss 0.500" in text
    assert "after" in text
    assert "inside" not in text
    assert "epoch 1/2  loss 0.5" not in text


def test_elsewhere_there_are_plain_lines():
    text = printed(False, work)
    assert text.splitlines() == ["begun", "epoch 1/2  loss 0.5"]


def test_nobody_asked_and_nothing_is_said(capsys):
    work(Reporter())
    assert capsys.readouterr().out == ""
