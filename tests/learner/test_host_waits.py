"""How often a microbatch makes the host wait for the model's device: counted on a CPU, as if it were another device."""

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kenpo
from kenpo.errors import NonFiniteError
from kenpo.learner.learner import Learner, LearnerOptions
from kenpo.models import backward, head
from kenpo.models.scorer import Scorer
from kenpo.ops import masked, ratios
from learner.test_learner import D, flat, learner_of, rollouts

#: Operations whose result, or its shape, the host has to know before it can go on.
WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero",
}  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts them, with selection by a mask, whose result has a size that only the device knows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        by_mask = (
            name.startswith("aten::index")
            and any(
                isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in (args[1] if len(args) > 1 else ()) or ()
            )
            if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
            else False
        )
        if name in WAITING or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch):
    """As if nothing lay at hand."""
    monkeypatch.setattr(masked, "at_hand", lambda x: False)
    monkeypatch.setattr(ratios, "at_hand", lambda x: False)


@pytest.fixture(scope="module")
def model():
    return tiny.llama(dtype=D)


def counted(monkeypatch, learner, algorithm, batch):
    """(waits in each microbatch, waits of the whole gradient)."""
    calls = []

    def watched(method):
        def call(*args, **how):
            with Waits() as waits:
                result = method(*args, **how)
            calls.append(waits.seen)
            return result

        return call

    prepared = kenpo.prepare(algorithm, batch)
    with monkeypatch.context() as patch, Waits() as whole:
        for name in ("backward", "terms"):
            patch.setattr(Scorer, name, watched(getattr(Scorer, name)))
        learner.gradient(prepared, algorithm)
    return calls, whole.seen


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "dapo", "tis", "sapo", "gmpo"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_microbatch_waits_once(model, monkeypatch, elsewhere, name, chunk):
    """That once is transformers', which looks whether its mask hides anything; however many chunks the head takes.

    Whether terms are finite is looked at once for a minibatch, and so are the figures.
    """
    algorithm, batch = kenpo.get(name).but(selection=()), rollouts(model)
    if chunk is not None:
        monkeypatch.setattr(backward, "FEW_LOGITS", 0)
        monkeypatch.setattr(head, "FEW_LOGITS", 0)
        monkeypatch.setattr(backward, "chunk_positions", lambda *a: chunk)
    many, all_of_many = counted(monkeypatch, learner_of(model, 60), algorithm, batch)
    one, all_of_one = counted(monkeypatch, learner_of(model, 10**6), algorithm, batch)
    assert len(many) > 3
    assert len(one) == 1
    assert {tuple(seen) for seen in (*many, *one)} == {("aten::_local_scalar_dense",)}
    assert len(all_of_many) - len(many) == len(all_of_one) - 1


def test_the_count_sees_a_wait(model):
    """The counter itself: every kind of wait that it knows, and a selection by a mask."""
    x = torch.arange(4.0)
    with Waits() as waits:
        x.sum().item()
        x.nonzero()
        torch.equal(x, x)
        x.unique()
        x[x > 1]
        bool((x > 1).any())
    assert len(waits.seen) >= 6


def test_numbers_are_the_same_without_a_look(model, monkeypatch):
    """What is not at hand takes the ways that ask nothing: the same gradient."""
    for name in ("grpo", "gspo", "tis"):
        algorithm, batch = kenpo.get(name), rollouts(model)
        found = []
        for at_hand in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(masked, "at_hand", lambda x, known=at_hand: known)
                patch.setattr(ratios, "at_hand", lambda x, known=at_hand: known)
                learner = learner_of(model, 60)
                learner.gradient(kenpo.prepare(algorithm, batch), algorithm)
                found.append(flat(learner.scorer.named_parameters()))
        assert float((found[0] - found[1]).norm()) <= 1e-12 * float(found[0].norm())


@pytest.mark.parametrize("chunk", [None, 5])
def test_what_is_not_finite_is_still_named(model, monkeypatch, elsewhere, chunk):
    broken = tiny.llama(dtype=D)
    batch = rollouts(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[int(batch.tokens[3, 5])] = torch.nan
    if chunk is not None:
        monkeypatch.setattr(backward, "FEW_LOGITS", 0)
        monkeypatch.setattr(backward, "chunk_positions", lambda *a: chunk)
    algorithm = kenpo.get("gspo")
    learner = Learner(Scorer(broken), LearnerOptions(60))
    with pytest.raises(NonFiniteError, match="logp: nan at the trained position"):
        learner.gradient(kenpo.prepare(algorithm, batch), algorithm)
