"""Reading .jsonl, .json and .parquet files into rows, each with its place in the file for error messages."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kenpo.errors import InputError

MISSING_PACKAGE = "in Kenpo's checkout: pip install '.[tasks]'"


class Row(NamedTuple):
    """One data row. `place` is what a message calls it: "line 3" (from 1, as an editor counts) or "row 3" (from 1)."""

    place: str
    values: dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a data file. InputError names the file, the line or row, and the mend; an empty file is an error."""
    if path.is_dir():
        files = sorted(p.name for p in path.iterdir() if p.suffix.lower() in READERS)
        listed = f" (it holds {', '.join(files[:5])})" if files else ""
        raise InputError(f"{path}: is a folder; name one .jsonl, .json or .parquet file{listed}")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: no ordinary file (a pipe or a device?), which could be waited for without end")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: the name must end in .jsonl, .json or .parquet so that the format is known")
    try:
        rows = list(reader(path))
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from error
    if not rows:
        raise InputError(f"{path}: the file is empty; it needs at least one row with a prompt and an answer")
    return rows


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line} is not UTF-8; save the file as UTF-8") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: invalid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested too deep
        reason = "nested too deep" if isinstance(error, RecursionError) else "a number with too many digits"
        raise InputError(f"{where}: unusable JSON ({reason})") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
        raise InputError(f'{where}: holds {kind}; each row must be an object such as {{"prompt": …, "answer": …}}')
    return value


def _json_lines(path: Path) -> Iterator[Row]:
    # split at "\n" alone: str.splitlines also cuts at U+2028 and its like, which JSON strings may hold
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path}: line {number}"
            yield Row(f"line {number}", _object(_parse(line, where), where))


def _json(path: Path) -> Iterator[Row]:
    text = _text(path)
    if not text.strip():
        return
    if text.lstrip()[0] != "[":  # JSON lines under another name are common
        yield from _json_lines_or_hint(path)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: invalid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError):
        rows = _parse(text, str(path))
    for number, value in enumerate(rows, 1):
        yield Row(f"row {number}", _object(value, f"{path}: row {number}"))


def _json_lines_or_hint(path: Path) -> Iterator[Row]:
    try:
        yield from _json_lines(path)
    except InputError as error:
        message = f"{error}; a .json file must hold one list of objects, or one object per line"
        raise InputError(message) from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: reading parquet needs pyarrow: {MISSING_PACKAGE}") from error
    if path.stat().st_size == 0:
        return
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{path}: not a readable parquet file ({reason})") from error
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        for values in batch.to_pylist():
            number += 1
            yield Row(f"row {number}", {name: plain(value) for name, value in values.items()})


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: dates as ISO text, decimals as text, bytes as text where they are UTF-8."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, decimal.Decimal):
        return None if value.is_nan() else str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, NaN, blank text or an empty list or object."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str | list | dict) and not (value.strip() if isinstance(value, str) else value)


READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}
