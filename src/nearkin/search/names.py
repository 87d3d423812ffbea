r"""File names as text that any file, page or JSON can hold.

A file name may have bytes that are not UTF-8. Python keeps them as lone surrogates, which cannot be encoded again.
"""

import re
from collections.abc import Callable
from typing import Any

_SPECIAL = re.compile(r"[\ud800-\udfff]|\\(?=x[0-9a-f]{2}|ud[89a-f][0-9a-f]{2})")
_ESCAPED = re.compile(r"\\(?:x(5c|[89a-f][0-9a-f])|u(d[89a-f][0-9a-f]{2}))")


def escape_name(name: str) -> str:
    r"""Write bytes that are not UTF-8 as `\xe9`, and a backslash that looks like the start of one as `\x5c`."""
    return _SPECIAL.sub(lambda found: _escaped(ord(found[0])), name)


def unescape_name(text: str) -> str:
    """The exact name that `escape_name` was given."""
    return _ESCAPED.sub(lambda found: _character(found[1], found[2]), text)


def escape_all(value: Any) -> Any:
    """A value of JSON with every text in it escaped."""
    return _in_all(escape_name, value)


def unescape_all(value: Any) -> Any:
    """The value that `escape_all` was given."""
    return _in_all(unescape_name, value)


def _in_all(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _in_all(change, entry) for name, entry in value.items()}
    return [_in_all(change, entry) for entry in value] if isinstance(value, list | tuple) else value


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # a byte, as os.fsdecode keeps it
        return f"\\x{code - 0xDC00:02x}"
    return "\\x5c" if code == ord("\\") else f"\\u{code:04x}"


def _character(byte: str | None, surrogate: str | None) -> str:
    if surrogate is not None:
        return chr(int(surrogate, 16))
    code = int(byte or "", 16)
    return chr(code if code < 0x80 else 0xDC00 + code)
