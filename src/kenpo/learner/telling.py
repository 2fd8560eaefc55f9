"""How a step does its work, as the plan says it: phases, the head, which rollouts go backward, shared prompts."""

from __future__ import annotations

from typing import Any

from kenpo.learner.idle import why_none_is_idle
from kenpo.learner.learner import couples_tokens
from kenpo.learner.memory import ModelFacts
from kenpo.learner.planning import Passes
from kenpo.models.head import FEW_LOGITS
from kenpo.models.shared_prompt import LEAST_SHARE

ONE_PHASE = "every weight can be made inside its own microbatch"


def phases(microbatch_tokens: int, passes: Passes) -> str:
    """Why a step takes one phase or two."""
    if passes.whole_groups:
        return (
            f"microbatches hold whole groups ({passes.whole_groups}); "
            f"with a group of more than {microbatch_tokens:,} tokens: yes"
        )
    return passes.two_phase or ONE_PHASE


def head_path(microbatch_tokens: int, restricted: bool, algorithm: Any, passes: Passes, facts: ModelFacts) -> str:
    """How log-probs and their gradients come about, and why. ``restricted``: sampling kept a part of the vocabulary."""
    if facts.chunk is None:
        return "whole logits: the head is not a bare Linear, or the model's own logits differ from it"
    if restricted:
        return "whole logits: they are restricted to what top-k and top-p sampling kept"
    if microbatch_tokens * facts.vocabulary <= FEW_LOGITS:
        return f"whole logits: {microbatch_tokens:,} positions of {facts.vocabulary:,} are few"
    fused = f"fused, {facts.chunk:,} positions at a time"
    if passes.two_phase:
        return f"{fused}, in the second phase: four matrix products in all"
    if "kl_ref" in algorithm.needs:
        return "a tile of the vocabulary at a time, made again in the backward pass: four matrix products (kl_ref)"
    coupled = couples_tokens(algorithm, not passes.old)
    if coupled:
        return f"{fused}: three matrix products, four for longer responses ({coupled} couples their tokens)"
    return f"{fused}: three matrix products"


def backward_path(algorithm: Any, passes: Passes) -> str:
    """Which rollouts run a backward pass, and why."""
    if passes.two_phase:
        return "rollouts with a coefficient other than 0; the rest is left out of the second phase"
    why = why_none_is_idle(algorithm)
    return f"every rollout: {why}" if why else "groups with an advantage other than 0; the rest is only measured"


def prompt_path(group_size: int, facts: ModelFacts) -> str:
    """Whether a group's prompt runs once in scoring and training, and why not."""
    if facts.unshared:
        return f"no   {facts.unshared}"
    if group_size == 1:
        return "no   a group holds one sample"
    return f"yes  where that saves {LEAST_SHARE:.0%} of a group's tokens, in scoring and training"
