"""PPO's parts beside verl's `core_algos`, and the value loss beside OpenRLHF's: numbers and gradients.

`make hosts` runs this in an environment that has verl, and OpenRLHF's files without their dependencies.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("verl", reason="runs in the environment of `make hosts`")
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

import torch  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

import kenpo  # noqa: E402

D = torch.float64
PPO = kenpo.get("ppo")
SEEDS = range(5)
FIELDS = {"logp_old": "old", "logp_ref": "ref", "values_old": "values_old"}


def case(seed, size=9, width=11):
    """Rows with holes in their masks (an environment's tokens), values, and three policies' log-probs."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=D)  # noqa: E731
    mask = torch.rand(size, width, generator=g) < 0.7
    mask[:, 0] = True
    last = width - 1 - mask.flip(1).int().argmax(1)
    rewards, logp = draw(size), -draw(size, width).abs() - 0.1
    scores = torch.zeros(size, width, dtype=D).scatter(1, last[:, None], rewards[:, None])
    return {"mask": mask, "scores": scores, "rewards": rewards, "logp": logp, "old": logp + 0.5 * draw(size, width),
            "ref": logp + 0.3 * draw(size, width), "values_old": draw(size, width),
            "values": draw(size, width)}  # fmt: skip


def place(x):
    """A response's numbers behind one token of a prompt."""
    return torch.nn.functional.pad(x, (1, 0))


def ours(a, c, **more):
    """kenpo's evaluation of the case."""
    fields = {name: place(c[key]) for name, key in FIELDS.items()} | more
    rollouts = kenpo.Rollouts(
        mask=place(c["mask"]), group=torch.arange(len(c["rewards"])), rewards=c["rewards"], **fields
    )
    policy = kenpo.Policy(place(c["logp"]), values=place(c["values"]))
    prepared, result = kenpo.prepare(a, rollouts), kenpo.evaluate(a, rollouts, policy)
    cut = {n: None if x is None else x[:, 1:] for n, x in vars(prepared).items() if n in ("advantages", "returns")}
    return SimpleNamespace(**cut), result, {n: x[:, 1:] for n, x in result.gradients.items()}


def advantages(c, beta, gamma, lam):
    """verl's advantages and returns with its KL in the reward, as its trainer puts them together."""
    kl = core_algos.kl_penalty(c["old"], c["ref"], kl_penalty="kl") * c["mask"]
    return core_algos.compute_gae_advantage_return(
        token_level_rewards=c["scores"] - beta * kl, values=c["values_old"], response_mask=c["mask"].to(D),
        gamma=gamma, lam=lam,
    )  # fmt: skip


def actor(dual):
    return ActorConfig(strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=2,
                       use_dynamic_bsz=False, clip_ratio=0.2, clip_ratio_c=dual)  # fmt: skip


def close(x, y):
    """Equal but for the 1e-8 that verl adds to a count before it divides by it."""
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("beta", "gamma", "lam"), [(0.0, 1.0, 1.0), (0.05, 1.0, 0.95), (0.3, 0.97, 0.8)])
def test_gae_and_returns(seed, beta, gamma, lam):
    c = case(seed)
    a = PPO.with_settings({"advantage.kl": beta, "advantage.gamma": gamma, "advantage.lam": lam})
    prepared, *_ = ours(a, c)
    theirs, returns = advantages(c, beta, gamma, lam)
    assert close(prepared.advantages, theirs * c["mask"])
    assert close(prepared.returns, returns * c["mask"])


def test_verl_leaves_numbers_at_masked_positions_where_ours_are_0():
    c = case(0)
    theirs, _ = advantages(c, 0.0, 1.0, 0.95)
    prepared, *_ = ours(PPO, c)
    assert bool(theirs[~c["mask"]].any())
    assert not bool(prepared.advantages[~c["mask"]].any())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_policys_loss_and_its_gradient(seed):
    c = case(seed)
    _, mine, gradients = ours(PPO.but(regularizers=()), c)
    theirs, _ = advantages(c, 0.05, 1.0, 0.95)
    logp = c["logp"].clone().requires_grad_()
    loss, _ = core_algos.compute_policy_loss_vanilla(
        old_log_prob=c["old"], log_prob=logp, advantages=theirs, response_mask=c["mask"].to(D), config=actor(1e9)
    )
    loss.backward()
    assert close(mine.loss.detach(), loss.detach())
    assert close(gradients["logp"], logp.grad)
    assert bool(gradients["logp"].any())


def test_verls_second_bound_acts_on_bad_tokens_that_became_three_times_as_likely():
    c = case(1)
    c["old"] = c["logp"] - 2.0  # every ratio is e²
    *_, gradients = ours(PPO.but(regularizers=()), c)
    theirs, _ = advantages(c, 0.05, 1.0, 0.95)
    logp = c["logp"].clone().requires_grad_()
    core_algos.compute_policy_loss_vanilla(
        old_log_prob=c["old"], log_prob=logp, advantages=theirs, response_mask=c["mask"].to(D), config=actor(3.0)
    )[0].backward()
    bad = (theirs < 0) & c["mask"]
    assert bool(gradients["logp"][bad].all())
    assert not bool(logp.grad[bad].any())
    assert close(gradients["logp"][~bad], logp.grad[~bad])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_loss_and_its_gradient(seed):
    c = case(seed)
    a = PPO.with_settings({"regularizers.value_loss.coef": 1.0, "regularizers.value_loss.clip": 0.4})
    prepared, mine, gradients = ours(a, c)
    values = c["values"].clone().requires_grad_()
    loss, share = core_algos.compute_value_loss(
        vpreds=values, returns=prepared.returns, values=c["values_old"], response_mask=c["mask"].to(D),
        cliprange_value=0.4,
    )  # fmt: skip
    loss.backward()
    assert float(mine.metrics["value_loss"]) == pytest.approx(float(loss), rel=1e-8)
    assert close(gradients["values"], values.grad)
    assert float(mine.metrics["value_loss_clipped"]) == pytest.approx(float(share), rel=1e-8)
    assert 0 < float(share) < 1


@pytest.mark.parametrize("seed", SEEDS)
def test_remax(seed):
    c = case(seed)
    baseline = torch.linspace(-1, 1, len(c["rewards"]), dtype=D)
    prepared, *_ = ours(kenpo.get("remax"), c, baseline=baseline)
    theirs, _ = core_algos.compute_remax_outcome_advantage(c["scores"], baseline, c["mask"].to(D))
    assert close(prepared.advantages, theirs * c["mask"])


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_with_its_kl_in_the_reward(seed):
    c = case(seed)
    prepared, *_ = ours(kenpo.get("reinforce_pp-kl"), c)
    kl = core_algos.kl_penalty(c["old"], c["ref"], kl_penalty="kl") * c["mask"]
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        c["scores"] - 0.01 * kl, c["mask"].to(D), config=SimpleNamespace(gamma=1.0)
    )
    assert close(prepared.advantages, theirs)


@pytest.fixture(scope="module")
def openrlhf():
    """OpenRLHF's losses by themselves: of DeepSpeed, which a function beside them uses, there is the name alone."""
    found = importlib.util.find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        pytest.skip("OpenRLHF's files are not there")
    folder = Path(next(iter(found.submodule_search_locations))) / "models"
    package = ModuleType("openrlhf_models")
    package.__path__ = [str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "openrlhf_models", package)
        if importlib.util.find_spec("deepspeed") is None:
            patch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        try:
            return importlib.import_module("openrlhf_models.loss")
        except ImportError as error:
            pytest.skip(f"OpenRLHF's losses need more than torch: {error}")


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_loss_of_openrlhf(seed, clip, openrlhf):
    c = case(seed)
    a = PPO.with_settings({"regularizers.value_loss.coef": 1.0, "regularizers.value_loss.clip": clip})
    prepared, mine, gradients = ours(a, c)
    values = c["values"].clone().requires_grad_()
    loss = openrlhf.ValueLoss(clip)(values, c["values_old"], prepared.returns, c["mask"])
    loss.backward()
    assert float(mine.metrics["value_loss"]) == pytest.approx(float(loss), rel=1e-8)
    assert close(gradients["values"], values.grad)
