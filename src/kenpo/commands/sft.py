"""`kenpo sft`: supervised warm start on demonstrations."""

from __future__ import annotations

from kenpo.commands.arguments import parse

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
    from kenpo.trainer.sft import SFTConfig, run

    run(parse(SFTConfig, argv, prog="kenpo sft", description=DESCRIPTION))
    return 0
