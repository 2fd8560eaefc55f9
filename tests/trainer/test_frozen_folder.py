"""What users' own programs read in a run's folder: names of files, and the keys in them.

A change breaks this on purpose; if it is meant, say it in CHANGELOG.md and docs/guides/run-folder.md.
"""

import json

from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train

FILES = {"batches", "checkpoints", "config.json", "curve.png", "metrics.jsonl", "samples.jsonl", "summary.json"}
CHECKPOINT = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "trainer"}
SUMMARY = {"steps", "eval", "eval_figure", "seconds", "peak_rss_bytes", "tokens", "versions"}
METRICS = {"step", "reward", "correct", "tokens", "time", "loss", "grad_norm", "lr", "entropy", "kl_sampler",
           "sampler_gap", "clip_high", "clip_low", "ratio", "groups_kept", "rounds", "truncated"}  # fmt: skip
SAMPLES = {"step", "round", "status", "detail", "reward", "tokens", "kept", "completion", "answer", "parts"}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_names_and_keys(options, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(options | {"steps": 2, "out": str(run), "log_samples": 4, "record_batches": True})))
    found = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert found - {"owner.json"} == FILES
    (last,) = (path for path in (run / "checkpoints").iterdir() if path.name.endswith("2"))
    assert {path.name for path in last.iterdir()} >= CHECKPOINT
    assert json.loads((run / "summary.json").read_text()).keys() == SUMMARY
    assert set(lines(run / "metrics.jsonl")[-1]) >= METRICS
    assert set(lines(run / "samples.jsonl")[0]) >= SAMPLES
