"""Expert traces: worked solutions that somebody else wrote, as rows of the groups of their problems (``origin`` 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError
from kenpo.experience.demonstrations import unopened
from kenpo.experience.files import check_prompt, prompt_key
from kenpo.experience.judge import judge
from kenpo.experience.layouts import pick
from kenpo.experience.mixture import Group, Member, Mixture
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.rows import is_missing
from kenpo.experience.shards import read_rows
from kenpo.experience.verdict import Verifier
from kenpo.seeds import stable_seed
from kenpo.types import EXPERT

TRACE, LOGP = "trace", "trace_logp"


@dataclass(frozen=True)
class Trace:
    """An expert's response: its text, or its ids as they were sampled, the end included where there was one.

    ``logp``: the expert's own log-probs in nats, one per token of the ids or of the text with its end; one number
    stands for every token (0: a fixed procedure wrote it); None: nobody knows.
    """

    response: str | tuple[int, ...]
    logp: float | tuple[float, ...] | None = None
    where: str = ""


class Traces:
    """The traces of a task's problems: from a file, matched by the prompt, or from the task's own column ``trace``.

    The file has a column for the prompt, ``trace`` (text, or a list of ids) and perhaps ``trace_logp`` (a list of
    numbers, or one). A prompt may have several. Raises `InputError` naming file, row and column.
    """

    def __init__(self, path: str | None = None, prompt_column: str = "prompt") -> None:
        self.path = path
        self._by_prompt = None if path is None else read_traces(path, prompt_column)

    def of(self, problem: Problem) -> Sequence[Trace]:
        """All traces of the problem; empty: there is none."""
        if self._by_prompt is not None:
            return self._by_prompt.get(prompt_key(problem.prompt), ())
        if is_missing(problem.extra.get(TRACE)):
            return ()
        return (_trace(problem.extra, problem.place or f"problem {problem.id}"),)

    def check(self, problems: Iterable[Problem]) -> list[Problem]:
        """The problems that have a trace. InputError if none has."""
        found = [p for p in problems if self.of(p)]
        if not found and self.path is not None:
            raise InputError(
                f"--expert {self.path}: no trace belongs to a problem of the task; prompts are compared letter by "
                "letter, so take them over unchanged"
            )
        if not found:
            raise InputError(
                "expert traces: the task has no column 'trace'; name a file of them (prompt, trace) with --expert"
            )
        return found


def read_traces(path: str, prompt_column: str = "prompt") -> dict[bytes, list[Trace]]:
    """The traces of a data file by the digest of their prompt."""
    found: dict[bytes, list[Trace]] = {}
    for row in read_rows(path):
        where = row.place
        prompt = pick(row.values, prompt_column)
        check_prompt(prompt, where, prompt_column)
        if is_missing(row.values.get(TRACE)):
            raise InputError(f"{where}: no trace (column 'trace'); give it one or remove the row")
        found.setdefault(prompt_key(prompt), []).append(_trace(row.values, where))
    return found


def _trace(values: Mapping[str, Any], where: str) -> Trace:
    """A row's trace, checked as far as that goes without a tokenizer."""
    response, logp = values[TRACE], values.get(LOGP)
    if isinstance(response, list | tuple):
        if not response or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in response):
            raise InputError(f"{where}: column 'trace' holds a list that is not one of token ids")
        response = tuple(response)
    elif not isinstance(response, str):
        raise InputError(f"{where}: column 'trace' holds a {type(response).__name__}, not a text or a list of ids")
    if is_missing(logp):
        return Trace(response, None, where)
    numbers: list[Any] = list(logp) if isinstance(logp, list | tuple) else [logp]
    for x in numbers:
        if not isinstance(x, int | float) or isinstance(x, bool) or not math.isfinite(x) or x > 0:
            raise InputError(f"{where}: column 'trace_logp' holds {x!r}, which is no log-prob (a number of at most 0)")
    return Trace(response, tuple(map(float, numbers)) if isinstance(logp, list | tuple) else float(numbers[0]), where)


class Experts(Mixture):
    """Adds `rows` traces to each group whose problem has one; with more traces than rows, others each time.

    The verifier judges a trace like any response. `known`: the algorithm reads the expert's log-probs, so that each
    trace must have them; elsewhere they are NaN where nobody knows them: never the policy's own.
    """

    def __init__(
        self, traces: Traces, prompts: Prompts, verifier: Verifier, ends: frozenset[int], rows: int = 1, seed: int = 0,
        known: bool = False,
    ) -> None:  # fmt: skip
        self.traces, self.prompts, self.verifier, self.ends = traces, prompts, verifier, ends
        self.rows, self.seed, self.known = rows, seed, known

    def check(self, problems: Iterable[Problem]) -> None:
        """InputError if none of the problems has a trace, or for the first one that can't be used."""
        for problem in self.traces.check(problems):
            for trace in self.traces.of(problem):
                self.encode(problem, trace)

    def join(self, groups: Sequence[Group], step: int, round_: int) -> None:
        drawn = [(g, self.encode(g.problem, t)) for g in groups for t in self.chosen(g, step, round_)]
        verdicts = judge(self.verifier, [g.problem for g, _ in drawn], [[e] for _, e in drawn])
        for (group, episode), (verdict,) in zip(drawn, verdicts, strict=True):
            group.members.append(Member(episode, verdict, EXPERT, {"origin": "expert"}))

    def chosen(self, group: Group, step: int, round_: int) -> list[Trace]:
        """`rows` of the problem's traces, in turn from one that step and place decide; fewer if there are fewer."""
        traces = self.traces.of(group.problem)
        first = stable_seed(self.seed, step, round_, group.place, 0x6578) % max(1, len(traces))
        return [traces[(first + k) % len(traces)] for k in range(min(self.rows, len(traces)))]

    def encode(self, problem: Problem, trace: Trace) -> Episode:
        """The problem's prompt and the trace. InputError, naming the row, for what the model can't take."""
        prompt, tokenizer = self.prompts.encode(problem), self.prompts.tokenizer
        if isinstance(trace.response, str):
            if tokenizer.eos_token_id is None:
                raise InputError(f"{trace.where}: the tokenizer has no end token to put behind a trace; give it as ids")
            text = unopened(tokenizer, prompt, trace.response)
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            ids = ids if ids and ids[-1] in self.ends else [*ids, tokenizer.eos_token_id]
        else:
            ids, text = list(trace.response), ""
        self._check(ids, len(prompt), trace)
        ended = ids[-1] in self.ends
        if not isinstance(trace.response, str):
            text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
        # no support: an expert's tokens may lie outside what top-k and top-p keep of the policy
        said = Segment(ids, sampled=True, logp=self._logp(trace, len(ids)), support=[[]] * len(ids))
        return Episode((given(prompt), said), finish="stop" if ended else "length", text=text)

    def _check(self, ids: Sequence[int], before: int, trace: Trace) -> None:
        unknown, end = self.prompts.tokenizer.unk_token_id, self.prompts.tokenizer.eos_token_id
        if unknown is not None and unknown != end and unknown in ids:
            raise InputError(f"{trace.where}: the trace holds characters that the tokenizer does not know")
        if max(ids) >= self.prompts.vocabulary:
            raise InputError(f"{trace.where}: id {max(ids)} is outside the model's vocabulary")
        context = self.prompts.context
        if context is not None and before + len(ids) > context:
            raise InputError(
                f"{trace.where}: prompt and trace, {before + len(ids)} tokens, do not fit the model's context of "
                f"{context}; shorten the trace or remove the row"
            )

    def _logp(self, trace: Trace, tokens: int) -> Sequence[float]:
        if trace.logp is None:
            if self.known:
                raise InputError(
                    f"{trace.where}: no log-probs of the expert (column 'trace_logp'), which the algorithm reads; add "
                    "them, or use luffy, which takes them as 1"
                )
            return [math.nan] * tokens
        if isinstance(trace.logp, float):
            return [trace.logp] * tokens
        if len(trace.logp) != tokens:
            raise InputError(
                f"{trace.where}: {len(trace.logp)} numbers in column 'trace_logp', but the trace has {tokens} tokens "
                "with this tokenizer, its end included; give it as ids"
            )
        return trace.logp
