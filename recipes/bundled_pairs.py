"""How the bundled pairs are made. Run

    python recipes/bundled_pairs.py --out pairs.jsonl

The bundled model answers addition problems, eight samples each; the task's own verifier says which are right. The first
right and the first wrong answer to a problem are a pair, a problem without both gives none. Training pairs come from
the training side of the task, held-out pairs from the held-out side. The labels in the file are the verifier's; a run
swaps a share of the training pairs (``--flipped-pairs``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.hf import HFEngine
from kenpo.experience.addition import AdditionTask
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.verdict import Sample
from kenpo.experience.verifiers import load_verifier
from kenpo.models.loading import load_model
from kenpo.seeds import stable_seed

SAMPLES, TOKENS, SEED = 8, 40, 20


def main(out: str, train: int = 2048, heldout: int = 256) -> None:
    """Write `train` training pairs and `heldout` held-out ones, those marked as such."""
    model, tokenizer = load_model("bundled", trainable=False)
    engine, prompts = HFEngine(model, tokenizer), Prompts(model, tokenizer, None, TOKENS)
    task = AdditionTask(seed=SEED)
    lines = []
    for count, problems, held in (
        (train, (task.train(i) for i in range(10**6)), False),
        (heldout, iter(task.heldout(3000)), True),
    ):
        found: list[dict[str, object]] = []
        seen: set[int] = set()
        while len(found) < count:
            asked = [p for _, p in zip(range(128), problems, strict=False)]
            fresh = [p for p in asked if p.id not in seen]
            seen |= {p.id for p in fresh}
            found += decided(engine, prompts, fresh)
        lines += [{**pair, **({"heldout": True} if held else {})} for pair in found[:count]]
    Path(out).write_text("".join(json.dumps(line) + "\n" for line in lines))


def decided(engine: HFEngine, prompts: Prompts, problems: Sequence[Problem]) -> Iterator[dict[str, object]]:
    """A pair for each problem of which some samples are right and some are wrong."""
    options = SamplingOptions(max_tokens=TOKENS)
    requests = [
        Request(tuple(prompts.encode(p)), stable_seed(SEED, p.id, j), options) for p in problems for j in range(SAMPLES)
    ]
    episodes = engine.sample(requests)
    with load_verifier("numeric") as verifier:
        for n, problem in enumerate(problems):
            texts = [e.text for e in episodes[n * SAMPLES : (n + 1) * SAMPLES] if not e.truncated]
            verdicts = verifier.score([Sample(completion=t, answer=problem.answer) for t in texts])
            right = [t for t, v in zip(texts, verdicts, strict=True) if v.reward == 1]
            wrong = [t for t, v in zip(texts, verdicts, strict=True) if v.reward == 0]
            if right and wrong:
                yield {"prompt": problem.prompt, "chosen": right[0], "rejected": wrong[0]}


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
