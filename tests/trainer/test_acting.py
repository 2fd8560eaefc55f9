"""What a run says of itself before and at its first step, and what `kenpo show`, `list` and `check` say."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from kenpo.cli import main
from kenpo.presets import ONLY_BUNDLED, RECIPES


def command(options, *more):
    return ["train", "--model", options["model"], "--steps", "2", "--prompts", "2", "--group-size", "2",
            "--max-tokens", "4", "--eval-problems", "0", "--threads", "1", "--checkpoint-every", "0",
            *more]  # fmt: skip


def told(capsys, *args):
    capsys.readouterr()
    assert main([str(a) for a in args]) == 0
    return capsys.readouterr()


def told_help(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    return capsys.readouterr().out


def test_parts_that_can_not_act_are_named_in_plan_run_and_show(options, capsys, tmp_path):
    one = ("--algorithm", "gspo")
    for args in (
        command(options, *one, "--dry-run"),
        command(options, *one, "--verifier", options["verifier"], "--out", tmp_path / "a"),
    ):
        out = told(capsys, *args)
        assert "surrogate can't act: " in out.out + out.err
        assert "it would with " in out.out + out.err
    assert "surrogate: can't act" in told(capsys, "show", "gspo").out
    several = told(capsys, *command(options, *one, "--minibatches", "2", "--dry-run"))
    assert "can't act" not in several.out


@pytest.mark.parametrize("name", ["rloo", "conspo"])
def test_updates_without_a_ratio_are_planned_as_biased(name, options, capsys):
    assert "biased updates" in told(capsys, *command(options, "--algorithm", name, "--epochs", "2", "--dry-run")).out
    assert "biased updates" not in told(capsys, *command(options, "--algorithm", name, "--dry-run")).out
    assert "biased updates" not in told(capsys, *command(options, "--epochs", "2", "--dry-run")).out


def test_rewards_that_are_all_alike_are_told_at_once(options, capsys, tmp_path):
    (tmp_path / "never.py").write_text("def never(completion, answer):\n    return 0.0\n")
    error = told(capsys, *command(options, "--verifier", f"{tmp_path / 'never.py'}:never", "--out", tmp_path / "a")).err
    assert error.count("all 4 rewards are 0: ") == 1
    for cause in ("--group-size", "--max-tokens", "samples.jsonl"):
        assert cause in error
    more = command(options, "--verifier", options["verifier"], "--group-size", "8", "--out", tmp_path / "b")
    assert "rewards are" not in told(capsys, *more).err


def test_the_catalogue_says_what_trains_and_acts(capsys):
    rows = {row["name"]: row for row in json.loads(told(capsys, "list", "--json").out)}
    assert rows["grpo"]["trains"] is True
    assert rows["grpo"]["lacks"] == []
    assert rows["grpo"]["acts"] == "with several updates"
    assert rows["rloo"]["acts"] == "always"
    assert "stale or foreign" in rows["tis"]["acts"]
    assert all(row["source"] for row in rows.values())
    assert rows["dapo"]["acts"] == "with several updates; shaping.soft_overlong is off until its number is set"


def test_the_table_says_what_trains_and_when_it_acts(capsys):
    lines = told(capsys, "list").out.splitlines()
    head = [lines[0].index(title) for title in ("kenpo train", "all parts act", "status")]
    cells = {line.split()[0]: [line[a:b].strip() for a, b in pairwise(head)] for line in lines[1:-4] if line}
    rows = json.loads(told(capsys, "list", "--json").out)
    assert cells.keys() == {row["name"] for row in rows}
    for row in rows:
        trains = "yes" if row["trains"] else f"no, lacks {', '.join(row['lacks'])}"
        assert cells[row["name"]] == [trains, row["acts"] if row["trains"] else "–"]
    assert cells["tis"] == ["yes", "with several updates and stale or foreign samples"]
    assert cells["rspo"][0].startswith("no, lacks router_logp")
    assert sum(not row["trains"] for row in rows) == 3


def test_check_runs_a_step(capsys):
    found = json.loads(told(capsys, "check", "--json").out)
    assert found["ok"] is True
    assert found["problems"] == []
    assert {"kenpo", "torch", "transformers"} <= found["versions"].keys()
    assert main(["check", "--device", "cuda:99"]) == 2
    assert "problem: " in capsys.readouterr().out


def test_eval_takes_every_row_of_a_file(options, capsys, tmp_path):
    for count in (1, 12):
        data = tmp_path / f"test{count}.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(count)))
        args = ("eval", options["model"], "--task", data, "--max-tokens", "3", "--json")
        assert json.loads(told(capsys, *args).out)["sets"][f"test{count}"]["problems"] == count
    assert json.loads(told(capsys, *args, "--problems", "5").out)["sets"]["test12"]["problems"] == 5


def test_no_advice_for_extras_pins_torch():
    root = Path(__file__).parents[2]
    for path in [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("src/**/*.py")]:
        for line in path.read_text().splitlines():
            assert not ("pip install" in line and "-c constraints" in line and "[" in line), f"{path}: {line}"


def test_a_recipe_sets_options_and_those_beside_it_win(capsys):
    from kenpo.commands.training import read_config

    config = read_config(["--recipe", "several-updates", "--epochs", "3"])
    assert (config.minibatches, config.epochs, config.lr) == (4, 3, 2e-5)
    assert main(["train", "--recipe", "several-update", "--dry-run"]) == 2
    assert "did you mean several-updates?" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_guide_says_of_a_recipe_is_what_it_sets(name, capsys):
    guide = (Path(__file__).parents[2] / "docs/guides/recipes.md").read_text()
    options = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in RECIPES[name].items())
    assert f"`{name}`" in guide
    if name not in ("ppo", "vapo"):  # which the guide to critics is about
        assert f"`{options}`".replace("0.0001", "1e-4").replace("2e-05", "2e-5") in guide
        assert f"recipe-{name}.png" in guide or RECIPES[name].get("algorithm") == name
    assert name in told_help(capsys)


@pytest.mark.parametrize("name", sorted(ONLY_BUNDLED))
def test_a_recipe_made_for_the_bundled_model_is_for_no_other(name, options, capsys):
    assert main(["train", "--recipe", name, "--model", options["model"], "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--recipe {name}: its numbers were made for the bundled model" in error
    assert "--temperature " in error
    assert main(["train", "--recipe", name, "--task", "addition", "--dry-run", "--eval-problems", "0"]) == 0


def test_precision_and_determinism_follow_the_device():
    from kenpo.errors import InputError
    from kenpo.trainer.config import TrainConfig, resolve
    from kenpo.trainer.plan import notes

    assert resolve(TrainConfig(device="cpu")).dtype == "float32"
    assert resolve(TrainConfig(device="cuda")).dtype == "bfloat16"
    assert resolve(TrainConfig(device="cuda:1", dtype="float32")).dtype == "float32"
    with pytest.raises(InputError, match="--deterministic off"):
        resolve(TrainConfig(device="cpu", deterministic="off"))
    loose = resolve(TrainConfig(device="cuda", deterministic="off"))
    import kenpo

    assert any("does not repeat bit for bit" in line for line in notes(kenpo.get("grpo"), loose))


def test_a_norm_that_was_cut_is_shown_before_and_after(options, capsys, tmp_path):
    args = command(options, "--verifier", options["verifier"], "--group-size", "8")
    cut = told(capsys, *args, "--grad-clip", "1e-9", "--out", tmp_path / "a").out
    assert cut.count(" cut to 1e-09") == 2
    assert " cut to " not in told(capsys, *args, "--grad-clip", "0", "--out", tmp_path / "b").out
