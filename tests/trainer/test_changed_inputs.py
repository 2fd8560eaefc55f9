"""A run does not go on with other rows, another verifier, algorithm, model or template without being told to."""

import json
import shutil

import pytest

import kenpo
from kenpo.cli import main
from kenpo.runs import identity
from kenpo.trainer.config import TrainConfig

REWARD = "def digits(completion, answer, **kw):\n    return sum(c.isdigit() for c in completion) / 9\n"
MINE = "import kenpo\nMINE = kenpo.get('grpo').but(name='mine', regularizers=())\n"


def rows(path, numbers):
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in numbers))


@pytest.fixture
def unfinished(models, tmp_path):
    """A run of two steps that has its first checkpoint only, and everything it stands on, all of it in tmp_path."""
    shutil.copytree(models / "qwen3", tmp_path / "model")
    rows(tmp_path / "task.jsonl", range(20))
    rows(tmp_path / "eval.jsonl", range(50, 55))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "mine.py").write_text(MINE)
    run = tmp_path / "run"
    kenpo.train(TrainConfig(
        model=str(tmp_path / "model"), task=str(tmp_path / "task.jsonl"), eval_file=str(tmp_path / "eval.jsonl"),
        verifier=f"{tmp_path / 'reward.py'}:digits", algorithm=f"{tmp_path / 'mine.py'}:MINE", steps=2, prompts=2,
        group_size=2, max_tokens=4, lr=1e-3, eval_problems=4, eval_every=0, checkpoint_every=1, threads=1, quiet=True,
        out=str(run),
    ))  # fmt: skip
    shutil.rmtree(run / "checkpoints" / "step_000002")
    (run / "summary.json").unlink()
    return run


def other_weight(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "rows of the task": ("task.jsonl: 20 then, 15 now", lambda at: rows(at / "task.jsonl", range(100, 115))),
    "rows of the task ": ("task.jsonl)", lambda at: rows(at / "task.jsonl", [1, 0, *range(2, 20)])),
    "held-out rows": ("eval.jsonl)", lambda at: rows(at / "eval.jsonl", range(60, 65))),
    "verifier reward.py": ("reward.py)", lambda at: (at / "reward.py").write_text(REWARD + "# more\n")),
    "algorithm mine.py": ("mine.py)", lambda at: (at / "mine.py").write_text(MINE + "# more\n")),
    "model": ("model)", lambda at: other_weight(at / "model")),
    "chat template": (
        "the tokenizer)",
        lambda at: (at / "run/checkpoints/step_000001/chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
    ),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_change_is_refused_by_name_and_taken_when_accepted(what, unfinished, tmp_path, capsys):
    word, change = CHANGES[what]
    change(tmp_path)
    before = {p: p.read_bytes() for p in unfinished.rglob("*") if p.is_file()}
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"since step_000001 other contents have come into: {what.strip()} (" in said
    assert word in said
    assert "--accept-changes" in said
    assert {p: p.read_bytes() for p in unfinished.rglob("*") if p.is_file()} == before

    assert main(["train", "--resume", str(unfinished), "--quiet", "--accept-changes"]) == 0
    (line,) = [json.loads(x) for x in (unfinished / "changes.jsonl").read_text().splitlines()]
    assert line["step"] == 1
    assert [told.partition(" (")[0] for told in line["accepted"]] == [what.strip()]
    (unfinished / "summary.json").unlink()
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 0  # the newest checkpoint stands on what is there


def test_what_is_the_same_goes_on(unfinished, tmp_path):
    """The same rows in a file written anew, another date; a base model that is gone and that nothing needs."""
    rows(tmp_path / "task.jsonl", range(20))
    shutil.rmtree(tmp_path / "model")
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 0
    assert not (unfinished / "changes.jsonl").exists()


def test_a_change_within_a_large_file_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 1000)
    monkeypatch.setattr(identity, "BLOCK", 100)
    path = tmp_path / "weights"
    digests = set()
    for content in (b"a" * 100_000, b"b" * 100_000, b"a" * 100_001, b"a" * 99_999 + b"b", b"b" + b"a" * 99_999):
        path.write_bytes(content)
        identity._file_digest.cache_clear()
        digests.add(identity.file_digest(path))
    assert len(digests) == 5
