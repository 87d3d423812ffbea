"""Progress: bars in a terminal, lines elsewhere, nothing without a console. Tables in narrow terminals."""

import io

from rich.console import Console

from nearkin.console import PrintedTable, Reporter


def printed(terminal: bool, job) -> str:
    file = io.StringIO()
    job(Reporter(Console(file=file, force_terminal=terminal, width=100)))
    return file.getvalue()


def work(reporter: Reporter) -> None:
    reporter.note("started")
    with reporter.training(10) as status:
        status(3, "epoch 1/2 · loss 0.500")
        with reporter.bar("inside") as advance:  # one bar at a time: rich refuses two
            advance(1, 2)
    with reporter.bar("after") as advance:
        advance(2, 2)
    reporter.epoch("epoch 1/2  loss 0.5")


def test_a_terminal_has_bars_and_no_epoch_lines():
    text = printed(True, work)
    assert "started" in text
    assert "loss 0.500" in text
    assert "after" in text
    assert "inside" not in text
    assert "epoch 1/2  loss 0.5" not in text


def test_without_a_terminal_there_are_plain_lines():
    text = printed(False, work)
    assert text.splitlines() == ["started", "epoch 1/2  loss 0.5"]


def test_without_a_console_nothing_is_printed(capsys):
    work(Reporter())
    assert capsys.readouterr().out == ""


def lines_of(table: PrintedTable, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_wide_table_of_numbers_is_split_between_columns():
    table = PrintedTable("", ["", "mean radius", "R@1"], [["long name", "12.34", "56.78"]])
    assert lines_of(table, 60) == ["           mean radius    R@1", "long name        12.34  56.78"]
    assert lines_of(table, 27) == ["             mean", "           radius    R@1", "long name   12.34  56.78"]
    assert lines_of(table, 20) == [
        "             mean",
        "           radius",
        "long name   12.34",
        "",
        "             R@1",
        "long name  56.78",
    ]


def test_a_wide_table_of_text_folds_its_cells():
    table = PrintedTable("", ["name", "text"], [["a", "one two three"]], text=True)
    assert lines_of(table, 14) == ["name  text", "a     one two", "      three"]
