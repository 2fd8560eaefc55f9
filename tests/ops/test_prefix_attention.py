"""Attention over a shared prefix and own keys equals one softmax over both, in value and in all five gradients."""

import itertools

import pytest
import torch

from kenpo.errors import InputError
from kenpo.ops.prefix_attention import Owners, prefix_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}
OWNERS = {"in order": [0, 0, 1, 1], "mixed": [0, 1, 0, 0, 2, 1], "one": [0, 0, 0], "a prefix without rows": [2, 0, 2]}


def by_hand(query, key, value, prefix_key, prefix_value, owner, real, scaling):
    """One row and head at a time: all keys, one softmax."""
    rows, heads, new, _ = query.shape
    groups, own = key.shape[1], key.shape[2]
    out = []
    for r, h in itertools.product(range(rows), range(heads)):
        g, p = h // (heads // groups), owner[r]
        keys = torch.cat([prefix_key[p, g][real[p]], key[r, g]])
        values = torch.cat([prefix_value[p, g][real[p]], value[r, g]])
        before = int(real[p].sum())
        for s in range(new):
            seen = before + own - new + s + 1
            weights = (scaling * keys[:seen] @ query[r, h, s]).softmax(0)
            out.append(weights @ values[:seen])
    return torch.stack(out).view(rows, heads, new, -1)


def inputs(owner, new, own, heads, groups, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows, prefixes, size = len(owner), 3, 16
    shapes = [
        (rows, heads, new),
        (rows, groups, own),
        (rows, groups, own),
        (prefixes, groups, 9),
        (prefixes, groups, 9),
    ]
    return [torch.randn(*s, size, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("owner", list(OWNERS.values()), ids=list(OWNERS))
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize(("new", "own"), [(5, 5), (1, 7), (1, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_one_softmax(dtype, owner, heads, groups, new, own, padded):
    given = inputs(owner, new, own, heads, groups, dtype)
    real = torch.ones(3, 9, dtype=torch.bool)
    if padded:
        real[0, :3], real[2, :8] = False, False
    scaling = 0.3 if padded else None
    found = prefix_attention(
        *given, Owners.of(torch.tensor(owner), 3), real=real if padded else None, scaling=scaling
    )  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in given]
    want = by_hand(*exact, owner, real, scaling or 0.25)
    assert found.dtype == dtype
    assert found.shape == want.shape
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = zip(
        [found.detach(), *torch.autograd.grad(found, given, upstream.to(dtype))],
        [want.detach(), *torch.autograd.grad(want, exact, upstream)],
        strict=True,
    )
    for got, right in pairs:
        assert float((got - right).abs().max()) <= TOLERANCE[dtype] * float(right.abs().max())


def test_large_scores_stay_finite():
    owner = [0, 1, 2]
    query, *rest = inputs(owner, 4, 4, 2, 2, torch.float32)
    with torch.no_grad():
        query *= 300
    out = prefix_attention(query, *rest, Owners.of(torch.tensor(owner), 3))
    out.sum().backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (query, *rest))
    want = by_hand(query, *rest, owner, torch.ones(3, 9, dtype=torch.bool), 0.25)
    assert torch.allclose(out, want, atol=1e-4)


def test_under_autocast_it_runs_in_its_dtype():
    owner = [0, 0, 1]
    given = inputs(owner, 3, 3, 2, 2, torch.float32)
    owners = Owners.of(torch.tensor(owner), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = prefix_attention(*given, owners)
    assert low.dtype == torch.bfloat16
    assert torch.allclose(low.float(), prefix_attention(*given, owners), atol=3e-2)
    low.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in given)


def test_queries_in_the_middle_are_refused():
    with pytest.raises(InputError, match="2 queries over 5 own keys"):
        prefix_attention(*inputs([0, 1], 2, 5, 2, 2, torch.float64), Owners.of(torch.tensor([0, 1]), 3))


def test_places_of_rows():
    owners = Owners.of(torch.tensor([1, 0, 1, 1]), 2)
    assert owners.slot.tolist() == [3, 0, 4, 5]
    assert (owners.size, owners.full) == (3, False)
    assert Owners.of(torch.tensor([0, 0, 1, 1]), 2).full
    assert not Owners.of(torch.tensor([0, 1, 0, 1]), 2).full
    x = torch.randn(4, 6, 2, 5)
    assert torch.equal(owners.handed_back(owners.gathered(x, 3), 6, 2), x)
