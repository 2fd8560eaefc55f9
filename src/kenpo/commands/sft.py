"""`kenpo sft`: supervised training on demonstrations, by the trainer of `kenpo train`."""

from __future__ import annotations

from kenpo.commands.training import run_training
from kenpo.errors import InputError

DESCRIPTION = """Train a causal LM on prompts and responses: `kenpo train --algorithm sft`, with all that a run has.

examples:
  kenpo sft --model MODEL_FOLDER --data pairs.jsonl --lr 1e-5 --batch 16 --out runs/sft
      pairs.jsonl holds lines such as {"prompt": "2+2=", "response": "4"}; a prompt may also be a list of chat messages
  kenpo sft --model MODEL_FOLDER --data pairs.jsonl --eval-task problems.jsonl --out runs/sft
      measures held-out greedy accuracy on a task with a verifier, besides the held-out loss
  kenpo sft --model MODEL_FOLDER --data pairs.jsonl --lora-rank 16 --packing on --microbatch-tokens 8192
  kenpo sft --resume runs/sft
  kenpo sft --model bundled --steps 20
      more of what the bundled model was made from: demonstrations of 3-digit addition

--data is --task and --batch is --prompts of kenpo train. The model folder is RUN/checkpoints/step_NNNNNN.
"""

_OTHER_NAMES = {"--data": "--task", "--batch": "--prompts"}
_GONE = {
    "--fresh": "kenpo sft starts from a model folder; make one with random weights by recipes/fresh_model.py",
    "--micro-batch": "give --microbatch-tokens, the tokens of one forward and backward",
    "--eval-tokens": "give --max-tokens, the longest response that is measured",
}


def sft(argv: list[str]) -> int:
    """Run one supervised training from command-line arguments."""
    return run_training(renamed(argv), prog="kenpo sft", description=DESCRIPTION, algorithm="sft")


def renamed(argv: list[str]) -> list[str]:
    """The arguments under the names that `kenpo train` knows. InputError for an option that is no more."""
    found = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        if name in _GONE:
            raise InputError(f"{name}: {_GONE[name]}")
        found.append(_OTHER_NAMES.get(name, name) + equals + value)
    return found
