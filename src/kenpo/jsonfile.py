"""JSON files that people write: read whole, or one line about what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kenpo.errors import InputError


class _Twice(ValueError):
    """A key that stands twice in one object, of which JSON readers would drop the first without a word."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parsed JSON (NaN and Infinity allowed). `InputError` that names the file and the fault, a key given twice too."""
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8-sig"), object_pairs_hook=_object)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{path}: JSON nested too deeply") from None
    except _Twice as error:
        raise InputError(f"{path}: {error.args[0]!r} is given twice in one object; keep one") from None
    except ValueError:
        raise InputError(f"{path}: holds a number with too many digits") from None
