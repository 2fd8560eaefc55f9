"""Supervised warm start: next-token training on demonstrations, and an ordinary model folder at the end.

One optimizer step minimises the mean of -log p over the response tokens (their end included) of the whole batch,
however the batch was cut into microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenpo.errors import InputError, RunError
from kenpo.trainer.sft_config import FRESH_SIZES, SFTConfig, resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kenpo.trainer.demonstrations import Row, Source


def _say(line: str) -> None:
    print(line, flush=True)


def run(config: SFTConfig, report: Callable[[str], None] = _say) -> dict[str, Any]:
    """Train as `config` says, write the model folder, and return the summary.

    OUT is an ordinary model folder; OUT/sft holds config.json (resolved), losses.jsonl and summary.json.
    Raises `InputError` before any work for what can be known then, `RunError` for a loss that is not finite or a disk
    that is full; neither leaves anything at OUT.
    """
    import torch

    out = Path(config.out)
    if os.path.lexists(out):
        raise InputError(f"--out: {out} exists; choose another folder")
    config = resolve(config)
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    started = time.monotonic()
    source = _source(config)
    model, tokenizer = _start(config)
    measure = _evaluation(config, model, tokenizer)
    before = measure() if measure else None
    if before is not None:
        report(f"held-out greedy accuracy before: {before:.1%}")
    losses = list(_train(config, model, tokenizer, source, report))
    after = measure() if measure else None
    if after is not None:
        report(f"held-out greedy accuracy after:  {after:.1%}")
    summary = {"eval": {"before": before, "after": after}, "loss": losses[-1]["loss"],
               "parameters": sum(p.numel() for p in model.parameters()),
               "seconds": round(time.monotonic() - started, 1)}  # fmt: skip
    _write(out, model, tokenizer, config, losses, summary)
    report(f"wrote {out}")
    return summary


def _source(config: SFTConfig) -> Source:
    from kenpo.trainer.demonstrations import AdditionSource, FileSource

    if config.data == "addition":
        assert config.dropped_carry is not None
        return AdditionSource(config.seed, config.dropped_carry)
    assert config.prompt_column is not None
    assert config.response_column is not None
    return FileSource(config.data, config.prompt_column, config.response_column, config.seed)


def _start(config: SFTConfig) -> tuple[Any, Any]:
    """The model, on its device, and its tokenizer. Dropout stays off: it would make the step depend on the split."""
    from kenpo.models.loading import load_model

    model: Any
    weights = "float64" if config.dtype == "float64" else "float32"
    if config.fresh is None:
        assert config.model is not None
        model, tokenizer = load_model(config.model, dtype=weights, device=config.device)
    else:
        from kenpo.trainer.fresh import Architecture

        tokenizer = _tokenizer(config.tokenizer)
        shape = Architecture(config.fresh, **{n: getattr(config, n) for n in FRESH_SIZES})
        model = shape.build(tokenizer, config.seed)
        if weights == "float64":
            model = model.double()
        model = model.to(config.device)
    if tokenizer.eos_token_id is None:
        raise InputError("tokenizer: has no end-of-sequence token, so no response could ever end; add one to it")
    return model.eval(), tokenizer


def _tokenizer(folder: str | None) -> Any:
    if folder is None:
        from kenpo.experience.addition import character_tokenizer

        return character_tokenizer()
    from kenpo.models.loading import load_tokenizer

    if not Path(folder).is_dir():
        raise InputError(f"--tokenizer: {folder} is not a folder; give one that holds tokenizer.json")
    try:
        return load_tokenizer(folder, local=True)
    except InputError as error:
        raise InputError(f"--tokenizer: {error}") from None


def _evaluation(config: SFTConfig, model: Any, tokenizer: Any) -> Callable[[], float] | None:
    """A function that measures held-out greedy accuracy, or None where nothing is to be measured."""
    if config.eval_task is None or config.eval_problems == 0:
        return None
    from kenpo.engines.base import Request, SamplingOptions
    from kenpo.engines.hf import HFEngine
    from kenpo.experience.tasks import load_task
    from kenpo.experience.verifiers import Sample, load_verifier
    from kenpo.models.loading import encode_prompt

    task = load_task(config.eval_task, seed=config.seed, heldout=config.eval_problems)
    problems = task.heldout(config.eval_problems)
    prompts = [encode_prompt(tokenizer, p.prompt, task.system) for p in problems]
    options = SamplingOptions(max_tokens=config.eval_tokens)

    def measure() -> float:
        engine = HFEngine(model, tokenizer)
        answers = engine.sample([Request(tuple(p), 0, options, greedy=True) for p in prompts])
        samples = [Sample(completion=a.text, answer=p.answer, prompt=p.prompt, truncated=a.truncated, extra=p.extra)
                   for a, p in zip(answers, problems, strict=True)]  # fmt: skip
        with load_verifier(task.verifier, task=task) as verifier:
            verdicts = verifier.score(samples)
        return sum(v.reward >= 1 for v in verdicts) / len(verdicts)

    return measure


def token_mean_loss(scorer: Any, rows: Sequence[Row], total: int) -> Tensor:
    """The share of `rows` in the batch loss: the sum of -log p over their response tokens, divided by `total`.

    `total` is the number of response tokens of the whole batch, so shares of microbatches add up to the batch's mean.
    """
    import torch

    from kenpo.trainer.demonstrations import collate
    from kenpo.types import Rollouts

    tokens, mask = (x.to(scorer.device) for x in collate(rows))
    nothing = torch.zeros(len(rows), device=tokens.device)
    batch = Rollouts(tokens=tokens, mask=mask, group=nothing.long(), rewards=nothing)
    logp = scorer.graph(batch).logp
    assert logp is not None
    return -logp[mask].sum() / total


def accumulate(
    scorer: Any, rows: Sequence[Row], micro_batch: int, autocast: contextlib.AbstractContextManager
) -> float:
    """Add the gradient of the batch loss to the parameters and return the loss; equal for every `micro_batch`."""
    total = sum(len(row.ids) - row.prompt for row in rows)
    rows = sorted(rows, key=lambda row: len(row.ids))  # alike lengths together: less padding
    value = 0.0
    for start in range(0, len(rows), micro_batch):
        with autocast:
            loss = token_mean_loss(scorer, rows[start : start + micro_batch], total)
        loss.backward()
        value += loss.item()
    return value


def _train(
    config: SFTConfig, model: Any, tokenizer: Any, source: Source, report: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Run the optimizer steps; yields one record per step."""
    import torch

    from kenpo.models.loading import context_length
    from kenpo.models.scorer import Scorer
    from kenpo.trainer.demonstrations import encode

    scorer = Scorer(model)
    context = context_length(model)
    optimizer = _optimizer(config, model)
    assert config.micro_batch is not None
    with _progress(config) as advance:
        for step in range(config.steps):
            rows = [encode(tokenizer, source.text(step * config.batch + i), context) for i in range(config.batch)]
            rate = config.lr * _pace(config, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")
            loss = accumulate(scorer, rows, config.micro_batch, autocast)
            limit = config.grad_clip or math.inf
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunError(f"step {step + 1}: loss {loss}, gradient norm {norm}; lower --lr or raise --warmup")
            optimizer.step()
            advance(loss)
            if not config.quiet and (step + 1) % max(1, config.steps // 10) == 0:
                report(f"step {step + 1}/{config.steps}  loss {loss:.4f}")
            yield {"step": step + 1, "loss": loss, "lr": rate, "grad_norm": norm,
                   "tokens": sum(len(row.ids) - row.prompt for row in rows)}  # fmt: skip


def _optimizer(config: SFTConfig, model: Any) -> torch.optim.AdamW:
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    rest = [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def _pace(config: SFTConfig, step: int) -> float:
    """The factor on the learning rate in `step` (from 0): warm-up from 1/warmup to 1, then the schedule's course."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[config.schedule]


@contextlib.contextmanager
def _progress(config: SFTConfig) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal's standard error; a function that does nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("sft"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=config.quiet or not console.is_terminal) as bar:
        row = bar.add_task("sft", total=config.steps, loss=math.nan)
        yield lambda loss: bar.update(row, advance=1, loss=loss)


def _write(
    out: Path, model: Any, tokenizer: Any, config: SFTConfig, losses: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
    """Write everything to a temporary folder beside `out`, flush it to the disk, then rename it: all or nothing."""
    from kenpo.runs.checkpoint import save_model
    from kenpo.runs.disk import disk_errors, sync_folder, sync_tree

    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    with disk_errors(f"--out: {out}"):
        try:
            (temporary / "sft").mkdir(parents=True)
            save_model(temporary, model, tokenizer)
            recorded = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out", "quiet")}
            (temporary / "sft" / "config.json").write_text(json.dumps(recorded, indent=2) + "\n")
            (temporary / "sft" / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            (temporary / "sft" / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
            sync_tree(temporary)
            os.rename(temporary, out)
            sync_folder(out.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
