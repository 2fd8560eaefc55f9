"""`kenpo eval`: greedy accuracy, avg@k, maj@k and pass@k of a model on one or several sets of problems."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from kenpo.commands.arguments import merge_repeats, parse, positional
from kenpo.commands.groups import EVAL
from kenpo.errors import InputError
from kenpo.options import TemplateArgs, VerifierSpec

_LISTS = ("--task", "--template-args", "--stop", "--k", "--verifier")

_EVAL = """Greedy accuracy of a model on held-out problems; with --samples also avg@k, maj@k and pass@k. Each figure has
a 95 % interval over the problems.

examples:
  kenpo eval bundled --task addition
  kenpo eval path/to/model --task gsm8k.jsonl math500.jsonl --samples 8 --json
  kenpo eval runs/first/checkpoints/step_000012 --task addition --samples 8 --k 1 2 4 8
"""


@dataclass(frozen=True)
class EvalOptions:
    """Options of ``kenpo eval``."""

    task: tuple[str, ...] = ("addition",)
    """"addition", "reasoning_gym:NAME", or a data file; several make several sets, each with its own figures."""
    prompt_column: str = "prompt"
    """Column of a data file that holds the prompt."""
    answer_column: str = "answer"
    """Column of a data file that holds the answer."""
    eval_file: str | None = None
    """File whose rows are evaluated instead of the task's own."""
    system: str | None = None
    """System prompt, used with a chat template."""
    template: str = "auto"
    """Chat template: auto (the model's own), none (prompts are rendered already), or a file."""
    template_args: TemplateArgs = None
    """What the chat template reads besides the messages: --template-args enable_thinking=false."""
    verifier: VerifierSpec = None
    """Default: each task's own. Several, with weights (a.py:f=1 b.py:g=0.2), are parts of one reward."""
    time_limit: float = 10.0
    """Seconds that a verifier may take for one call."""
    verifier_workers: int = 2
    """Processes that judge with own functions, math_verify or reasoning_gym."""
    verifier_memory: int = 8 << 30
    """Bytes of address space of each of them; 0: no limit."""
    sandbox: bool = False
    """Run them under bubblewrap: no network, no writing outside a /tmp of their own."""
    correct_at: float = 1.0
    """A sample is correct when its reward is at least this."""
    problems: int | None = None
    """Problems of each set that are evaluated; default: all rows of a file, 500 of an endless task."""
    samples: int = 1
    """Samples per problem, for avg@k and maj@k of all of them and for pass@k; 1 without --k: greedy only."""
    k: tuple[int, ...] = ()
    """pass@k for these k, each at most --samples (1 and --samples)."""
    temperature: float = 1.0
    """Logits are divided by it before sampling."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of this mass; 1: all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: all."""
    max_tokens: int = 256
    """Longest response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's end-of-sequence ids."""
    keep_special_tokens: bool = False
    """Let the verifier see all special tokens of a response; tags in pairs (<answer>, </answer>) are always kept."""
    batch: int = 256
    """Prompts generated at once."""
    sampling_tokens: int | None = None
    """Tokens that sampling holds at once; default: what free memory allows."""
    seed: int = 0
    """Of the sampling; the same seed gives the same samples."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the model."""
    device: str | None = None
    """cpu, cuda or cuda:N; default: cuda where there is one."""
    threads: int | None = None
    """CPU threads; default: those torch would use."""
    json: bool = False
    """One JSON object instead of a table."""


def evaluate(argv: list[str]) -> int:
    """The command ``kenpo eval``."""
    name, argv = positional(argv, "kenpo eval MODEL", _EVAL, EvalOptions, EVAL)
    arguments = merge_repeats(argv, _LISTS)
    options = parse(EvalOptions, arguments, prog="kenpo eval MODEL", description=_EVAL, groups=EVAL)
    check(options)
    result = run_eval(name, options)
    print(json.dumps(result) if options.json else "\n".join(table(result)))
    return 0


def check(o: EvalOptions) -> None:
    """InputError for numbers out of range and for options that exclude each other."""
    for k in o.k:
        if not 1 <= k <= o.samples:
            raise InputError(f"--k {k}: pass@k needs at least k samples per problem; --samples is {o.samples}")
    for name in ("problems", "samples", "batch", "sampling_tokens"):
        if (value := getattr(o, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')}: {value} is below the least allowed, 1")
    if not o.task:
        raise InputError("--task: name at least one")
    if len(o.task) > 1 and o.eval_file is not None:
        raise InputError("--eval-file takes the place of one task's rows; with several sets name the files with --task")


def run_eval(name: str, options: EvalOptions) -> dict[str, Any]:
    """What ``kenpo eval --json`` prints: ``{"model", "sets": {NAME: figures}}``, each set as if it were alone."""
    import torch

    from kenpo.engines.hf import HFEngine
    from kenpo.engines.room import sampling_room
    from kenpo.experience.files import set_names
    from kenpo.experience.verifiers import load_verifier
    from kenpo.models.loading import check_system, load_model
    from kenpo.models.machine import best_device
    from kenpo.models.templates import set_template
    from kenpo.terminal import to_stderr

    o = options
    if o.threads:
        torch.set_num_threads(o.threads)
    sampling_of(o)
    names = set_names(o.task)
    tasks = {key: open_task(spec, o) for key, spec in zip(names, o.task, strict=True)}
    with ExitStack() as stack:
        verifiers = {
            key: stack.enter_context(load_verifier(
                o.verifier or task.verifier, task=task, time_limit=o.time_limit, workers=o.verifier_workers,
                memory=o.verifier_memory, sandbox=o.sandbox, show=to_stderr, answer_column=o.answer_column,
            ))
            for key, task in tasks.items()
        }  # fmt: skip
        problems = {key: evaluated(task, o) for key, task in tasks.items()}
        model, tokenizer = load_model(name, dtype=o.dtype, device=o.device or best_device(), trainable=False)
        set_template(tokenizer, o.template, o.template_args)
        check_system(tokenizer, o.system)
        engine = HFEngine(model, tokenizer, o.sampling_tokens or sampling_room(model, o.max_tokens))
        prompts = {key: prompts_of(model, tokenizer, tasks[key], problems[key], o) for key in names}
        sets = {
            key: {"task": spec, **figures(problems[key], prompts[key], verifiers[key], engine, o)}
            for key, spec in zip(names, o.task, strict=True)
        }
    return {"model": name, "samples": o.samples, "sets": sets}


def sampling_of(o: EvalOptions) -> Any:
    """How samples are drawn. InputError for a number out of range."""
    from kenpo.engines.base import SamplingOptions

    return SamplingOptions(o.temperature, o.top_p, o.top_k, o.max_tokens, o.stop, o.keep_special_tokens)


def open_task(spec: str, o: EvalOptions) -> Any:
    """The task of one set."""
    from kenpo.experience.tasks import load_task

    return load_task(
        spec, prompt_column=o.prompt_column, answer_column=o.answer_column, heldout=0, eval_file=o.eval_file,
        system=o.system,
    )  # fmt: skip


def prompts_of(model: Any, tokenizer: Any, task: Any, problems: Sequence[Any], o: EvalOptions) -> Any:
    """The problems as this model's ids; each was encoded once."""
    from kenpo.experience.prompts import Prompts

    prompts = Prompts(model, tokenizer, o.system or task.system, o.max_tokens)
    prompts.check(problems)
    return prompts


def evaluated(task: Any, o: EvalOptions) -> list[Any]:
    """The problems to evaluate: a file's rows, in file order; of an endless task those that no training ever draws."""
    if task.ids is None:
        return task.heldout(o.problems or 500)
    if o.eval_file is not None:
        return task.heldout(o.problems or sys.maxsize)
    return [task.problem(n) for n in task.ids][: o.problems]


def figures(problems: Sequence[Any], prompts: Any, verifier: Any, engine: Any, o: EvalOptions) -> dict[str, Any]:
    """The figures of one set: greedy, and of the samples if there are any."""
    from kenpo.experience import estimates
    from kenpo.experience.evaluate import Evaluator
    from kenpo.ranks import Ranks

    evaluator = Evaluator(
        problems, engine, prompts, verifier, Ranks(), sampling_of(o), correct_at=o.correct_at, batch=o.batch
    )
    outcome, records = evaluator.run()
    total = outcome.judged + outcome.no_verdict
    groups = estimates.by_problem(records, len(problems), o.correct_at)
    interval = estimates.average_at(groups, 1)
    assert interval is not None  # a set without verdicts has raised
    greedy = {
        "accuracy": outcome.accuracy, "low": interval.low, "high": interval.high, "correct": outcome.correct,
        "judged": outcome.judged, "reward": outcome.reward / outcome.judged, "length": outcome.tokens / total,
        "truncated": outcome.truncated / total,
    }  # fmt: skip
    found: dict[str, Any] = {
        "verifier": verifier.name, "problems": len(problems), "no_verdict": outcome.no_verdict, "greedy": greedy,
        "pass@k": {}, "avg@k": None, "maj@k": None,
    }  # fmt: skip
    if o.samples == 1 and not o.k:
        return found
    sampled, records = evaluator.run(samples=o.samples, greedy=False, seed=o.seed)
    groups = estimates.by_problem(records, len(problems), o.correct_at)
    found["no_verdict"] += sampled.no_verdict
    ks = o.k or tuple(dict.fromkeys((1, o.samples)))
    found["pass@k"] = {str(k): told(estimates.pass_at(groups, k, o.samples), k) for k in ks}
    found["avg@k"] = told(estimates.average_at(groups, o.samples), o.samples)
    found["maj@k"] = told(estimates.majority_at(groups, o.samples), o.samples)
    return found


def told(found: Any, k: int) -> dict[str, Any] | None:
    """An estimate as JSON; None where no problem has enough judged samples."""
    return None if found is None else {**found._asdict(), "k": k}


def table(result: dict[str, Any]) -> list[str]:
    """The figures as lines: a row per set, a column per figure, intervals in brackets."""
    k = result["samples"]
    rows = []
    for name, found in result["sets"].items():
        greedy = {"mean": found["greedy"]["accuracy"], **found["greedy"]}
        row = {"set": name, "problems": str(found["problems"]), "greedy": shown(greedy)}
        if found["pass@k"]:
            row |= {f"avg@{k}": shown(found["avg@k"]), f"maj@{k}": shown(found["maj@k"])}
            row |= {f"pass@{n}": shown(entry) for n, entry in found["pass@k"].items()}
        row |= {"length": f"{found['greedy']['length']:.1f}", "no verdict": str(found["no_verdict"])}
        rows.append({**row, "judged by": found["verifier"]})
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in rows[0]}
    lines = [{title: title for title in widths}, *rows]
    return [
        f"model {result['model']}; in brackets 95 % intervals over the problems",
        *("  ".join(line[title].ljust(width) for title, width in widths.items()).rstrip() for line in lines),
    ]


def shown(found: dict[str, Any] | None) -> str:
    """A figure and its interval; a dash for none."""
    return "–" if found is None else f"{found['mean']:.4f} [{found['low']:.3f}, {found['high']:.3f}]"
