"""What is refused of TRL's configuration, told without TRL: a namespace stands for GRPOConfig."""

from types import SimpleNamespace

import pytest
import torch

import kenpo
from kenpo.errors import InputError
from kenpo.integrations.host import Figures, merged, prompt_ids, shuffled_by_group
from kenpo.integrations.trl_config import REPLACED, check_config, check_fed, check_windows, with_length
from kenpo.types import Loss

#: GRPOConfig's own defaults in TRL 1.16.
DEFAULTS = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "delta": None, "importance_sampling_level": "token",
    "scale_rewards": "group", "beta": 0.0, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0, "vespo_k_neg": 3.0, "vespo_lambda_pos": 3.0, "vespo_lambda_neg": 2.0,
    "multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "off_policy_mask_threshold": None, "use_bias_correction_kl": True,
    "mask_truncated_completions": False, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
}  # fmt: skip
CHANGED = {
    "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 2.0, "importance_sampling_level": "sequence",
    "scale_rewards": "none", "beta": 0.04, "sapo_temperature_neg": 1.2, "sapo_temperature_pos": 1.2,
    "vespo_k_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_pos": 1.0, "vespo_lambda_neg": 1.0,
    "multi_objective_aggregation": "normalize_then_sum", "top_entropy_quantile": 0.2, "entropy_coef": 0.01,
    "use_adaptive_entropy": True, "off_policy_mask_threshold": 0.5, "use_bias_correction_kl": False,
    "mask_truncated_completions": True, "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.5,
}  # fmt: skip
NEUTRAL = {
    "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "deepspeed": None, "fsdp": None,
    "router_aux_loss_coef": None, "generation_kwargs": None, "steps_per_generation": 4,
    "gradient_accumulation_steps": 2, "num_iterations": 1, "per_device_train_batch_size": 8, "num_generations": 4,
}  # fmt: skip


def config(**changes):
    return SimpleNamespace(**(DEFAULTS | NEUTRAL | changes))


def test_defaults_pass_and_every_replaced_knob_is_in_the_table():
    assert REPLACED.keys() == DEFAULTS.keys() == CHANGED.keys()
    check_config(config(), DEFAULTS, kenpo.get("grpo"))


@pytest.mark.parametrize("name", CHANGED)
def test_a_replaced_knob_is_refused_in_one_line_that_names_it(name):
    with pytest.raises(InputError) as error:
        check_config(config(**{name: CHANGED[name]}), DEFAULTS, kenpo.get("grpo"))
    assert f"GRPOConfig({name}={CHANGED[name]!r})" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 20), ("top_p", 0.9), ("min_p", 0.1), ("repetition_penalty", 1.1), ("deepspeed", "ds.json"),
     ("fsdp", "full_shard"), ("router_aux_loss_coef", 0.01), ("generation_kwargs", {"top_p": 0.9})],
)  # fmt: skip
def test_what_trl_would_ignore_or_was_not_tried_is_refused(name, value):
    with pytest.raises(InputError, match=name):
        check_config(config(**{name: value}), DEFAULTS, kenpo.get("grpo"))


def test_scale_rewards_may_be_said_in_its_old_form():
    check_config(config(scale_rewards="group"), DEFAULTS, kenpo.get("grpo"))
    with pytest.raises(InputError, match="scale_rewards"):
        check_config(config(scale_rewards=False), DEFAULTS, kenpo.get("grpo"))


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_step_must_not_span_two_generations(steps):
    with pytest.raises(InputError, match="span two generations"):
        check_windows(config(steps_per_generation=steps), kenpo.get("grpo"))


def test_updates_beyond_the_algorithms_own_limit_are_refused():
    check_windows(config(steps_per_generation=2), kenpo.get("online_icepop"))
    with pytest.raises(InputError, match="at most 1 update"):
        check_windows(config(), kenpo.get("online_icepop"))


def test_windows_must_hold_whole_groups_only_where_a_stage_looks_across_rows():
    check_windows(config(per_device_train_batch_size=3), kenpo.get("grpo"))
    with pytest.raises(InputError, match="second_moment"):
        check_windows(config(per_device_train_batch_size=3), kenpo.get("m2po"))
    check_windows(config(per_device_train_batch_size=3, steps_per_generation=2), kenpo.get("m2po"))


@pytest.mark.parametrize(("name", "field"), [("rspo", "router_logp"), ("luffy", "origin"), ("trm-exact", "kl_sampler")])
def test_what_trl_cannot_feed_is_refused_with_the_field(name, field):
    with pytest.raises(InputError, match=field):
        check_fed(kenpo.get(name), config())


def test_an_open_length_takes_the_response_limit():
    assert with_length(kenpo.get("dr_grpo"), 64).settings()["aggregate.length"] == 64
    assert with_length(kenpo.get("grpo"), 64) is kenpo.get("grpo")


def test_shuffling_keeps_groups_together():
    group = torch.tensor([3, 3, 3, 1, 1, 1, 7, 7, 7, 0, 0, 0])
    torch.manual_seed(0)
    orders = [shuffled_by_group(group) for _ in range(8)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(12))
        assert (group[order].reshape(4, 3) == group[order].reshape(4, 3)[:, :1]).all()
    assert len({tuple(o.tolist()) for o in orders}) > 1


def test_a_prompts_identity_does_not_depend_on_padding_or_response():
    tokens = torch.tensor([[-1, -1, 5, 6, 9], [5, 6, 8, 8, -1], [-1, 5, 7, 9, 9]])
    mask = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]).bool()
    a, b, c = prompt_ids(tokens, mask).tolist()
    assert a == b != c


def test_figures_add_up_over_microbatches_and_ranks():
    def share(total, count, peak):
        sums = {"kept": (torch.tensor(total), torch.tensor(count))}
        return Loss(torch.tensor(0.0), torch.zeros(1), sums, {"ratio_max": torch.tensor(peak)})

    one, two = Figures(), Figures()
    one.note(share(1.0, 4.0, 1.5))
    one.note(share(3.0, 4.0, 1.2))
    two.note(share(0.0, 8.0, 3.0))
    assert merged([one.plain(), two.plain()]) == {"kept": 0.25, "ratio_max": 3.0}
