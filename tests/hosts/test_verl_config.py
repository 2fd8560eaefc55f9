"""Which of verl's routes carries an algorithm, and what is refused, told without verl."""

from types import SimpleNamespace

import pytest

import kenpo
from kenpo.errors import InputError
from kenpo.integrations.verl_config import (
    IGNORED,
    check_actor,
    check_one_step,
    route,
    why_not_coefficients,
    why_not_registries,
)


@pytest.mark.parametrize(
    "name", ["gspo", "luspo", "gmpo", "sapo", "sspo", "cispo", "gppo", "ripo", "rloo", "reinforce_pp"]
)
def test_the_registries_carry_what_needs_a_microbatch_and_two_counts(name):
    assert route(kenpo.get(name)) == "registries"


@pytest.mark.parametrize(
    ("name", "why"),
    [("grpo", "logp_ref"), ("dapo", "drop_uniform_groups"), ("m2po", "logp_sampler"), ("stapo", "spurious_tokens"),
     ("tis", "logp_sampler"), ("trm", "logp_sampler")],
)  # fmt: skip
def test_the_others_take_a_column_of_coefficients_for_a_named_reason(name, why):
    assert why in why_not_registries(kenpo.get(name))
    assert route(kenpo.get(name)) == "coefficients"


@pytest.mark.parametrize(("name", "field"), [("rspo", "router_logp"), ("luffy", "origin"), ("zcpo", "kl_ref")])
def test_what_neither_can_feed_is_refused_with_the_field(name, field):
    with pytest.raises(InputError, match=field):
        route(kenpo.get(name))


def test_a_column_that_this_configuration_does_not_hold_is_named():
    held = frozenset({"mask", "group", "rewards", "prompt_id", "logp"})
    assert why_not_coefficients(kenpo.get("gspo"), held) is None
    assert "logp_sampler" in why_not_coefficients(kenpo.get("m2po"), held)


@pytest.mark.parametrize("knob", IGNORED)
def test_an_actors_knob_off_its_default_is_refused(knob):
    check_actor(SimpleNamespace(**IGNORED), "kenpo:gspo")
    value = {"loss_agg_mode": "seq-mean-token-sum", "loss_scale_factor": 7}.get(knob, 0.31)
    with pytest.raises(InputError, match=knob):
        check_actor(SimpleNamespace(**(IGNORED | {knob: value})), "kenpo:gspo")


def config(actor=None, algorithm=None, **data):
    loss = SimpleNamespace(loss_mode="kenpo:coefficients")
    given = {"ppo_epochs": 1, "ppo_mini_batch_size": 16, "policy_loss": loss, "entropy_coeff": 0, "use_kl_loss": False}
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(**(given | (actor or {})))),
        algorithm=SimpleNamespace(**({"use_kl_in_reward": False, "rollout_correction": None} | (algorithm or {}))),
        data=SimpleNamespace(**({"train_batch_size": 16} | data)),
    )


def test_one_step_per_batch_passes():
    check_one_step(config(), "kenpo:m2po")
    check_one_step(config({"use_kl_loss": True, "kl_loss_coef": 0.0}), "kenpo:grpo")


@pytest.mark.parametrize(
    ("actor", "algorithm", "what"),
    [
        ({"ppo_epochs": 2}, {}, "ppo_epochs=1"),
        ({"ppo_mini_batch_size": 8}, {}, "ppo_mini_batch_size=16"),
        ({}, {"rollout_correction": SimpleNamespace(bypass_mode=True)}, "bypass_mode"),
        ({}, {"use_kl_in_reward": True}, "use_kl_in_reward"),
        ({"entropy_coeff": 0.01}, {}, "entropy_coeff"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {}, "kl_loss_coef"),
        ({"policy_loss": SimpleNamespace(loss_mode="vanilla")}, {}, "kenpo:coefficients"),
    ],
)
def test_what_would_not_be_exact_is_refused_with_the_knob(actor, algorithm, what):
    with pytest.raises(InputError, match=what):
        check_one_step(config(actor, algorithm), "kenpo:m2po")
