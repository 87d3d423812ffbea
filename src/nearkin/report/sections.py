"""The sections of a report made of text, tables and curves: runs, scores, tests, ranking, curves, settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nearkin.benchmark.tables import LEVEL
from nearkin.console import PrintedTable
from nearkin.evaluation.statistics import p_words
from nearkin.report.charts import Line, critical_difference, line_chart
from nearkin.report.comparison import Ranking, class_ranking, comparison_tables, facts_table, run_facts, score_table
from nearkin.report.html import Html, Thumbnails, escape, facts, figure, join, paragraph, table
from nearkin.report.measured_runs import MAIN_METRICS, MeasuredRun, score_curve


class Section(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    body: Html


@dataclass(frozen=True)
class ReportData:
    """What the sections are made from."""

    runs: Sequence[MeasuredRun]
    methods: dict[str, list[MeasuredRun]]  # sorted by seed
    thumbnails: Thumbnails
    points: int  # images on the map, at most

    @property
    def first_runs(self) -> list[MeasuredRun]:
        """The run with the lowest seed of each method; pictures show these."""
        return [runs[0] for runs in self.methods.values()]


def _table_with_notes(found: PrintedTable, *, heading: bool = True, text: Sequence[int] = (0,)) -> Html:
    title = f"<h3>{escape(found.title)}</h3>" if heading else ""
    notes = join(paragraph(note, "note") for note in found.notes)
    return Html(title + table(found.header, found.cells, label=found.title, text=text) + notes)


def about(report: ReportData) -> Section:
    """What was trained, how, and how the epoch was chosen."""
    if len(report.runs) == 1:
        return Section("about", "The run", facts(run_facts(report.runs[0])))
    found = facts_table(report.runs)
    return Section("about", "The runs", _table_with_notes(found, heading=False, text=range(len(found.header))))


def scores(report: ReportData) -> Section:
    """The table of metrics."""
    return Section("scores", "Scores", _table_with_notes(score_table(report.runs), heading=False))


def significance(report: ReportData) -> Section:
    """Significance tests between methods."""
    found = comparison_tables(report.runs)
    if not found:
        return Section("tests", "Tests", paragraph("All runs are seeds of one method: there is nothing to compare."))
    notes = dict.fromkeys(note for each in found for note in each.notes)  # once, not below every table
    tables = [_table_with_notes(each._replace(notes=[]), text=(0, len(each.header) - 1)) for each in found]
    return Section("tests", "Tests", join([*tables, *(paragraph(note, "note") for note in notes)]))


def ranking(report: ReportData) -> Section:
    """The critical-difference diagram over test classes, or why there is none."""
    found = class_ranking(report.runs, MAIN_METRICS[0])
    if found.why_not:
        body = paragraph(f"No critical-difference diagram is drawn. {found.why_not}")
    else:
        names, ranks = found.names, found.ranks
        title = f"Average ranks over {ranks.blocks} test classes by {MAIN_METRICS[0]}"
        chart = critical_difference(names, ranks.ranks.tolist(), found.groups, ranks.critical, title=title)
        body = join([figure(chart, _ranking_caption(found), kind="wide"), paragraph(_ranking_scope(report), "note")])
    return Section("ranking", "Critical differences", body)


def _ranking_caption(found: Ranking) -> str:
    ranks = found.ranks
    friedman = f"Friedman's test over {ranks.blocks:,} test classes: p {p_words(ranks.p)}."
    if not found.differ:
        return f"{friedman} It is not significant, so no pair is compared; the bar joins all methods."
    return (
        f"{friedman} Average rank of each method by the {MAIN_METRICS[0]} of a class, 1 is best. A bar joins methods "
        f"without a significant difference by Nemenyi's test at {LEVEL}."
    )


def _ranking_scope(report: ReportData) -> str:
    seeds = any(len(runs) > 1 for runs in report.methods.values())
    ranked = "each method's mean over its runs" if seeds else "one trained model of each method"
    return (
        f"The blocks are the test classes, and the diagram ranks {ranked}. It compares these models on such classes. "
        "It says nothing about other data sets or other seeds; for seeds see the tests over seeds."
    )


def curves(report: ReportData) -> Section:
    """Loss, validation scores and test scores over the epochs."""
    charts = [chart for chart in (_loss_chart(report), _check_chart(report), _test_chart(report)) if chart]
    if not charts:
        return Section("curves", "Learning curves", paragraph("This run has no log: see those of its parts."))
    return Section("curves", "Learning curves", Html(f'<div class="charts">{join(charts)}</div>'))


def _loss_chart(report: ReportData) -> Html | None:
    losses = _event_curves(report, "epoch", "loss")
    caption = "Mean loss per epoch."
    if len(report.methods) > 1:
        caption += " Losses of different methods are different quantities: compare shapes, not heights."
    return figure(line_chart(losses, x="epoch", y="loss", title="Loss over epochs"), caption) if losses else None


def _check_chart(report: ReportData) -> Html | None:
    checks = _event_curves(report, "check", "score")
    if not checks:
        return None
    first, on = next((run, e["on"]) for run in report.runs for e in run.events if e["event"] == "check")
    by = first.config["plan"]["select_by"]
    chart = line_chart(checks, x="epoch", y=f"{by}, percent", title=f"{by} on {on} over epochs")
    return figure(chart, f"Scores on {on}, which choose the epoch to keep if the run chooses one.")


def _test_chart(report: ReportData) -> Html | None:
    several = len(report.methods) > 1
    lines = [line for run in report.runs for line in _test_curves(run, several=several)]
    if not lines:
        return None
    mark = report.runs[0].result["kept_epoch"] if len(report.runs) == 1 else None
    y = f"{MAIN_METRICS[0] if several else 'score'}, percent"
    chart = line_chart(lines, x="epoch", y=y, title="Test scores over epochs", mark=mark)
    more = " The dotted line marks the epoch that was kept." if mark is not None else ""
    caption = f"Test scores, from before training on. They choose no epoch unless stated above.{more}"
    return figure(chart, caption)


def _event_curves(report: ReportData, event: str, value: str) -> list[Line]:
    """The curve of each run whose log has such events; a model of several parts has no log."""
    lines = []
    for run in report.runs:
        found = [e for e in run.events if e["event"] == event]
        x = [e["step"] / _steps_per_epoch(run) for e in found]
        lines.append(Line(run.label.method, x, [e[value] for e in found]))
    return [line for line in lines if line.x]


def _steps_per_epoch(run: MeasuredRun) -> float:
    epochs = [e for e in run.events if e["event"] == "epoch"]
    return epochs[0]["step"] / epochs[0]["epoch"] if epochs else 1.0


def _test_curves(run: MeasuredRun, *, several: bool) -> list[Line]:
    lines = []
    for metric in MAIN_METRICS[:1] if several else MAIN_METRICS:
        epochs, values = score_curve(run.events, run.result, metric)
        if len(epochs) > 1:
            label = run.label.method if several else metric
            lines.append(Line(label, epochs, values, "-" if len(epochs) > 2 else ":"))
    return lines


def training_classes(report: ReportData) -> Section | None:
    """What methods stored about their training classes, if anything."""
    parts = []
    for run in report.first_runs:
        if run.class_records is not None and run.class_records.columns:
            columns = run.class_records.columns
            cells = [
                [name, *(f"{float(values[c]):.4g}" for values in columns.values())]
                for c, name in enumerate(run.class_records.names)
            ]
            label = f"Training classes of {run.label.run}"
            shown = table(["training class", *columns], cells, label=label, sortable=True, tall=True)
            parts += [Html(f"<h3>{escape(run.label.run)}</h3>"), shown]
    return Section("training-classes", "Training classes", join(parts)) if parts else None


def configuration(report: ReportData) -> Section:
    """All settings of each run, folded."""
    parts = []
    for run in report.runs:
        rows = [*run.config["plan"].items(), *((f"→ {k}", v) for k, v in run.config.get("resolved", {}).items())]
        cells = [[name, ", ".join(value) if isinstance(value, list) else value] for name, value in rows]
        label = f"Settings of {run.label.run}"
        parts.append(f"<details><summary>{escape(label)}</summary><p><code>{escape(run.config['method'])}</code></p>")
        parts.append(f"{table(['setting', 'value'], cells, label=label, text=(0, 1))}</details>")
    note = paragraph("→ marks the value used for a setting left at its default (0, −1, empty).", "note")
    return Section("configuration", "Configuration", Html("".join(parts) + note))
