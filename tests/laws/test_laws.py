"""The laws that every catalogued algorithm keeps, in float64 on random batches."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
from reference.cases import make_case

import kenpo
from kenpo import metrics
from kenpo.errors import KenpoError
from kenpo.learner.idle import idle_rows
from laws.build import added, cut, same, shuffled, tensors, widened
from laws.catalogue import algorithm, names, options

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = names()
FEW = range(4)


def scored(case):
    """Prompt positions that a penalty reads."""
    rollouts = case["rollouts"]
    return rollouts.get("prompt_mask") or [[0] * len(row) for row in rollouts["mask"]]


@functools.cache
def _cached(key):
    seed, *kind = key
    return make_case(seed, **dict(kind))


def case_of(name, seed, **kind):
    """A random case with every field the algorithm reads; algorithms share them, so nobody may change one."""
    return _cached((seed, *sorted((kind | options(name)).items())))


def evaluated(name, case, dtype=torch.float64):
    return kenpo.evaluate(algorithm(name), *tensors(case, dtype))


def alike(got, want, tolerance=1e-10):
    """Gradients of the same policy fields, each equal up to `tolerance`."""
    return got.keys() == want.keys() and all(same(got[n], g, tolerance) for n, g in want.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", ["none", "usual", "extreme"])
def test_finite_and_zero_off_the_mask(name, gap):
    for seed in range(34):
        case = case_of(name, seed, gap=gap, no_verdict=seed % 3 == 0, fresh=seed % 4 == 0)
        result = evaluated(name, case)
        off = ~torch.tensor(case["rollouts"]["mask"], dtype=torch.bool)
        unscored = off & ~torch.tensor(scored(case), dtype=torch.bool)
        for value, zero in ((result.coefficients, unscored), (result.advantages, off), (result.weights, off)):
            assert bool(torch.isfinite(value).all()), (seed, name)
            assert not bool(value[zero].any()), (seed, name)
        assert math.isfinite(float(result.loss))


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name):
    for seed in FEW:
        rollouts, policy = tensors(case_of(name, seed))
        a = algorithm(name)
        plain = kenpo.evaluate(a, rollouts, policy)
        wide = kenpo.evaluate(a, widened(rollouts, 3), widened(policy, 3))
        width = rollouts.mask.shape[1]
        assert same(wide.loss, plain.loss)
        for field, gradient in plain.gradients.items():
            wider = wide.gradients[field]
            assert same(wider[:, :width] if wider.dim() > 1 else wider, gradient)
            assert wider.dim() < 2 or not bool(wider[:, width:].any())


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_stand_in_any_order(name):
    for seed in FEW:
        rollouts, policy = tensors(case_of(name, seed))
        a, order = algorithm(name), shuffled(len(rollouts), seed)
        plain, moved = kenpo.evaluate(a, rollouts, policy), kenpo.evaluate(a, rollouts[order], policy[order])
        assert same(moved.loss, plain.loss)
        assert alike(moved.gradients, {n: g[order] for n, g in plain.gradients.items()})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_add_up(name, size):
    """Shares of 1 or 3 rows sum to the whole minibatch's loss, coefficients and metrics: in one phase where the
    algorithm allows it, else by evaluating whole and cutting the coefficients."""
    for seed in range(2 * size):
        rollouts, policy = tensors(case_of(name, seed, fresh=seed % 2 == 0))
        a = algorithm(name)
        whole = kenpo.evaluate(a, rollouts, policy)
        prepared = kenpo.prepare(a, rollouts)
        two = a.two_phase(rollouts) is not None
        batch = kenpo.weigh(a, prepared, policy if two else None)
        if two and any(s is not None and s.span > kenpo.Scope.SEQUENCE for s in (a.ratio, a.surrogate)):
            assert alike(kenpo.coefficients(a, batch, policy)[1], whole.gradients)
            continue
        loss, found = 0.0, {n: torch.zeros_like(g) for n, g in whole.gradients.items()}
        sums, extremes = {}, {}
        for rows in cut(len(rollouts), size):
            share, gradients = kenpo.coefficients(a, batch[rows], policy[rows])
            loss = loss + share.loss
            for field, gradient in gradients.items():
                found[field][rows] = gradient
            added(sums, share.sums)
            extremes = {n: max(v, extremes.get(n, v)) for n, v in share.extremes.items()}
        assert same(loss, whole.loss.detach(), 1e-9)
        assert alike(found, whole.gradients)
        merged = metrics.as_floats(sums, extremes)
        assert merged.keys() == whole.metrics.keys()
        for word, value in whole.metrics.items():
            assert math.isclose(merged[word], value, rel_tol=1e-9, abs_tol=1e-12) or value != value, word


@pytest.mark.parametrize("name", NAMES)
def test_a_one_phase_call_is_refused_where_two_are_needed(name):
    rollouts, _policy = tensors(case_of(name, 1))
    a = algorithm(name)
    prepared = kenpo.prepare(a, rollouts)
    if a.two_phase(rollouts, whole_groups=True):
        with pytest.raises(kenpo.errors.ScopeError):
            kenpo.weigh(a, prepared)
    else:
        kenpo.weigh(a, prepared)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_and_weights_are_constants(name):
    rollouts, policy = tensors(case_of(name, 2))
    fields = [f for f in sorted(algorithm(name).reaches) if getattr(policy, f) is not None]
    for field in fields:
        getattr(policy, field).requires_grad_()
    result = kenpo.evaluate(algorithm(name), rollouts, policy)
    assert not result.advantages.requires_grad
    assert not result.weights.requires_grad
    again = torch.autograd.grad(result.loss, [getattr(policy, f) for f in fields], allow_unused=True)
    for field, gradient in zip(fields, again, strict=True):
        assert torch.equal(torch.zeros_like(result.gradients[field]) if gradient is None else gradient,
                           result.gradients[field])  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_junk_at_masked_positions_changes_nothing(name):
    for seed in FEW:
        case = case_of(name, seed)
        clean = {part: dict(fields) for part, fields in case.items()}
        rows = zip(case["rollouts"]["mask"], scored(case), strict=True)
        mask = [[m or q for m, q in zip(*row, strict=True)] for row in rows]
        for part in case:
            for field, rows in case[part].items():
                if (
                    field in ("mask", "prompt_mask", "reward_parts")
                    or not isinstance(rows[0], list)
                    or isinstance(rows[0][0], list)
                ):
                    continue
                if len(rows[0]) != len(mask[0]):  # [B,K]: no tokens
                    continue
                clean[part][field] = [
                    [x if m else -1.0 if isinstance(x, float) else x for x, m in zip(row, keep, strict=True)]
                    for row, keep in zip(rows, mask, strict=True)
                ]
        assert alike(evaluated(name, case).gradients, evaluated(name, clean).gradients, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["masked", "uniform", "no verdict", "no rows"])
def test_nothing_to_learn_gives_zero_with_a_graph(name, what):
    rollouts, policy = tensors(case_of(name, 3))
    if what == "masked":
        rollouts = rollouts.replace(mask=torch.zeros_like(rollouts.mask))
        if rollouts.prompt_mask is not None:
            rollouts = rollouts.replace(prompt_mask=torch.zeros_like(rollouts.prompt_mask))
    elif what == "no verdict":
        rollouts = rollouts.replace(rewards=torch.full_like(rollouts.rewards, math.nan))
    elif what == "no rows":
        rollouts, policy = rollouts[:0], policy[:0]
    else:
        rollouts = rollouts.replace(rewards=torch.full_like(rollouts.rewards, 0.1))
        a = kenpo.get(name)
        made = a.advantage.reads_parts or any("answer" in s.needs or s.parts for s in a.shaping)
        if not a.advantage.group_relative or a.regularizers or made:
            pytest.skip("an outcome without a group baseline, a penalty, answers or parts of a reward still teach")
    policy.logp.requires_grad_()
    result = kenpo.evaluate(algorithm(name), rollouts, policy)
    assert float(result.loss.detach()) == 0.0
    assert result.loss.requires_grad
    assert not bool(result.coefficients.any())


@pytest.mark.parametrize("name", NAMES)
def test_idle_rollouts_have_no_coefficient(name):
    """What a trainer leaves out of its backward pass, told by the advantages, gets no gradient from the whole loss."""
    a, idle_seen = algorithm(name), 0
    for seed in range(8):
        rollouts, policy = tensors(case_of(name, seed, fresh=seed % 2 == 0))
        rewards = torch.where(rollouts.group == rollouts.group[0], rollouts.rewards[0], rollouts.rewards)
        rollouts = rollouts.replace(rewards=rewards)
        if a.two_phase(rollouts):
            continue  # its coefficients are known before any backward pass
        idle = idle_rows(a, kenpo.weigh(a, kenpo.prepare(a, rollouts)))
        idle_seen += int(idle.sum())
        for field, gradient in kenpo.evaluate(a, rollouts, policy).gradients.items():
            assert not bool(gradient[idle].any()), (field, seed)
    if not (a.two_phase() or a.selection) and isinstance(a.advantage, kenpo.stages.GroupZScore):
        assert (idle_seen > 0) == (not a.regularizers)


@pytest.mark.parametrize("name", NAMES)
def test_bad_numbers_at_trained_positions_are_named(name):
    a = algorithm(name)
    for field in sorted(a.needs & {"logp_old", "logp_sampler", "logp_ref", "logp"}):
        for bad in (math.nan, math.inf, -math.inf):
            rollouts, policy = tensors(case_of(name, 4, uniform_group=False))
            selected = kenpo.select(a, rollouts)
            row, token = (rollouts.mask & selected[:, None]).nonzero()[0].tolist()
            owner = policy if field == "logp" else rollouts
            getattr(owner, field)[row, token] = bad
            with pytest.raises(kenpo.errors.NonFiniteError, match=rf"{field}.*\[{row}, {token}\]"):
                kenpo.evaluate(a, rollouts, policy)


def half_precision_is_finite(a, case, dtype):
    """Advantages in float32; finite coefficients but where fp16 has no such number; refused only for numbers beyond."""
    try:
        result = kenpo.evaluate(a, *tensors(case, dtype))
    except kenpo.errors.NonFiniteError:
        assert dtype == torch.float16  # -1e9 and the like are beyond fp16
        return
    assert result.advantages.dtype == torch.float32
    c = result.coefficients.float()  # autograd hands it over in logp's own dtype
    beyond = c.isinf() if dtype == torch.float16 else c.isnan()  # a slope above 65504 is no fp16 number
    assert bool((torch.isfinite(c) | beyond).all() & ~c.isnan().any())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_raised_and_finite(name, dtype):
    for seed in range(5):
        case = case_of(name, seed, gap="extreme" if seed % 2 else "usual")
        half_precision_is_finite(algorithm(name), case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_thousand_batches(name):
    """Finite or a named error, and invariant to 1e-10 in float64, over the whole zoo of shapes; every fifth batch in
    half precision too, where only what no fp16 number holds may be refused.

    A loss is a sum in which saturated terms of e^20·A may cancel: what they round to is allowed for.
    """
    a, refused = algorithm(name), 0
    for seed in range(2000):
        gap = ("none", "usual", "extreme")[seed % 3]
        case = make_case(seed, **({"gap": gap, "fresh": seed % 5 == 0, "no_verdict": seed % 7 == 0} | options(name)))
        rollouts, policy = tensors(case)
        order = shuffled(len(rollouts), seed)
        try:
            plain = kenpo.evaluate(a, rollouts, policy)
        except KenpoError:
            refused += 1
            continue
        moved = kenpo.evaluate(a, widened(rollouts, 2)[order], widened(policy, 2)[order])
        assert same(moved.coefficients[:, : rollouts.mask.shape[1]], plain.coefficients[order]), seed
        ratio = plain.metrics.get("ratio_max", 1.0)
        term = max(1.0, ratio if math.isfinite(ratio) else 1.0) * max(1.0, float(plain.advantages.abs().amax()))
        allowed = 1e-10 * abs(float(plain.loss.detach())) + 4 * torch.finfo(torch.float64).eps * term
        assert abs(float((moved.loss - plain.loss).detach())) <= allowed, seed
        if seed % 5 == 0:
            half_precision_is_finite(a, case, torch.float16 if seed % 10 else torch.bfloat16)
    assert refused == 0  # every number drawn at a trained position is finite, so nothing may be refused


# -- on policy ------------------------------------------------------------------------------------------------------

SEQUENCE_MEANS = ("grpo-without-kl", "gspo", "gspo_token", "gmpo", "sapo", "sspo")
TOKEN_MEANS = ("cispo", "dapo", "m2po", "minpro", "gppo", "ripo")


def on_policy_coefficients(name, seed=8):
    rollouts, policy = tensors(make_case(seed, uniform_group=False, single_group=False, empty_rows=False))
    rollouts = rollouts.replace(logp_old=policy.logp, logp_sampler=policy.logp)
    a = kenpo.get("grpo").but(regularizers=()) if name == "grpo-without-kl" else algorithm(name).but(selection=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kenpo.evaluate(a, rollouts, policy).coefficients


@pytest.mark.parametrize("family", [SEQUENCE_MEANS, TOKEN_MEANS], ids=["sequence mean", "token mean"])
def test_on_policy_the_coefficients_coincide(family):
    known = [n for n in family if n in NAMES or n == "grpo-without-kl"]
    first = on_policy_coefficients(known[0])
    assert bool(first.any())
    for name in known[1:]:
        assert same(on_policy_coefficients(name), first, 1e-12), name
