"""Writes docs/catalogue.md, docs/algorithms/NAME.md and their drawings from the declarations themselves: `make docs`.

`python docs/build_pages.py --check` writes nothing and exits with status 1 if a page is not what the declarations say
(line numbers of links aside, which drift with every edit above them).
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import json
import math
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import kenpo  # noqa: E402
from kenpo.algorithms import READING_ORDER  # noqa: E402
from kenpo.commands.notes import NOTES  # noqa: E402
from kenpo.commands.objectives import changes, documentation, file_of, not_supplied, parent, slots  # noqa: E402
from kenpo.stages import Context, Scope, Stage, snake  # noqa: E402

PAGES = ROOT / "docs" / "algorithms"
SAYS = "<!-- Written by docs/build_pages.py from the declarations; run `make docs`, do not edit. -->"

# Entries of the reading list without mathematics that could be found: not in the catalogue.
WITHOUT_MATHEMATICS = (
    ("MOER: expert prefixes with selective rollback", "nothing public but the title"),
    ("CORD: conflict-aware RL with distillation", "nothing public but the title"),
    ("On-policy residual learning for diffusion language models", "a project page without formulas"),
    ("Trajectory-aware policy optimization", "nothing public but the title"),
    ("Generalized PPO, the divergence view", "nothing public but the title; not the gradient-preserving GPPO"),
    ("RLCPR", "the mechanism is described, no formula is public"),
    ("Rank-masked policy optimization (arXiv:2609.09135)", "the direction is known, no constant of it"),
    ("Range-GRPO for intervals of positive width (arXiv:2610.01548)", "`range_grpo` is its point limit only"),
    ("ERILS (arXiv:2608.01717)", "only that advantages are normalised per source is known"),
    ("Consolidating RLVR (arXiv:2608.27409) and RL for code optimisation (arXiv:2607.25970)", "no new objective"),
    ("SSPO, versions 2 and 3", "their gate is not public; `sspo` is version 1, `sspo-arctan` a gate like it"),
)


# -- numbers ------------------------------------------------------------------------------------------------------


def ready(name: str) -> kenpo.Algorithm:
    """The algorithm with the numbers that it refuses to run without."""
    a = kenpo.get(name)
    return a.with_settings({"aggregate.length": 8}) if a.settings().get("aggregate.length", 0) is None else a


@functools.cache
def random_batch(seed: int, far: bool, supervised: bool = False) -> tuple[kenpo.Rollouts, kenpo.Policy]:
    """A batch with every field any algorithm reads, of low entropy; `far`: some tokens far likelier or rare."""
    from laws.build import tensors
    from reference.cases import make_case

    drawn = {
        "topk": 3,
        "router": (2, 2),
        "experts": True,
        "query": True,
        "critic": True,
        "answers": True,
        "parts": True,
    }
    case = make_case(seed, **drawn, supervised=supervised, finite_junk=True, groups=6, width=12)
    rollouts, policy = tensors(case)
    logp = policy.logp.clone()
    if far:
        logp[:, ::4] = (rollouts.logp_old[:, ::4] + 2.6).clamp(max=-1e-4)
        old = rollouts.logp_old.clone()
        old[:, 3::4], logp[:, 3::4] = -7.1, -7.0
        rollouts = rollouts.replace(logp_old=old)
    return rollouts, policy.replace(logp=logp, entropy=policy.entropy * 0.15)


def figures(names: list[str]) -> tuple[str, list[list[str]]]:
    """Where the numbers are from, and per name: loss, Σ |coefficient|, largest change of one against the first name.

    The first random batch on which the most variants differ.
    """
    best: tuple[int, str, list[list[str]]] = (-1, "", [])
    for seed, far in itertools.product(range(12), (False, True)):
        given = any(r.supervised for n in names for r in kenpo.get(n).regularizers)
        results = [kenpo.evaluate(ready(n), *random_batch(seed, far, given)) for n in names]
        moved = [apart(r.gradients, results[0].gradients) for r in results]
        moved = [m if m > 1e-9 else 0.0 for m in moved]
        rows = [
            [
                f"{float(r.loss.detach()) + 0.0:.5g}",
                f"{sum(float(g.abs().sum()) for g in r.gradients.values()):.5g}",
                f"{m:.3g}" if m else "–",
            ]
            for r, m in zip(results, moved, strict=True)
        ]
        differ = sum(m > 0 for m in moved)
        if differ > best[0]:
            best = (differ, f"random batch {seed}{' with far tokens' if far else ''}", rows)
        if differ == len(names) - 1:
            break
    return best[1], best[2]


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two algorithms' coefficients in any policy field; 0 where one lacks it."""
    found = 0.0
    for name in one.keys() | other.keys():
        a, b = one.get(name), other.get(name)
        found = max(found, float(((0 if a is None else a) - (0 if b is None else b)).abs().max()))
    return found


class Given(kenpo.stages.Advantage):
    """The reward as it is, on every token."""

    def __call__(self, rewards, ctx, state):
        return ctx.per_token(rewards), state


def curves(a: kenpo.Algorithm, points: int = 121) -> list[tuple[float, list[float], list[float]]] | None:
    """[(A, objective, coefficient)] over ratios 0.2…5 of one-token responses; None if it is no function of a ratio."""
    fields = {"logp", "logp_old", "logp_sampler", "logp_ref", "logp_prox", "logp_guided", "entropy", "truncated"}
    moving = [s for s in (*a.weights, a.ratio, a.surrogate) if s is not None]
    if a.ratio is None or not a.needs <= fields or any(s.span > Scope.SEQUENCE for s in moving):
        return None
    a = a.but(advantage=Given(), selection=(), shaping=(), regularizers=())
    x = torch.linspace(math.log(0.2), math.log(5), points, dtype=torch.float64)
    found = []
    for advantage in (1.0, -1.0):
        anchor = torch.zeros(points, 2, dtype=torch.float64) - 2.0
        logp = anchor + x.unsqueeze(-1)
        mask = torch.zeros(points, 2, dtype=torch.bool)
        mask[:, 1] = True
        more = dict.fromkeys(a.needs & fields - {"logp", "entropy", "truncated"}, anchor)
        if "truncated" in a.needs:
            more["truncated"] = torch.zeros(points, dtype=torch.bool)
        entropy = {"entropy": torch.ones_like(anchor)} if "entropy" in a.needs else {}
        rewards = torch.full((points,), advantage, dtype=torch.float64)
        rollouts = kenpo.Rollouts(mask=mask, group=torch.arange(points), rewards=rewards, **more)
        policy = kenpo.Policy(logp=logp.requires_grad_(), **entropy)
        ctx = Context(rollouts, torch.ones(points, dtype=torch.bool), policy, advantage * mask.double())
        gain = a.surrogate(a.ratio(ctx), ctx)
        for stage in a.weights:
            gain = gain * stage(ctx).detach()
        (slope,) = torch.autograd.grad(gain[:, 1].sum(), logp)
        found.append((advantage, gain[:, 1].tolist(), slope[:, 1].tolist()))
    return found


# -- drawings -----------------------------------------------------------------------------------------------------


def drawing(name: str) -> str | None:
    """An SVG of objective and coefficient against the ratio, or None."""
    found = curves(ready(name))
    if found is None:
        return None
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="280" viewBox="0 0 720 280" '
        'font-family="sans-serif" font-size="12"><rect width="720" height="280" fill="white"/>'
    ]
    for panel, (title, index) in enumerate((("objective", 1), ("coefficient: d objective / d log π", 2))):
        parts.append(_panel(60 + 350 * panel, title, [(row[0], row[index]) for row in found]))
    return "\n".join([*parts, "</svg>\n"])


def _panel(left: float, title: str, lines: list[tuple[float, list[float]]]) -> str:
    width, top, height = 280, 30, 200
    values = [v for _, row in lines for v in row]
    low, high = min(-1.0, *values), max(1.0, *values)
    low, high = max(low, -6.0), min(high, 6.0)
    span = high - low

    def x(log_r: float) -> float:
        return left + width * (log_r - math.log(0.2)) / (math.log(5) - math.log(0.2))

    def y(v: float) -> float:
        return top + height * (high - min(max(v, low), high)) / span

    out = [f'<text x="{left}" y="{top - 10}">{title}</text>']
    for r in (0.2, 0.5, 1, 2, 5):
        out.append(f'<path d="M{x(math.log(r)):.1f} {top}v{height}" stroke="#ddd"/>')
        out.append(f'<text x="{x(math.log(r)):.1f}" y="{top + height + 16}" text-anchor="middle">{r:g}</text>')
    step = next(s for s in (0.5, 1, 2, 4) if span / s <= 8)
    for k in range(math.ceil(low / step), math.floor(high / step) + 1):
        out.append(f'<path d="M{left} {y(k * step):.1f}h{width}" stroke="{"#999" if k == 0 else "#ddd"}"/>')
        out.append(f'<text x="{left - 6}" y="{y(k * step) + 4:.1f}" text-anchor="end">{k * step:g}</text>')
    for (advantage, row), color in zip(lines, ("#1f6fb2", "#c2452d"), strict=True):
        n = len(row)
        points = " ".join(
            f"{x(math.log(0.2) + (math.log(5) - math.log(0.2)) * i / (n - 1)):.1f},{y(v):.1f}"
            for i, v in enumerate(row)
        )
        dash = "" if advantage > 0 else ' stroke-dasharray="6 3"'
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        sign = "A = +1" if advantage > 0 else "A = −1"
        out.append(
            f'<text x="{left + (10 if advantage > 0 else 80)}" y="{top + height + 36}" fill="{color}">{sign}</text>'
        )
    out.append(f'<text x="{left + width}" y="{top + height + 36}" text-anchor="end">ratio</text>')
    return "\n".join(out)


# -- pages --------------------------------------------------------------------------------------------------------


def _table(columns: list[str], rows: list[list[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(c.replace("\n", " ") for c in row) + " |" for row in cells) + "\n"


def _link(thing: type) -> str:
    file = Path(inspect.getsourcefile(thing)).relative_to(ROOT)  # type: ignore[arg-type]
    line = inspect.getsourcelines(thing)[1]
    return f"[{file.as_posix()}:{line}](../../{file.as_posix()}#L{line})"


def _stages(a: kenpo.Algorithm) -> Iterator[Stage]:
    for stage in a.stages:
        yield stage
        yield from stage.nested


def _source(stage: Stage) -> str:
    text = " ".join((inspect.getdoc(type(stage)) or "").split())
    found = re.search(r"Source: (.*?)(?=\.( [A-Z`]|$)|$)", text)
    return found[1].replace("|", "\\|").replace("``", "`") if found else "–"


def _lead(stage: Stage) -> str:
    text = " ".join((inspect.getdoc(type(stage)) or "").split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0].rstrip(".").replace("|", "\\|").replace("``", "`")


def _value(v: object) -> str:
    return "–" if v is None else f"{v:g}" if isinstance(v, float) else f"`{v!r}`".replace("|", "\\|")


def _sources_behind(cls: type) -> dict[str, str]:
    """File -> text of a stage's class and of the functions in kenpo.ops that it names."""
    found = {_file(cls): inspect.getsource(cls)}
    for module, name in sorted(set(re.findall(r"\b([a-z]+)\.([a-z_0-9]+)\b", found[_file(cls)]))):
        if module != "masked" and (ROOT / "src/kenpo/ops" / f"{module}.py").exists():  # masked is behind everything
            thing = getattr(__import__(f"kenpo.ops.{module}", fromlist=["_"]), name, None)
            if inspect.isfunction(thing):
                found[_file(thing)] = found.get(_file(thing), "") + inspect.getsource(thing)
    return found


def _file(thing: object) -> str:
    return Path(inspect.getsourcefile(inspect.unwrap(thing))).relative_to(ROOT).as_posix()  # type: ignore[arg-type]


@functools.cache
def _planted() -> list[dict[str, object]]:
    return tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text(encoding="utf-8"))["mutant"]


@functools.cache
def _tests() -> list[tuple[str, str]]:
    """(node id, source) of every test function outside the laws, which name no stage."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for f in ast.walk(ast.parse(text)):
            if isinstance(f, ast.FunctionDef) and f.name.startswith("test_"):
                node = f"{path.relative_to(ROOT).as_posix()}::{f.name}"
                found.append((node, ast.get_source_segment(text, f) or ""))
    return found


def tests_of(cls: type) -> list[str]:
    """Up to two tests (node ids) of one detail: those that catch a fault planted in it, then those that name it."""
    own = {_file(cls): inspect.getsource(cls)}
    catching = [
        str(node) for texts in (own, _sources_behind(cls)) for m in _planted()
        if str(m["old"]) in texts.get(str(m["file"]), "") for node in m["tests"]  # type: ignore[attr-defined]
    ]  # fmt: skip
    naming = [node for node, text in _tests() if re.search(rf"\b({cls.__name__}|{snake(cls)})\b", text)]
    first: dict[str, str] = {}
    for node in (*catching, *naming):
        first.setdefault(node.split("[")[0], node)
    return list(first.values())[:2]


def _test_of(stage: Stage, name: str) -> str:
    """Links to the algorithm's reference and to the tests of one of its details."""
    reference = f"tests/laws/test_references.py::test_equals_its_reference[usual-{name}]"
    nodes = dict.fromkeys([reference, *tests_of(type(stage))])
    return ", ".join(f"[`{n.split('::')[-1]}`](../../{n.split('::')[0]})" for n in nodes)


def _proof(names: list[str]) -> str:
    lines = [
        f"- `pytest tests/laws -k {names[0]}`: the plain-Python reference, and the laws every algorithm keeps "
        "([laws](../../tests/laws/test_laws.py), [reference](../../tests/laws/references.py)).",
    ]
    printed = json.loads((ROOT / "tests/golden/formulas.json").read_text(encoding="utf-8"))["entries"]
    entries = [e["name"] for e in printed if e.get("algorithm") in names]
    if entries:
        lines.append(
            f"- Printed numbers: {', '.join(f'`{e}`' for e in entries)} in "
            "[formulas.json](../../tests/golden/formulas.json), asserted by "
            "[test_formulas.py](../../tests/golden/test_formulas.py)."
        )
    recorded = [
        p for p in sorted((ROOT / "tests/conformance").glob("*.json"))
        if json.loads(p.read_text(encoding="utf-8"))["algorithm"] in names
    ]  # fmt: skip
    if recorded:
        files = ", ".join(f"[{p.name}](../../tests/conformance/{p.name})" for p in recorded)
        lines.append(f"- Recorded cases: {files}.")
    return "\n".join(lines) + "\n"


def page(file: str) -> str:
    """The page of one declaration file."""
    module = __import__(f"kenpo.algorithms.{file}", fromlist=["_"])
    names = [n for n in kenpo.names() if file_of(n) == file]
    first, note = kenpo.get(names[0]), NOTES[file]
    doc = (documentation(names[0]) or "").split("\n", 1)
    above = parent(first.name)
    out = [SAYS, "", f"# {doc[0].rstrip('.')}", "", _prose(doc[1]) if len(doc) > 1 else "", ""]
    out += [f"**Use it for**: {note.use}", "", f"**Mind**: {note.mind}", ""]
    out += [f"Status: {first.status}. Paper: {first.source}. Scope: {first.scope.name.lower()}.", ""]
    reason = first.two_phase()
    step = f"two phases: {reason}." if reason else "one phase."
    out += [f"Reads: {', '.join(f'`{n}`' for n in sorted(first.needs)) or 'nothing optional'}. Step: {step}", ""]
    if (PAGES / f"{file}.svg").exists() or curves(ready(first.name)) is not None:
        out += [f"![Objective and coefficient against the ratio]({file}.svg)", ""]
        out += ["One-token responses, π_old = μ, probability .135 under both; the value is cut at ±6.", ""]
    out += ["## Slots", "", _table(["slot", "stage", "sees", "reads"], [_marked(r) for r in slots(first)])]
    if above:
        rows = [[f"`{k}`", _value(x), _value(y)] for k, (x, y) in kenpo.get(above).diff(first).items()]
        link = f"[`{above}`]({file_of(above)}.md)"
        out += [f"## What it changes in {link}", "", _table(["slot", f"`{above}`", f"`{first.name}`"], rows)]
    if len(names) > 1:
        where, numbers = figures(names)
        out += ["## Variants", "", f"Numbers on {where} of `docs/build_pages.py` (six groups, twelve tokens):", ""]
        rows = []
        for n, row in zip(names, numbers, strict=True):
            differs = first.diff(kenpo.get(n))
            words = "; ".join(f"`{k}`: {_value(y)}" for k, (_, y) in differs.items()) or "–"
            rows.append([f"`{n}`", words, *row])
        out += [_table(["name", "differs in", "loss", "Σ abs. coefficients", "largest change of one"], rows)]
    out += ["## Where each detail stands", ""]
    seen = {type(s): (s, n) for n in reversed(names) for s in _stages(kenpo.get(n))}
    used = dict.fromkeys(type(s) for n in names for s in _stages(kenpo.get(n)))
    rows = [[f"`{snake(s)}`: {_lead(s)}", _source(s), _link(type(s)), _test_of(s, n)] for s, n in map(seen.get, used)]
    out += [_table(["detail", "source", "our line", "test"], rows)]
    line = Path(inspect.getsourcefile(module)).relative_to(ROOT).as_posix()  # type: ignore[arg-type]
    out += [f"Declaration: [{line}](../../{line}).", "", "## Proof", "", _proof(names)]
    if note.elsewhere:
        out += ["## Elsewhere", "", *[f"- {text}" for text in note.elsewhere], ""]
        out += ["As read in the sources in mid-2026.", ""]
    return "\n".join(out)


def _prose(text: str) -> str:
    """A docstring as Markdown: double backticks become single ones; indented formulas are code already."""
    return text.strip("\n").replace("``", "`")


def _marked(row: list[str]) -> list[str]:
    slot, stage, sees, reads = row
    return [slot, f"`{stage}`".replace("|", "\\|") if stage != "–" else stage, sees, reads]


def catalogue() -> str:
    """docs/catalogue.md."""
    rows = []
    for n in kenpo.names():
        a = kenpo.get(n)
        reason = a.two_phase()
        rows.append([
            f"[`{n}`](algorithms/{file_of(n)}.md)",
            a.source,
            ", ".join(changes(a)) or "–",
            ", ".join(f"`{x}`" for x in sorted(a.needs)) or "–",
            "two" if reason else "one",
            "no" if not_supplied(a) else "yes",
            a.status,
        ])  # fmt: skip
    out = [
        SAYS,
        "",
        "# The catalogue",
        "",
        f"{len(rows)} algorithms in {len(READING_ORDER)} declarations, in reading order. A name with a hyphen is a "
        "variant: a form in which paper, released code or a common reading differ from the default.",
        "",
        "`kenpo train` supplies what most of them read; the others (an expert's traces, router scores, top-K or "
        "full-vocabulary log-probs) are evaluated on data that you put into `kenpo.Rollouts` and `kenpo.Policy`.",
        "",
        "`kenpo show NAME` prints one, `kenpo diff A B` what differs. *Status*: `paper` is the published formula; `our "
        "reading` fills a gap that the page names; a `reconstruction` is not the paper's objective.",
        "",
        _table(["name", "paper", "changes to GRPO", "reads", "phases", "`kenpo train`", "status"], rows),
        "## Without public mathematics",
        "",
        "These stand on the reading list and not in the catalogue, because no formula of theirs could be found:",
        "",
        *[f"- {name}: {why}." for name, why in WITHOUT_MATHEMATICS],
        "",
    ]
    return "\n".join(out)


def pages() -> dict[Path, str]:
    """Every page's path and text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {PAGES / f"{file}.md": page(file) for file in READING_ORDER}
        return found | {ROOT / "docs" / "catalogue.md": catalogue()}


def without_lines(text: str) -> str:
    """The page without the line numbers of its links."""
    return re.sub(r"(?<=\.py)(:\d+|#L\d+)", "", text)


def stale() -> list[str]:
    """Pages that differ from what the declarations say, and pages of declarations that are gone."""
    wanted = pages()
    bad = [
        p.relative_to(ROOT).as_posix()
        for p, text in wanted.items()
        if not p.exists() or without_lines(p.read_text(encoding="utf-8")) != without_lines(text)
    ]
    return bad + [p.relative_to(ROOT).as_posix() for p in PAGES.glob("*.md") if p not in wanted]


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        for name in stale():
            print(f"{name} is out of date; run `make docs`", file=sys.stderr)
        return 1 if stale() else 0
    torch.set_num_threads(1)
    PAGES.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in READING_ORDER:
            svg = drawing(next(n for n in kenpo.names() if file_of(n) == file))
            if svg is not None:
                (PAGES / f"{file}.svg").write_text(svg, encoding="utf-8")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
