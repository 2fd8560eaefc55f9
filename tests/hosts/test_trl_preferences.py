"""Preference losses beside TRL's own code on the same tensors. `make hosts` runs this in an environment that has TRL.

Where the definitions agree, losses and gradients agree to 1e-6 (they do to 1e-12 in float64). Where they don't:

- TRL's DPO has no conservative loss (label smoothing is its CPO trainer's and `robust`'s).
- Its `ipo` divides each side by its tokens, our `ipo-normalised`; our `ipo` sums.
- Its margin for SimPO is `simpo_gamma`, our ``surrogate.gamma``; ours is given as gamma/beta by default.
- Its reward model takes pairs; ours takes groups of any size and counts each group once.
- Its DPO trainer takes a row without a response token into the mean; ours leaves the pair out.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="runs in the environment of `make hosts`")
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

import torch  # noqa: E402
from trl import DPOTrainer, RewardTrainer  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402

import kenpo  # noqa: E402
from kenpo.stages import PairLogistic, PairSquared  # noqa: E402

PAIRS, WIDTH = 6, 11
ACCELERATOR = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


def tensors(scale):
    """Masks, log-probs and reference log-probs [2P,T], chosen rows first; sequence log-ratios of up to about ±200."""
    g = torch.Generator().manual_seed(7)
    first = torch.randint(1, 4, (2 * PAIRS, 1), generator=g)
    last = torch.randint(5, WIDTH + 1, (2 * PAIRS, 1), generator=g)
    place = torch.arange(WIDTH)
    mask = (place >= first) & (place < last)
    logp, ref = (-scale * torch.rand(mask.shape, generator=g, dtype=torch.float64) for _ in range(2))
    return mask, logp * mask, ref * mask


def ours(algorithm, mask, **terms):
    """(loss, gradients) of the pairs as groups of two, rejected rows first."""
    order = torch.arange(2 * PAIRS).roll(PAIRS)
    rewards = (order < PAIRS).double()
    ref = terms.pop("logp_ref", None)
    rollouts = kenpo.Rollouts(
        mask=mask[order], group=order % PAIRS, rewards=rewards, logp_ref=None if ref is None else ref[order]
    )
    result = kenpo.evaluate(algorithm, rollouts, kenpo.Policy(**{n: v.detach()[order] for n, v in terms.items()}))
    gradients = {n: torch.empty_like(g).index_copy_(0, order, g) for n, g in result.gradients.items()}
    return result.loss, gradients


def trls_dpo(kind, beta, smoothing, mask, logp, ref):
    """(loss, gradient) of `DPOTrainer._compute_loss` with these log-probs in place of a model's."""
    leaf = logp[:, 1:].clone().requires_grad_()
    nothing = torch.zeros_like(leaf)

    def model(**_):
        top = torch.zeros(leaf.shape, dtype=torch.bool)
        return SimpleNamespace(log_probs=leaf, entropy=nothing, mean_logits=nothing, is_top1=top)

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0], beta=beta,
        label_smoothing=smoothing, use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    chosen, rejected = ref.sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.long), "attention_mask": torch.ones(mask.shape),
        "completion_mask": mask.long(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    loss.backward()
    return loss.detach(), torch.cat([torch.zeros_like(logp[:, :1]), leaf.grad], 1) * mask


def agree(one, two):
    assert torch.allclose(one[0].double(), two[0].double(), rtol=1e-6, atol=1e-9)
    assert float((one[1] - two[1]).norm()) <= 1e-6 * float(two[1].norm())
    assert float(two[1].norm()) > 0


DPO = {
    "sigmoid": kenpo.get("dpo"),
    "robust": kenpo.get("dpo-robust"),
    "ipo": kenpo.get("ipo-normalised"),
}


@pytest.mark.parametrize("scale", [0.5, 60.0])
@pytest.mark.parametrize("kind", DPO)
def test_dpo_and_ipo(kind, scale):
    mask, logp, ref = tensors(scale)
    theirs = trls_dpo(kind, 0.1, 0.1, mask, logp, ref)
    loss, gradients = ours(DPO[kind], mask, logp=logp, logp_ref=ref)
    agree((loss, gradients["logp"]), theirs)


def test_our_summed_ipo_is_not_trls():
    mask, logp, ref = tensors(0.5)
    loss, _ = ours(kenpo.get("ipo").but(surrogate=PairSquared(beta=0.1)), mask, logp=logp, logp_ref=ref)
    assert abs(float(loss) - float(trls_dpo("ipo", 0.1, 0.0, mask, logp, ref)[0])) > 1e-3


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_and_conservative_labels(smoothing):
    mask, logp, _ = tensors(3.0)
    leaf = logp.clone().requires_grad_()
    means = (leaf * mask).sum(1) / mask.sum(1)
    trainer = SimpleNamespace(
        loss_type="simpo", alpha=0.0, accelerator=ACCELERATOR, simpo_gamma=0.5, beta=2.0, label_smoothing=smoothing
    )
    loss = CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()
    loss.backward()
    kind = {"loss": "conservative", "smoothing": smoothing} if smoothing else {}
    stage = PairLogistic(beta=2.0, reference=False, normalise=True, gamma=0.5, **kind)
    mine, gradients = ours(kenpo.get("simpo").but(surrogate=stage), mask, logp=logp)
    agree((mine, gradients["logp"]), (loss.detach(), leaf.grad))


@pytest.mark.parametrize("centring", [0.0, 0.01])
def test_the_reward_model(centring):
    mask, logp, _ = tensors(1.0)
    leaf = logp.sum(1).clone().requires_grad_()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=ACCELERATOR, _total_train_tokens=0, _tp_size=1,
        args=SimpleNamespace(center_rewards_coefficient=centring or None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    model = lambda **_: SimpleNamespace(logits=leaf[:, None])  # noqa: E731
    loss = RewardTrainer.compute_loss(trainer, model, {"attention_mask": torch.ones(mask.shape)})
    loss.backward()
    stage = PairLogistic(on="score", beta=1.0, centring=centring)
    mine, gradients = ours(kenpo.get("reward_model").but(surrogate=stage), mask, score=leaf)
    agree((mine, gradients["score"]), (loss.detach(), leaf.grad))
