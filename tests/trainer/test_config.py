"""The configuration: defaults said openly, JSON round trip, the command line, what may differ on resume."""

import json

import pytest

from kenpo.cli import main
from kenpo.commands.training import read_config
from kenpo.errors import InputError, UnknownNameError
from kenpo.options import parse_settings
from kenpo.trainer.config import (
    RECIPE,
    TrainConfig,
    differences,
    from_dict,
    load,
    resolve,
    resolve_settings,
    to_dict,
)  # fmt: skip
from kenpo.trainer.defaults import USUAL


def test_recipe_holds_for_the_bundled_model_on_its_task_only():
    recipe, usual = resolve(TrainConfig(threads=1)), resolve(TrainConfig(model="some/model", threads=1))
    assert {n: getattr(recipe, n) for n in RECIPE} == RECIPE
    assert {n: getattr(usual, n) for n in USUAL} == USUAL
    assert recipe.settings == {"regularizers": [], "surrogate.high": 0.28}
    assert resolve(TrainConfig(algorithm="gspo", threads=1)).settings == {}
    assert resolve(TrainConfig(task="reasoning_gym:chain_sum", threads=1)).lr == USUAL["lr"]


def test_resolving_twice_changes_nothing():
    once = resolve(TrainConfig(settings={"surrogate.high": 0.3}, threads=1))
    assert resolve(once) == once
    assert all(getattr(once, n) is not None for n in (*USUAL, "device", "threads", "record_batches"))


def test_a_setting_of_the_user_replaces_the_recipes_for_the_same_slot():
    assert resolve_settings({"surrogate.high": 0.3}, True) == {"regularizers": [], "surrogate.high": 0.3}
    assert resolve_settings({"regularizers.kl_to_reference.beta": 0.1}, True) == {
        "surrogate.high": 0.28, "regularizers.kl_to_reference.beta": 0.1,
    }  # fmt: skip


def test_json_round_trip_and_unknown_keys(tmp_path):
    config = resolve(TrainConfig(settings={"surrogate.high": 0.3}, stop=("x",), threads=1))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    assert resolve(load(path)) == config
    assert not {"out", "resume", "dry_run", "quiet", "series"} & to_dict(config).keys()
    with pytest.raises(UnknownNameError, match=r"temprature.*did you mean temperature"):
        from_dict({"temprature": 1.0})
    path.write_text("[1]")
    with pytest.raises(InputError, match="one JSON object"):
        load(path)
    for content, said in (
        (b"{", "not valid JSON"), (b"\xff\xfe", "not a text file"), (b'{"lr": 1, "lr": 2}', "'lr' is given twice"),
        (b'{"settings": {"ratio.low": 1, "ratio.low": 2}}', "'ratio.low' is given twice"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(InputError, match=said):
            load(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(to_dict(config)).encode())
    assert resolve(load(path)) == config


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": "four"}, "--steps: 'four' is not a whole number"),
        ({"steps": 1.5}, "--steps: 1.5 is not a whole number"),
        ({"seed": True}, "--seed: True is not a whole number"),
        ({"task": 7}, "--task: 7 is not text"),
        ({"stop": "abc"}, "--stop: 'abc' is not a list"),
        ({"settings": [1]}, "--set: .1. is not an object"),
        ({"betas": ["a", "b"]}, "--betas: .* is not a list"),
        ({"lr": float("inf")}, "--lr: inf is not a finite number"),
    ],
)
def test_a_value_of_another_kind_is_named(values, said):
    with pytest.raises(InputError, match=said):
        from_dict(values)


def test_paths_are_taken_as_text(tmp_path):
    assert TrainConfig(out=tmp_path).out == str(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": 0.0}, {"lora_alpha": 0.0, "lora_rank": 4}, {"head_dtype": "float32", "dtype": "float64"},
     {"top_p": 0.0}, {"top_p": 1.5}, {"steps": 0}, {"group_size": 0}, {"lr": -1.0},
     {"schedule": "x"}, {"dtype": "float16"}, {"betas": (0.9, 1.0)}, {"time_limit": 0.0}, {"minibatches": 0},
     {"lr": float("nan")}],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad)).replace("_", ".")):
        TrainConfig(**bad)


def test_more_minibatches_than_groups_are_refused():
    with pytest.raises(InputError, match="--minibatches 4 exceeds --prompts 3"):
        resolve(TrainConfig(minibatches=4, prompts=3))


def test_settings_from_text():
    assert parse_settings(["a.b=0.3", "c=[]", "d.over=kept"]) == {"a.b": 0.3, "c": [], "d.over": "kept"}
    with pytest.raises(InputError, match=r"SLOT\.FIELD=VALUE"):
        parse_settings(["a.b"])


def test_list_options_may_be_repeated(tmp_path):
    config = read_config(
        [
            "--set",
            "surrogate.high=0.3",
            "--steps",
            "5",
            "--set",
            "surrogate.low=0.1",
            "--with=untruncated",
            "--stop",
            "a",
            "b",
        ]
    )
    assert config.settings == {"surrogate.high": 0.3, "surrogate.low": 0.1}
    assert config.stages == ("untruncated",)
    assert config.stop == ("a", "b")
    assert config.steps == 5


def test_further_options_go_over_a_recorded_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"steps": 7, "seed": 3, "settings": {"surrogate.high": 0.3}}))
    config = read_config(["--config", str(path), "--seed", "4", "--set", "surrogate.low=0.1"])
    assert (config.steps, config.seed) == (7, 4)
    assert config.settings == {"surrogate.high": 0.3, "surrogate.low": 0.1}


@pytest.mark.parametrize("argv", [["--resume", "RUN"], ["--out", "RUN", "--resume"], ["--resume=RUN"]])
def test_three_ways_to_say_resume(tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.json").write_text(json.dumps(to_dict(TrainConfig(seed=9))))
    config = read_config(argv)
    assert (config.out, config.resume, config.seed) == ("RUN", True, 9)


@pytest.mark.parametrize("more", [["--recipe", "several-updates"], ["--config", "other.json"]])
@pytest.mark.parametrize("argv", [["--resume", "RUN"], ["--series", "RUN"]])
def test_a_recipe_or_a_file_beside_a_run_that_goes_on_is_not_dropped(tmp_path, monkeypatch, capsys, argv, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.json").write_text(json.dumps(to_dict(resolve(TrainConfig(seed=9, threads=1)))))
    (tmp_path / "other.json").write_text(json.dumps({"seed": 9, "minibatches": 4, "threads": 1}))
    assert main(["train", *argv, *more]) == 2
    assert "minibatches was 1, now 4" in capsys.readouterr().err
    assert not list(tmp_path.glob("RUN-*"))


def test_differences_name_what_was_given_and_changed():
    recorded = resolve(TrainConfig(model="m", seed=1, threads=1))
    assert differences(recorded, TrainConfig(model="m", seed=1)) == {}
    assert differences(recorded, TrainConfig(model="m", seed=2, lr=0.5, keep=9)) == {"seed": (1, 2), "lr": (1e-6, 0.5)}


def test_one_line_for_what_the_parser_refuses():
    for argv, what in (
        (["--lrr", "1"], "--lrr"), (["--lr", "x"], "--lr"), (["--schedule", "up"], "up"),
        (["--set", "ab"], "SLOT.FIELD=VALUE"),
        (["--config"], "--config needs a value"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=what):
            read_config(argv)
