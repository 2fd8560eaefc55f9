"""RePO: where nearly all of a group failed, the policy restates an expert's trace in its own words (``origin`` 3).

Two requests for each such prompt: explain the trace, then answer the problem with the explanation at hand. The answer
takes the place of the group's worst response, by the rule of `kenpo.experience.exchange.replaced`. Source: RePO,
arXiv:2602.10819. Not public and ours: the thresholds, the templates, that an answer is judged before it may replace
anything, the phrases that give a trace away, and the buffer (off by default; the paper has none).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kenpo.engines.base import Engine, Request, SamplingOptions
from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError
from kenpo.experience.exchange import replaced
from kenpo.experience.experts import Experts
from kenpo.experience.judge import judge
from kenpo.experience.mixture import Group, Member, Mixture
from kenpo.experience.problem import Problem, Prompt
from kenpo.experience.verdict import Verdict
from kenpo.fields import REPHRASED
from kenpo.seeds import stable_seed

EXPLAIN = (
    "{prompt}\n\nA worked solution:\n\n{trace}\n\nExplain in your own words how this problem is solved, step by step."
)
ANSWER = "{prompt}\n\nNotes:\n\n{explanation}\n\nSolve the problem in your own words, as if without these notes."
#: An answer with one of these speaks of a text that the bare prompt does not show.
GIVEAWAYS = (
    "worked solution", "given solution", "provided solution", "reference solution", "the solution above", "the notes",
    "these notes", "the expert", "the trace",
)  # fmt: skip
_THOUGHT = "</think>"


@dataclass(frozen=True)
class RephraseOptions:
    """``explain`` places ``{prompt}`` and ``{trace}``, ``answer`` ``{prompt}`` and ``{explanation}``.

    A prompt is hard if at least a ``share`` of its group's rewards is below ``below``. ``buffer``: accepted answers
    kept, one per prompt, the latest; one of them stands in where the fresh one is refused.
    """

    explain: str = EXPLAIN
    answer: str = ANSWER
    below: float = 0.5
    share: float = 0.75
    buffer: int = 0
    giveaways: tuple[str, ...] = GIVEAWAYS

    def __post_init__(self) -> None:
        for option, text, field in (("explain", self.explain, "trace"), ("answer", self.answer, "explanation")):
            for needed in ("prompt", field):
                if text.count(f"{{{needed}}}") != 1:
                    raise InputError(f"--rephrase-{option}: {{{needed}}} must stand in it once, got {text!r}")
        if not 0 <= self.share <= 1:
            raise InputError(f"--rephrase-share: {self.share} is a share of the group and lies in [0, 1]")


def filled(prompt: Prompt, template: str, **texts: str) -> Prompt:
    """The template with prompt and texts in their places, braces in them meaning nothing; of a conversation, in its
    last message.

    >>> filled("1+1=", "{trace};{prompt}", trace="{prompt}2")
    '{prompt}2;1+1='
    """
    if isinstance(prompt, str):
        return re.sub(r"\{(\w+)\}", lambda m: {**texts, "prompt": prompt}.get(m[1], m[0]), template)
    *before, last = [dict[str, Any](m) for m in prompt]
    return [*before, {**last, "content": filled(str(last.get("content", "")), template, **texts)}]


class Rephrase(Mixture):
    """Puts restated answers in the places of failures.

    The row holds the bare prompt; its ``logp_sampler`` is that of the request that sampled it. Its state is the buffer:
    ``[[prompt id, entry], …]``, oldest first, JSON alone.
    """

    def __init__(
        self, experts: Experts, engine: Engine, sampling: SamplingOptions, options: RephraseOptions, seed: int = 0
    ) -> None:
        self.experts, self.engine, self.sampling, self.options, self.seed = experts, engine, sampling, options, seed
        self.buffer: dict[int, dict[str, Any]] = {}
        self._fresh: list[list[Any]] = []

    def check(self, problems: Sequence[Problem]) -> None:
        """InputError if no problem has a trace, or for the first whose trace the model can't be shown."""
        self.experts.check(problems)
        for problem in problems:
            for trace in self.experts.traces.of(problem):
                self._ask(problem, self.options.explain, trace=self.experts.encode(problem, trace).text)

    def join(self, groups: Sequence[Group], step: int, round_: int) -> None:
        hard = [(g, t) for g in groups if self._place(g, math.inf) is not None
                for t in self.experts.chosen(g, step, round_)[:1]]  # fmt: skip
        traces = [self.experts.encode(g.problem, t).text for g, t in hard]
        asked = [self._ask(g.problem, self.options.explain, trace=t) for (g, _), t in zip(hard, traces, strict=True)]
        told = self._sample([g for g, _ in hard], asked, step, round_, 0)
        answerable: list[tuple[Group, Episode, list[int]]] = []
        for (group, _), explanation in zip(hard, told, strict=True):
            text = explanation.text.rpartition(_THOUGHT)[2].strip()
            try:
                answerable.append((group, explanation, self._ask(group.problem, self.options.answer, explanation=text)))
            except InputError as error:
                self._aside(group, explanation, Verdict(math.nan, "abstain", detail=str(error)), "no answer was asked")
        answers = self._sample([g for g, _, _ in answerable], [ids for _, _, ids in answerable], step, round_, 1)
        verdicts = judge(self.experts.verifier, [g.problem for g, _, _ in answerable], [[e] for e in answers])
        for (group, explanation, _), answer, (verdict,) in zip(answerable, answers, verdicts, strict=True):
            self._settle(group, answer, verdict, len(explanation.tokens))

    def _settle(self, group: Group, answer: Episode, verdict: Verdict, further: int) -> None:
        """Accept or refuse a group's fresh answer; where it is refused, one from the buffer may stand in."""
        why = self.refusal(group, answer, verdict)
        if why is None:
            entry = {
                "ids": answer.tokens, "logp": answer.logp, "version": answer.version, "text": answer.text,
                "reward": verdict.reward, "extracted": verdict.answer, "parts": dict(verdict.parts),
            }  # fmt: skip
            self._fresh.append([group.problem.id, entry])
            self._replace(group, entry, verdict, {"further_tokens": further})
            return
        self._aside(group, answer, verdict, why, further)
        kept = self.buffer.get(group.problem.id)
        if kept is not None and self._place(group, kept["reward"]) is not None:
            old = Verdict(kept["reward"], "ok", kept["extracted"], parts=kept["parts"])
            self._replace(group, kept, old, {"buffered": True})

    def refusal(self, group: Group, answer: Episode, verdict: Verdict) -> str | None:
        """Why an answer takes no place, or None."""
        if answer.truncated:
            return "truncated"
        found = next((g for g in self.options.giveaways if g in answer.text.lower()), None)
        if found is not None:
            return f"it names the trace ({found!r})"
        return "no better than what it would replace" if self._place(group, verdict.reward) is None else None

    def _place(self, group: Group, reward: float) -> int | None:
        o = self.options
        return replaced([m.verdict.reward for m in group.members], reward, delta=o.below, rho=o.share)

    def _replace(self, group: Group, entry: Mapping[str, Any], verdict: Verdict, told: Mapping[str, Any]) -> None:
        place = self._place(group, verdict.reward)
        assert place is not None
        failure = group.members[place]
        ids = entry["ids"]
        # no support: what top-k and top-p kept was kept after another prompt
        said = Segment(ids, sampled=True, logp=entry["logp"], version=entry["version"], support=[[]] * len(ids))
        bare = self.experts.prompts.encode(group.problem)
        episode = Episode((given(bare), said), text=entry["text"])
        group.members[place] = Member(episode, verdict, REPHRASED, {"origin": "rephrased", **told})
        failure.told = {**failure.told, "aside": "replaced"}
        group.aside.append(failure)

    def _aside(self, group: Group, episode: Episode, verdict: Verdict, why: str, further: int = 0) -> None:
        told = {"origin": "rephrased", "aside": why, "further_tokens": further}
        group.aside.append(Member(episode, verdict, REPHRASED, told))

    def _ask(self, problem: Problem, template: str, **texts: str) -> list[int]:
        return self.experts.prompts.encode(replace(problem, prompt=filled(problem.prompt, template, **texts)))

    def _sample(
        self, groups: Sequence[Group], prompts: Sequence[Sequence[int]], step: int, round_: int, which: int
    ) -> list[Episode]:
        seeds = [stable_seed(self.seed, step, round_, g.place, which, 0x7265) for g in groups]
        return self.engine.sample([Request(tuple(p), s, self.sampling) for p, s in zip(prompts, seeds, strict=True)])

    # -- the buffer ---------------------------------------------------------------------------------------------------

    def begin(self, state: Any) -> None:
        self.buffer = {int(id_): entry for id_, entry in state or ()}
        self._fresh = []

    def fresh(self) -> list[Any]:
        return self._fresh if self.options.buffer else []

    def kept(self, fresh: Sequence[Any]) -> Any:
        kept = dict(self.buffer)
        for id_, entry in fresh:
            kept.pop(id_, None)
            kept[id_] = entry
        newest = list(kept.items())[-self.options.buffer :] if self.options.buffer else []
        return [[id_, entry] for id_, entry in newest]
