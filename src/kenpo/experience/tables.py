"""Rows of comma- or tab-separated text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from kenpo.errors import InputError

_LONGEST_CELL = 1 << 26  # characters


def table_rows(text: str, where: str, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line of the file, cells by column) for each row below the header. An empty cell is a missing value.

    A cell that holds chat messages as JSON, a list of objects with roles, becomes these messages; all others stay text.
    InputError for a header without or with equal names, a row of another length, and messages written as Python.
    """
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            first, line = line, reader.line_num + 1
            if not cells or cells == [""]:
                continue
            if names is None:
                names = _header(cells, f"{where}: line {first}", delimiter)
                continue
            if len(cells) != len(names):
                raise InputError(
                    f"{where}: line {first}: {len(cells)} cells under {len(names)} columns; put a text that holds "
                    f"{delimiter!r} or a line break into double quotes"
                )
            place = f"{where}: line {first}"
            yield first, {n: _cell(c, f"{place}, column {n!r}") for n, c in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise InputError(
            f"{where}: line {line}: not readable as a table ({error}); save it with double quotes"
        ) from None


def _header(cells: list[str], where: str, delimiter: str) -> list[str]:
    names = [c.strip() for c in cells]
    if len(names) == 1 and delimiter == "," and (";" in names[0] or "\t" in names[0]):
        raise InputError(
            f"{where}: one column named {names[0]!r}; columns must be separated by commas (or name it .tsv)"
        )
    if "" in names:
        raise InputError(f"{where}: column {names.index('') + 1} has no name; the first line must name the columns")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{where}: two columns are named {name!r}; rename one")
    return names


def _cell(text: str, where: str) -> Any:
    if text == "":
        return None
    if text.startswith("[{") and ("role" in text or "from" in text):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            if text.startswith(("[{'role'", "[{'content'", "[{'from'", "[{'value'")):
                raise InputError(
                    f"{where}: holds messages written as Python; write them as JSON, or use .jsonl"
                ) from None
            return text
        if all(isinstance(m, dict) and {"role", "from"} & m.keys() for m in value):
            return value
    return text
