"""Full-vocabulary and top-K divergences: exact values, gradients, and the traps of estimators, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from kenpo.divergence import Divergence
from kenpo.errors import InputError
from kenpo.ops.linear_divergence import linear_divergence
from kenpo.ops.linear_logprob import Second, Transform
from kenpo.ops.vocabulary import divergence, trust_region

P, Q = [0.7, 0.2, 0.1], [0.25, 0.5, 0.25]
SPECS = [
    *(Divergence(k) for k in ("forward", "reverse", "jsd")),
    Divergence("jsd", 0.2),
    Divergence("jsd", 0.0),
    Divergence("jsd", 1.0),
    Divergence("forward", clip=0.05),
    *(Divergence(k, top=3, owner=o, rest=r) for k in ("forward", "reverse", "jsd") for o in ("student", "teacher")
      for r in ("tail", "renormalised", "generalised")),
]  # fmt: skip


def name(spec):
    return "-".join(str(x) for x in (spec.kind, spec.weight, spec.top, spec.owner, spec.rest, spec.clip))


def logs(x):
    return torch.tensor(x, dtype=torch.float64).log()


def with_gradient(spec, p=P, q=Q, **more):
    x = logs(p).requires_grad_()
    d = divergence(x, logs(q), spec, **more)
    d.backward()
    return float(d), x.grad


def summed(p, q, spec):
    """D by plain sums over probabilities, written from the definitions."""
    top = None if spec.top is None else set(
        sorted(range(len(p)), key=lambda v: -(p if spec.owner == "student" else q)[v])[: spec.top])  # fmt: skip
    extra = 0.0
    if top is not None:
        inside_p, inside_q = [p[v] for v in sorted(top)], [q[v] for v in sorted(top)]
        P, Q = math.fsum(inside_p), math.fsum(inside_q)
        if spec.rest == "tail":
            p, q = [*inside_p, 1 - P], [*inside_q, 1 - Q]
        elif spec.rest == "renormalised":
            p, q = [x / P for x in inside_p], [x / Q for x in inside_q]
        else:
            p, q, extra = inside_p, inside_q, Q - P
    b = spec.weight
    if spec.kind == "forward" or (spec.kind == "jsd" and b == 0):
        terms = [y * math.log(y / x) for x, y in zip(p, q, strict=True)]
        return math.fsum(terms if spec.clip is None else [min(t, spec.clip) for t in terms]) - extra
    if spec.kind == "reverse" or b == 1:
        return math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) + extra
    m = [b * y + (1 - b) * x for x, y in zip(p, q, strict=True)]
    return math.fsum(b * y * math.log(y / z) + (1 - b) * x * math.log(x / z) for x, y, z in zip(p, q, m, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_equals_the_plain_sum_and_its_numerical_slope(spec):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    d = divergence(x, y, spec)
    (slope,) = torch.autograd.grad(d.sum(), x)
    for row in range(4):
        p, q = x[row].detach().softmax(-1).tolist(), y[row].softmax(-1).tolist()
        assert math.isclose(float(d[row].detach()), summed(p, q, spec), rel_tol=1e-11, abs_tol=1e-13)
        for v in range(7):
            up, down = ([*x[row].tolist()] for _ in range(2))
            up[v] += 1e-6
            down[v] -= 1e-6
            sides = [summed(torch.tensor(z, dtype=torch.float64).softmax(-1).tolist(), q, spec) for z in (up, down)]
            assert abs((sides[0] - sides[1]) / 2e-6 - float(slope[row, v])) < 1e-8


def test_known_numbers():
    """Formulas worked out by hand for p = (.7,.2,.1), q = (.25,.5,.25)."""
    known = {
        Divergence("forward"): (0.429813195, (0.45, -0.3, -0.15)),
        Divergence("reverse"): (0.445846372, (0.408641, -0.272427, -0.136214)),
        Divergence("jsd", 0.2): (0.067589616, (0.067198, -0.044798, -0.022399)),
        Divergence("jsd", 0.5): (0.105296936, None),
        Divergence("forward", top=1, owner="teacher"): (0.223143551, None),
        Divergence("reverse", top=1, rest="generalised"): (0.270734, None),
        Divergence("reverse", top=1, rest="tail"): (0.445846, None),
    }
    for spec, (value, slope) in known.items():
        d, g = with_gradient(spec)
        assert math.isclose(d, value, abs_tol=6e-7), spec
        if slope is not None:
            assert torch.allclose(g, torch.tensor(slope, dtype=torch.float64), atol=6e-7), spec


def test_directions_ends_and_exchange():
    forward, reverse = with_gradient(Divergence("forward"))[0], with_gradient(Divergence("reverse"))[0]
    assert with_gradient(Divergence("jsd", 0.0))[0] == forward
    assert with_gradient(Divergence("jsd", 1.0))[0] == reverse
    assert math.isclose(with_gradient(Divergence("forward"), Q, P)[0], reverse, rel_tol=1e-12)
    for b in (0.2, 0.5):  # JSD(b)(p, q) = JSD(1-b)(q, p)
        swapped = with_gradient(Divergence("jsd", 1 - b), Q, P)[0]
        assert math.isclose(with_gradient(Divergence("jsd", b))[0], swapped, rel_tol=1e-12)
    near = with_gradient(Divergence("jsd", 0.01))[0]  # it jumps: 0.01 of the forward KL, not the forward KL
    assert abs(near / 0.01 - forward) < 0.05 * forward
    assert near < 0.02 * forward


@pytest.mark.parametrize("b", [0.005, 1e-9, 0.995, -0.1, 1.1, math.nan])
def test_a_weight_close_to_an_end_is_refused(b):
    with pytest.raises(InputError, match="learning rate"):
        Divergence("jsd", b)


@pytest.mark.parametrize("bad", [{"kind": "kl"}, {"owner": "both"}, {"rest": "truncated"}, {"top": 0}, {"clip": 0.1}])
def test_what_is_not_offered_is_refused_by_name(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        Divergence(**bad)


def test_equal_models_shifts_and_whole_supports():
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for spec in SPECS:
        if spec.clip is None:
            same = x.clone().requires_grad_()
            d = divergence(same, x, spec)
            d.sum().backward()
            assert float(d.detach().abs().max()) < 1e-12
            assert float(same.grad.abs().max()) < 1e-12
            assert bool((divergence(x, y, spec) >= 0).all())
        assert torch.allclose(divergence(x + 3, y - 5, spec), divergence(x, y, spec), atol=1e-12)
    for kind in ("forward", "reverse", "jsd"):
        whole = divergence(x, y, Divergence(kind))
        for rest in ("tail", "renormalised", "generalised"):
            assert torch.allclose(divergence(x, y, Divergence(kind, top=6, rest=rest)), whole, atol=1e-12)
        assert bool((divergence(x, y, Divergence(kind, top=2)) <= whole + 1e-12).all())  # merging loses information


def test_temperature_divides_both_logits_and_nothing_is_multiplied_back():
    x, y = logs(P).requires_grad_(), logs(Q)
    d = divergence(x, y, Divergence("reverse"), temperature=2.0)
    p, q = ((z.detach() / 2).softmax(-1) for z in (x, y))
    want = (p * (p / q).log()).sum()
    assert math.isclose(float(d), float(want), rel_tol=1e-12)
    (slope,) = torch.autograd.grad(d, x)
    assert torch.allclose(slope, p * ((p / q).log() - want) / 2, atol=1e-12)
    with pytest.raises(InputError, match="temperature"):
        divergence(x, y, temperature=0.0)


def test_no_gradient_reaches_the_teacher():
    x, y = logs(P).requires_grad_(), logs(Q).requires_grad_()
    divergence(x, y).backward()
    assert y.grad is None
    h = torch.randn(3, 2, dtype=torch.float64)
    w = torch.randn(4, 2, dtype=torch.float64)
    teacher_h, teacher_w = h.clone().requires_grad_(), w.clone().requires_grad_()
    linear_divergence(h.requires_grad_(), w.requires_grad_(), Second(teacher_h, teacher_w)).sum().backward()
    assert teacher_h.grad is None
    assert teacher_w.grad is None


def test_a_teacher_held_near_a_base():
    base, live = logs(P), logs(Q)
    assert torch.equal(trust_region(base, live, 0.0), base)
    assert torch.allclose(trust_region(base, live, 0.25), 0.75 * base + 0.25 * live)
    with pytest.raises(InputError, match="mix"):
        trust_region(base, live, 1.5)


# -- what an estimator on the sampled token trains, by enumeration ---------------------------------------------------


def expected_gradient(c):
    """Σ_y p(y)·c(y)·d log p(y)/d logits."""
    p = torch.tensor(P, dtype=torch.float64)
    c = torch.as_tensor(c, dtype=torch.float64)
    return p * (c - (p * c).sum())


def test_what_each_estimator_trains():
    """k1 sent backward trains nothing; k3 sent backward the forward KL; k3 as a reward neither; g as a reward the
    reverse KL; a prefix's whole KL as an advantage nothing."""
    forward, reverse = with_gradient(Divergence("forward"))[1], with_gradient(Divergence("reverse"))[1]
    p, q = logs(P), logs(Q)
    g = q - p
    per_token = {}
    for label, term in {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: d.exp() - 1 - d}.items():
        logp = p.clone().requires_grad_()
        term(q - logp).sum().backward()
        per_token[label] = expected_gradient(logp.grad)
    assert torch.allclose(per_token["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(per_token["k2"], reverse, atol=1e-12)
    assert torch.allclose(per_token["k3"], forward, atol=1e-12)
    assert torch.allclose(expected_gradient(-g), reverse, atol=1e-12)  # score function, A = g
    k3_reward = expected_gradient(g.exp() - 1 - g)
    assert torch.allclose(k3_reward, reverse - forward, atol=1e-12)
    assert not torch.allclose(k3_reward, reverse, atol=0.1)
    undetached = expected_gradient(-g + p)
    assert not torch.allclose(undetached, reverse, atol=0.1)
    whole = torch.full((3,), with_gradient(Divergence("reverse"))[0], dtype=torch.float64)
    assert torch.allclose(expected_gradient(whole), torch.zeros(3, dtype=torch.float64), atol=1e-12)


def test_a_truncated_sum_is_no_divergence_and_a_tail_mends_it():
    """The reverse KL's bare sum over the student's top 1 falls below that of the equal teacher when mass leaves the
    support; the tail bucket and the generalised form never go below 0."""
    p, q = [0.2, 0.4, 0.4], [0.6, 0.2, 0.2]
    bare = math.fsum(p[v] * math.log(p[v] / q[v]) for v in (0,))
    assert bare < 0
    for rest in ("tail", "generalised"):
        assert with_gradient(Divergence("reverse", top=1, owner="teacher", rest=rest), p, q)[0] > 0


# -- from hidden states and two heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=name)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_fused_form_equals_the_plain_one(spec, cap):
    """Value and gradients of hidden states, head and bias, over chunks that do not divide the positions."""
    g = torch.Generator().manual_seed(5)
    h, w, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((7, 4), (11, 4), (11,)))
    teacher = Second(
        *(torch.randn(s, generator=g, dtype=torch.float64) for s in ((7, 3), (11, 3), (11,))), Transform(1.3)
    )
    transform = Transform(0.7, 1.5, cap)
    upstream = torch.randn(7, generator=g, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (h, w, b)]
    z = 1.5 * (h @ w.T + b)
    z = z if cap is None else cap * (z / cap).tanh()
    plain = divergence(z / 0.7, (teacher.hidden @ teacher.weight.T + teacher.bias) / 1.3, spec)
    want = torch.autograd.grad(plain, leaves, upstream)
    fused = linear_divergence(h, w, teacher, spec, bias=b, transform=transform, chunk=3)
    got = torch.autograd.grad(fused, leaves, upstream)
    assert torch.allclose(fused, plain, rtol=1e-10, atol=1e-10)
    for x, y in zip(got, want, strict=True):
        assert torch.allclose(x, y, rtol=1e-10, atol=1e-10)


def test_a_tail_held_at_its_floor_has_no_gradient():
    """A student surer than 1 − 1e-7 of its top token: both forms hold the tail and agree."""
    for kind in ("forward", "reverse", "jsd"):
        spec = Divergence(kind, top=1)
        h = torch.tensor([[30.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
        w, y = torch.eye(4, dtype=torch.float64), torch.tensor([[1.0, 0.5, 0.2, 0.0]], dtype=torch.float64)
        plain, fused = divergence(h, y, spec), linear_divergence(h, w, Second(y, w), spec)
        assert torch.allclose(plain, fused, rtol=1e-12)
        (a,), (b,) = torch.autograd.grad(plain, h), torch.autograd.grad(fused, h)
        assert bool(torch.isfinite(a).all())
        assert torch.allclose(a, b, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_no_positions_are_fine():
    h, w = torch.randn(3, 2, requires_grad=True), torch.randn(5, 2)
    (slope,) = torch.autograd.grad(linear_divergence(h, w, Second(h * 2, w)).sum(), h)
    assert slope.shape == h.shape
    assert linear_divergence(h[:0], w, Second(h[:0], w)).shape == (0,)


def test_half_precision_heads_accumulate_in_float32():
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).bfloat16().requires_grad_() for s in ((64, 8), (33, 8)))
    teacher = Second(h.detach().flip(0), w.detach())
    d = linear_divergence(h, w, teacher, chunk=5)
    assert d.dtype == torch.float32
    got = torch.autograd.grad(d.sum(), (h, w))
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    want = torch.autograd.grad(
        linear_divergence(*wide, Second(teacher.hidden.double(), teacher.weight.double())).sum(), wide
    )
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.bfloat16
        assert float((x.double() - y).norm() / y.norm()) < 0.02


def test_other_vocabularies_and_positions_are_refused():
    h, w = torch.randn(3, 2), torch.randn(5, 2)
    with pytest.raises(InputError, match="6 entries"):
        linear_divergence(h, w, Second(h, torch.randn(6, 2)))
    with pytest.raises(InputError, match="2 positions"):
        linear_divergence(h, w, Second(h[:2], w))
    with pytest.raises(InputError, match="4 entries"):
        divergence(torch.zeros(3), torch.zeros(4))


def test_an_id_that_is_never_sampled_stays_finite():
    """A bias of −inf in both heads: its token has no mass on either side."""
    h, w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), torch.randn(5, 2, dtype=torch.float64)
    bias = torch.zeros(5, dtype=torch.float64)
    bias[2] = -math.inf
    keep = [0, 1, 3, 4]
    for kind in ("forward", "reverse", "jsd"):
        spec, teacher = Divergence(kind), torch.randn(3, 2, dtype=torch.float64)
        d = linear_divergence(h, w, Second(teacher, w, bias), spec, bias=bias)
        want = divergence(h @ w[keep].T, teacher @ w[keep].T, spec)
        assert torch.allclose(d, want, atol=1e-12)
        (slope,) = torch.autograd.grad(d.sum(), h)
        assert bool(torch.isfinite(slope).all())
