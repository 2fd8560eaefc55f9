"""Reading data files (JSON, tables, parquet, compressed or not) into rows, each with its place for error messages."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from kenpo.errors import InputError

Found = tuple[str, dict[str, Any]]  # "line 3" or "row 3", and what stands there
MISSING_PACKAGE = "in Kenpo's checkout: pip install '.[tasks]'"


class Row(NamedTuple):
    """One data row. `place` is what a message calls it: "a.jsonl: line 3" as an editor counts, "a.parquet: row 3"."""

    place: str
    values: dict[str, Any]


def read_file(path: Path) -> list[Row]:
    """All rows of one data file. InputError names the file, the line or row, and the mend, also for an empty file."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: no ordinary file (a pipe or a device?), which could be waited for without end")
    reader = READERS.get(ending(path))
    if reader is None:
        raise InputError(f"{path}: the name must end in {FORMATS} so that the format is known")
    try:
        rows = [Row(f"{path}: {place}", values) for place, values in reader(path)]
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from error
    if not rows:
        raise InputError(f"{path}: the file is empty; it needs at least one row with a prompt and an answer")
    return rows


def ending(path: Path) -> str:
    """The ending that names the format, in lower case, without that of a compression: ``.jsonl`` of a.jsonl.gz."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _bytes(path: Path) -> bytes:
    """What the file holds, unpacked if its name says that it is compressed."""
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        return path.read_bytes()
    try:
        with opener(path) as f:
            return f.read()
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, PermissionError):
            raise
        raise InputError(f"{path}: can't be unpacked as {path.suffix} ({error}); compress it again") from None


def _text(path: Path) -> str:
    raw = _bytes(path)
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


def _json_lines(path: Path) -> Iterator[Found]:
    # split at "\n" alone: str.splitlines also cuts at U+2028 and its like, which JSON strings may hold
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path}: line {number}"
            yield (f"line {number}", _object(_parse(line, where), where))


def _json(path: Path) -> Iterator[Found]:
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
        yield (f"row {number}", _object(value, f"{path}: row {number}"))


def _json_lines_or_hint(path: Path) -> Iterator[Found]:
    try:
        yield from _json_lines(path)
    except InputError as error:
        message = f"{error}; a .json file must hold one list of objects, or one object per line"
        raise InputError(message) from error


def _table(path: Path) -> Iterator[Found]:
    from kenpo.experience.tables import table_rows

    for line, values in table_rows(_text(path), str(path), "\t" if ending(path) == ".tsv" else ","):
        yield (f"line {line}", values)


def _parquet(path: Path) -> Iterator[Found]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: reading parquet needs pyarrow: {MISSING_PACKAGE}") from error
    raw = _bytes(path)
    if not raw:
        return
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(raw))
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{path}: not a readable parquet file ({reason})") from error
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        for values in batch.to_pylist():
            number += 1
            yield (f"row {number}", {name: plain(value) for name, value in values.items()})


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


READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}
FORMATS = ".jsonl, .json, .csv, .tsv or .parquet (each perhaps with .gz, .bz2 or .xz behind it)"
OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # type: ignore[dict-item]
