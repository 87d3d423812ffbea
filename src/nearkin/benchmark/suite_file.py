"""The TOML file of a suite as one plain table: completed by its base, rows repeated, definitions filled in.

`suite` documents the keys; here are `base`, `define` and `each`, and checks of a table.
"""

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkin.errors import NearkinError
from nearkin.evaluation import parse_metric
from nearkin.spec import fits, nearest, words
from nearkin.training.run_metric import RunMetric

PLACEHOLDER = re.compile(r"\{(\w+)\}")


def read_suite_file(path: Path) -> dict[str, Any]:
    """The table of a suite without `base`, `define` and `each`; values are not checked."""
    table = _with_base(path)
    rows, define, data = table.get("row"), table.pop("define", {}), table.get("data")
    if not isinstance(define, dict):
        raise NearkinError(f"In suite {path.stem} define must be a table, not {define!r}.")
    if isinstance(rows, list):
        names = list(data) if isinstance(data, dict) else []
        table["row"] = [_with_definitions(row, names, define) for row in _repeat(rows, f"suite {path.stem}")]
    return table


def _with_base(path: Path) -> dict[str, Any]:
    """The tables of a file, completed by those of its base."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NearkinError(f"The suite {path} cannot be read: {error}.") from None
    if "base" not in table:
        return table
    base = _with_base(path.parent / str(table.pop("base")))
    used = {name: entry for name, entry in base.get("data", {}).items() if name in table.get("data", {})}
    return _merge({**base, "data": used}, table)


def _merge(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Both tables in one; the second one's keys come first and win, tables inside them are merged likewise."""
    merged = {**table, **{key: value for key, value in base.items() if key not in table}}
    both = [key for key in table if isinstance(table[key], dict) and isinstance(base.get(key), dict)]
    return merged | {key: _merge(base[key], table[key]) for key in both}


def _repeat(rows: Sequence[Any], where: str) -> Iterator[Any]:
    """The rows; one with `each` once per combination of its values."""
    for row in rows:
        if not isinstance(row, dict) or "each" not in row:
            yield row
            continue
        each = row["each"]
        if not isinstance(each, dict) or not all(isinstance(values, list) for values in each.values()):
            raise NearkinError(f"In {where} each must be a table of lists, not {each!r}.")
        rest = {key: value for key, value in row.items() if key != "each"}
        for values in itertools.product(*each.values()):
            filled = _fill(rest, dict(zip(each, values, strict=True)))
            yield filled | ({"x": _number(filled["x"])} if isinstance(filled.get("x"), str) else {})


def _fill(value: Any, names: Mapping[str, Any]) -> Any:
    """Replace {KEY} in all texts of a value; a text that is nothing but {KEY} becomes the value itself."""
    if isinstance(value, dict):
        return {key: _fill(inner, names) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value.startswith("{") and value.endswith("}") and value[1:-1] in names:
        return names[value[1:-1]]
    return PLACEHOLDER.sub(lambda found: str(names.get(found[1], found[0])), value)


def _with_definitions(row: Any, data: Sequence[str], define: Mapping[str, Any]) -> Any:
    """The row with one method per data set, in which definitions are filled in."""
    if not isinstance(row, dict) or not isinstance(row.get("method"), str | dict):
        return row
    method = row["method"]
    methods = {}
    for name, text in (dict.fromkeys(data, method) if isinstance(method, str) else method).items():
        texts = {key: value.get(name) if isinstance(value, dict) else value for key, value in define.items()}
        methods[name] = _fill(text, {key: value for key, value in texts.items() if value is not None})
    return {**row, "method": methods}


def _number(text: str) -> float | str:
    """The number a text is; the text itself if it is none, for the check to refuse."""
    try:
        return float(text)
    except ValueError:
        return text


def check_metric(name: Any, where: str) -> None:
    """Raise if this is not the name of a metric, as "R@1", or of joint embeddings, as "R@1 512-d"."""
    metric = RunMetric.parse(name).metric if isinstance(name, str) else name
    try:
        parse_metric(metric)
    except (NearkinError, TypeError) as error:
        raise NearkinError(f"In {where}: {error}") from None


def check_table(table: Any, known: Mapping[str, Any], where: str, needed: tuple[str, ...] = ()) -> None:
    """Raise unless this is a table with known keys, values of their types, and the needed keys."""
    if not isinstance(table, dict):
        raise NearkinError(f"In {where} a table of keys and values is needed, not {table!r}.")
    for name, value in table.items():
        if name not in known:
            raise NearkinError(f"In {where} there is no {name!r}.{nearest(name, known)} See the suites of nearkin.")
        if not fits(value, known[name]):
            raise NearkinError(f"In {where} {name} must be {type_words(known[name])}, not {value!r}.")
    for name in needed:
        if name not in table:
            raise NearkinError(f"In {where} {name} is missing.")


def type_words(hint: Any) -> str:
    """A type as an error names it."""
    return {
        dict: "a table",
        list: "a list",
        str | dict: "a spec, or one per data set",
        str | list: "a name, or a list of names",
    }.get(hint) or words(hint)
