"""The fused path gives the gradients of logits → log_softmax → gather, whatever the chunks."""

from __future__ import annotations

import pytest
import torch

from kenpo.ops.fused_logprob import Gains, chunk_positions, fused_linear_logprob
from kenpo.ops.linear_logprob import Transform

D = torch.float64
PLAIN = Transform()


def inputs(n=23, h=8, v=101, k=3, bias=True, dtype=D):
    g = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=D).to(dtype)

    targets, ids = torch.randint(v, (n,), generator=g), torch.randint(v, (n, k), generator=g)
    ids[::4, 2], ids[1, 0] = -1, targets[1]
    return normal(n, h), normal(v, h), normal(v) if bias else None, targets, ids


def by_the_book(hidden, weight, bias, targets, ids, transform, loss):
    """Terms and gradients in float64 through autograd on whole logits."""
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    z = leaves[0] @ leaves[1].T + (leaves[2] if bias is not None else 0.0)
    z = z * (transform.scale or 1.0)
    z = z if transform.cap is None else transform.cap * torch.tanh(z / transform.cap)
    logp = (z / transform.temperature).log_softmax(-1)
    at_ids = logp.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    terms = logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1), at_ids
    return terms, torch.autograd.grad(loss(*terms), leaves)


def loss(logp, entropy, at_ids):
    """Not linear: the upstream gradients are only known once the terms are."""
    return (logp**2 * 0.3 + entropy.sin()).sum() + (at_ids * logp[:, None]).sum()


def gains(terms):
    leaves = [x.detach().requires_grad_() for x in terms[:3]]
    with torch.enable_grad():
        return Gains(*torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("transform", [PLAIN, Transform(0.7, scale=0.5), Transform(1.3, 2.0, 5.0)])
@pytest.mark.parametrize("sizes", [[23], [1] * 23, [5, 0, 17, 1]])
@pytest.mark.parametrize("tile", [7, 4096])
def test_terms_and_gradients(transform, sizes, tile):
    hidden, weight, bias, targets, ids = inputs()
    want, right = by_the_book(hidden, weight, bias, targets, ids, transform, loss)
    d_weight, d_bias, seen = torch.zeros_like(weight), torch.zeros_like(bias), []

    def gains_of(at, terms):
        for got, book in zip(terms[:3], want, strict=True):
            assert torch.allclose(got, book[at], rtol=1e-12, atol=1e-12)
        seen.append(at)
        return gains(terms)

    d_hidden = fused_linear_logprob(
        hidden, weight, targets, sizes, gains_of, bias=bias, transform=transform, entropy=True, ids=ids,
        d_weight=d_weight, d_bias=d_bias, tile=tile,
    )  # fmt: skip
    assert [at.stop - at.start for at in seen] == sizes
    for got, book in zip((d_hidden, d_weight, d_bias), right, strict=True):
        assert float((got - book).abs().max()) <= 1e-10 * float(book.abs().max())


def test_only_what_is_asked_for():
    """No entropy, no ids, a frozen head; an accumulator is added to, not overwritten."""
    hidden, weight, _, targets, ids = inputs(bias=False)
    _, (d_h, d_w) = by_the_book(hidden, weight, None, targets, ids, PLAIN, lambda logp, *_: (logp**2).sum())

    def gains_of(at, terms):
        assert terms.entropy is None
        assert terms.ids_logp is None
        return Gains(2 * terms.logp)

    assert torch.allclose(fused_linear_logprob(hidden, weight, targets, [20, 3], gains_of), d_h, rtol=1e-11)
    total = torch.ones_like(weight)
    fused_linear_logprob(hidden, weight, targets, [20, 3], gains_of, d_weight=total)
    assert torch.allclose(total - 1, d_w, rtol=1e-10, atol=1e-10)


def test_no_positions():
    hidden, weight, _, targets, _ = inputs(bias=False)
    d = fused_linear_logprob(hidden[:0], weight, targets[:0], [], lambda at, t: Gains(), d_weight=weight.clone())
    assert d.shape == (0, 8)


def test_many_bf16_chunks_add_up_in_float32():
    """64 chunks into a float32 accumulator stay as near to the exact gradient as one chunk."""
    hidden, weight, _, targets, _ = inputs(n=256, v=64, bias=False, dtype=torch.bfloat16)
    _, (d_h, d_w) = by_the_book(hidden, weight, None, targets, targets[:, None], PLAIN, lambda logp, *_: logp.sum())

    def run(sizes):
        total = torch.zeros(64, 8)
        d = fused_linear_logprob(
            hidden, weight, targets, sizes, lambda at, t: Gains(torch.ones_like(t.logp)), d_weight=total
        )
        assert d.dtype == torch.float32
        return [float((x.double() - y).norm() / y.norm()) for x, y in ((d, d_h), (total, d_w))]

    assert max(run([256])) < 1e-2
    assert max(run([4] * 64)) < 1e-2


def test_autocast_makes_the_products_in_its_dtype():
    hidden, weight, _, targets, _ = inputs(bias=False, dtype=torch.float32)
    _, (d_h, d_w) = by_the_book(hidden, weight, None, targets, targets[:, None], PLAIN, lambda logp, *_: logp.sum())
    total, dtypes = torch.zeros_like(weight), set()

    def gains_of(at, terms):
        dtypes.add(terms.logp.dtype)
        return Gains(torch.ones_like(terms.logp))

    with torch.autocast("cpu", torch.bfloat16):
        d = fused_linear_logprob(hidden, weight, targets, [9, 14], gains_of, d_weight=total)
    assert dtypes == {torch.float32}
    for got, book in ((d, d_h), (total, d_w)):
        assert 1e-6 < float((got.double() - book).norm() / book.norm()) < 2e-2


def test_chunks_are_sized_in_bytes():
    assert chunk_positions(151936, 2, "cpu") >= 2 * chunk_positions(151936, 4, "cpu") > 500
    assert chunk_positions(10**12, 4, "cpu") == 16


def test_autocast_rounds_the_products_alone():
    g = torch.Generator().manual_seed(0)
    h, w = ((torch.randn(n, 32, generator=g) * s).bfloat16().float() for n, s in ((6, 3.0), (200, 1.0)))
    seen = []

    def gains_of(at, terms):
        seen.append(terms.entropy.clone())
        return Gains(entropy=torch.ones_like(terms.entropy))

    with torch.autocast("cpu", torch.bfloat16):
        d = fused_linear_logprob(h, w, torch.arange(6), [6], gains_of, entropy=True)
    leaf = h.clone().requires_grad_()
    z = (leaf.bfloat16() @ w.bfloat16().T).float().log_softmax(-1)
    right = -(z.exp() * z).sum(-1)
    assert torch.allclose(seen[0], right, rtol=1e-4, atol=1e-4)
    (want,) = torch.autograd.grad(right.sum(), leaf)
    assert float((d - want).norm() / want.norm()) < 2e-2
