"""How Kenpo forms the quantities of formulas.json: divergences, weights, gates, corrections."""

from __future__ import annotations

import math

import torch

import kenpo
from golden.given import Given, batch, context, logs, same, tensor, weights
from kenpo.ops import divergences, ratios, trust
from kenpo.stages import (
    BinaryKLMask,
    Compatibility,
    CorrectionMoment,
    DivergenceMask,
    GroupMass,
    MaskedIS,
    MomentClip,
    QueryWeight,
    SecondMoment,
    SequenceKLMask,
    SpuriousTokens,
    TokenMean,
    TokenRatio,
    TruncatedIS,
)


def binary_divergence(i, want):
    mu, pi = tensor(logs(i["mu"])), tensor(logs(i["pi"]))
    return {"tv": divergences.binary_tv(mu, pi), "kl": divergences.binary_kl(mu, pi)}


def divergence_mask(i, want):
    stage = DivergenceMask(kind=i["kind"], threshold=i["threshold"])
    return {"mask": weights(stage, i["A"], logp=logs(i["pi"]), logp_sampler=logs(i["mu"]))}


def topk_divergence(i, want):
    top = sorted(range(len(i["mu"])), key=lambda k: -i["mu"][k])[: i["top_k"]]
    v, out = i["token"], {}
    for kind in ("tv", "kl"):
        stage = DivergenceMask(kind=kind, buckets="top_k")
        ctx = context(
            tokens=[v], topk_ids=[[top]], topk_logp_sampler=[[logs(i["mu"][k] for k in top)]],
            topk_logp=[[logs(i["pi"][k] for k in top)]], logp=logs([i["pi"][v]]), logp_sampler=logs([i["mu"][v]]),
        )  # fmt: skip
        out[kind] = stage._divergence(ctx)[0, 1]
    return out | {"binary_tv": divergences.binary_tv(*(tensor(math.log(i[n][v])) for n in ("mu", "pi")))}


def kl_estimators(i, want):
    x = tensor(logs(i["rho"]) if "rho" in i else [math.log(p / m) for m, p in zip(i["mu"], i["pi"], strict=True)])
    k = {"k1": divergences.k1(x), "k2": divergences.k2(x), "k3": divergences.k3(x)}
    return k | {"mean_k3": k["k3"].mean(), "max_k2": k["k2"].max(), "max_k3": k["k3"].max()}


def sequence_mask_denominators(i, want):
    """A weight of 0 on the second response, under two averages and two denominators."""
    fields = {"logp": [logs(r) for r in i["rho"]], "logp_sampler": [[0.0, 0.0]] * 2, "logp_old": [[0.0, 0.0]] * 2}
    fields["kl_sampler"] = [[0.0, 0.0], [1.0, 1.0]]
    rollouts, policy = batch([i["A"]] * 2, **fields)
    trm = kenpo.get("trm-exact").but(advantage=Given())
    means = {o: trm.but(aggregate=TokenMean(over=o)) for o in ("all", "kept")}
    return {
        "sum_all": kenpo.evaluate(trm, rollouts, policy).loss.detach(),
        "token_mean_all": kenpo.evaluate(means["all"], rollouts, policy).loss.detach(),
        "token_mean_kept": kenpo.evaluate(means["kept"], rollouts, policy).loss.detach(),
    }


def moments(i) -> tuple[dict, torch.Tensor, torch.Tensor]:
    fields = {"logp": [x - 9 for x in i["log_ratio"]], "logp_sampler": [-9.0] * len(i["log_ratio"])}
    x = tensor(i["log_ratio"])
    return fields, x, trust.outward(x, tensor(i["A"]))


def second_moment(i, want):
    fields, x, out = moments(i)
    stage = SecondMoment(i["budget"])
    mask = weights(stage, i["A"], **fields)
    _, gain = None, ratios.saturate(x).exp() * tensor(i["A"]) * mask
    squares = (x * x)[out & (mask > 0)]
    return {
        "outward": out.double(),
        "mask": mask,
        "mean_before": (x * x)[out].mean(),
        "mean_after": squares.mean() if len(squares) else 0.0,
        "objective": gain.mean(),
    }


def second_moment_code(i, want):
    fields, x, out = moments(i)
    low, high = MomentClip(i["budget"]).range(context(i["A"], **fields))
    squares, tau = (x * x)[out], math.log1p(high)
    after = squares.clamp(max=tau * tau).mean()
    return {"sorted": squares.sort().values, "tau": tau, "low": low, "high": high, "mean_after": after}


def second_moment_areal(i, want):
    """The budget at which each further token goes is the mean over the tokens left."""

    def kept(budget):
        fields = {"logp_old": i["log_ratio"], "logp_sampler": [0.0] * len(i["log_ratio"])}
        return weights(CorrectionMoment(budget), **fields)

    for gone, average in enumerate(want["suffix_means"]):
        assert int((kept(average + 2e-6) == 0).sum()) == gone
        assert int((kept(average - 2e-6) == 0).sum()) > gone
    first = int((kept(want["suffix_means"][1] + 2e-6) == 0).nonzero())
    masked = (kept(i["budget"]) == 0).nonzero().flatten().tolist()
    return {"masked": sorted(masked, key=lambda k: k != first), "suffix_means": want["suffix_means"]}


def spurious_tokens(i, want):
    stage = SpuriousTokens(i["probability"], i["quantile"], i["scope"])
    keep = weights(stage, i["A"], logp=logs(i["p"]), entropy=i["H"])
    pool = [h for h, p, a in zip(i["H"], i["p"], i["A"], strict=True) if a > 0 and p < i["probability"]]
    pool = pool if i["scope"] == "conditional" else i["H"]
    return {"keep": keep, "denominator": keep.sum(), "threshold": trust.quantile(tensor(pool), i["quantile"])}


def correction_ratios(i, want):
    open_ = {"cap": None}
    return {
        "rho": weights(TruncatedIS(**open_), **i),
        "product": weights(TruncatedIS(level="sequence", **open_), **i)[0],
        "geometric": ratios.sequence_log_mean(c := context(**i).log_correction(), c != 0)[0, 0].exp(),
    }


def truncated_is(i, want):
    cap = i.pop("cap")
    return {
        "token": weights(TruncatedIS(cap), **i),
        "sequence": weights(TruncatedIS(cap, level="sequence"), **i)[0],
    }


def masked_is(i, want):
    return {"weights": weights(MaskedIS(i.pop("floor"), i.pop("cap")), **i)}


def binary_kl(i, want):
    p, q = tensor(math.log(i["p"])), tensor(math.log(i["q"]))
    return {"forward": divergences.binary_kl(p, q), "reverse": divergences.binary_kl(q, p)}


def binary_kl_band(i, want):
    """The accepted band of ρ at each probability under μ, found by trying all ρ."""
    out = {}
    for mu in want["rho_bands"]:
        rho = [k / 1000 for k in range(1, 30000) if k / 1000 * float(mu) < 1]
        old = [math.log(r * float(mu)) for r in rho]
        keep = weights(BinaryKLMask(i["threshold"]), logp_old=old, logp_sampler=logs([float(mu)] * len(rho)))
        kept = [r for r, k in zip(rho, keep.tolist(), strict=True) if k]
        out[mu] = [kept[0], kept[-1]]
    for mu, band in want["rho_bands"].items():
        same(out[mu], band, 0.06)
    return {}


def group_mass(i, want):
    fields = {"logp": [[math.log(r) - 5] for r in i["ratios"]], "logp_old": [[-5.0]] * len(i["ratios"])}
    return {"weights": weights(GroupMass(i["cap"]), **fields)[:, 0]}


def mini_rl(i, want):
    logp, old, mu = (list(x) for x in zip(*i["logp_old_sampler"], strict=True))
    fields = {"logp": [logp] * 2, "logp_old": [old] * 2, "logp_sampler": [mu] * 2, "mask": [[1] * 5, [0] * 5]}
    out = {}
    for name in ("mini_rl", "mini_rl-old"):
        for A in (0.75, -0.25):
            rollouts, policy = batch([A, -A], **fields)
            result = kenpo.evaluate(kenpo.get(name), rollouts, policy)
            word = "slope" if name == "mini_rl" else "slope_old"
            out[f"{word}_A={A}".replace("0.", ".")] = 2 * result.coefficients[0, 1:]
            if name == "mini_rl":
                out[f"loss_A={A}".replace("0.", ".")] = 2 * result.loss.detach()
    ctx = context(**fields)
    bounded = TokenRatio(anchor="sampler")(ctx).clamp(max=kenpo.get("mini_rl").surrogate.cap)
    out |= {"r": TokenRatio()(ctx)[0, 1:].detach(), "w": bounded[0, 1:].detach()}
    return {n: v for n, v in out.items() if n in want}


def query_weight(i, want):
    s = i["surprisal"]
    fields = {"mask": [[0, 1]] * 3, "prompt_mask": [[1, 0]] * 3, "logp_ref": [[-x, 0.0] for x in s]}
    return {"w": weights(QueryWeight(sum(s) / len(s)), **fields)[:, 1]}


def compatibility(i, want):
    source = [i["source_mean"]] * len(i["receiver"])
    w = weights(Compatibility(i["threshold"]), logp_old=i["receiver"], logp_source=source)[:, 0]
    free = weights(Compatibility(0.0), logp_old=i["receiver"], logp_source=source)[:, 0]
    same(free, [min(s, 1.0) for s in want["s"]], 1e-9)
    return {"w": w}


def sequence_kl_mask(i, want):
    stage = SequenceKLMask(max=i["max"], mean=i["mean"])
    return {"keep": weights(stage, logp=i["log_ratio"], logp_sampler=[[0.0], [0.0]])[:, 0]}


def most_surprising(i, want):
    return {"boosted": trust.top_fraction(tensor(i["surprisal"]), tensor(i["chosen"]).bool(), i["fraction"])}


CHECKS = {
    "binary_divergence": binary_divergence,
    "divergence_mask": divergence_mask,
    "topk_divergence": topk_divergence,
    "kl_estimators": kl_estimators,
    "sequence_mask_denominators": sequence_mask_denominators,
    "second_moment": second_moment,
    "second_moment_code": second_moment_code,
    "second_moment_areal": second_moment_areal,
    "spurious_tokens": spurious_tokens,
    "correction_ratios": correction_ratios,
    "truncated_is": truncated_is,
    "masked_is": masked_is,
    "binary_kl": binary_kl,
    "binary_kl_band": binary_kl_band,
    "group_mass": group_mass,
    "mini_rl": mini_rl,
    "query_weight": query_weight,
    "compatibility": compatibility,
    "sequence_kl_mask": sequence_kl_mask,
    "most_surprising": most_surprising,
}
