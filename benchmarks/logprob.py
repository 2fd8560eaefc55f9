"""Log-probs, loss and backward from hidden states: Kenpo against Liger's chunked GRPO loss and against whole logits.

    python benchmarks/logprob.py              # N 8,192, H 1,024, V 151,936; 5 rounds, half an hour on 2 cores
    python benchmarks/logprob.py --quick      # small sizes, to see that it runs
    python benchmarks/logprob.py --only float32:ours,float32:liger --repeats 2 --keep runs/logprob.jsonl
    python benchmarks/logprob.py --repeats 0 --keep runs/logprob.jsonl      # the table of what was measured so far
    python benchmarks/logprob.py --teacher --repeats 1      # a divergence between two heads, beside log-probs alone

All sides get the same hidden states [N,H] (8 rollouts), head [V,H] and targets, take a clipped token-mean loss and
leave the gradients of both. Every measurement is a process of its own (memory: its peak over the inputs, VmHWM); a
round runs all sides once. ``two_phase`` is an algorithm of batch scope (M2PO), ``frozen_head`` makes no gradient of
the head. ``teacher`` is gkd: a Jensen-Shannon divergence between two heads of this size, over the whole vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure

SIDES = ("ours", "liger", "two_phase", "frozen_head", "teacher", "plain")
DTYPES = ("float32", "bfloat16")
ROLLOUTS = 8
LIGER = "liger-kernel==0.8.5"
TARGETS = {
    "memory_over_plain": 1 / 12, "memory_over_liger": 1.0, "time_over_liger": 1.05, "time_bf16_over_liger": 0.9,
    "time_two_phase_over_liger": 1.5, "time_frozen_head_over_liger": 0.75,
    "memory_bf16_over_plain": 1 / 12, "memory_bf16_over_liger": 1.0, "memory_teacher_over_ours": 2.0,
}  # fmt: skip


# -- one measurement, in a process of its own ---------------------------------------------------------------------


def inputs(a: argparse.Namespace, positions: int, vocabulary: int) -> tuple[Any, Any, Any, Any]:
    """Hidden states, head, targets, rewards; the same in every process."""
    import torch

    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, a.hidden, generator=g).to(getattr(torch, a.dtype)).requires_grad_()
    weight = torch.empty(vocabulary, a.hidden, dtype=hidden.dtype)
    for part in weight.split(4096):  # in pieces: a second copy would count as the peak of what comes after
        part.copy_(torch.randn(part.shape, generator=g).mul_(a.hidden**-0.5))
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (positions,), generator=g)
    return hidden, weight, targets, torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0])


def z_scores(rewards: Any) -> Any:
    """GRPO's advantages of one group."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def plain(hidden: Any, weight: Any, targets: Any, rewards: Any) -> float:
    """Whole logits, log_softmax, gather, autograd."""
    logp = (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None]).view(ROLLOUTS, -1)
    ratio, advantage = (logp - logp.detach()).exp(), z_scores(rewards)[:, None]
    loss = -(ratio * advantage).minimum(ratio.clamp(0.8, 1.2) * advantage).mean()
    loss.backward()
    return float(loss)


def liger(hidden: Any, weight: Any, targets: Any, rewards: Any) -> float:
    """Liger's chunked loss. Not compiled: that part is 8 x 1,024 numbers, and compiling would be timed."""
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    make = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    length = len(hidden) // ROLLOUTS
    loss, _ = make(
        hidden.view(ROLLOUTS, length, -1), weight, targets.view(ROLLOUTS, length),
        attention_mask=torch.ones(ROLLOUTS, length), advantages=z_scores(rewards),
    )  # fmt: skip
    loss.backward()
    return float(loss)


def kenpo_side(side: str) -> Callable[..., float]:
    """The trainer's path without the decoder: weigh, the fused head, coefficients of each chunk."""

    def run(hidden: Any, weight: Any, targets: Any, rewards: Any) -> float:
        import torch

        import kenpo
        from kenpo.models.backward import head_backward
        from kenpo.models.head import Head
        from kenpo.models.passes import Rows
        from kenpo.models.terms import Forward, terms_of
        from kenpo.models.value_head import ScalarHeads

        length = len(hidden) // ROLLOUTS
        mask = torch.ones(ROLLOUTS, length + 1, dtype=torch.bool)
        mask[:, 0] = False
        rollouts = kenpo.Rollouts(mask=mask, group=torch.zeros(ROLLOUTS, dtype=torch.int64), rewards=rewards)
        row, column = mask.nonzero(as_tuple=True)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight.detach(), requires_grad=side != "frozen_head")
        head = Head(None, linear)
        sizes = [length] * ROLLOUTS
        rows = Rows(row, row, column, row, column - 1, targets, row, sizes, sizes, sizes, sizes)
        made = Forward(rows, hidden, None, head, ScalarHeads(), None, None, None)
        two = side == "two_phase"
        a = kenpo.get("m2po" if two else "dapo").but(selection=(), shaping=())
        a = a if two else a.with_settings({"surrogate.low": 0.2, "surrogate.high": 0.2})
        if two:
            with torch.no_grad():
                whole = terms_of(made, rollouts, 1.0, frozenset({"logp"}))
            rollouts = rollouts.replace(logp_sampler=whole.logp)
            batch = kenpo.weigh(a, kenpo.prepare(a, rollouts), whole)
            found = kenpo.coefficients(a, batch, whole)
            total = [float(found[0].loss)]
        else:
            batch, total = kenpo.weigh(a, kenpo.prepare(a, rollouts)), []

        def shares(rows: slice, policy: Any, measured: bool) -> Any:
            if two:
                return {n: g[rows] for n, g in found[1].items()}
            loss, grads = kenpo.coefficients(a, batch[rows], policy, measured)
            if measured:
                total.append(float(loss.loss))
            return grads

        parts = head.linear()
        assert parts is not None
        hidden.backward(head_backward(made, parts, rollouts, shares, 1.0, divisible=True))
        weight.grad = linear.weight.grad
        return sum(total)

    return run


def teacher_side(hidden: Any, weight: Any, targets: Any, rewards: Any) -> float:
    """gkd through the trainer's path: the divergence of two heads and its gradient, by chunks of positions."""
    import torch

    import kenpo
    from kenpo.models.backward import backward
    from kenpo.models.head import Head, Reference
    from kenpo.models.passes import Rows
    from kenpo.models.terms import Forward
    from kenpo.models.value_head import ScalarHeads

    length = len(hidden) // ROLLOUTS
    mask = torch.ones(ROLLOUTS, length + 1, dtype=torch.bool)
    mask[:, 0] = False
    rollouts = kenpo.Rollouts(mask=mask, group=torch.zeros(ROLLOUTS, dtype=torch.int64), rewards=rewards)
    row, column = mask.nonzero(as_tuple=True)
    heads = []
    for w in (weight.detach(), OTHER[0]):
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(w, requires_grad=not heads)
        heads.append(Head(None, linear))
    sizes = [length] * ROLLOUTS
    rows = Rows(row, row, column, row, column - 1, targets, row, sizes, sizes, sizes, sizes)
    a = kenpo.get("gkd")
    taught = (Reference(OTHER[1], heads[1]), a.terms["kl_teacher"])
    made = Forward(rows, hidden, None, heads[0], ScalarHeads(), None, None, None, taught)
    batch, total = kenpo.weigh(a, kenpo.prepare(a, rollouts)), []

    def coefficients(rows: slice, policy: Any, measured: bool) -> Any:
        loss, grads = kenpo.coefficients(a, batch[rows], policy, measured)
        if measured:
            total.append(float(loss.loss))
        return grads

    backward(made, rollouts, coefficients, 1.0, frozenset({"kl_teacher"}), divisible=True)
    weight.grad = heads[0].module.weight.grad
    return sum(total)


#: The teacher's head [V,H] and states [N,H], inputs like the others.
OTHER: list[Any] = []


def one(a: argparse.Namespace) -> dict[str, Any]:
    """Seconds, bytes over the inputs, and numbers by which the sides can be told to agree."""
    import torch

    if a.threads:
        torch.set_num_threads(a.threads)
    if a.measure == "rates":
        return rates(a)
    run = {"plain": plain, "liger": liger, "teacher": teacher_side}.get(a.measure) or kenpo_side(a.measure)
    small = inputs(a, 16 * ROLLOUTS, 512)
    OTHER[:] = [small[1].detach(), small[0].detach()]
    run(*small)  # libraries and threads start here
    tensors = inputs(a, a.positions, a.vocabulary)
    if a.measure == "teacher":
        g = torch.Generator().manual_seed(1)
        OTHER[:] = [tensors[1].detach().flip(0), torch.randn(tensors[0].shape, generator=g).to(tensors[0].dtype)]
    seconds, loss = [0.0, 0.0], [0.0]

    def timed() -> None:
        began = time.perf_counter(), time.process_time()
        loss[0] = run(*tensors)
        seconds[:] = time.perf_counter() - began[0], time.process_time() - began[1]

    added = measure.added_bytes(timed)
    norms = [None if x.grad is None else float(x.grad.float().norm()) for x in tensors[:2]]
    return {"seconds": seconds[0], "cpu_seconds": seconds[1], "bytes": added, "loss": loss[0], "norms": norms,
            "torch": torch.__version__}  # fmt: skip


def rates(a: argparse.Namespace) -> dict[str, Any]:
    """Operations per second of the three matrix products, alone and large, and bytes per second of a copy."""
    import torch

    dtype = getattr(torch, a.dtype)
    n, v = min(512, a.positions), min(32768, a.vocabulary)
    h, w, d = (torch.randn(s, generator=torch.Generator().manual_seed(0)).to(dtype) for s in
               ((n, a.hidden), (v, a.hidden), (n, v)))  # fmt: skip
    big = torch.zeros(2**27)
    other = torch.empty_like(big)
    work: dict[str, tuple[Callable[[], Any], float]] = {
        "logits": (lambda: h @ w.T, 2.0 * n * v * a.hidden),
        "d hidden": (lambda: d @ w, 2.0 * n * v * a.hidden),
        "d head": (lambda: d.T @ h, 2.0 * n * v * a.hidden),
        "copy": (lambda: other.copy_(big), 8.0 * big.numel()),
    }
    found = {}
    for name, (run, amount) in work.items():
        times = measure.interleaved({name: run}, 5)[name]
        found[name] = amount / min(times)
    return found


# -- all of them --------------------------------------------------------------------------------------------------


def floor(a: argparse.Namespace, products: tuple[str, ...], rate: dict[str, float]) -> float:
    """Seconds that the products alone take at the rates measured on their own; other work and memory are on top."""
    each = 2.0 * a.positions * a.hidden * a.vocabulary
    return sum(each / rate[p] for p in products)


PRODUCTS = {
    "ours": ("logits", "d hidden", "d head"),
    "two_phase": ("logits", "logits", "d hidden", "d head"),
    "frozen_head": ("logits", "d hidden"),
    "liger": ("logits", "logits", "d hidden", "d head"),
    "teacher": ("logits",) * 4 + ("d hidden", "d head"),
    "plain": ("logits", "d hidden", "d head"),
}


def traffic(a: argparse.Namespace, dtype: str, chunk: int) -> float:
    """Bytes that the fused path moves through memory: logits five times, head and its gradient twice in each chunk."""
    width = 4 if dtype == "float32" else 2
    chunks = -(-a.positions // chunk)
    return a.positions * a.vocabulary * width * 5.0 + chunks * a.vocabulary * a.hidden * (2 * width + 8.0)


def collect(a: argparse.Namespace, wanted: list[tuple[str, str]], results: list[dict[str, Any]]) -> None:
    """Run the rounds; every result goes to the file at once, so that a broken run loses nothing."""
    sizes = [f"--{n}={getattr(a, n)}" for n in ("positions", "hidden", "vocabulary", "threads")]
    peer = None
    if any(side == "liger" for _, side in wanted) and a.repeats:
        peer = measure.environment("liger", ["torch==2.13.0"], ["torch==2.13.0", LIGER])
    for turn in range(a.repeats):
        for dtype, side in wanted:
            if side == "plain" and turn >= a.plain_repeats:
                continue
            python = peer if side == "liger" and peer else sys.executable
            arguments = [__file__, "--measure", side, "--dtype", dtype, *sizes]
            found = measure.child(arguments, python)
            entry = {"side": side, "dtype": dtype, "round": turn, "sizes": sizes[:3], **found}
            results.append(entry)
            if a.keep:
                with open(a.keep, "a") as f:
                    f.write(json.dumps(entry) + "\n")
            if side != "rates":
                print(f"{dtype:8} {side:12} {found['seconds']:8.2f} s {found['bytes'] / 2**20:8.0f} MiB",
                      file=sys.stderr, flush=True)  # fmt: skip


def summary(results: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Medians by dtype and side."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for dtype in DTYPES:
        for side in SIDES:
            mine = [r for r in results if (r["dtype"], r["side"]) == (dtype, side)]
            if mine:
                found[dtype, side] = {
                    k: statistics.median(r[k] for r in mine) for k in ("seconds", "cpu_seconds", "bytes")
                }
    return found


def ratios_of(m: dict[tuple[str, str], dict[str, float]]) -> dict[str, float]:
    """The ratios whose both sides were measured."""
    f, b = DTYPES
    pairs = {
        "memory_over_plain": ((f, "ours"), (f, "plain"), "bytes"),
        "memory_over_liger": ((f, "ours"), (f, "liger"), "bytes"),
        "time_over_liger": ((f, "ours"), (f, "liger"), "seconds"),
        "time_bf16_over_liger": ((b, "ours"), (b, "liger"), "seconds"),
        "time_two_phase_over_liger": ((f, "two_phase"), (f, "liger"), "seconds"),
        "time_frozen_head_over_liger": ((f, "frozen_head"), (f, "liger"), "seconds"),
        "memory_bf16_over_plain": ((b, "ours"), (b, "plain"), "bytes"),
        "memory_teacher_over_ours": ((f, "teacher"), (f, "ours"), "bytes"),
        "memory_bf16_over_liger": ((b, "ours"), (b, "liger"), "bytes"),
    }
    return {name: m[x][what] / m[y][what] for name, (x, y, what) in pairs.items() if x in m and y in m}


def agree(results: list[dict[str, Any]]) -> str:
    """How far the sides' gradient norms lie apart; the two-phase algorithm has another loss."""
    lines = []
    for dtype in DTYPES:
        for i, what in enumerate(("hidden states", "head")):
            norms = [
                r["norms"][i] for r in results
                if r["dtype"] == dtype and r["side"] in ("ours", "liger", "plain") and r["norms"][i]
            ]  # fmt: skip
            if len(norms) > 1:
                lines.append(f"{dtype} {what} {max(norms) / min(norms) - 1:.1e}")
    return "gradient norms of ours, liger and plain agree to: " + ", ".join(lines)


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true")
    p.add_argument("--quick", action="store_true", help="N 1,024, H 128, V 16,384, two rounds")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--plain-repeats", type=int, default=1, help="rounds of whole logits: they matter for memory only")
    p.add_argument("--only", default="", help="DTYPE:SIDE,...; sides: " + ", ".join((*SIDES, "rates")))
    p.add_argument("--keep", type=Path, help="append every result to this file, and report on all that it holds")
    for name, value in {"positions": 8192, "hidden": 1024, "vocabulary": 151936, "threads": 0}.items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--teacher", action="store_true", help="only ours and teacher, in float32")
    p.add_argument("--measure", choices=(*SIDES, "rates"), help=argparse.SUPPRESS)
    p.add_argument("--dtype", choices=DTYPES, default="float32", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.measure:
        print(json.dumps(one(a)))
        return
    if a.quick:
        a.positions, a.hidden, a.vocabulary, a.repeats = 1024, 128, 16384, 2
    everything = [(d, s) for d in DTYPES for s in (*SIDES, "rates")]
    if a.teacher:
        a.only = "float32:ours,float32:teacher"
    wanted = [tuple(x.split(":", 1)) for x in a.only.split(",") if x] or everything
    if unknown := set(wanted) - set(everything):
        listed = ", ".join(map(":".join, everything))
        p.error(f"--only: there is no {':'.join(sorted(unknown)[0])}; there are {listed}")
    results: list[dict[str, Any]] = []
    if a.keep and a.keep.exists():
        sizes = [f"--{n}={getattr(a, n)}" for n in ("positions", "hidden", "vocabulary")]
        results = [r for r in map(json.loads, a.keep.read_text().splitlines()) if r["sizes"] == sizes]
    collect(a, wanted, results)
    report(a, results)


def report(a: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Table, ratios beside their targets, versions."""
    timed = [r for r in results if r["side"] != "rates"]
    medians, rate = summary(timed), {r["dtype"]: r for r in results if r["side"] == "rates"}
    ratios = ratios_of(medians)
    if not a.json:
        print(f"N {a.positions:,}, H {a.hidden:,}, V {a.vocabulary:,}; medians\n")
        rows = []
        for (dtype, side), m in medians.items():
            r = rate.get(dtype)
            least = floor(a, PRODUCTS[side], r) if r else 0.0
            number = sum((x["dtype"], x["side"]) == (dtype, side) for x in timed)
            figures = [f"{m['seconds']:.2f}", f"{m['cpu_seconds']:.2f}", f"{m['bytes'] / 2**20:.0f}"]
            figures += [f"{least:.2f}", f"{m['seconds'] / least:.2f}"] if r else ["-", "-"]
            rows.append([f"{dtype} {side}", number, *figures])
        print(
            measure.table(
                rows, ["side", "runs", "seconds", "of all cores", "MiB added", "products alone, s", "over that"]
            )
        )
        for dtype, r in rate.items():
            from kenpo.ops.fused_logprob import chunk_positions

            moved = traffic(a, dtype, chunk_positions(a.vocabulary, 4 if dtype == "float32" else 2, "cpu"))
            speed = ", ".join(f"{n} {r[n] / 1e9:.0f}" for n in ("logits", "d hidden", "d head"))
            print(f"\n{dtype}: {speed} GFLOP/s; copy {r['copy'] / 1e9:.1f} GB/s; the fused path moves "
                  f"{moved / 1e9:.0f} GB: {moved / r['copy']:.1f} s if none of it stays in a cache")  # fmt: skip
        print("\n" + agree(timed))
        for name, value in ratios.items():
            print(f"  {name:30} {value:.3f}  (target {TARGETS[name]:.3f})")
    found = measure.versions() | {"liger": LIGER.split("==")[1]}
    measure.finish("logprob", ratios, found, a.json, results=results)


if __name__ == "__main__":
    main()
