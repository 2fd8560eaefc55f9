"""The tiled log-prob path equals logits → log_softmax → gather, in value and in every gradient."""

from __future__ import annotations

import math

import pytest
import torch

from kenpo.errors import InputError
from kenpo.ops.linear_logprob import Second, Transform, linear_logprob

D = torch.float64


def plain(hidden, weight, targets, bias, transform, ids):
    """The same by the book: whole logits, autograd."""
    z = hidden @ weight.T
    z = z if bias is None else z + bias
    z = z if transform.scale is None else z * transform.scale
    z = z if transform.cap is None else transform.cap * torch.tanh(z / transform.cap)
    logp = (z / transform.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    at_ids = None if ids is None else logp.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy, at_ids


def inputs(n=64, h=16, v=1000, k=3, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=g, dtype=D, requires_grad=True)
    weight = torch.randn(v, h, generator=g, dtype=D, requires_grad=True)
    b = torch.randn(v, generator=g, dtype=D, requires_grad=True) if bias else None
    targets = torch.randint(v, (n,), generator=g)
    ids = torch.randint(v, (n, k), generator=g)
    ids[::3, 1] = -1
    ids[1, 0] = targets[1]
    ups = [
        torch.randn(n, generator=g, dtype=D),
        torch.randn(n, generator=g, dtype=D),
        torch.randn(n, k, generator=g, dtype=D),
    ]
    return hidden, weight, b, targets, ids, ups


@pytest.mark.parametrize(
    "transform", [Transform(), Transform(0.7), Transform(1.3, scale=0.5), Transform(0.8, 2.0, 5.0)]
)
@pytest.mark.parametrize("tile", [7, 256, 4096])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_all_gradients(transform, tile, bias):
    hidden, weight, b, targets, ids, ups = inputs(bias=bias)
    leaves = [x for x in (hidden, weight, b) if x is not None]
    ours = linear_logprob(hidden, weight, targets, bias=b, transform=transform, entropy=True, ids=ids, tile=tile)
    theirs = plain(hidden, weight, targets, b, transform, ids)
    assert ours.kl is None
    for x, y in zip(ours[:3], theirs, strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12)
    for pick in ([0], [1], [2], [0, 1, 2]):
        loss = sum((ups[i] * ours[i]).sum() for i in pick)
        want = sum((ups[i] * theirs[i]).sum() for i in pick)
        got = torch.autograd.grad(loss, leaves, retain_graph=True)
        right = torch.autograd.grad(want, leaves, retain_graph=True)
        for x, y in zip(got, right, strict=True):
            assert float((x - y).abs().max()) <= 1e-10 * float(y.abs().max())


def test_the_gradient_of_the_entropy_is_not_lost():
    """p = (1/4, 3/4): dH/dz = ±0.20599."""
    z = torch.tensor([[0.0, math.log(3.0)]], dtype=D, requires_grad=True)
    h = linear_logprob(z, torch.eye(2, dtype=D), torch.tensor([0]), entropy=True).entropy
    h.backward()
    assert float(h.detach()) == pytest.approx(0.56234, abs=5e-6)
    assert z.grad.tolist()[0] == pytest.approx([0.20599, -0.20599], abs=5e-6)


def test_a_soft_cap_is_applied_before_the_softmax():
    out = linear_logprob(
        torch.tensor([[60.0, 0.0]], dtype=D), torch.eye(2, dtype=D), torch.tensor([1]), transform=Transform(cap=30.0)
    )
    assert float(out.logp) == pytest.approx(-28.9208, abs=5e-5)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do():
    hidden, weight, _, targets, _, _ = inputs(bias=False)
    frozen = weight.detach()
    linear_logprob(hidden, frozen, targets).logp.sum().backward()
    assert hidden.grad is not None
    assert frozen.grad is None
    assert bool(hidden.grad.any())


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4, -1e4], [0.0, 0.0]], dtype=torch.float32, requires_grad=True)
    out = linear_logprob(hidden, torch.eye(2), torch.tensor([0, 1]), entropy=True, tile=1)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert out.logp.tolist() == pytest.approx([0.0, math.log(0.5)])
    assert bool(torch.isfinite(hidden.grad).all())


def test_no_positions():
    hidden, weight, _, _, _, _ = inputs(bias=False)
    out = linear_logprob(hidden[:0], weight, torch.empty(0, dtype=torch.long), entropy=True)
    assert out.logp.shape == out.entropy.shape == (0,)
    out.logp.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_to_double(dtype):
    hidden, weight, _, targets, _, _ = inputs(n=32, v=300, bias=False)
    want = plain(hidden, weight, targets, None, Transform(), None)[0]
    right = torch.autograd.grad(want.sum(), [hidden, weight])
    h, w = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
    out = linear_logprob(h, w, targets, tile=64).logp
    got = torch.autograd.grad(out.sum(), [h, w])
    assert out.dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for x, y in zip(got, right, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < tolerance


def test_autocast_uses_its_dtype_and_returns_gradients_in_the_parameters():
    hidden, weight, _, targets, _, _ = inputs(n=8, v=50, bias=False)
    h, w = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_logprob(h, w, targets).logp
    out.sum().backward()
    assert w.grad.dtype == torch.float32
    exact = plain(hidden, weight, targets, None, Transform(), None)[0].detach()
    assert float((out.detach().double() - exact).abs().max()) < 0.2


def test_autocast_rounds_the_products_alone():
    """Entropy, divergence and their gradients are those of the rounded logits, not of rounded moments."""
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(6, 32, generator=g) * 3, torch.randn(200, 32, generator=g)
    other = torch.randn(200, 32, generator=g)
    h = h.bfloat16().float().requires_grad_()
    w = w.bfloat16().float()
    targets = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_logprob(h, w, targets, entropy=True, second=Second(h.detach(), other))
    z, y = ((x.bfloat16() @ v.bfloat16().T).float().log_softmax(-1) for x, v in ((h, w), (h.detach(), other)))
    right = -(z.exp() * z).sum(-1), (z.exp() * (z - y)).sum(-1)
    for got, want in zip((found.entropy, found.kl), right, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        ours, theirs = (torch.autograd.grad(x.sum(), h, retain_graph=True)[0] for x in (got, want))
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


def test_an_id_that_is_never_sampled():
    hidden, weight, bias, targets, _, _ = inputs(n=8, v=50)
    closed = bias.detach().clone()
    closed[[3, 40]] = -torch.inf
    targets = targets.clone()
    targets[(targets == 3) | (targets == 40)] = 5
    found = linear_logprob(hidden, weight, targets, bias=closed, entropy=True, tile=7)
    z = (hidden @ weight.T + closed).log_softmax(-1)
    assert torch.allclose(found.logp, z.gather(-1, targets[:, None])[:, 0])
    finite = z.masked_fill(z.isinf(), 0.0)
    assert torch.allclose(found.entropy, -(finite.exp() * finite).sum(-1), atol=1e-10)
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(found.entropy.sum(), [hidden, weight]))


@pytest.mark.parametrize("reverse", [False, True])
def test_an_id_that_neither_head_samples_adds_nothing_to_their_divergence(reverse):
    g = torch.Generator().manual_seed(0)
    h, w, v = (torch.randn(n, 8, generator=g, dtype=D, requires_grad=k < 2) for k, n in enumerate((5, 20, 20)))
    bias = torch.zeros(20, dtype=D)
    bias[3] = -torch.inf
    open_ = torch.arange(20) != 3
    found = linear_logprob(
        h, w, torch.tensor([0, 1, 2, 4, 5]), bias=bias, second=Second(h.detach(), v, bias, reverse=reverse)
    )
    p, q = ((x @ y[open_].T).log_softmax(-1) for x, y in ((h, w), (h.detach(), v)))
    right = (q.exp() * (q - p)).sum(-1) if reverse else (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(found.kl, right)
    for got, want in zip(*(torch.autograd.grad(x.sum(), [h, w]) for x in (found.kl, right)), strict=True):
        assert torch.allclose(got, want)


@pytest.mark.parametrize(("field", "id_"), [("targets", 50), ("targets", -1), ("ids", 50), ("ids", -2)])
def test_ids_outside_the_vocabulary_are_named(field, id_):
    hidden, weight, _, targets, ids, _ = inputs(n=8, v=50, bias=False)
    given = {"targets": targets.clone(), "ids": ids.clone()}
    given[field].view(-1)[2] = id_
    with pytest.raises(InputError, match=rf"{field}: id {id_} is outside the vocabulary of 50"):
        linear_logprob(hidden, weight, given["targets"], ids=given["ids"])


@pytest.mark.parametrize("field", ["targets", "ids"])
def test_narrow_ids_are_refused_in_words(field):
    hidden, weight, _, targets, ids, _ = inputs(n=8, v=50, bias=False)
    given = {"targets": targets, "ids": ids}
    given[field] = given[field].int()
    with pytest.raises(InputError, match=rf"{field}: ids are int64, got torch.int32"):
        linear_logprob(hidden, weight, given["targets"], ids=given["ids"])


def test_a_second_head_over_another_vocabulary_is_refused():
    hidden, weight, _, targets, _, _ = inputs(n=8, v=50, bias=False)
    for size in (49, 51, 26):
        second = Second(hidden, weight.new_ones(size, weight.shape[1]))
        with pytest.raises(InputError, match=f"{size} entries"):
            linear_logprob(hidden, weight, targets, second=second, tile=25)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tile", [7, 4096])
def test_divergence_from_a_second_head(reverse, tile):
    """Value and gradient, also together with the other terms; the second head gets none."""
    hidden, weight, b, targets, ids, ups = inputs(n=20, v=90)
    h2, w2, _, _, _, _ = inputs(n=20, v=90, h=5, seed=1)
    ours_t, their_t = Transform(0.9, cap=6.0), Transform(1.2, scale=0.5)
    second = Second(h2, w2, transform=their_t, reverse=reverse)
    got = linear_logprob(
        hidden, weight, targets, bias=b, transform=ours_t, entropy=True, ids=ids, second=second, tile=tile
    )
    z = (6.0 * torch.tanh((hidden @ weight.T + b) / 6.0) / 0.9).log_softmax(-1)
    y = (h2 @ w2.T * 0.5 / 1.2).log_softmax(-1).detach()
    kl = (y.exp() * (y - z)).sum(-1) if reverse else (z.exp() * (z - y)).sum(-1)
    assert torch.allclose(got.kl, kl, rtol=1e-12, atol=1e-12)
    h = -(z.exp() * z).sum(-1)
    logp = z.gather(-1, targets[:, None]).squeeze(-1)
    for mine, book in (
        (ups[1] * got.kl, ups[1] * kl),
        (ups[0] * got.logp + ups[1] * got.kl + got.entropy, ups[0] * logp + ups[1] * kl + h),
    ):
        a = torch.autograd.grad(mine.sum(), [hidden, weight, b], retain_graph=True)
        right = torch.autograd.grad(book.sum(), [hidden, weight, b], retain_graph=True)
        for x, y_ in zip(a, right, strict=True):
            assert float((x - y_).abs().max()) <= 1e-10 * float(y_.abs().max())
    got.kl.sum().backward()
    assert h2.grad is None
    assert w2.grad is None


def test_divergence_from_itself_is_zero():
    hidden, weight, _, targets, _, _ = inputs(n=9, v=50, bias=False)
    for reverse in (False, True):
        kl = linear_logprob(
            hidden, weight, targets, second=Second(hidden, weight, reverse=reverse), tile=11
        ).kl.detach()
        assert float(kl.abs().max()) < 1e-12
