"""What an objective costs: loss and d loss / d log-prob from given tensors and advantages, without metrics and KL.

    python benchmarks/objective_cost.py                 # B 256, T 2,048, float32; a few minutes on 2 quiet cores
    python benchmarks/objective_cost.py --quick         # small sizes, to see that it runs
    python benchmarks/objective_cost.py --only dapo,pmpo --json

Every catalogued algorithm whose inputs are all [B,T] against plain GRPO: what is timed starts at prepared rollouts and
takes in `weigh` (weights and totals) and `coefficients` (loss and gradient). GRPO also against verl's loss function,
which can't be called without its clip fractions and KL estimate, and against the bare arithmetic of TRL's, on the same
tensors; these two only make the loss, and autograd its gradient. Everything runs in one process, in an environment with
verl (.peers/verl, made on the first run) and this source tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import measure

VERL = "verl==0.9.1"
# What verl's loss functions import; its other dependencies (engines, trainers, loggers) stay out.
NEEDED = ("ray", "tensordict", "hydra-core", "transformers>=5,<6", "pandas", "codetiming", "packaging", "numpy",
          "torchdata", "datasets", "accelerate", "orjson")  # fmt: skip
TARGETS = {"worst_over_grpo": 3.0, "pmpo_over_grpo": 4.0, "grpo_over_verl": 1.05, "grpo_over_trl": 1.05}


# -- in the peer's environment --------------------------------------------------------------------------------------


def tensors(batch: int, width: int) -> dict[str, Any]:
    """Random log-probs and advantages; a tenth of the positions is masked, as prompts and padding are."""
    import torch

    g = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Any:
        return torch.randn(batch, width, generator=g) * scale

    old = -torch.rand(batch, width, generator=g) * 3 - 0.01
    mask = torch.rand(batch, width, generator=g) > 0.1
    mask[:, 0] = False
    return {
        "mask": mask, "group": torch.arange(batch) // 8, "rewards": torch.rand(batch, generator=g), "logp_old": old,
        "logp": (old + noise(0.15)).clamp(max=-1e-4), "logp_sampler": (old + noise(0.02)).clamp(max=-1e-4),
        "logp_ref": (old + noise(0.1)).clamp(max=-1e-4), "logp_prox": (old + noise(0.05)).clamp(max=-1e-4),
        "logp_guided": (old + noise(0.1)).clamp(max=-1e-4), "kl_ref": noise(0.1).abs(), "kl_sampler": noise(0.01).abs(),
        "entropy": noise(0.5).abs(),
    }  # fmt: skip


def eligible(name: str) -> Any:
    """The catalogued algorithm without its KL if all that it reads is [B,T], else None."""
    import kenpo
    from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS

    a = kenpo.get(name)
    specs = {**ROLLOUT_FIELDS, **POLICY_FIELDS}
    if any(specs[n].axes != "BT" or specs[n].kind != "float" for n in a.needs):
        return None
    if a.settings().get("aggregate.length", 0) is None:
        a = a.with_settings({"aggregate.length": 1024})
    return a.but(regularizers=())


def kenpo_side(a: Any, given: dict[str, Any]) -> Any:
    """A function that makes loss and coefficients of one minibatch."""
    import kenpo
    from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS

    needs = a.needs | {"logp"}
    rollouts = kenpo.Rollouts(
        **{n: given[n] for n in ("mask", "group", "rewards")},
        **{n: given[n] for n in needs & ROLLOUT_FIELDS.keys() if n in given},
    )
    policy = kenpo.Policy(**{n: given[n] for n in needs & POLICY_FIELDS.keys()})
    prepared = kenpo.prepare(a, rollouts)
    two = a.two_phase(rollouts) is not None

    def run() -> Any:
        batch = kenpo.weigh(a, prepared, policy if two else None)
        return kenpo.coefficients(a, batch, policy, measure=False)

    return run


def verl_side(given: dict[str, Any], advantages: Any) -> Any:
    """verl's clipped loss with GRPO's mean over responses; its dual clip is set out of reach."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, clip_ratio_low=0.2,
        clip_ratio_high=0.2, clip_ratio_c=1e9,
    )  # fmt: skip

    def run() -> Any:
        logp = given["logp"].detach().requires_grad_()
        loss, _ = compute_policy_loss_vanilla(
            given["logp_old"], logp, advantages, given["mask"].float(), "seq-mean-token-mean", config
        )
        loss.backward()
        return loss.detach(), logp.grad

    return run


def trl_side(given: dict[str, Any], advantages: Any) -> Any:
    """The arithmetic of TRL's loss_type "grpo": ratio, two-sided clip, minimum, mean per response, mean."""
    import torch

    mask = given["mask"].float()
    row = advantages.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)  # one advantage per response, as TRL has it

    def run() -> Any:
        logp = given["logp"].detach().requires_grad_()
        ratio = torch.exp(logp - given["logp_old"])
        held = torch.clamp(ratio, 0.8, 1.2)
        tokens = -torch.min(ratio * row, held * row)
        loss = ((tokens * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        loss.backward()
        return loss.detach(), logp.grad

    return run


def measured(a: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every side, and the versions they ran with."""
    import warnings

    import torch

    import kenpo

    warnings.simplefilter("ignore")
    given = tensors(a.batch, a.width)
    names = [n for n in kenpo.names() if (not a.only or n in ("grpo", *a.only)) and eligible(n) is not None]
    sides = {n: kenpo_side(eligible(n), given) for n in names}
    rollouts = kenpo.Rollouts(**{n: given[n] for n in ("mask", "group", "rewards", "logp_old")})
    advantages = kenpo.prepare(eligible("grpo"), rollouts).advantages
    peers = {"trl": trl_side(given, advantages)} | ({"verl": verl_side(given, advantages)} if a.verl else {})
    share, gradients = sides["grpo"]()
    for name, run in peers.items():
        loss, slope = run()
        torch.testing.assert_close(loss, share.loss, msg=f"{name} computes something else", rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(slope, gradients["logp"], msg=f"{name} differentiates something else")
    seconds: dict[str, list[float]] = {}
    over: dict[str, float] = {}
    for name, run in {**sides, **peers}.items():  # each against GRPO in the same rounds
        pair = measure.interleaved({"grpo": sides["grpo"], name: run}, a.repeats) if name != "grpo" else None
        if pair is not None:
            seconds[name], over[name] = pair[name], measure.ratio(pair[name], pair["grpo"])
            seconds.setdefault("grpo", []).extend(pair["grpo"])
    found = measure.versions("verl") | {"threads": str(torch.get_num_threads())}
    return {"seconds": seconds, "over": over, "versions": found, "peers": list(peers)}


# -- the script ---------------------------------------------------------------------------------------------------


def ratios_of(over: dict[str, float], peers: list[str]) -> dict[str, float]:
    """The ratios to report; PMPO, whose solver has a bound of its own, apart."""
    own = {n: r for n, r in over.items() if n not in peers}
    plain = {n: r for n, r in own.items() if not n.startswith("pmpo")}
    found = {}
    if plain:
        found["worst_over_grpo"] = max(plain.values())
        found["worst_over_grpo_with_pmpo"] = max(own.values())
    if "pmpo" in own:
        found["pmpo_over_grpo"] = own["pmpo"]
    return found | {f"grpo_over_{p}": 1 / over[p] for p in peers}


def main() -> int:
    """Measure in the peer's environment and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", type=lambda s: tuple(s.split(",")), default=(), help="these algorithms")
    parser.add_argument("--quick", action="store_true", help="B 16, T 256, three rounds")
    parser.add_argument("--no-verl", dest="verl", action="store_false", help="without verl, in this environment")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.quick:
        a.batch, a.width, a.repeats = 16, 256, 3
    if a.inside:
        print(json.dumps(measured(a)))
        return 0
    if a.verl:
        import torch

        pinned = [f"torch=={torch.__version__.split('+')[0]}"]
        python = measure.environment("verl", pinned, ["--no-deps", VERL], [*pinned, *NEEDED])
        more = {"PYTHONPATH": str(measure.ROOT / "src"), "VERL_USE_EXTERNAL_PLUGINS": "none"}
        found = measure.child([__file__, "--inside", *sys.argv[1:]], python, **more)
    else:
        found = measured(a)
    seconds, over = found["seconds"], found["over"]
    ratios = ratios_of(over, found["peers"])
    if not a.json:
        print(f"loss and gradient, B {a.batch}, T {a.width}, float32; medians of {a.repeats} rounds")
        rows = [[n, f"{1e3 * statistics.median(s):.2f}", f"{over.get(n, 1.0):.2f}"] for n, s in seconds.items()]
        print(measure.table(sorted(rows, key=lambda r: -float(r[2])), ["", "ms", "over GRPO"]))
        print("\ntargets:  " + ", ".join(f"{n} ≤ {v:g}" for n, v in TARGETS.items()))
    measure.finish("objective_cost", ratios, found["versions"], a.json, seconds=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
