"""The embedded engine: samples with the very module that is trained, exactly, through transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kenpo.engines.base import Completion, SamplingOptions, check_prompt_fits
from kenpo.engines.decoding import choose
from kenpo.engines.sampling import Draw, StopStrings, cut_text, decode_all, draw, take_best, uniforms
from kenpo.errors import InputError, NonFiniteError
from kenpo.models.loading import context_length, stop_ids, vocabulary_size


class HFEngine:
    """Samples from a transformers causal LM in this process.

    Each prompt runs once for all its samples, prompts of different lengths share a batch (padded at the left, positions
    counting real tokens), and rows that are done leave it. ``batch_tokens`` bounds the tokens (prompt and response, all
    rows) held at once; it changes speed and memory, not the samples. Log-probs come from the logits that sampled.
    The model is put in eval mode. ``version`` counts its weights and is stamped on every completion.
    """

    streams = True  # `generate` takes `done`

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int = 65536) -> None:
        if batch_tokens < 1:
            raise InputError(f"batch_tokens: {batch_tokens} is not 1 or more")
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.version = 0
        self.stops = stop_ids(model, tokenizer)

    def set_weights(self, version: int) -> None:
        """The shared module has been updated; no cache outlives a call, so only the version changes."""
        self.version = version

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        greedy: bool = False,
        done: Callable[[int, list[Completion]], None] | None = None,
    ) -> list[list[Completion]]:
        """For each prompt one completion per seed, in order. With ``greedy`` the likeliest token is taken at each step
        and the seeds only count the samples; top-k and top-p then have no effect and ``support`` is None.

        ``done(p, completions)`` is called as soon as prompt p has all of its own; what it raises ends the sampling.

        Every end-of-sequence id of the model and tokenizer ends a response, and so does a stop string. A response ends
        at ``max_tokens`` or at the model's context, ``truncated``, with the last token as sampled. Raises `InputError`
        for a prompt that is empty, too long or outside the vocabulary; `NonFiniteError` for NaN logits.
        """
        if len(prompts) != len(seeds):
            raise InputError(f"seeds: {len(seeds)} rows for {len(prompts)} prompts")
        self._check(prompts, options)
        self.model.eval()
        kind = choose(self.model) if any(seeds) else None
        found: list[list[Completion | None]] = [[None] * len(s) for s in seeds]
        for chunk in self._chunks(prompts, seeds, options, pads=kind is None or kind.pads):  # type: ignore[attr-defined]
            assert kind is not None
            for (p, s), completion in zip(chunk, self._run(kind, prompts, seeds, chunk, options, greedy), strict=True):
                found[p][s] = completion
            for p in dict.fromkeys(p for p, _ in chunk):
                if done is not None and None not in found[p]:
                    done(p, [c for c in found[p] if c is not None])
        return [[c for c in row if c is not None] for row in found]

    def _check(self, prompts: Sequence[list[int]], options: SamplingOptions) -> None:
        size, context = vocabulary_size(self.model), context_length(self.model)
        for p, ids in enumerate(prompts):
            check_prompt_fits(ids, context, options.max_tokens, f"prompt {p}")
            if max(ids) >= size or min(ids) < 0:
                raise InputError(f"prompt {p}: id {max(ids)} is outside the model's vocabulary of {size}")

    def _limit(self, prompt: Sequence[int], options: SamplingOptions) -> int:
        context = context_length(self.model)
        return options.max_tokens if context is None else min(options.max_tokens, context - len(prompt))

    def _chunks(
        self, prompts: Sequence[list[int]], seeds: Sequence[Sequence[int]], options: SamplingOptions, pads: bool
    ) -> Iterator[list[tuple[int, int]]]:
        """(prompt, sample) pairs to run together, prompts in order of length, within the token budget."""
        chunk: list[tuple[int, int]] = []
        longest = 0
        for p in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            length = len(prompts[p]) + self._limit(prompts[p], options)
            for s in range(len(seeds[p])):
                widest = max(longest, length)
                mixed = not pads and chunk and len(prompts[chunk[0][0]]) != len(prompts[p])
                if chunk and (mixed or widest * (len(chunk) + 1) > self.batch_tokens):
                    yield chunk
                    chunk, widest = [], length
                longest = widest
                chunk.append((p, s))
        if chunk:
            yield chunk

    def _run(
        self,
        kind: type,
        prompts: Sequence[list[int]],
        seeds: Sequence[Sequence[int]],
        chunk: list[tuple[int, int]],
        options: SamplingOptions,
        greedy: bool,
    ) -> list[Completion]:
        device = self.model.get_input_embeddings().weight.device
        used = sorted({p for p, _ in chunk}, key=lambda p: len(prompts[p]))
        place = {p: i for i, p in enumerate(used)}
        owner = torch.tensor([place[p] for p, _ in chunk], device=device)
        decoder = kind(self.model)
        limits = torch.tensor([self._limit(prompts[p], options) for p, _ in chunk], device=device)
        u = uniforms([seeds[p][s] for p, s in chunk], int(limits.max())).to(device)
        tight = bool((limits < options.max_tokens).any())
        book = _Book(len(chunk), int(limits.max()), device)
        stopper = _Stopper(self, options, len(chunk), device)
        live = torch.arange(len(chunk), device=device)  # rows the decoder holds, by their place in the chunk
        done = torch.zeros(len(chunk), dtype=torch.bool, device=device)
        logits = decoder.start([prompts[p] for p in used], owner)
        for t in range(int(limits.max())):
            drawn = take_best(logits, options) if greedy else draw(logits, u[live, t], options)
            if bool(drawn.bad.any()):
                _refuse(drawn.bad & ~done[live], chunk, live, t)
            book.write(live, t, drawn, done)
            stopped = stopper.check(live, drawn.ids, done)
            ended = stopped | (t + 1 >= limits[live])
            fresh = ended & ~done[live]
            book.end(live[fresh], t + 1, ~stopped[fresh])
            done[live] |= ended
            going = ~done[live]
            left = int(going.sum())
            if left == 0:
                break
            ids = drawn.ids
            # Dropping rows copies the cache, so it waits; but a row that filled the context can't take another step.
            if left <= 0.8 * len(live) or (tight and left < len(live)):
                rows = going.nonzero().squeeze(-1)
                decoder.keep(rows)
                live, ids = live[rows], ids[rows]
            logits = decoder.step(ids)
        return self._completions(book, options, stopper)

    def _completions(self, book: _Book, options: SamplingOptions, stopper: _Stopper) -> list[Completion]:
        tokens, logps, supports = book.lists()
        truncated = book.truncated.tolist()
        spoken = [t[:-1] if t and t[-1] in stopper.ids else t for t in tokens]
        texts = [cut_text(text, options.stop)[0] for text in decode_all(self.tokenizer, spoken)]
        return [
            Completion(
                tokens[r], logps[r], truncated[r], None if supports is None else supports[r], texts[r], self.version
            )
            for r in range(len(tokens))
        ]


def _refuse(bad: Tensor, chunk: list[tuple[int, int]], live: Tensor, t: int) -> None:
    """NaN logits in a row that still runs are an error; a row that is done may hold anything."""
    if bool(bad.any()):
        p, s = chunk[int(live[bad.nonzero()[0, 0]])]
        raise NonFiniteError(
            f"prompt {p}, sample {s}, response position {t}: the model's logits are NaN; its weights are damaged "
            "or the learning rate was too high (go back to an earlier checkpoint)"
        )


class _Stopper:
    """Which rows a token ends: by id (end of sequence, or a stop string that is one special token) or by text."""

    def __init__(self, engine: HFEngine, options: SamplingOptions, rows: int, device: torch.device) -> None:
        special = set(engine.tokenizer.all_special_tokens)
        as_ids = {s: engine.tokenizer.convert_tokens_to_ids(s) for s in options.stop if s in special}
        self.ids = engine.stops | frozenset(as_ids.values())
        self.tensor = torch.tensor(sorted(self.ids), dtype=torch.long, device=device)
        texts = [s for s in options.stop if s not in as_ids]
        self.strings = StopStrings(engine.tokenizer, texts, rows) if texts else None

    def check(self, live: Tensor, ids: Tensor, done: Tensor) -> Tensor:
        stopped = torch.isin(ids, self.tensor)
        if self.strings is None:
            return stopped
        at = (~done[live] & ~stopped).nonzero().squeeze(-1)
        hits = self.strings.push(live[at].tolist(), ids[at].tolist())
        stopped[at] = torch.tensor(hits, dtype=torch.bool, device=ids.device)
        return stopped


@dataclass
class _Book:
    """What was sampled: tokens and log-probs [R, limit], and how each row ended."""

    rows: int
    limit: int
    device: torch.device
    tokens: Tensor = field(init=False)
    logp: Tensor = field(init=False)
    length: Tensor = field(init=False)
    truncated: Tensor = field(init=False)
    support: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = torch.zeros((self.rows, self.limit), dtype=torch.long, device=self.device)
        self.logp = torch.zeros((self.rows, self.limit), dtype=torch.float64, device=self.device)
        self.length = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.truncated = torch.zeros(self.rows, dtype=torch.bool, device=self.device)

    def write(self, live: Tensor, t: int, drawn: Draw, done: Tensor) -> None:
        self.tokens[live, t] = drawn.ids
        self.logp[live, t] = drawn.logp.double()
        if drawn.support is not None:
            going = ~done[live]
            self.support.append((live[going], drawn.support[going]))

    def end(self, rows: Tensor, length: int, truncated: Tensor) -> None:
        self.length[rows] = length
        self.truncated[rows] = truncated

    def lists(self) -> tuple[list[list[int]], list[list[float]], list[list[list[int]]] | None]:
        """Tokens, log-probs and supports as lists, each row as long as its response."""
        lengths = self.length.tolist()
        tokens = [row[:n] for row, n in zip(self.tokens.tolist(), lengths, strict=True)]
        logps = [row[:n] for row, n in zip(self.logp.tolist(), lengths, strict=True)]
        if not self.support:
            return tokens, logps, None
        supports: list[list[list[int]]] = [[] for _ in lengths]
        for rows, kept in self.support:
            for row, ids in zip(rows.tolist(), kept.tolist(), strict=True):
                supports[row].append([i for i in ids if i >= 0])
        return tokens, logps, supports
