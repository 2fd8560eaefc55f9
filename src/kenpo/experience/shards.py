"""What a data specification names: a file, several, a folder of shards, a pattern, a saved or a hub data set."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from kenpo.errors import InputError
from kenpo.experience.rows import FORMATS, MISSING_PACKAGE, READERS, Row, ending, plain, read_file

HUB = "hub:"
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.\d])", re.IGNORECASE)
Spec = str | Path | Sequence[str | Path]


def read_rows(spec: Spec) -> list[Row]:
    """All rows of `spec`, file after file: a folder's data files and a pattern's matches in the order of their names.

    ``hub:NAME``, ``hub:NAME:SPLIT`` and ``hub:NAME:CONFIG:SPLIT`` (split train by itself) are read by `datasets`, and
    so is a folder that `datasets` saved. InputError names what can't be read and the mend.
    """
    if isinstance(spec, str | Path):
        return _one(str(spec))
    if not spec:
        raise InputError("no data file is named")
    names = [str(item) for item in spec]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name}: the data file is given twice")
    return [row for name in names for row in _one(name)]


def looks_like_data(spec: str) -> bool:
    """Whether `spec` means data and no task's name."""
    path = Path(spec)
    return spec.startswith(HUB) or path.exists() or ending(path) in READERS or any(c in spec for c in "/\\*?")


def name_of(spec: Spec) -> str:
    """A short name: of a file without its endings, of a folder or hub data set its last part; several joined by +."""
    if not isinstance(spec, str | Path):
        return "+".join(dict.fromkeys(map(name_of, spec)))
    text = str(spec)
    if text.startswith(HUB):
        return text.removeprefix(HUB).split(":")[0].rstrip("/").rpartition("/")[2]
    path = Path(text)
    while path.suffix.lower() in READERS or path.suffix.lower() in (".gz", ".bz2", ".xz"):
        path = path.with_suffix("")
    return path.name


def is_path(spec: str) -> bool:
    """Whether `spec` is a file, a folder or a pattern: not a task's name, and not the hub's."""
    return looks_like_data(spec) and not spec.startswith(HUB)


def _one(spec: str) -> list[Row]:
    if spec.startswith(HUB):
        return _hub(spec)
    path = Path(spec)
    if path.is_dir():
        return (
            _saved(path) if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file() else _folder(path)
        )
    if not path.exists() and any(c in spec for c in "*?["):
        found = sorted(p for p in map(Path, glob.glob(spec)) if p.is_file())
        if not found:
            raise InputError(f"{spec}: no file matches this pattern")
        return [row for file in found for row in read_file(file)]
    return read_file(path)


def _folder(path: Path) -> list[Row]:
    files = sorted(p for p in path.iterdir() if p.is_file() and ending(p) in READERS and not p.name.startswith("."))
    if not files:
        raise InputError(f"{path}: a folder without data files; they end in {FORMATS}")
    kinds = sorted({ending(p) for p in files})
    if len(kinds) > 1:
        raise InputError(
            f"{path}: the folder holds files of different formats ({', '.join(kinds)}); name the ones that are meant, "
            f"as in '{path / ('*' + kinds[0])}'"
        )
    splits = {word[1].lower() for p in files if (word := _SPLIT.search(p.name))}
    if len(splits) > 1:
        raise InputError(
            f"{path}: the folder holds several splits ({', '.join(sorted(splits))}); name one, as in "
            f"'{path / (min(splits) + '*')}'"
        )
    return [row for file in files for row in read_file(file)]


def _hub(spec: str) -> list[Row]:
    name, *rest = spec.removeprefix(HUB).split(":")
    if not name or len(rest) > 2 or "" in rest:
        raise InputError(f"{spec}: write hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    split, config = rest[-1] if rest else "train", rest[0] if len(rest) == 2 else None
    datasets = _datasets(spec)
    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # whatever the hub, the network or a foreign file may raise
        raise InputError(f"{spec}: datasets can't load it ({_first_line(error)})") from None
    return _listed(found, spec)


def _saved(path: Path) -> list[Row]:
    datasets = _datasets(str(path))
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise InputError(f"{path}: datasets can't load it ({_first_line(error)})") from None
    if isinstance(found, dict):
        raise InputError(f"{path}: holds the splits {', '.join(found)}; name one of them: {path / next(iter(found))}")
    return _listed(found, str(path))


def _datasets(spec: str):
    try:
        import datasets
    except ImportError:
        raise InputError(f"{spec}: needs the package datasets: {MISSING_PACKAGE}") from None
    datasets.disable_progress_bars()
    return datasets


def _listed(found, spec: str) -> list[Row]:
    rows = [Row(f"{spec}: row {n}", {k: plain(v) for k, v in row.items()}) for n, row in enumerate(found, 1)]
    if not rows:
        raise InputError(f"{spec}: the data set is empty; it needs at least one row with a prompt and an answer")
    return rows


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
