"""`kenpo loss · list · show · diff`: the catalogue and the numbers behind it."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from kenpo.commands.arguments import parse
from kenpo.errors import InputError, RunError


@dataclass(frozen=True)
class LossOptions:
    """Evaluate an algorithm on recorded numbers, in float64.

    examples:
      kenpo loss case.json
      kenpo loss case.json --out result.json

    CASE is JSON: {"algorithm": "gspo", "settings": {"surrogate.high": 0.1}, "cases": [{"rollouts": {"mask": [[0, 1, 1],
    [0, 1, 0]], "group": [0, 0], "rewards": [1.0, 0.0], "logp_old": [[0, -1.2, -0.4], [0, -0.9, 0]]},
    "policy": {"logp": [[0, -1.1, -0.5], [0, -0.8, 0]]}}]}
    """

    case: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CASE.json")]
    """File of cases (JSON)."""
    out: str | None = None
    """Write the results here instead of to standard output."""


def loss(argv: list[str]) -> int:
    """`kenpo loss CASE.json [--out OUT.json]`."""
    options = parse(LossOptions, argv, prog="kenpo loss", description=LossOptions.__doc__ or "")
    from kenpo.casefile import run_file

    if options.out is not None and Path(options.out).exists() and Path(options.out).samefile(options.case):
        raise InputError(f"--out {options.out}: that is the file of cases itself; choose another name")
    text = json.dumps(run_file(options.case))
    if options.out is None:
        print(text)
        return 0
    try:
        Path(options.out).write_text(text + "\n")
    except OSError as error:
        raise RunError(f"could not write {options.out}: {error.strerror}") from None
    return 0


@dataclass(frozen=True)
class ListOptions:
    """The catalogue of algorithms: what each changes, where it comes from, whether and when it acts in `kenpo train`.

    examples:
      kenpo list
      kenpo list --json
    """

    json: bool = False
    """Machine-readable output."""


def when_all_act(a: Any) -> str:
    """Under which conditions every part of the algorithm can act."""
    import kenpo
    from kenpo.conditions import OFF

    several = 4 if a.updates is None else a.updates
    conditions: dict[str, dict[str, Any]] = {
        "always": {},
        "with several updates": {"updates": several},
        "with stale or foreign samples": {"stale": True, "foreign": True},
        "with several updates and stale or foreign samples": {"updates": several, "stale": True, "foreign": True},
    }
    off = {p.part for p in kenpo.acts(a) if p.needed == OFF}
    set_up = "".join(f"; {part} is off until its number is set" for part in sorted(off))
    for words, how in conditions.items():
        if all(p.acts or p.part in off for p in kenpo.acts(a, **how)):
            return words + set_up
    return "never in full"


def entry(a: Any) -> dict[str, Any]:
    """One algorithm as a row of the catalogue."""
    return {
        "name": a.name,
        "source": a.source,
        "status": standing(a),
        "summary": summary(a.name),
        "changes": changes(a),
        "needs": sorted(a.needs),
        "scope": a.scope.name.lower(),
        "updates": a.updates,
        "not_supplied": not_supplied(a),
        "trains": not not_supplied(a),
        "lacks": not_supplied(a),
        "acts": when_all_act(a),
    }


def not_supplied(a: Any) -> list[str]:
    """Fields that the algorithm reads and `kenpo train` does not supply: evaluate it in a loop of your own."""
    from kenpo.experience.feeding import SOURCE_OF
    from kenpo.experience.mixing import MIXED
    from kenpo.experience.pairing import FIELDS
    from kenpo.learner.teaching import TAUGHT
    from kenpo.trainer.plan import SUPPLIED, VALUED

    pairs = FIELDS if SOURCE_OF.get(a.name) == "pairs" else frozenset()
    return sorted(a.needs - SUPPLIED - TAUGHT - VALUED - MIXED - pairs)


def standing(a: Any) -> str:
    """The catalogue's status, or what an algorithm that is not the catalogue's own derives from."""
    from kenpo.algorithms import catalogue

    known = catalogue().get(a.name)
    if known is None:
        return f"your own, derived from {a.source}"
    return a.status if a == known else f"changed from {a.name}"


def summary(name: str) -> str:
    """The first line of the docstring of the file that declares the algorithm."""
    return (documentation(name) or "").split("\n")[0]


def documentation(name: str) -> str | None:
    """The docstring of the module that declares the catalogued algorithm `name`."""
    from kenpo.algorithms import module_of

    module = module_of(name)
    return None if module is None else inspect.getdoc(module)


def file_of(name: str) -> str | None:
    """The name of the file in algorithms/ that declares the catalogued algorithm `name`, without its ending."""
    from kenpo.algorithms import module_of

    module = module_of(name)
    return None if module is None else module.__name__.rsplit(".", 1)[-1]


def family(name: str) -> list[str]:
    """Names of the catalogued algorithms in one file: the method itself, then its variants."""
    import kenpo

    here = file_of(name)
    return [n for n in kenpo.names() if here is not None and file_of(n) == here]


def parent(name: str) -> str | None:
    """The catalogued algorithm that the declaration of `name` starts from; None for the root."""
    import kenpo
    from kenpo.algorithms import module_of

    module, first = module_of(name), family(name)[0]
    if name != first:
        return first
    imported = [v.name for v in vars(module).values() if isinstance(v, kenpo.Algorithm)] if module else []
    return next((n for n in imported if n not in family(name)), None)


def changes(a: Any) -> list[str]:
    """The slots in which `a` differs from GRPO."""
    import kenpo

    root = kenpo.get("grpo")
    return sorted({key.split(".")[0] for key in root.diff(a)}, key=[*a.SLOTS, "updates"].index)


def list_(argv: list[str]) -> int:
    """`kenpo list [--json]`."""
    options = parse(ListOptions, argv, prog="kenpo list", description=ListOptions.__doc__ or "")
    import kenpo

    rows = [entry(kenpo.get(n)) for n in kenpo.names()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    columns = ["name", "paper", "changes to GRPO", "reads", "kenpo train", "all parts act", "status"]
    _table(columns, [row_of(r) for r in rows])
    print(f"\n{len(rows)} algorithms; a name with a hyphen is a variant. kenpo show NAME, kenpo diff A B")
    print(
        "all parts act: kenpo train samples afresh for every batch; several updates of it are --minibatches or --epochs"
    )
    print("above 1; stale or foreign samples come from lagging weights or an engine that is not the embedded one")
    return 0


def row_of(r: Any) -> list[str]:
    """An entry's line of the table."""
    trains = "yes" if r["trains"] else f"no, lacks {', '.join(r['lacks'])}"
    changed, reads = (", ".join(r[key]) or "–" for key in ("changes", "needs"))
    return [r["name"], r["source"], changed, reads, trains, r["acts"] if r["trains"] else "–", r["status"]]


@dataclass(frozen=True)
class ShowOptions:
    """One algorithm: its formula, slots and numbers, source, variants, and what other trainers do under its name.

    examples:
      kenpo show gspo
      kenpo show dapo --set surrogate.high=0.3 --with untruncated
      kenpo show my.py:MINE --json
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """A catalogued name (kenpo list) or FILE.py:NAME."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a number: slot.field=value."""
    with_: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="with")] = ()
    """Append a stage by its snake-case name."""
    json: bool = False
    """Machine-readable output."""


def show(argv: list[str]) -> int:
    """`kenpo show NAME`."""
    options = parse(ShowOptions, argv, prog="kenpo show", description=ShowOptions.__doc__ or "")
    from kenpo.loading import resolve
    from kenpo.options import parse_settings

    a = resolve(options.name, parse_settings(options.set), options.with_)
    known = ":" not in options.name
    document = documentation(a.name) if known else None
    more = beside(a.name) if known else {}
    if options.json:
        found = {**entry(a), "settings": a.settings(), "documentation": document, **more}
        print(json.dumps(found, indent=2, default=str))
        return 0
    if document:
        print(document + "\n")
    _table(["slot", "stage", "sees", "reads"], slots(a))
    reason = a.two_phase()
    print(f"source: {a.source} · status: {standing(a)}")
    print(f"step: {'two phases: ' + reason if reason else 'one phase'}")
    if missing := not_supplied(a):
        print(
            f"train: not by kenpo train, which has no {', '.join(missing)}; put it into kenpo.Rollouts or kenpo.Policy"
        )
    if a.updates is not None:
        print(f"updates: at most {a.updates} optimizer step on a rollout batch; a trainer refuses more")
    import kenpo

    for part in kenpo.acts(a):
        if not part.acts:
            print(f"{part.part}: can't act with one update a batch of fresh samples ({part.why}); needs {part.needed}")
    if more.get("variants"):
        print(f"variants: {', '.join(more['variants'])} (kenpo diff {a.name} {more['variants'][0]})")
    for word in ("use", "mind", "elsewhere"):
        for text in [more[word]] if isinstance(more.get(word), str) else more.get(word, []):
            print(textwrap.fill(f"{word}: {text}", 110, subsequent_indent="    "))
    return 0


def slots(a: Any) -> list[list[str]]:
    """Rows (slot, stage, sees, reads) of an algorithm's stages in running order."""
    rows = []
    for slot in a.SLOTS:
        value = getattr(a, slot)
        stages = value if isinstance(value, tuple) else (value,) if value else ()
        rows += [
            [slot if i == 0 else "", repr(s), s.span.name.lower(), ", ".join(sorted(s.needs)) or "–"]
            for i, s in enumerate(stages)
        ]
        rows += [] if stages else [[slot, "–", "", ""]]
    return rows


def beside(name: str) -> dict[str, Any]:
    """What stands beside the declaration: parent, variants, when to use it, and what others do under its name."""
    from kenpo.commands.notes import NOTES

    here = file_of(name)
    note = NOTES.get(here) if here else None
    variants = [n for n in family(name) if n != name]
    return {"parent": parent(name), "variants": variants, **({} if note is None else note._asdict())}


@dataclass(frozen=True)
class DiffOptions:
    """The slots and numbers in which two algorithms differ, and nothing else.

    examples:
      kenpo diff grpo gspo
      kenpo diff dapo my.py:MINE --json
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A catalogued name or FILE.py:NAME."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """Another."""
    json: bool = False
    """Machine-readable output."""


def diff(argv: list[str]) -> int:
    """`kenpo diff A B`."""
    options = parse(DiffOptions, argv, prog="kenpo diff", description=DiffOptions.__doc__ or "")
    from kenpo.loading import resolve

    a, b = resolve(options.a), resolve(options.b)
    found = a.diff(b)
    if options.json:
        print(json.dumps({k: list(v) for k, v in found.items()}, indent=2, default=repr))
    elif found:
        _table(["slot", a.name, b.name], [[k, _text(x), _text(y)] for k, (x, y) in found.items()])
    else:
        print(f"{a.name} and {b.name} are the same in every slot")
    return 0


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else repr(value)


def _table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; plain columns, without cutting, when standard output is not a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, box=None, header_style="bold")
        for row in rows:
            table.add_row(*[cell.replace("[", r"\[") for cell in row])
        Console().print(table)
        return
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
