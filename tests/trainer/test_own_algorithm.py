"""An algorithm of one's own is tried on a small batch before a model is loaded."""

from __future__ import annotations

import json

import pytest

import kenpo
from kenpo.cli import main
from kenpo.errors import MissingFieldError
from kenpo.trainer.config import TrainConfig

HEAD = """
from dataclasses import dataclass
import kenpo
from kenpo import stages as S

@dataclass(frozen=True)
class Mine(S.Clip):
    def __call__(self, ratio, ctx):
        {body}

MINE = kenpo.get("grpo").but(name="mine", surrogate=Mine(), regularizers=())
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("return ratio * float('nan')", "NaN"),
        ("return ratio[:, :2]", "small batch"),
        ("return ctx.read('logp_ref')", "logp_ref"),
    ],
)
def test_a_faulty_stage_is_found_before_the_run(tmp_path, capsys, body, says):
    file = tmp_path / "mine.py"
    file.write_text(HEAD.format(body=body))
    out = tmp_path / "run"
    assert main(["train", "--algorithm", f"{file}:MINE", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert not out.exists()


def test_a_sound_one_passes(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD.format(body="return super().__call__(ratio, ctx)"))
    assert main(["train", "--algorithm", f"{file}:MINE", "--dry-run"]) == 0


PARTS = """
import kenpo
from kenpo.stages import DropUniformGroups, PartsZScore

MINE = kenpo.get("dapo").but(
    name="mine", shaping=(), selection=(DropUniformGroups(by="parts", parts=("right", "short")),),
    advantage=PartsZScore(("right", "short"), (1.0, 0.25)),
)
"""


def test_a_reward_of_parts_trains_and_is_recorded_part_by_part(tmp_path, options, capsys):
    file, scorer = tmp_path / "mine.py", tmp_path / "score.py"
    file.write_text(PARTS)
    scorer.write_text(
        "def score(completion, answer):\n"
        "    right = float(completion.endswith(str(answer)))\n"
        "    return {'reward': right, 'right': right, 'short': 1 / (1 + len(completion))}\n"
    )
    run = tmp_path / "run"
    config = {**options, "algorithm": f"{file}:MINE", "verifier": f"{scorer}:score", "settings": None, "steps": 1}
    kenpo.train(TrainConfig(**config, out=str(run)))
    figures = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert figures["part/right"] == figures["reward"]
    assert 0 < figures["part/short"]["sum"] < figures["part/short"]["count"]
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert set(sample["parts"]) == {"right", "short"}
    scorer.write_text("def score(completion, answer):\n    return float(completion.endswith(str(answer)))\n")
    with pytest.raises(MissingFieldError, match="verifier that returns a dict"):
        kenpo.train(TrainConfig(**config, out=str(tmp_path / "other")))
