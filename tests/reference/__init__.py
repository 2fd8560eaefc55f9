"""Independent references of Kenpo's algorithms: plain Python, the papers' formulas, nothing from kenpo.

`REFERENCES[name](case, **numbers)` gives (loss, coefficients, advantages, weights); without numbers the defaults are
the catalogue's. `numbers(settings)` turns a case file's dotted settings into these keyword arguments.
"""

from __future__ import annotations

from functools import partial

from . import (
    group_coupled,
    grpo_family,
    mismatch,
    mixed_policy,
    pairwise,
    rejection,
    signals,
    teachers,
    trust_region,
    values,
)
from .batch import sequence_sum
from .variants import VARIANTS

REFERENCES = {
    "grpo": grpo_family.grpo,
    "dapo": grpo_family.dapo,
    "dr_grpo": grpo_family.dr_grpo,
    "gspo": grpo_family.gspo,
    "gspo_token": grpo_family.gspo_token,
    "luspo": grpo_family.luspo,
    "gmpo": grpo_family.gmpo,
    "pmpo": grpo_family.pmpo,
    "sapo": grpo_family.sapo,
    "sspo": grpo_family.sspo,
    "cispo": grpo_family.cispo,
    "dhpo": grpo_family.dhpo,
    "dppo": trust_region.dppo,
    "dppo_kl": trust_region.dppo_kl,
    "dppo_topk": trust_region.dppo_topk,
    "trm": trust_region.trm,
    "minpro": trust_region.minpro,
    "m2po": trust_region.m2po,
    "off_policy_grpo": trust_region.off_policy_grpo,
    "stapo": trust_region.stapo,
    "mini_rl": trust_region.mini_rl,
    "rspo": trust_region.rspo,
    "tis": mismatch.tis,
    "mis": mismatch.mis,
    "icepop": mismatch.icepop,
    "online_icepop": mismatch.online_icepop,
    "kpop": mismatch.kpop,
    "gppo": mismatch.gppo,
    "ripo": mismatch.ripo,
    "rloo": mismatch.rloo,
    "sft": mismatch.sft,
    "reinforce_pp": mismatch.reinforce_pp,
    "reinforce_pp_baseline": mismatch.reinforce_pp_baseline,
    "stare": group_coupled.stare,
    "gmc_grpo": group_coupled.gmc_grpo,
    "missing_old_logits": mixed_policy.missing_old_logits,
    "opsm": rejection.opsm,
    "stare-c2": partial(group_coupled.stare, variant="C2"),
} | VARIANTS

# Further methods. Some need arguments beside the case (a length, random numbers, a source's log-probs).
WIDER = {
    "zcpo": group_coupled.zcpo,
    "reco": group_coupled.reco,
    "sis": group_coupled.sis,
    "conspo": group_coupled.conspo,
    "ggpo": group_coupled.ggpo,
    "range_grpo": group_coupled.range_grpo,
    "luffy": mixed_policy.luffy,
    "grin": mixed_policy.grin,
    "oc_grpo": mixed_policy.oc_grpo,
    "graft_with_sources": mixed_policy.graft,
    "erpo": mixed_policy.erpo,
    "reinforce_pp_kl": mixed_policy.reinforce_pp_kl,
    "remax": mixed_policy.remax,
    "ppo": values.ppo,  # a fifth item: slopes of values and entropy
    "vapo": values.vapo,
    "reward_model": pairwise.reward_model_batch,  # a fifth item: slopes of scores
    "dpo": pairwise.dpo_batch,
    "dpo-conservative": partial(pairwise.dpo_batch, variant="conservative", label_smoothing=0.1),
    "dpo-robust": partial(pairwise.dpo_batch, variant="robust", label_smoothing=0.1),
    "ipo": partial(pairwise.dpo_batch, variant="ipo"),
    "ipo-normalised": partial(pairwise.dpo_batch, variant="ipo_length_normalised"),
    "simpo": pairwise.simpo_batch,
    "mdre": pairwise.mdre_batch,
    "repo": grpo_family.grpo,
    "sft_mixture": mixed_policy.sft_mixture,
    "rlid": mixed_policy.rlid,
    "opd": teachers.opd,
    "opd-tinker": partial(teachers.opd, anchor="sampler", average=sequence_sum),
    "opd-prime": partial(teachers.opd, anchor="current", clip=None, drop=0.2, drift=1e-3),
    "opd-prefix": teachers.opd_prefix,
    "opsa": teachers.opsa,
    "opsa-fixed": partial(teachers.opsa, adaptive=False),
    "gkd": teachers.gkd,  # from here on a fifth item: slopes of the divergence
    "gkd-mixed": partial(teachers.gkd, own=0.5),
    "minillm": teachers.minillm,
    "minillm-inclusive": partial(teachers.minillm, inclusive=True),
    "sdpo": teachers.sdpo,
    "sdpo-sampled": partial(teachers.sdpo, sampled=True),
    "opsd": partial(teachers.sdpo, weighted=False),
    "teacher_mixed": teachers.teacher_mixed,
    "teacher_mixed-added": partial(teachers.teacher_mixed, rule="additive"),
    "teacher_mixed-losses": partial(teachers.teacher_mixed, rule="losses"),
    "spo": signals.spo,
    "ttrl": signals.ttrl,
    "ttpo": signals.ttpo,
    "gapo": signals.gapo,
    "mad_rl": signals.mad_rl,
    "mad_rl-l2": partial(signals.mad_rl, kind="l2"),
    "mad_rl-forward-kl": partial(signals.mad_rl, kind="forward_kl"),
    "mad_rl-jsd": partial(signals.mad_rl, kind="jsd"),
    "rlcr": signals.rlcr,
    "gprl": signals.gprl,
    "riskpo": signals.riskpo,
    "riskpo-masses": partial(signals.riskpo, masses=True),
    "ppo-ptx": partial(values.ppo, ptx=27.8),
    "rfpo": partial(values.ppo, lam=1.0, kl_coef=0.0, frozen=True),
    "reinforce_pp-kl": partial(mixed_policy.reinforce_pp_kl, kl_coef=0.01),
}


def numbers(settings: dict) -> dict:
    """{"surrogate.low": .1} as {"low": .1}; `"regularizers": []` as beta 0. The last part of a key names the number."""
    if "regularizers" in settings and settings["regularizers"] != []:
        raise ValueError("from a file a tuple slot can only be emptied")
    return {"beta" if key == "regularizers" else key.rsplit(".", 1)[-1]: 0.0 if key == "regularizers" else value
            for key, value in settings.items()}  # fmt: skip
