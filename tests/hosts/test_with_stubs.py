"""The plug-ins' own arithmetic, with modules that stand for TRL and verl. `make hosts` has the real ones."""

import importlib
import sys
import types

import pytest
import torch

import kenpo

PROMPT, WIDTH = 3, 6


@pytest.fixture
def trl(monkeypatch):
    """`kenpo.integrations.trl` over a stand-in of TRL: a trainer class without anything in it."""
    pytest.importorskip("accelerate")
    package, trainer, utils = (types.ModuleType(n) for n in ("trl", "trl.trainer", "trl.trainer.utils"))
    package.GRPOTrainer, package.GRPOConfig = type("GRPOTrainer", (), {}), type("GRPOConfig", (), {})
    utils.split_tensor_dict = None
    for name, module in {"trl": package, "trl.trainer": trainer, "trl.trainer.utils": utils}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kenpo.integrations.trl", raising=False)
    module = importlib.import_module("kenpo.integrations.trl")
    monkeypatch.setattr(module, "gather_object", lambda x: x)
    yield module
    sys.modules.pop("kenpo.integrations.trl", None)


@pytest.fixture
def verl(monkeypatch):
    """`kenpo.integrations.verl` over a stand-in of verl's two registries."""
    core = types.ModuleType("verl.trainer.ppo.core_algos")
    core.ADV_ESTIMATOR_REGISTRY, core.POLICY_LOSS_REGISTRY = {}, {}
    core.register_adv_est = lambda name: lambda fn: core.ADV_ESTIMATOR_REGISTRY.setdefault(name, fn)
    core.register_policy_loss = lambda name: lambda fn: core.POLICY_LOSS_REGISTRY.setdefault(name, fn)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    monkeypatch.delitem(sys.modules, "kenpo.integrations.verl", raising=False)
    yield importlib.import_module("kenpo.integrations.verl")
    sys.modules.pop("kenpo.integrations.verl", None)


def batch(seed=0, rows=8):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (rows,), generator=g)
    mask = torch.zeros(rows, PROMPT + WIDTH, dtype=torch.bool)
    mask[:, PROMPT:] = torch.arange(WIDTH) < lengths[:, None]
    draw = lambda: torch.randn(rows, PROMPT + WIDTH, generator=g, dtype=torch.float64)  # noqa: E731
    logp = -draw().abs()
    rollouts = kenpo.Rollouts(
        mask=mask, group=torch.arange(rows) // 4, rewards=torch.rand(rows, generator=g, dtype=torch.float64),
        logp_old=logp + 0.3 * draw(), logp_sampler=logp + 0.3 * draw(),
    )  # fmt: skip
    return rollouts, logp * mask


@pytest.mark.parametrize("name", ["gspo", "luspo", "m2po", "cispo"])
@pytest.mark.parametrize("processes", [1, 2])
def test_microbatches_of_a_window_add_up_to_one_evaluation_over_all_processes(trl, name, processes):
    rollouts, values = batch()
    a = kenpo.get(name)
    logp = values.clone().requires_grad_()
    self = object.__new__(trl.KenpoGRPOTrainer)
    self.algorithm, self.prepared = a, kenpo.prepare(a, rollouts)
    self.model = self.model_wrapped = types.SimpleNamespace(training=True)
    self.accelerator = types.SimpleNamespace(num_processes=processes, is_main_process=True)
    self._figures = {"train": trl.Figures(), "eval": trl.Figures()}
    self.compute_loss_context_manager = torch.no_grad
    self._terms = lambda model, inputs: (logp[inputs["kenpo_row"]], None)
    slices = [{"kenpo_row": torch.tensor(r)} for r in ([3, 0], [7, 1], [2], [6, 4, 5])]
    self._open(slices)
    for part in slices:
        self._compute_loss(self.model, part).backward()
    want = kenpo.evaluate(a, rollouts, kenpo.Policy(values)).coefficients
    assert torch.allclose(logp.grad / processes, want, rtol=1e-12, atol=1e-14)
    sums, _ = self._figures["train"].plain()
    assert sums["advantage_abs"][1] == float(rollouts.mask.sum())


def test_a_generation_of_two_ranks_becomes_one_batch_of_rollouts(trl):
    self = object.__new__(trl.KenpoGRPOTrainer)
    self.model, self.num_generations = types.SimpleNamespace(training=True), 2
    self.reward_weights, self.reward_func_names = torch.tensor([1.0, 0.5]), ["right", "form"]
    self.state = types.SimpleNamespace(global_step=5)
    nan = float("nan")
    self._parts = torch.tensor([[1.0, 2.0], [nan, 1.0], [nan, nan], [0.0, 0.0]])
    tokens = torch.tensor([[-1, 4, 5, 6], [-1, 4, 5, 7], [3, 3, 5, 6], [3, 3, 5, 7]])
    mask = torch.tensor([[0, 0, 1, 1]] * 4).bool()
    made = self._rollouts({"tokens": tokens, "mask": mask, "truncated": torch.zeros(4, dtype=torch.bool)})
    assert made.rewards[:2].tolist() == [2.0, 0.5]
    assert bool(made.rewards[2].isnan())
    assert made.group.tolist() == [0, 0, 1, 1]
    assert made.prompt_id[0] == made.prompt_id[1] != made.prompt_id[2]
    assert made.policy_version.tolist() == [[-1, -1, 5, 5]] * 4
    assert set(made.reward_parts) == {"right", "form"}


@pytest.mark.parametrize("name", ["gspo", "luspo", "cispo", "rloo"])
def test_verls_two_functions_give_one_evaluation_over_uneven_ranks(verl, name):
    rollouts, values = batch(seed=1)
    a = kenpo.get(name)
    r = {"mask": rollouts.mask[:, 1:].long(), "old": rollouts.logp_old[:, 1:]}
    scores = torch.zeros_like(r["old"])
    scores[:, -1] = rollouts.rewards
    advantages, _ = verl.ADV_ESTIMATOR_REGISTRY[f"kenpo:{name}"](
        token_level_rewards=scores, response_mask=r["mask"], index=[str(int(g)) for g in rollouts.group]
    )
    logp = values[:, 1:].clone().requires_grad_()
    info = {"dp_size": 2, "batch_num_tokens": int(r["mask"].sum()), "global_batch_size": 8}
    config = types.SimpleNamespace(global_batch_info=info, loss_agg_mode="token-mean")
    for cut in (slice(0, 3), slice(3, 4), slice(4, 8)):
        loss, _ = verl.POLICY_LOSS_REGISTRY[f"kenpo:{name}"](
            old_log_prob=r["old"][cut], log_prob=logp[cut], advantages=advantages[cut], response_mask=r["mask"][cut],
            loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
        )  # fmt: skip
        (loss / 2).backward()  # verl averages over ranks
    want = kenpo.evaluate(a, rollouts, kenpo.Policy(values)).coefficients[:, 1:]
    assert torch.allclose(logp.grad, want, rtol=1e-12, atol=1e-14)


def test_a_column_of_coefficients_times_the_ranks(verl):
    rollouts, values = batch(seed=2)
    a = kenpo.get("m2po")
    scores = torch.zeros(8, PROMPT + WIDTH - 1, dtype=torch.float64)
    scores[:, -1] = rollouts.rewards
    column, state, figures = verl.coefficient_column(
        a, None, uid=rollouts.group.tolist(), response_mask=rollouts.mask[:, 1:].long(), scores=scores,
        logp=values[:, 1:], logp_sampler=rollouts.logp_sampler[:, 1:],
    )  # fmt: skip
    fresh = rollouts.replace(logp_old=None)
    want = kenpo.evaluate(a, fresh, kenpo.Policy(values)).coefficients[:, 1:]
    assert torch.equal(column, want)
    assert state is None
    assert "kenpo/weight" in figures
    logp = values[:, 1:].clone().requires_grad_()
    config = types.SimpleNamespace(global_batch_info={"dp_size": 4})
    loss, _ = verl.POLICY_LOSS_REGISTRY["kenpo:coefficients"](
        old_log_prob=logp.detach(), log_prob=logp, advantages=column, response_mask=rollouts.mask[:, 1:], config=config
    )
    loss.backward()
    assert torch.allclose(logp.grad, 4 * want)


def test_unknown_counts_and_weights_of_verls_own_are_refused(verl):
    rollouts, values = batch()
    given = {"old_log_prob": values, "log_prob": values, "advantages": values, "response_mask": rollouts.mask.long()}
    loss = verl.POLICY_LOSS_REGISTRY["kenpo:gspo"]
    with pytest.raises(kenpo.errors.InputError, match="global token or sequence count"):
        loss(**given, config=types.SimpleNamespace(global_batch_info={"dp_size": 1}))
    with pytest.raises(kenpo.errors.InputError, match="rollout_is"):
        loss(**given, config=types.SimpleNamespace(global_batch_info={}), rollout_is_weights=values)


@pytest.mark.parametrize(("name", "what"), [("aux_loss_enabled", "router loss"), ("_is_vlm", "takes images")])
def test_models_that_trl_trains_otherwise_are_refused(trl, name, what):
    self = object.__new__(trl.KenpoGRPOTrainer)
    setattr(self, name, True)
    with pytest.raises(kenpo.errors.InputError, match=what):
        self._check_model()
