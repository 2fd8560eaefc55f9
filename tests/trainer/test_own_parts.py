"""An engine, a source and a KL in the reward need nothing but a file of the user's own."""

import json

from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train

ENGINE = """
from kenpo.engines.hf import HFEngine
TOLD = []

class Mine(HFEngine):
    def update(self, weights, version):
        TOLD.append((version, sum(1 for _ in weights())))
        super().update(weights, version)

    def close(self):
        TOLD.append("closed")
"""

SOURCE = """
import torch
from kenpo.episode import Episode, Segment, given
from kenpo.experience.episode import Row, build_rollouts
from kenpo.experience.source import Collected, Source

class Counting(Source):
    headline, heldout = "eval/seen", 1

    def next(self, step, state, priorities=None, usable=None):
        seen = torch.zeros(2, dtype=torch.int64) if state is None else state["seen"]
        episodes = [Episode((given([3, 4]), Segment([5 + i], sampled=True, logp=[-1.0], version=step))) for i in (0, 1)]
        rows = [Row(e, 0, reward=float(i)) for i, e in enumerate(episodes)]
        return Collected(build_rollouts(rows), figures={"seen": int(seen.sum())}, state={"seen": seen + 1}, generated=2)

    def measure(self, score):
        return {"eval/seen": {"sum": 3, "count": 4}}

def make(making):
    return Counting()
"""


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_an_engine_of_ones_own_gets_weights_and_versions(options, tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    train(TrainConfig(**(options | {"steps": 2, "engine": f"{tmp_path}/engine.py:Mine", "out": str(tmp_path / "run")})))
    import sys

    told = sys.modules["kenpo_user_engine"].TOLD
    assert [t[0] for t in told if t != "closed"] == [1, 2]
    assert all(t[1] > 5 for t in told if t != "closed")
    assert told[-1] == "closed"


def test_a_source_of_ones_own_keeps_tensors_over_a_resume(options, tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    fields = options | {"source": f"{tmp_path}/source.py:make", "steps": 4, "out": str(tmp_path / "run")}
    summary = train(TrainConfig(**fields))
    assert [line["seen"] for line in lines(tmp_path / "run")[1:]] == [0, 2, 4, 6]
    assert summary["eval"] == {"before": 0.75, "after": 0.75}
    (tmp_path / "run" / "summary.json").unlink()
    import shutil

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    train(TrainConfig(**fields, resume=True))
    assert [line["seen"] for line in lines(tmp_path / "run")[1:]] == [0, 2, 4, 6]


def test_a_kl_in_the_reward_trains_with_one_update(options, tmp_path):
    fields = {
        "algorithm": "reinforce_pp",
        "settings": {"advantage.beta": 0.1},
        "steps": 1,
        "out": str(tmp_path / "run"),
    }
    train(TrainConfig(**(options | fields)))
    assert {"old", "ref"} <= lines(tmp_path / "run")[-1]["time"].keys()
