"""`kenpo train` and `kenpo sample`."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kenpo.commands.arguments import merge_repeats, parse, positional, take
from kenpo.commands.groups import SAMPLE, TRAIN
from kenpo.commands.prompts import prompts
from kenpo.errors import InputError, KenpoError, unknown_name
from kenpo.options import TemplateArgs
from kenpo.terminal import plain

_LISTS = (
    "--set",
    "--template-args",
    "--task",
    "--eval-file",
    "--with",
    "--stop",
    "--loggers",
    "--lora-targets",
    "--verifier",
)

_TRAIN = """Train a model with any algorithm on any task, and write everything about it into one folder.

examples:
  kenpo train
      the bundled model learns 3-digit addition with grpo
  kenpo train --algorithm dapo --set surrogate.high=0.3 --dry-run
      print the plan: which model passes run and why, the arithmetic, the memory
  kenpo train --model path/to/model --task reasoning_gym:chain_sum --max-tokens 128
  kenpo train --model path/to/model --task data.jsonl --verifier my.py:reward
  kenpo train --algorithm my.py:MINE --with untruncated --set aggregate.over=kept
  kenpo train --algorithm gspo --recipe several-updates
      eight updates a batch at their own learning rate: bounds act
  kenpo train --algorithm dapo --recipe sparse-reward
      few samples earn anything (recipes: on-policy, several-updates, long-answers, sparse-reward)
  kenpo train --resume runs/grpo-addition-1
      go on from the last checkpoint, bit for bit
  kenpo train --config runs/grpo-addition-1/config.json --seed 1
      the same run again with another seed
  torchrun --nproc-per-node 2 -m kenpo train
"""


def train(argv: list[str]) -> int:
    """The command ``kenpo train``."""
    return run_training(argv, prog="kenpo train", description=_TRAIN)


def run_training(argv: list[str], *, prog: str, description: str, **defaults: Any) -> int:
    """One training run from command-line arguments; `defaults` are options that the command starts from."""
    config = read_config(argv, prog, description, **defaults)
    from kenpo.ranks import among
    from kenpo.runs.progress import make_progress
    from kenpo.trainer.loop import train as run

    rank = among()[0]
    try:
        summary = run(config, make_progress(config.quiet) if rank == 0 else ())
    except KenpoError as error:
        if rank == 0:
            raise
        return error.exit_status  # every rank meets the same error; the first one says it
    except KeyboardInterrupt:  # the second Ctrl-C: at once
        if rank == 0:
            print("kenpo train: stopped at once; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    if rank == 0 and "plan" in summary:
        print(summary["plan"])
    return 0


def read_config(argv: list[str], prog: str = "kenpo train", description: str = _TRAIN, **defaults: Any) -> Any:
    """A TrainConfig from the command line: a recorded one (``--config``, ``--resume``) under the further options."""
    from kenpo.runs.folder import next_in_series
    from kenpo.trainer.config import TrainConfig, from_dict, load
    from kenpo.trainer.settle import recorded_config

    argv, resume = _resume(argv)
    file, argv = take(argv, "--config")
    base = TrainConfig(**defaults)
    if file:
        base = load(file)
    out, _ = take(argv, "--out")
    series, _ = take(argv, "--series")
    if resume and out and not file:  # with a file too, what differs from the recorded one is refused by name
        base = recorded_config(Path(out).expanduser())
    elif series and not out and not file:
        path, unfinished = next_in_series(Path(series).expanduser())
        if unfinished:
            base = recorded_config(path)
    recipe, argv = take(argv, "--recipe")
    base = from_dict({**vars(base), **options_of(recipe), "resume": resume})  # options as given, of a recorded run too
    arguments = merge_repeats(argv, _LISTS)
    config = parse(TrainConfig, arguments, prog=prog, description=description, default=base, groups=TRAIN)
    if base.settings and config.settings is not base.settings:
        config = config.but(settings={**base.settings, **(config.settings or {})})
    check_recipe(recipe, config)
    return config


def options_of(recipe: str | None) -> dict[str, Any]:
    """The options that a recipe names. UnknownNameError for one that there is not."""
    from kenpo.presets import RECIPES

    if recipe is not None and recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    return RECIPES[recipe] if recipe is not None else {}


def check_recipe(recipe: str | None, config: Any) -> None:
    """InputError for a recipe made for the bundled model where another model or task is trained."""
    from kenpo.experience.options import BUNDLED_TASK
    from kenpo.models.options import BUNDLED_MODEL
    from kenpo.presets import ONLY_BUNDLED, RECIPES

    if recipe in ONLY_BUNDLED and (config.model, config.task) != (BUNDLED_MODEL, BUNDLED_TASK):
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in RECIPES[recipe].items())
        raise InputError(
            f"--recipe {recipe}: its numbers were made for the bundled model on its task ({options}); "
            "with a model or task of yours give options of yours"
        )


def _resume(argv: list[str]) -> tuple[list[str], bool]:
    """``--resume RUN`` as ``--out RUN``; a bare ``--resume`` goes with ``--out``."""
    rest: list[str] = []
    resume = False
    items = list(argv)
    while items:
        arg = items.pop(0)
        name, _, value = arg.partition("=")
        if name != "--resume":
            rest.append(arg)
            continue
        resume = True
        if not value and items and not items[0].startswith("--"):
            value = items.pop(0)
        if value:
            rest += ["--out", value]
    return rest, resume


# -- sample -----------------------------------------------------------------------------------------------------------

_SAMPLE = """Talk to a model: type a prompt a line, or pipe prompts in (one per line, one completion each).

examples:
  kenpo sample bundled --prompt "123+456="
  kenpo sample runs/first/checkpoints/step_000012 --temperature 0.7
  printf '1+2=\\n3+4=\\n' | kenpo sample path/to/model --json
"""


@dataclass(frozen=True)
class SampleOptions:
    """Options of ``kenpo sample``."""

    prompt: str | None = None
    """Complete this one prompt and leave."""
    system: str | None = None
    """System prompt, used with a chat template."""
    template: str = "auto"
    """Chat template: auto (the model's own), none (prompts are rendered already), or a file."""
    template_args: TemplateArgs = None
    """What the chat template reads besides the messages: --template-args enable_thinking=false."""
    greedy: bool = False
    """The likeliest token each time."""
    samples: int = 1
    """Completions per prompt."""
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
    """Print special tokens too."""
    seed: int = 0
    """Of the sampling; the same seed gives the same samples."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the model."""
    device: str | None = None
    """cpu, cuda or cuda:N; default: cuda where there is one."""
    json: bool = False
    """One JSON object per completion: prompt, completion, tokens, logp, truncated."""


def sample(argv: list[str]) -> int:
    """The command ``kenpo sample``."""
    name, argv = positional(argv, "kenpo sample MODEL", _SAMPLE, SampleOptions, SAMPLE)
    arguments = merge_repeats(argv, _LISTS)
    options = parse(SampleOptions, arguments, prog="kenpo sample MODEL", description=_SAMPLE, groups=SAMPLE)
    if options.samples < 1:
        raise InputError("--samples is at least 1")
    from kenpo.engines.base import Request, SamplingOptions, check_prompt_fits
    from kenpo.engines.hf import HFEngine
    from kenpo.engines.room import sampling_room
    from kenpo.models.loading import check_ends, check_system, context_length, encode_prompt, load_model
    from kenpo.models.machine import best_device
    from kenpo.models.templates import set_template
    from kenpo.seeds import stable_seed

    o = options
    sampling = SamplingOptions(o.temperature, o.top_p, o.top_k, o.max_tokens, o.stop, o.keep_special_tokens)
    model, tokenizer = load_model(name, dtype=o.dtype, device=o.device or best_device(), trainable=False)
    set_template(tokenizer, o.template, o.template_args)
    check_system(tokenizer, o.system)
    check_ends(model, tokenizer, o.stop)
    engine = HFEngine(model, tokenizer, sampling_room(model, o.max_tokens))
    for number, text in enumerate(prompts(o.prompt)):
        try:
            ids = encode_prompt(tokenizer, text, o.system)
        except InputError as error:
            raise InputError(f"prompt {number + 1}: {error}") from None
        check_prompt_fits(ids, context_length(model), o.max_tokens, f"prompt {number + 1}")
        asked = [Request(tuple(ids), stable_seed(o.seed, number, j), sampling, o.greedy) for j in range(o.samples)]
        for c in engine.sample(asked):
            if o.json:
                entry = {
                    "prompt": text,
                    "completion": c.text,
                    "tokens": len(c.tokens),
                    "logp": math.fsum(c.logp),
                    "truncated": c.truncated,
                }
                print(json.dumps(entry, ensure_ascii=False), flush=True)
            else:
                print(plain(c.text), flush=True)
    return 0
