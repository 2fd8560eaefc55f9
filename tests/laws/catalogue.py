"""What a law needs to know about a catalogued algorithm: the numbers to set and the extra fields to draw."""

from __future__ import annotations

import kenpo

#: Settings without which an entry refuses to run.
SETTINGS: dict[str, dict] = {
    name: {"aggregate.length": 7} for name in ("dr_grpo", "range_grpo", "luffy", "luffy-known")
}
#: Extra fields that the random cases must carry.
OPTIONS: dict[str, dict] = {"spo": {"binary": True}, "rlcr": {"binary": True}}


def algorithm(name: str) -> kenpo.Algorithm:
    """The catalogued algorithm, ready to run."""
    return kenpo.get(name).with_settings(SETTINGS.get(name, {}))


def options(name: str) -> dict:
    """Options of `make_case` that draw every field the algorithm reads."""
    a = kenpo.get(name)
    found: dict = {}
    if a.needs & {"topk_ids", "topk_logp", "topk_logp_sampler", "topk_logp_old"}:
        found["topk"] = 3
    if a.needs & {"router_logp", "router_logp_old", "routes"}:
        found["router"] = (2, 2)
    if a.advantage.reads_parts or any(s.parts for s in a.shaping):
        found["parts"] = True
    if "origin" in a.needs:
        found["experts"] = True
    if "support_ids" in a.needs:
        found["decisions"] = True
    if a.needs & {"values", "values_old", "score_old"}:
        found["critic"] = True
    if any(s.supervised for s in a.regularizers):
        found |= {"supervised": True, "experts": False}
    if a.needs & {"answer", "prompt_id", "target_ids", "drift"}:
        found["answers"] = True
    if "logp_old" in a.advantage.needs:  # read before the policy runs
        found["fresh"] = False
    if "prompt_mask" in a.needs:
        found["query"] = True
    if "logp_old" in a.prepare_needs:
        found["fresh"] = False  # it must be there before the first update
    return found | OPTIONS.get(name, {})


def names() -> list[str]:
    return kenpo.names()
