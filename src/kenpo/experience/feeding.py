"""What a run learns from: which source an algorithm takes by default, and options that belong to one source alone."""

from __future__ import annotations

from typing import Any

from kenpo.errors import InputError

PAIRWISE = ("reward_model", "dpo", "dpo-conservative", "dpo-robust", "ipo", "ipo-normalised", "simpo", "mdre")
#: What a catalogued algorithm learns from, if not from samples of the policy.
SOURCE_OF = {"sft": "demonstrations", **dict.fromkeys(PAIRWISE, "pairs")}
#: Sources that bring the responses along, with their number per prompt.
GIVEN = {"demonstrations": 1, "pairs": 2}

# Option -> (its default, the sources it belongs to, what a message calls them).
_OWN: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "dropped_carry": (None, ("demonstrations",), "demonstrations (--algorithm sft)"),
    "response_column": ("response", ("demonstrations",), "demonstrations (--algorithm sft)"),
    "eval_task": (None, ("demonstrations", "pairs"), "demonstrations (--algorithm sft) and pairs (--algorithm dpo)"),
    "chosen_column": ("chosen", ("pairs",), "pairs (--algorithm dpo)"),
    "rejected_column": ("rejected", ("pairs",), "pairs (--algorithm dpo)"),
    "unusable_pairs": ("skip", ("pairs",), "pairs (--algorithm dpo)"),
    "flipped_pairs": (None, ("pairs",), "pairs (--algorithm dpo)"),
}
_OF_THE_BUNDLED = {"dropped_carry": "demonstrations", "flipped_pairs": "pairs"}
_OF_A_FILE = ("prompt_column", "response_column", "chosen_column", "rejected_column", "eval_file")


def check_source(config: Any, source: str, bundled_task: str) -> None:
    """InputError for an option that would have no effect with this source."""
    words = "; leave it out"
    for name, (default, sources, called) in _OWN.items():
        if name == "response_column" and config.corpus is not None:
            continue  # a corpus beside the samples has responses too
        if getattr(config, name) != default and source not in sources:
            raise InputError(f"{_flag(name)} belongs to {called}{words}")
    if source not in GIVEN:
        return
    measured = config.eval_problems and (config.eval_task or config.task == bundled_task)
    if config.sampling_tokens is not None and not measured:
        raise InputError(f"--sampling-tokens: nothing is sampled without --eval-task{words}")
    if config.group_size not in (None, GIVEN[source]):
        number = {1: "one response a prompt", 2: "two responses each; --prompts counts pairs"}[GIVEN[source]]
        raise InputError(f"--group-size: {source} have {number}{words}")
    if config.task != bundled_task:
        for name, what in _OF_THE_BUNDLED.items():
            if getattr(config, name) is not None:
                raise InputError(f"{_flag(name)} belongs to the addition {what}; it has no effect on a file{words}")
        return
    for name in _OF_A_FILE:
        usual = None if name == "eval_file" else name.removesuffix("_column")
        if getattr(config, name) != usual:
            raise InputError(f"{_flag(name)}: columns and --eval-file name a file's parts{words}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
