"""`kenpo sft`: supervised warm start on demonstrations."""

from __future__ import annotations

import contextlib
import io

from kenpo.errors import InputError

DESCRIPTION = """Train a causal LM on prompts and responses, and write an ordinary model folder.

examples:
  kenpo sft --fresh qwen3 --out runs/warm
      a small Qwen3-style model with random weights learns the addition task's demonstrations
  kenpo sft --fresh llama --hidden 128 --layers 2 --heads 4 --kv-heads 2 --steps 50 --out runs/tiny
  kenpo sft --model MODEL_FOLDER --data pairs.jsonl --lr 1e-5 --batch 16 --micro-batch 4 --out runs/sft
      pairs.jsonl holds lines such as {"prompt": "2+2=", "response": "4"}; a prompt may also be a list of chat messages
  kenpo sft --model MODEL_FOLDER --data pairs.jsonl --eval-task problems.jsonl --out runs/sft
      measures held-out greedy accuracy before and after on a task with a verifier
"""


def sft(argv: list[str]) -> int:
    """Run one supervised training from command-line arguments."""
    import tyro

    from kenpo.trainer.sft import SFTConfig, run

    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            config = tyro.cli(SFTConfig, args=argv, prog="kenpo sft", description=DESCRIPTION)
    except SystemExit as leaving:
        if not leaving.code:  # --help
            raise
        raise InputError(f"{_first_complaint(complaints.getvalue())} (see kenpo sft --help)") from None
    run(config)
    return 0


def _first_complaint(box: str) -> str:
    """The first section of tyro's box on one line: what stands between the title and the next rule."""
    lines = [line.strip().strip("│|").strip() for line in box.splitlines()]
    if lines and lines[0][:1] not in ("╭", "+"):  # without a terminal the title has a line and a rule of its own
        lines = lines[1:]
    sections: list[list[str]] = [[]]
    for line in lines:
        if not set(line) - set("─-"):
            sections.append([])
        elif line[0] not in "╭╰+":
            sections[-1].append(line)
    text = next((" ".join(section) for section in sections if section), "the options can't be read")
    return text.removeprefix("Error parsing SFTConfig: ").removesuffix(".")
