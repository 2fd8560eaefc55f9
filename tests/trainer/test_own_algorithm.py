"""An algorithm of one's own is tried on a small batch before a model is loaded."""

from __future__ import annotations

import pytest

from kenpo.cli import main

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
