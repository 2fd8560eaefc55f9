"""Training forward and backward of groups whose prompt runs once, against the same rows with a prompt each.

    python benchmarks/shared_prompt.py            # prompt 1,024, response 64, group 8; about two minutes on 2 cores
    python benchmarks/shared_prompt.py --quick    # a small model, to see that it runs
    python benchmarks/shared_prompt.py --prompt 256 --response 128

Both sides are `kenpo.models.scorer.Scorer`, so both compute the head at trained positions only; they differ in
whether the prompt is shared. Memory is what a forward and backward adds to the process, each side in one of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from typing import Any

import measure


def build(a: argparse.Namespace) -> tuple[Any, Any]:
    """A random Llama-style model and one group of rollouts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kenpo.types import Rollouts

    torch.manual_seed(0)
    if a.threads:
        torch.set_num_threads(a.threads)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=a.vocabulary, hidden_size=a.hidden, intermediate_size=a.hidden * 11 // 4 // 64 * 64,
            num_hidden_layers=a.layers, num_attention_heads=a.heads, max_position_embeddings=a.prompt + a.response,
        )
    ).eval()  # fmt: skip
    prompt = torch.randint(a.vocabulary, (1, a.prompt)).expand(a.group, -1)
    tokens = torch.cat([prompt, torch.randint(a.vocabulary, (a.group, a.response))], 1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, a.prompt :] = True
    rollouts = Rollouts(
        tokens=tokens, mask=mask, group=torch.zeros(a.group, dtype=torch.int64), rewards=torch.zeros(a.group)
    )
    return model, rollouts


@functools.cache
def scorer_of(model: Any) -> Any:
    """The model's scorer, whose trials are no part of a step."""
    from kenpo.models.scorer import Scorer

    return Scorer(model)


def step(model: Any, rollouts: Any, shared: bool) -> None:
    """One forward and backward; the gradient is dropped."""
    from kenpo.models import shared_prompt

    shared_prompt.LEAST_TOKENS = 1 if shared else 10**12
    scorer_of(model).graph(rollouts).logp.sum().backward()
    model.zero_grad(set_to_none=True)


def start_up(model: Any, rollouts: Any) -> None:
    """What a first call sets up for good (the proofs of head and cache), kept out of the memory of a step."""
    few = rollouts[[0, 1]]
    mask = few.mask.clone()
    mask[:, 8:] = False
    mask[:, 6:8] = True
    step(model, few.replace(mask=mask), True)


def operations(a: argparse.Namespace, model: Any, shared: bool) -> float:
    """Floating-point operations of the matrix products that forward and backward can't do without.

    A layer's weight costs 2 operations a token forward and 4 backward; a prompt's last layer gives only its keys and
    values back. Attention: 2 products forward, 5 backward, over the pairs a causal mask leaves. Head: 3 products.
    """
    h, layer = a.hidden, sum(p.numel() for p in model.model.layers[0].parameters())
    own, prompt = a.response, a.prompt - 1
    rows = a.group * own
    prompts = prompt if shared else a.group * prompt
    body = 6.0 * layer * a.layers * (rows + prompts)
    if shared:
        body -= prompts * (4 * layer - 4 * 2 * h * h)
    pairs = (1 if shared else a.group) * prompt**2 / 2 + a.group * (own * prompt + own**2 / 2)
    return body + 14.0 * h * a.layers * pairs + 3 * 2.0 * rows * h * a.vocabulary


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true")
    p.add_argument("--quick", action="store_true", help="hidden 128, vocabulary 1,000, prompt 256, two rounds")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--threads", type=int, default=0)
    for name, value in {
        "prompt": 1024, "response": 64, "group": 8, "hidden": 512, "heads": 8, "layers": 4, "vocabulary": 32000,
    }.items():  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--memory-of", choices=("shared", "unshared"), help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.quick:
        a.hidden, a.vocabulary, a.prompt, a.heads, a.repeats = 128, 1000, 256, 4, 2
    model, rollouts = build(a)
    if a.memory_of:
        start_up(model, rollouts)
        print(json.dumps(measure.added_bytes(lambda: step(model, rollouts, a.memory_of == "shared"))))
        return
    seconds = measure.interleaved(
        {"unshared": lambda: step(model, rollouts, False), "shared": lambda: step(model, rollouts, True)}, a.repeats
    )
    arguments = [x for x in sys.argv if x != "--json"]
    memory = {side: measure.child([*arguments, "--memory-of", side]) for side in seconds}
    ratios = {
        "speedup": measure.ratio(seconds["unshared"], seconds["shared"]),
        "memory": memory["shared"] / memory["unshared"],
    }
    if not a.json:
        print(
            f"prompt {a.prompt}, response {a.response}, group {a.group}; hidden {a.hidden}, {a.layers} layers, "
            f"vocabulary {a.vocabulary:,}; median of {a.repeats} rounds\n"
        )
        rate = measure.product_rate(1024, a.hidden, 4 * a.hidden)
        rows = []
        for side, t in seconds.items():
            least = operations(a, model, side == "shared") / rate
            middle = statistics.median(t)
            rows.append([side, f"{middle:.3f}", f"{memory[side] / 2**20:.0f}", f"{least:.3f}", f"{middle / least:.2f}"])
        print(measure.table(rows, ["prompt", "seconds", "MiB added", "products alone, s", "over that"]))
        print(f"\nproducts alone: at the {rate / 1e9:.0f} GFLOP/s that one product of the layers' sizes reaches here")
    sizes = {n: getattr(a, n) for n in ("prompt", "response", "group", "hidden", "layers", "vocabulary", "repeats")}
    measure.finish(
        "shared_prompt", ratios, measure.versions(), a.json, seconds=seconds, memory_bytes=memory, sizes=sizes
    )


if __name__ == "__main__":
    main()
