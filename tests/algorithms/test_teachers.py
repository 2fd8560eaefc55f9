"""Distillation: known numbers through logits, the equalities that must hold, and faults that must show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from golden.given import batch, tensor
from laws.build import same, tensors
from reference.cases import make_case

import kenpo
from kenpo.divergence import Divergence, Term
from kenpo.errors import IllegalCombinationError, InputError, MissingFieldError
from kenpo.ops.vocabulary import divergence, mixture, trust_region
from kenpo.stages import (
    Added,
    CappedRatio,
    Clip,
    EvidenceRatio,
    FixedNegative,
    FutureGap,
    GroupCentred,
    GroupZScore,
    LeastLikely,
    Mix,
    OriginShare,
    PrefixShare,
    SampledGap,
    ScoreFunction,
    SequenceMean,
    SequenceSum,
    TeacherGap,
    TeacherTerm,
    TermPenalty,
    TokenMean,
    TokenRatio,
)

HERE = Path(__file__).parents[1] / "golden"
AVERAGES = {"token_mean": TokenMean(), "sequence_mean": SequenceMean(), "sequence_sum": SequenceSum()}


def cases(name, *variants):
    found = json.loads((HERE / f"{name}.json").read_text())
    found = [c for c in found if not variants or c["inputs"]["variant"] in variants]
    assert found, (name, variants)
    return [pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in found]


def close(got, want):
    assert torch.allclose(torch.as_tensor(got, dtype=torch.float64), tensor(want), rtol=1e-9, atol=1e-12), (got, want)


# -- on the sampled token ---------------------------------------------------------------------------------------------


def opd_of(i):
    a = {
        "sampler_anchor": "opd-tinker", "old_anchor": "opd", "current_anchor": "opd-prime",
        "prefix_weighted": "opd-prefix", "fixed_negative": "opsa",
    }[i["variant"]]  # fmt: skip
    a = kenpo.get(a)
    if i["variant"] == "fixed_negative":
        stages = {
            "advantage": FixedNegative(i["share"], i["value"], i["adaptive"]),
            "weights": (LeastLikely(i["share"]),),
        }
        return a.but(**stages, surrogate=Clip(i["clip"], i["clip"]))
    settings = {"advantage.coef": i["coef"]}
    keys = {"discount": "advantage.discount", "drop": "weights.fall_mask.drop", "boost": "weights.prefix_share.boost",
            "drift": "regularizers.squared_drift.coef"}  # fmt: skip
    settings |= {key: i[name] for name, key in keys.items() if name in i}
    a = a.with_settings(settings).but(aggregate=AVERAGES[i["aggregation"]])
    return a.but(surrogate=Clip(i["clip"], i["clip"])) if "clip" in i else a


@pytest.mark.parametrize(
    ("i", "e"),
    cases("opd", "sampler_anchor", "old_anchor", "current_anchor", "prefix_weighted", "fixed_negative"),
)
def test_opd(i, e):
    names = ("logp", "logp_old", "logp_sampler", "logp_teacher", "entropy")
    rollouts, policy = batch(mask=i["mask"], **{n: i[n] for n in names if n in i})
    result = kenpo.evaluate(opd_of(i), rollouts, policy)
    close(result.advantages[:, 1:], e["advantages"])
    close(result.weights[:, 1:], e["weights"])
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("opd", "estimators"))
def test_what_estimators_train(i, e):
    x, y = tensor(i["logits"]).requires_grad_(), tensor(i["logits_teacher"])
    for kind in ("forward", "reverse"):
        d = divergence(x, y, Divergence(kind))
        close(d.detach(), e[f"{kind}_kl"])
        close(torch.autograd.grad(d, x)[0], e[f"{kind}_kl_gradient"])
    p = x.detach().log_softmax(-1)
    for name, c in e["token_coefficients"].items():
        mean = (p.exp() * tensor(c)).sum()
        close(p.exp() * (tensor(c) - mean), e["expected_gradient"][name])
    """OPD's own coefficient, on policy, is the one called k1 as a reward."""
    n = len(i["logits"])
    rollouts, policy = batch(mask=[[1]] * n, logp=p[:, None], logp_old=p[:, None],
                             logp_teacher=y.log_softmax(-1)[:, None])  # fmt: skip
    result = kenpo.evaluate(kenpo.get("opd").but(aggregate=SequenceSum()), rollouts, policy)
    close(n * result.coefficients[:, 1], e["token_coefficients"]["k1_reward"])


@pytest.mark.parametrize(("i", "e"), cases("teacher_mixed"))
def test_teacher_mixed(i, e):
    own = GroupZScore() if i["normalise"] == "z" else GroupCentred()
    names = ("logp", "logp_old", "logp_teacher", "hinted", "kl_teacher")
    rollouts, policy = batch(i["rewards"], i["group"], i["mask"], **{n: i[n] for n in names if n in i})
    a = kenpo.get("teacher_mixed").but(surrogate=Clip(i["clip"], i["clip"]))
    scale = 1.0
    if i["variant"] == "convex":
        a = a.but(advantage=Mix(own, TeacherGap(), share=i["lambda"]))
    elif i["variant"] == "additive":
        a = a.but(advantage=Added(own, TeacherGap(coef=i["coef"])))
    elif i["variant"] == "convex_losses":
        scale = i["lambda"]
        a = a.but(advantage=own, regularizers=(SampledGap(coef=(1 - scale) / scale),))
    else:
        a = a.but(advantage=own, regularizers=(TermPenalty(TeacherTerm("reverse"), coef=i["beta"]),))
    result = kenpo.evaluate(a, rollouts, policy)
    close(result.loss.detach() * scale, e["loss"])
    close(result.coefficients[:, 1:] * scale, e["coefficients"])
    if "advantages" in e:
        close(result.advantages[:, 1:], e["advantages"])
    if "kl_coefficients" in e:
        close(result.gradients["kl_teacher"][:, 1:], e["kl_coefficients"])
    gap = kenpo.prepare(kenpo.get("opd"), rollouts).advantages[:, 1:]
    close(gap, e["teacher_advantages"])


# -- over the vocabulary ----------------------------------------------------------------------------------------------


class Logits:
    """A golden case's logits as leaves; the terms of the policy that come from them, behind one masked column."""

    def __init__(self, i, spec, temperature=1.0, teacher_temperature=1.0, base=None, mix=None):
        self.x = tensor(i["logits"]).requires_grad_()
        y = tensor(i["logits_teacher"])
        y = y if base is None else trust_region(tensor(base), y, mix)
        x = self.x / temperature
        self.kl = divergence(x, y / teacher_temperature, spec)
        self.teacher = y.log_softmax(-1)
        if "tokens" in i:
            ids = torch.tensor(i["tokens"]).unsqueeze(-1).clamp(min=0)
            self.logp = x.log_softmax(-1).gather(-1, ids).squeeze(-1)
            self.teacher_logp = self.teacher.gather(-1, ids).squeeze(-1)
        else:
            self.logp, self.teacher_logp = torch.zeros_like(self.kl), torch.zeros_like(self.kl)

    def evaluate(self, a, i, rewards=None, **fields):
        made = {"logp": self.logp.detach(), "kl_teacher": self.kl.detach(), "logp_teacher": self.teacher_logp} | fields
        rollouts, policy = batch(rewards, i.get("group"), i["mask"], **made)
        result = kenpo.evaluate(a, rollouts, policy)
        up = {n: result.gradients[n][:, 1:] for n in result.gradients}
        parts = [(self.logp, up.get("logp")), (self.kl, up.get("kl_teacher"))]
        parts = [(x, g) for x, g in parts if g is not None and x.requires_grad]
        (slope,) = torch.autograd.grad([x for x, _ in parts], self.x, [g for _, g in parts])
        return result, up, slope


def direction(b, **more):
    return Divergence("jsd", float(b), **more)


@pytest.mark.parametrize(("i", "e"), cases("gkd"))
def test_gkd(i, e):
    top = {"top": i["K"], "owner": i["support"], "rest": i["treatment"]} if "K" in i else {}
    terms = Logits(i, direction(i["beta"], **top), i["temperature"], i["temperature_teacher"])
    a = kenpo.get("gkd").but(aggregate=AVERAGES[i["aggregation"]])
    fields = {}
    if i["variant"] == "mixture":
        a, fields = (
            a.but(weights=(OriginShare(i["lambda"]),)),
            {"origin": [0 if o == "on_policy" else 2 for o in i["origin"]]},
        )
    result, up, slope = terms.evaluate(a, i, **fields)
    mask = torch.tensor(i["mask"]).bool()
    close(torch.where(mask, terms.kl.detach(), 0.0), e["divergence"])
    close(result.loss.detach(), e["loss"])
    close(up["kl_teacher"], e["coefficients"])
    close(slope, e["logit_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("minillm"))
def test_minillm(i, e):
    terms = Logits(i, Divergence("reverse"))
    old = tensor(i["logp_old"])
    sampler = mixture(old, terms.teacher_logp, i["alpha"])
    inclusive = i["variant"] == "inclusive"
    advantage = FutureGap(
        normalise=i["length_norm"], inclusive=inclusive, gamma=i.get("gamma", 1.0), whiten=i["whiten"]
    )
    a = kenpo.get("minillm-inclusive" if inclusive else "minillm")
    clip = 1e9 if i["clip"] is None else i["clip"]
    a = a.but(advantage=advantage, surrogate=Clip(clip, clip), aggregate=AVERAGES[i["aggregation"]])
    result, up, slope = terms.evaluate(a, i, logp_old=i["logp_old"], logp_sampler=sampler)
    mask = torch.tensor(i["mask"]).bool()
    for name, x in (("logp", terms.logp), ("divergence", terms.kl)):
        close(torch.where(mask, x.detach(), 0.0), e[name])
    p = old if inclusive else terms.logp.detach()
    close(torch.where(mask, (p - sampler).exp(), 0.0), e["weights"])
    close(result.advantages[:, 1:], e["returns"])
    close(result.loss.detach(), e["loss"])
    close(up["logp"], e["coefficients"])
    close(up["kl_teacher"], e["divergence_coefficients"])
    close(slope, e["logit_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("sdpo"))
def test_sdpo(i, e):
    top = {"top": i["K"], "rest": i["treatment"]} if "K" in i else {}
    terms = Logits(i, direction(i["alpha"], **top), base=i.get("logits_base"), mix=i.get("mix"))
    a = kenpo.get("sdpo-sampled" if i["variant"] == "sampled_token" else "sdpo")
    a = a.with_settings({"weights.capped_ratio.cap": i["cap"], "weights.truncated_is.cap": i["sampler_cap"]})
    fields = {n: i[n] for n in ("logp_old", "logp_sampler")}
    result, up, slope = terms.evaluate(a, i, i["rewards"], hinted=e["hinted"], **fields)
    close(result.weights[:, 1:], e["weights"])
    close(result.loss.detach(), e["loss"])
    close(up["logp" if "logp" in e else "kl_teacher"], e["coefficients"])
    close(slope, e["logit_gradient"])
    if "advantages" in e:
        hinted = torch.tensor(e["hinted"]).bool().unsqueeze(-1)
        close(result.advantages[:, 1:], torch.where(hinted, tensor(e["advantages"]), 0.0).tolist())


# -- equalities -------------------------------------------------------------------------------------------------------

NAMES = tuple(n for n in kenpo.names() if kenpo.get(n).needs & {"kl_teacher", "logp_teacher"})
NAMES = tuple(n for n in NAMES if n != "ttpo")  # also unlearns by a vote


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_that_is_the_student_teaches_nothing(name):
    """Log-probs under all policies alike and a divergence of 0: loss and coefficients of the teacher's part are 0."""
    rollouts, policy = tensors(make_case(2, gap="none", experts=True))
    same_as = {f"logp_{n}": policy.logp for n in ("old", "sampler", "teacher")}
    rollouts = rollouts.replace(rewards=torch.zeros_like(rollouts.rewards), **same_as)
    policy = policy.replace(kl_teacher=torch.zeros_like(policy.kl_teacher))
    result = kenpo.evaluate(kenpo.get(name), rollouts, policy)
    assert abs(float(result.loss.detach())) < 1e-12
    assert not bool(result.coefficients.any())


def test_sampled_gaps_equal_the_reverse_kl_in_expectation():
    """Every token of a vocabulary as a row, weighed by its probability: OPD's and SDPO's sampled forms, with every
    anchor on policy, give the reverse KL's logit gradient; the sequence's with discount 1 is tested below."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 6, generator=g, dtype=torch.float64)
    x.requires_grad_()
    (want,) = torch.autograd.grad(divergence(x, y, Divergence("reverse")), x)
    p = x.log_softmax(-1)
    column = p.detach()[:, None]
    rollouts, policy = batch(mask=[[1]] * 6, logp=column, logp_old=column, logp_sampler=column,
                             logp_teacher=y.log_softmax(-1)[:, None], hinted=[1] * 6)  # fmt: skip
    for name in ("opd", "opd-tinker", "opd-prime", "sdpo-sampled"):
        a = kenpo.get(name).but(aggregate=SequenceSum())
        c = 6 * kenpo.evaluate(a, rollouts, policy).coefficients[:, 1]
        (got,) = torch.autograd.grad((p.detach().exp() * c * p).sum(), x, retain_graph=True)
        assert torch.allclose(got, want, atol=1e-12), name


@pytest.mark.parametrize("way", ["opd with discount 1", "minillm without normalisation"])
def test_credit_to_later_tokens_is_the_sequence_kl(way):
    """Two tokens of three symbols, every sequence enumerated: the gradient is that of KL(π‖q) over sequences."""
    g = torch.Generator().manual_seed(4)
    first, second = (torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in ((3,), (3, 3)))
    q1, q2 = (torch.randn(s, generator=g, dtype=torch.float64).log_softmax(-1) for s in ((3,), (3, 3)))
    p1, p2 = first.log_softmax(-1), second.log_softmax(-1)
    whole, theirs = p1[:, None] + p2, q1[:, None] + q2
    want = torch.autograd.grad((whole.exp() * (whole - theirs)).sum(), (first, second), retain_graph=True)
    rows = [(a, b) for a in range(3) for b in range(3)]
    logp = torch.stack([torch.stack([p1[a], p2[a, b]]) for a, b in rows])
    teacher = torch.stack([torch.stack([q1[a], q2[a, b]]) for a, b in rows])
    kls = divergence(second, q2, Divergence("reverse"))
    kl = torch.stack([torch.stack([divergence(first, q1, Divergence("reverse")), kls[a]]) for a, _ in rows])
    fields = dict.fromkeys(("logp", "logp_old", "logp_sampler"), logp.detach())
    rollouts, policy = batch(mask=[[1, 1]] * 9, logp_teacher=teacher, kl_teacher=kl.detach(), **fields)
    if way.startswith("opd"):
        a = kenpo.get("opd").with_settings({"advantage.discount": 1.0}).but(aggregate=SequenceSum())
    else:
        a = kenpo.get("minillm").but(advantage=FutureGap(normalise=False))
    found = kenpo.evaluate(a, rollouts, policy).gradients
    chance = logp.detach().sum(-1, keepdim=True).exp()
    total = (9 * chance * found["logp"][:, 1:] * logp).sum()
    if "kl_teacher" in found:
        total = total + (9 * chance * found["kl_teacher"][:, 1:] * kl).sum()
    got = torch.autograd.grad(total, (first, second))
    for x, y in zip(got, want, strict=True):
        assert torch.allclose(x, y, atol=1e-12)


def test_opd_against_the_reference_is_the_kl_in_the_reward():
    """Teacher = reference: the k2 penalty's gradient on policy, and REINFORCE++'s KL reward without return-to-go."""
    rollouts, policy = tensors(make_case(6, gap="none"))
    hinted = torch.ones(len(rollouts), dtype=torch.bool)
    rollouts = rollouts.replace(logp_old=policy.logp, logp_teacher=rollouts.logp_ref, hinted=hinted)
    got = kenpo.evaluate(kenpo.get("opd"), rollouts, policy).coefficients
    k2 = kenpo.stages.KLToReference(beta=1.0, estimator="k2")
    penalty = kenpo.get("opd").but(advantage=GroupCentred(), regularizers=(k2,))
    zero = rollouts.replace(rewards=torch.zeros_like(rollouts.rewards))
    assert same(got, kenpo.evaluate(penalty, zero, policy).coefficients)


def test_sdpo_with_every_row_hinted_on_policy_is_gkd_by_tokens():
    rollouts, policy = tensors(make_case(3, gap="none"))
    rollouts = rollouts.replace(
        hinted=torch.ones(len(rollouts), dtype=torch.bool), logp_old=policy.logp, logp_sampler=policy.logp
    )
    gkd = kenpo.evaluate(kenpo.get("gkd").but(aggregate=TokenMean()), rollouts, policy)
    assert same(
        kenpo.evaluate(kenpo.get("sdpo"), rollouts, policy).gradients["kl_teacher"], gkd.gradients["kl_teacher"]
    )


def test_mixtures_at_their_ends():
    rollouts, policy = tensors(make_case(7, experts=True))
    run = lambda a: kenpo.evaluate(a, rollouts, policy).coefficients  # noqa: E731
    mixed = kenpo.get("teacher_mixed")
    grpo = kenpo.get("grpo").but(regularizers=(), aggregate=TokenMean())
    assert same(run(mixed.with_settings({"advantage.share": 1.0})), run(grpo))
    assert same(run(mixed.with_settings({"advantage.share": 0.0})), run(kenpo.get("opd")))
    assert same(run(kenpo.get("teacher_mixed-added").with_settings({"advantage.teacher.coef": 0.0})), run(grpo))
    prefix = kenpo.get("opd-prefix")
    assert same(run(prefix.but(weights=(PrefixShare(0.0),))), run(prefix.but(weights=())))
    evidence = grpo.but(weights=(EvidenceRatio(share=0.0),))
    assert same(run(evidence), run(grpo))
    kl = lambda own: kenpo.evaluate(  # noqa: E731
        kenpo.get("gkd").but(weights=(OriginShare(own),)), rollouts, policy
    ).gradients["kl_teacher"]
    assert not bool(kl(1.0)[rollouts.origin != 0].any())
    assert not bool(kl(0.0)[rollouts.origin == 0].any())


def test_losses_mix_like_advantages_on_policy_only():
    """With signs of both kinds under the clip, and off policy, mixing losses is another method."""
    rollouts, policy = tensors(make_case(9, gap="none", empty_rows=False))
    hinted = torch.ones(len(rollouts), dtype=torch.bool)
    convex, losses = kenpo.get("teacher_mixed"), kenpo.get("teacher_mixed-losses")
    on = rollouts.replace(logp_old=policy.logp, hinted=hinted)
    run = lambda a, r: kenpo.evaluate(a, r, policy).coefficients  # noqa: E731
    assert same(2 * run(convex, on), run(losses, on))
    off = on.replace(logp_old=policy.logp - 0.3 * policy.logp.cos())
    assert not same(2 * run(convex, off), run(losses, off), 1e-3)


def test_evidence_keeps_the_rewards_direction():
    rollouts, policy = tensors(make_case(11))
    a = kenpo.get("grpo").but(regularizers=(), weights=(EvidenceRatio(width=0.2, share=1.0),))
    result = kenpo.evaluate(a, rollouts, policy)
    w = result.weights[rollouts.mask & (result.advantages != 0)]
    assert float(w.min()) >= 0.8 - 1e-12
    assert float(w.max()) <= 1.2 + 1e-12
    unhinted = rollouts.mask & ~rollouts.hinted.unsqueeze(-1)
    assert bool((result.weights[unhinted] == 1).all())
    gap = rollouts.logp_teacher - rollouts.logp_old
    agree = rollouts.mask & rollouts.hinted.unsqueeze(-1) & (gap * result.advantages > 0)
    assert bool(agree.any())
    assert bool((result.weights[agree] > 1).all())


def test_the_teacher_is_a_constant():
    """Log-probs of the teacher that carry a graph get no gradient, under any anchor."""
    rollouts, policy = tensors(make_case(3))
    teacher = rollouts.logp_teacher.clone().requires_grad_()
    policy.logp.requires_grad_()
    for name in ("opd", "opd-prime", "sdpo-sampled", "teacher_mixed-losses"):
        result = kenpo.evaluate(kenpo.get(name), rollouts.replace(logp_teacher=teacher), policy)
        found = torch.autograd.grad(result.loss, [teacher, policy.logp], allow_unused=True)
        assert found[0] is None, name
        assert found[1] is not None, name


def test_what_prepare_reads_must_be_there():
    rollouts, policy = tensors(make_case(3, fresh=True))
    assert "logp_old" in kenpo.get("opd").prepare_needs
    with pytest.raises(MissingFieldError, match="logp_old"):
        kenpo.evaluate(kenpo.get("opd"), rollouts, policy)
    kenpo.evaluate(kenpo.get("opd-prime"), rollouts, policy)


def test_records_of_what_the_models_are_asked_for():
    assert kenpo.get("sdpo").surrogate.divergence.term == Term(
        "kl_teacher", "teacher", Divergence("jsd", 0.5, top=100, owner="student", rest="tail"), 1.0
    )
    assert kenpo.get("opsd").surrogate.divergence.term.temperature == 1.1
    assert kenpo.get("minillm").regularizers[0].divergence.term.divergence.kind == "reverse"
    assert kenpo.get("sdpo").terms == {"kl_teacher": kenpo.get("sdpo").surrogate.divergence.term}
    assert kenpo.get("grpo").terms == {}
    with pytest.raises(IllegalCombinationError, match="kl_teacher"):
        kenpo.get("gkd").but(regularizers=(TermPenalty(TeacherTerm("reverse")),))
    assert kenpo.get("gkd").with_settings({"surrogate.divergence.weight": 0.0}).surrogate.divergence.term


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TeacherTerm("jsd", 0.005), "learning rate"),
        (lambda: TeacherTerm(temperature=0.0), "temperature"),
        (lambda: TeacherTerm("reverse", clip=0.05), "clip"),
        (lambda: TeacherGap(discount=1.5), "discount"),
        (lambda: FutureGap(gamma=0.9), "inclusive"),
        (lambda: FixedNegative(value=0.5), "negative"),
        (lambda: Mix(share=1.5), "share"),
        (lambda: CappedRatio(cap=0.0), "cap"),
        (lambda: OriginShare(own=2.0), "own"),
        (lambda: TermPenalty(coef=-1.0), "coef"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_a_score_function_beside_a_ratio_weight_only():
    with pytest.raises(kenpo.errors.IllegalCombinationError):
        kenpo.get("sdpo-sampled").but(ratio=TokenRatio(), surrogate=ScoreFunction())
    assert math.isclose(kenpo.get("sdpo").settings()["weights.capped_ratio.cap"], 2.0)


def test_a_ratio_as_weight_is_capped():
    rollouts, policy = batch(logp=[[-1.0, -1.0]], logp_old=[[-3.0, -1.5]], logp_sampler=[[-3.0, -1.5]])
    a = kenpo.get("sdpo-sampled").but(advantage=GroupCentred(), weights=(CappedRatio(cap=2.0),))
    close(kenpo.evaluate(a, rollouts, policy).weights[0, 1:], [2.0, math.exp(0.5)])
