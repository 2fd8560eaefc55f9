"""Templates, rendered prompts and long rows in runs: said, counted, recorded, resumed."""

import json
import os
import shutil
import signal
from datetime import datetime

import pytest

from kenpo.cli import main
from kenpo.errors import InputError
from kenpo.experience.addition import character_tokenizer
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if fast is defined and fast %}+{% else %}={% endif %}"
)


@pytest.fixture
def data(tmp_path):
    """Twelve rows, two of which leave no room in a context of 64."""
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(10, 22)]
    rows[3]["prompt"] = "1+" * 32
    rows[7]["prompt"] = "2+" * 40
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(options, tmp_path, name="run", **more):
    summary = train(TrainConfig(**(options | {"out": str(tmp_path / name), "eval_problems": 0, **more})))
    return summary, (tmp_path / name / "samples.jsonl").read_text()


def test_long_rows_are_refused_by_name_or_left_out_and_counted(options, data, tmp_path, capsys):
    options |= {"task": str(data), "steps": 4, "quiet": False}
    with pytest.raises(InputError, match=r"line 4: the prompt: 64 tokens leave no room.*--long-prompts skip"):
        run(options, tmp_path)
    _, samples = run(options, tmp_path, long_prompts="skip")
    assert "data: left out 2 training and 0 held-out rows" in capsys.readouterr().err
    problems = {json.loads(line)["problem"] for line in samples.splitlines()}
    assert problems == set(range(12)) - {3, 7}
    with pytest.raises(InputError, match="made one by one"):
        run(options | {"task": "addition"}, tmp_path, "other", long_prompts="skip")


def test_a_run_that_left_rows_out_goes_on(options, data, tmp_path):
    from kenpo.runs.callbacks import Callback
    from kenpo.trainer.loop import Interrupted

    class Stop(Callback):
        def on_step(self, step, figures):
            if step == 3:
                os.kill(os.getpid(), 15)

    options |= {"task": str(data), "long_prompts": "skip", "eval_problems": 2, "out": str(tmp_path / "cut")}
    with pytest.raises(Interrupted):
        train(TrainConfig(**options), [Stop()])
    train(TrainConfig(**options, resume=True))
    train(TrainConfig(**{**options, "out": str(tmp_path / "whole")}))
    one, two = ((tmp_path / name / "samples.jsonl").read_text() for name in ("cut", "whole"))
    assert one == two


def test_long_demonstrations_are_left_out_too(options, tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1) * (40 if i == 12 else 1)} for i in range(10, 16)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["sft", "--model", options["model"], "--data", str(tmp_path / "d.jsonl"), "--steps", "2", "--batch", "2",
            "--threads", "1", "--eval-problems", "0"]  # fmt: skip
    assert main([*argv, "--out", str(tmp_path / "refused")]) == 2
    assert "line 3: 86 tokens do not fit" in capsys.readouterr().err
    assert main([*argv, "--out", str(tmp_path / "run"), "--long-prompts", "skip"]) == 0
    assert "left out 1 training and 0 held-out rows" in capsys.readouterr().err
    assert main([*argv[:3], "--steps", "1", "--out", str(tmp_path / "b"), "--long-prompts", "skip"]) == 2
    assert "made one by one" in capsys.readouterr().err


def test_template_and_arguments_go_into_the_run_and_its_checkpoints(options, data, tmp_path, capsys):
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    options |= {"task": str(data), "long_prompts": "skip", "steps": 2}
    _, plain = run(options, tmp_path, "plain", template=str(file))
    _, fast = run(options, tmp_path, "fast", template=str(file), template_args={"fast": True})
    assert plain != fast  # other prompts, other samples
    recorded = json.loads((tmp_path / "fast/config.json").read_text())
    assert recorded["template"] == str(file)
    assert recorded["template_args"] == {"fast": True}
    asked = ["--prompt", "1+2", "--greedy", "--max-tokens", "4", "--json"]
    checkpoint = str(tmp_path / "fast/checkpoints/step_000002")
    answers = []
    for more in ([], ["--template", str(file)], ["--template", str(file), "--template-args", "fast=true"]):
        assert main(["sample", checkpoint, *asked, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["logp"])
    assert answers[0] == answers[2] != answers[1]
    assert main(["sample", checkpoint, *asked, "--template-args", "slow=true"]) == 2
    assert "does not read it (it reads: fast)" in capsys.readouterr().err


def test_a_prompt_that_looks_rendered_is_said_once(models, options, tmp_path, capsys):
    folder = tmp_path / "m"
    shutil.copytree(models / "qwen3", folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    token = next(t for t in tokenizer.all_special_tokens if len(t) > 2 and t != tokenizer.unk_token)
    rows = [{"prompt": f"{token}{i}+1=", "answer": str(i)} for i in range(10, 20)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options |= {"model": str(folder), "task": str(tmp_path / "r.jsonl"), "steps": 1, "quiet": False}
    run(options, tmp_path, "twice")
    said = capsys.readouterr().err
    assert said.count(f"the prompt holds {token}") == 1
    assert "--template none" in said
    run(options, tmp_path, "once", template="none")
    assert f"holds {token}" not in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the run to be killed is a fork of this process")
def test_a_run_killed_at_step_4_of_9_goes_on_bit_for_bit_on_another_day(models, tmp_path, monkeypatch):
    """The template writes the second; every clock of the process that resumes is five days and an hour ahead."""
    from transformers.utils import chat_template_utils as rendering

    from kenpo.models import clock
    from kenpo.runs.callbacks import Callback

    folder = tmp_path / "m"
    shutil.copytree(models / "qwen3", folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d%H%M%S') }}+{% for m in messages %}{{ m['content'] }}{% endfor %}="
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(10, 22)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": str(folder), "task": str(tmp_path / "d.jsonl"), "steps": 9, "prompts": 2, "group_size": 2,
        "max_tokens": 5, "lr": 1e-3, "eval_problems": 2, "eval_every": 3, "checkpoint_every": 2, "threads": 1,
        "verifier": "numeric", "quiet": True,
    }  # fmt: skip

    class Kill(Callback):
        def on_step(self, step, figures):
            if step == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    def set_clocks(now):
        class At(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls.fromtimestamp(now, tz)

        monkeypatch.setattr("time.time", lambda: now)
        monkeypatch.setattr(clock, "_moment", None)
        monkeypatch.setattr(clock, "datetime", At)
        monkeypatch.setattr(rendering, "datetime", At)

    def go(name, **more):
        return train(TrainConfig(**options, out=str(tmp_path / name), **more))

    began = 1.7e9
    set_clocks(began)
    child = os.fork()
    if child == 0:
        try:
            train(TrainConfig(**options, out=str(tmp_path / "cut")), [Kill()])
        finally:
            os._exit(1)  # the tests go on in the parent alone
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    lines = (tmp_path / "cut/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 4
    assert (tmp_path / "cut/checkpoints/step_000002").exists()
    go("whole")
    set_clocks(began + 5 * 86400 + 3601)
    go("cut", resume=True)
    for name in ("samples.jsonl", "checkpoints/step_000009/model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    set_clocks(began + 5 * 86400 + 3601)
    go("late")  # a run of its own on that day has other prompts
    assert (tmp_path / "late/samples.jsonl").read_bytes() != (tmp_path / "cut/samples.jsonl").read_bytes()
