"""What samples earn: the verifier's verdicts on an engine's completions, and the record of each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kenpo.engines.base import Completion
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Sample, Verdict, Verifier


def judge(
    verifier: Verifier, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
) -> list[list[Verdict]]:
    """A verdict per completion, in the same nesting."""
    samples = [
        Sample(completion=c.text, answer=p.answer, prompt=p.prompt, truncated=c.truncated, extra=p.extra)
        for p, cs in zip(problems, completions, strict=True)
        for c in cs
    ]
    flat = iter(verifier.score(samples) if samples else [])
    return [[next(flat) for _ in cs] for cs in completions]


def describe(problem: Problem, number: int, completion: Completion, verdict: Verdict) -> dict[str, Any]:
    """One line of ``samples.jsonl``."""
    return {
        "problem": problem.id,
        "sample": number,
        "prompt": problem.prompt,
        "completion": completion.text,
        "tokens": len(completion.tokens),
        "truncated": completion.truncated,
        "reward": None if math.isnan(verdict.reward) else float(verdict.reward),
        "parts": {n: None if math.isnan(v) else float(v) for n, v in verdict.parts.items()},
        "status": verdict.status,
        "extracted": verdict.answer,
        "answer": problem.answer,
        "detail": verdict.detail,
    }
