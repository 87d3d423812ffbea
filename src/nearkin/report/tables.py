"""Tables of scores, for a terminal and for Markdown."""

from collections.abc import Mapping, Sequence

from rich.table import Table


def score_cells(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table with a row a name and a column a metric, in percent with one decimal."""
    metrics = list(dict.fromkeys(metric for scores in rows.values() for metric in scores))
    cells = [[name, *(f"{s[m]:.1f}" if m in s else "–" for m in metrics)] for name, s in rows.items()]
    return ["", *metrics], cells


def terminal_table(
    header: Sequence[str], cells: Sequence[Sequence[str]], *, title: str = "", text: bool = False, whole: bool = False
) -> Table:
    """A table for a terminal: the first column to the left, numbers to the right; with `text` all to the left.

    In a narrow terminal cells are folded; with `whole` the first column is not, so that names of rows stay readable.
    """
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(header):
        fixed = whole and not number
        table.add_column(
            name,
            justify="right" if number and not text else "left",
            overflow="ellipsis" if fixed else "fold",
            no_wrap=fixed,
        )
    for row in cells:
        table.add_row(*row)
    return table


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """The same in Markdown; with `text` every column stands to the left."""
    rule = ["---", *("---" if text else "---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *cells))
