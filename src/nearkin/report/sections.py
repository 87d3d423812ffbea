"""The sections of a report that are words and curves: what was run, scores, learning curves, settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nearkin.console import PrintedTable
from nearkin.report.charts import Line, line_chart
from nearkin.report.html import Html, Thumbs, escape, facts, figure, join, paragraph, table
from nearkin.report.measured_runs import MAIN, Study
from nearkin.report.run_tables import facts_table, run_facts, score_table


class Section(NamedTuple):
    """A part of the page."""

    id: str
    title: str
    body: Html


@dataclass(frozen=True)
class Material:
    """What the sections are made of."""

    studies: Sequence[Study]
    methods: dict[str, list[Study]]  # runs by seed
    thumbs: Thumbs
    points: int  # of the map

    @property
    def shown(self) -> list[Study]:
        """One run of each method, that of the lowest seed: what pictures are drawn of."""
        return [runs[0] for runs in self.methods.values()]


def printed(found: PrintedTable, *, heading: bool = True, text: Sequence[int] = (0,)) -> Html:
    """A table with its notes."""
    title = f"<h3>{escape(found.title)}</h3>" if heading else ""
    notes = join(paragraph(note, "note") for note in found.notes)
    return Html(title + table(found.header, found.cells, label=found.title, text=text) + notes)


def about(material: Material) -> Section:
    """What was trained, how, and what chose the epoch."""
    if len(material.studies) == 1:
        return Section("about", "What this is", facts(run_facts(material.studies[0])))
    found = facts_table(material.studies)
    columns = range(len(found.header))
    return Section("about", "What these are", printed(found, heading=False, text=columns))


def scores(material: Material) -> Section:
    """The metric table."""
    return Section("scores", "Scores", printed(score_table(material.studies), heading=False))


def curves(material: Material) -> Section:
    """Loss, checks and looks at the test set over the epochs."""
    charts = [chart for chart in (_loss_chart(material), _check_chart(material), _test_chart(material)) if chart]
    if not charts:
        return Section("curves", "Learning curves", paragraph("There is no log of its own: see those of its parts."))
    return Section("curves", "Learning curves", Html(f'<div class="charts">{join(charts)}</div>'))


def _loss_chart(material: Material) -> Html | None:
    losses = _lines(material, "epoch", "loss")
    words = "Mean loss of each epoch."
    if len(material.methods) > 1:
        words += " Losses of different methods are different quantities: compare shapes, not heights."
    return figure(line_chart(losses, x="epoch", y="loss", title="Loss over epochs"), words) if losses else None


def _check_chart(material: Material) -> Html | None:
    checks = _lines(material, "check", "score")
    if not checks:
        return None
    first, on = next((s, e["on"]) for s in material.studies for e in s.events if e["event"] == "check")
    by = first.config["plan"]["select_by"]
    chart = line_chart(checks, x="epoch", y=f"{by}, percent", title=f"{by} on {on} over epochs")
    return figure(chart, f"Checks on {on}: what chooses the epoch where one is chosen.")


def _test_chart(material: Material) -> Html | None:
    several = len(material.methods) > 1
    looks = [line for study in material.studies for line in _looks(study, several=several)]
    if not looks:
        return None
    mark = material.studies[0].result["kept_epoch"] if len(material.studies) == 1 else None
    y = f"{MAIN[0] if several else 'score'}, percent"
    chart = line_chart(looks, x="epoch", y=y, title="Test scores over epochs", mark=mark)
    more = " The dotted line marks the epoch that was kept." if mark is not None else ""
    return figure(chart, f"Looks at the test set, before training first; they choose nothing unless said above.{more}")


def _lines(material: Material, event: str, value: str) -> list[Line]:
    """The curve of each run that has one; a run of several parts has no log of its own."""
    lines = []
    for study in material.studies:
        found = [e for e in study.events if e["event"] == event]
        x = [e["step"] / _steps_per_epoch(study) for e in found]
        lines.append(Line(study.label.method, x, [e[value] for e in found]))
    return [line for line in lines if line.x]


def _steps_per_epoch(study: Study) -> float:
    epochs = [e for e in study.events if e["event"] == "epoch"]
    return epochs[0]["step"] / epochs[0]["epoch"] if epochs else 1.0


def _looks(study: Study, *, several: bool) -> list[Line]:
    lines = []
    for metric in MAIN[:1] if several else MAIN:
        seen = {e["epoch"]: e["scores"][metric] for e in study.events if e["event"] == "test" and metric in e["scores"]}
        if seen and metric in study.result["scores"]:
            seen[study.result["kept_epoch"]] = study.result["scores"][metric]
        label = study.label.method if several else metric
        if seen:
            lines.append(Line(label, sorted(seen), [seen[e] for e in sorted(seen)], "-" if len(seen) > 2 else ":"))
    return lines


def known(material: Material) -> Section | None:
    """What methods say about their training classes, where they say anything."""
    parts = []
    for study in material.shown:
        if study.known is not None and study.known.columns:
            columns = study.known.columns
            cells = [
                [name, *(f"{float(values[c]):.4g}" for values in columns.values())]
                for c, name in enumerate(study.known.names)
            ]
            shown = table(
                ["training class", *columns], cells, label=f"Training classes of {study.label.run}", sortable=True,
                tall=True,
            )  # fmt: skip
            parts += [Html(f"<h3>{escape(study.label.run)}</h3>"), shown]
    return Section("training-classes", "What the method knows of its training classes", join(parts)) if parts else None


def configuration(material: Material) -> Section:
    """Every setting, run by run; open where there is one."""
    parts = []
    for study in material.studies:
        rows = [*study.config["plan"].items(), *((f"→ {k}", v) for k, v in study.config.get("resolved", {}).items())]
        cells = [[name, ", ".join(value) if isinstance(value, list) else value] for name, value in rows]
        shown = table(["setting", "value"], cells, label=f"Settings of {study.label.run}", text=(0, 1))
        summary = escape(f"Settings of {study.label.run}")
        parts.append(f"<details><summary>{summary}</summary><p><code>{escape(study.config['method'])}</code></p>")
        parts.append(f"{shown}</details>")
    note = paragraph("→ marks what a blank (0, −1, empty) came to.", "note")
    return Section("configuration", "Configuration", Html("".join(parts) + note))
