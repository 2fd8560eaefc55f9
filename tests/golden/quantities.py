"""How Kenpo forms the quantities of formulas.json: advantages, ratios, surrogates, penalties."""

from __future__ import annotations

import math

import torch

import kenpo
from golden.given import Given, batch, context, gains, logs, tensor, weights
from kenpo.ops import divergences, ratios, sampling, surrogates
from kenpo.stages import (
    ByOrigin,
    CentredClip,
    ChiSquareClip,
    Clip,
    DetachedClip,
    GoldenAnswer,
    GradientPreservingClip,
    GroupCentred,
    GroupZScore,
    KLToReference,
    LeaveOneOut,
    Linear,
    PrefixMinRatio,
    RouterShift,
    SequenceRatio,
    ShapedProbability,
    SoftOverlong,
    TokenMean,
    TokenRatio,
    VarianceRatio,
    ZeroSumKL,
)


def group_advantages(stage, i):
    rollouts, policy = batch(i["rewards"], i.get("group"), logp=[[-1.0]] * len(i["rewards"]))
    a = kenpo.get("grpo").but(advantage=stage, regularizers=())
    return kenpo.evaluate(a, rollouts, policy).advantages[:, 1]


def branch_clip(i, want):
    band = (0.1, i["token_cap"] - 1), (1 - i["sequence_floor"], 0.15)
    m, held = surrogates.branch_clip(*(tensor(i[n]) for n in ("r", "s", "A")), i["weight"], *band)
    return {"m": m, "clipped": held, "objective": torch.minimum(m, held)}


def sapo_slope(i, want):
    peaks = []
    x = torch.linspace(0.5, 4, 35001, dtype=torch.float64).log()
    for tau in i["tau"]:
        _, slope = gains(kenpo.stages.SoftGate(tau_pos=tau), x.tolist())
        peaks.append([float(x[slope.argmax()].exp()), float(slope.max())])
    return {"peaks": peaks}


def ppo_clip_activity(i, want):
    clip = Clip(i["clip"], i["clip"])
    _, slope = gains(clip, [math.log(p / m) for m, p in zip(i["mu"], i["pi"], strict=True)], i["A"])
    return {"active": (slope != 0).double()}


def prefix_min(i, want):
    n, x = len(i["rho"]), logs(i["rho"])
    fields = {"logp": x, "logp_sampler": [0.0] * n}
    ctx = context(**fields)
    made = {
        name: PrefixMinRatio(**numbers)(ctx)[0, 1:].detach()
        for name, numbers in {
            "weights": {},
            "capped": {"cap_prefix_at_one": True},
            "inclusive": {"form": "inclusive"},
        }.items()
    }
    bounds = DetachedClip(floor=i["floor"], cap=i["cap"])
    prefixes = [[int(t <= k) for t in range(n)] for k in range(n)]
    longer = context(mask=prefixes, logp=[x] * n, logp_old=[[0.0] * n] * n)
    return made | {
        "prefix_min": ratios.log_prefix_min(ctx.log_ratio("sampler"), ctx.mask, strict=True)[0, 1:].exp(),
        "clipped": gains(bounds, x, ratio=PrefixMinRatio(), logp_old=[0.0] * n, logp_sampler=[0.0] * n)[1],
        "cumulative": SequenceRatio(pool="product")(longer)[:, 1].detach(),
    }


def centred_clip(i, want):
    fields = {"logp_old": logs([i["rho_old"]]), "logp_sampler": [0.0]}
    stage, anchor = CentredClip(i["radius"], i["floor"]), TokenRatio(anchor="sampler")
    gain, _ = gains(stage, logs([i["rho"] / i["rho_old"]]), i["A"], ratio=anchor, **fields)
    return {"objective": gain[0]}


def router_shift(i, want):
    old, new = ([[logs(layer) for layer in i[n]]] for n in ("old", "new"))
    ctx = context(logp=[-1.0], router_logp_old=old, router_logp=new)
    return {n: RouterShift(floor=0.0, layers=n).log_factor(ctx)[0, 1].exp() for n in want}


def router_shift_placement(i, want):
    out, moved = {}, {"router_logp": [[[math.log(i["gamma"])]]], "router_logp_old": [[[0.0]]]}
    for sign in ("pos", "neg"):
        for place in ("pre", "post"):
            a = kenpo.get(f"rspo-{place}-clip").but(advantage=Given(), aggregate=TokenMean())
            key = "weights.router_stability.shift.floor" if place == "post" else "ratio.shift.floor"
            a = a.with_settings({key: 0.0, "surrogate.low": i["clip"], "surrogate.high": i["clip"]})
            rollouts, policy = batch([i[sign]["A"]], logp=logs([i[sign]["r"]]), logp_old=[0.0], **moved)
            result = kenpo.evaluate(a, rollouts, policy)
            out |= {
                f"{sign}_{place}": -result.loss.detach(),
                f"{sign}_{place}_gradient": bool(result.coefficients.any()),
            }
    return {n: float(v) for n, v in out.items() if n in want}


def slopes(stage):
    def check(i, want):
        numbers = {n: v for n, v in i.items() if n != "r_and_A"}
        r, a = zip(*i["r_and_A"], strict=True)
        return {"coefficients": gains(stage(**numbers), logs(r), list(a))[1]}

    return check


def chi_square_clip(i, want):
    old = logs(i["p_old"])
    stage = ChiSquareClip(i["delta"], i["floor"], i["cap"])
    floor, cap = stage._bounds(context(logp=old, logp_old=old))
    radius = surrogates.chi_square_radius(tensor(old), i["delta"])
    return {"bounds": torch.stack([floor[0, 1:], cap[0, 1:]], -1).detach(), "radius": radius}


def chi_square_clip_objective(i, want):
    stage = ChiSquareClip(i["delta"], i["floor"], i["cap"])
    return {"objective": gains(stage, logs([i["r"]]), i["A"], logp_old=logs([i["p_old"]]))[0][0]}


def ggpo(i, want):
    fields = {"logp": [[-5.0 - z] for z in i["z"]], "logp_ref": [[-5.0]] * 4}
    rollouts, policy = batch([0.0, 1e-12, 0.0, 0.0], **fields)  # a mixed group; z lies in the log-probs
    result = kenpo.evaluate(kenpo.get("ggpo").with_settings({"surrogate.beta": 1.0}), rollouts, policy)
    return {"loss": result.loss.detach(), "softmax_minus_uniform": -result.coefficients[:, 1]}


def shaped_probability(i, want):
    x = logs(i["p"])
    f, slope = gains(Linear(), x, ratio=ShapedProbability(i["gamma"]), logp_old=[0.0] * len(x))
    return {"f": f, "coefficient": slope}


def sis_position(i, want):
    old, new = tensor(i["old"]), tensor(i["new"])
    x = (new / old).log().unsqueeze(0)
    top = old.topk(i["top_k"]).indices
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[0, top] = True
    change = x[0, top].expand(1, len(old), len(top))
    a = sampling.acceptance(x, change, torch.ones_like(change, dtype=torch.bool), inside)[0]
    mass = old * (a + (1 - a) * x[0].exp().clamp(1 - i["low"], 1 + i["high"]))
    return {
        "envelope": (x.exp()[0] / a).amin(),
        "acceptance_rate": (old * a).sum(),
        "expected_weight_mass": mass,
        "expected_weight_total": mass.sum(),
    }


def group_advantages_of(i, want):
    stages = {"leave_one_out": LeaveOneOut(), "sample": GroupZScore(), "population": GroupZScore(ddof=0)}
    return {n: group_advantages(stages[n], i) for n in want}


def group_advantages_of_counts(i, want):
    rewards = [1.0] * i["successes"] + [0.0] * (i["n"] - i["successes"])
    found = {n: group_advantages(GroupZScore(ddof=int(n == "sample")), {"rewards": rewards}) for n in want}
    return {n: [float(v[0]), float(v[-1])] for n, v in found.items()}


def advantages_per_source(i, want):
    def one(own, external):
        groups = [0] * len(own) + [1] * len(external)
        found = group_advantages(GroupZScore(i["eps"], i["ddof"]), {"rewards": own + external, "group": groups})
        return found[: len(own)], found[len(own) :]

    own, external = one(i["own"], i["external"])
    return {"own": own, "external": external, "external_all_right": one(i["own"], [1.0] * 4)[1]}


def grin_advantage(i, want):
    rewards = [i["reward_max"]] + [i["reward_max"]] * i["correct"] + [0.0] * (i["own"] - i["correct"])
    found = group_advantages(kenpo.get("grin").advantage, {"rewards": rewards})
    return {"golden": found[0], "wrong": found[-1]}


def golden_coefficient(i, want):
    x, expert = logs([i["p"]]), {"origin": [2], "logp_old": [0.0]}
    luffy = gains(Linear(), x, i["A"], ratio=ByOrigin(expert=ShapedProbability(i["gamma"])), **expert)
    return {"grin": gains(GoldenAnswer(), x, i["A"], **expert)[1][0], "luffy": luffy[1][0]}


def soft_overlong(i, want):
    stage = SoftOverlong(i["limit"], i["buffer"])
    mask = torch.arange(1, i["limit"] + 1) <= torch.tensor(i["lengths"]).unsqueeze(-1)
    ctx = context(mask=mask, logp=torch.zeros(mask.shape))
    return {"penalties": stage(torch.zeros(3, dtype=torch.float64), ctx)}


def conspo_identity(i, want):
    """GRPO's objective with binary rewards, population std and eps 0 is √(p(1−p)) (s₊ − s₋)."""
    width = max(map(len, i["ratios"]))
    mask = [[1] * len(r) + [0] * (width - len(r)) for r in i["ratios"]]
    rows = [logs(r) + [0.0] * (width - len(r)) for r in i["ratios"]]
    rollouts, policy = batch(i["rewards"], mask=mask, logp=rows, logp_old=[[0.0] * width] * len(rows))
    grpo = kenpo.get("grpo").but(advantage=GroupZScore(eps=0.0, ddof=0), regularizers=())
    grpo = grpo.but(surrogate=Clip(i["low"], i["high"]))
    out, mean = {"J": -kenpo.evaluate(grpo, rollouts, policy).loss.detach()}, grpo.but(advantage=Given())
    for name, sign, value in (("s_plus", 1.0, 1.0), ("s_minus", -1.0, 0.0)):
        rows = (rollouts.rewards == value).nonzero().squeeze(-1)
        part = rollouts[rows].replace(rewards=torch.full_like(rollouts.rewards[rows], sign))
        out[name] = -sign * kenpo.evaluate(mean, part, policy[rows]).loss.detach()
    return out


def conspo(i, want):
    scores = i["positive"] + i["negative"]
    rewards = [float(k < len(i["positive"])) for k in range(len(scores))]
    a = kenpo.get("conspo").with_settings({"surrogate.tau": float(i["tau"]), "surrogate.margin": float(i["margin"])})
    return {"loss": kenpo.evaluate(a, *batch(rewards, logp=[[s] for s in scores])).loss.detach()}


def kl_to_reference(i, want):
    ctx = context(**i)
    k3 = KLToReference(beta=1.0)(ctx)
    (slope,) = torch.autograd.grad(k3.sum(), ctx._core.policy.logp)
    return {"k3": k3[0, 1:].detach(), "slope": slope[0, 1:]}


def saturated_log_ratio(i, want):
    ctx = context(logp=i["logp"], logp_old=i["anchor"])
    d = ctx.log_ratio("old")
    (slope,) = torch.autograd.grad(d.sum(), ctx._core.policy.logp)
    return {"log_ratio": d[0, 1:].detach(), "slope": slope[0, 1:]}


def zero_sum_kl(i, want):
    rollouts, policy = batch(i["rewards"], logp=[[-1.0]] * 4, kl_ref=[[d] for d in i["divergence"]])
    a = kenpo.get("zcpo").with_settings({"advantage.beta": i["beta"]})
    assert isinstance(a.advantage, ZeroSumKL)
    return {"coefficients": kenpo.evaluate(a, rollouts, policy).advantages[:, 1]}


def query_penalty(i, want):
    """Two rows of one uniform group teach nothing; what is left is the query's term."""
    n = len(i["logp"])
    rollouts, policy = batch(
        [1.0], mask=[[0] * n + [1]], prompt_mask=[[1] * n + [0]],
        logp=[*i["logp"], -1.0], logp_ref=[*i["logp_ref"], -1.0],
    )  # fmt: skip
    a = kenpo.get("erpo").with_settings({"regularizers.query_kl.alpha": 1.0})
    result = kenpo.evaluate(a, rollouts, policy)
    d = tensor(i["logp_ref"]) - tensor(i["logp"])
    return {
        "k3": divergences.k3(d),
        "mean": result.loss.detach(),
        "gradient_of_mean": result.coefficients[0, 1 : n + 1],
    }


def variance_ratio(i, want):
    fields = {"logp": logs([i["p"]]), "logp_old": logs([i["p_old"]])}
    return {
        "v": weights(VarianceRatio(), **fields)[0],
        "importance_ratio": TokenRatio()(context(**fields))[0, 1].detach(),
    }


CHECKS = {
    "group_z_score": lambda i, w: {"advantages": group_advantages(GroupZScore(i["eps"], i["ddof"]), i)},
    "group_centred": lambda i, w: {"advantages": group_advantages(GroupCentred(), i)},
    "root_z_score": lambda i, w: {"advantages": group_advantages(kenpo.get("off_policy_grpo").advantage, i)},
    "branch_clip": branch_clip,
    "sapo_slope": sapo_slope,
    "ppo_clip_activity": ppo_clip_activity,
    "prefix_min": prefix_min,
    "centred_clip": centred_clip,
    "router_shift": router_shift,
    "router_shift_placement": router_shift_placement,
    "gradient_preserving_clip": slopes(GradientPreservingClip),
    "detached_clip": slopes(DetachedClip),
    "clip": slopes(Clip),
    "chi_square_clip": chi_square_clip,
    "chi_square_clip_objective": chi_square_clip_objective,
    "zero_sum_kl": zero_sum_kl,
    "ggpo": ggpo,
    "shaped_probability": shaped_probability,
    "variance_ratio": variance_ratio,
    "group_advantages": group_advantages_of,
    "group_advantages_of_counts": group_advantages_of_counts,
    "advantages_per_source": advantages_per_source,
    "sis_position": sis_position,
    "query_penalty": query_penalty,
    "grin_advantage": grin_advantage,
    "golden_coefficient": golden_coefficient,
    "soft_overlong": soft_overlong,
    "conspo_identity": conspo_identity,
    "conspo": conspo,
    "kl_to_reference": kl_to_reference,
    "saturated_log_ratio": saturated_log_ratio,
}
