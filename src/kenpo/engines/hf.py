"""The embedded engine: samples with the very module that is trained, exactly, through transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kenpo.engines.base import Done, Engine, Request, SamplingOptions, Weights, check_prompt_fits
from kenpo.engines.decoding import Decoder, choose
from kenpo.engines.sampling import Draw, StopStrings, cut_text, draw, take_best, uniforms
from kenpo.engines.text import decode_all
from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError, NonFiniteError, RunError
from kenpo.models.loading import context_length, stop_ids, vocabulary_size


class HFEngine(Engine):
    """Samples from a transformers causal LM in this process.

    Each prompt runs once for all its samples, prompts of different lengths share a batch (padded at the left, positions
    counting real tokens), and rows that are done leave it. ``batch_tokens`` bounds the tokens (prompt and response, all
    rows) held at once; it changes speed and memory, not the samples. Log-probs come from the logits that sampled.
    The model is put in eval mode. ``version`` counts its weights and is stamped on every segment.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int = 65536) -> None:
        if batch_tokens < 1:
            raise InputError(f"batch_tokens: {batch_tokens} is not 1 or more")
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.version = 0
        self.stops = stop_ids(model, tokenizer)

    def update(self, weights: Weights, version: int) -> None:
        """The shared module has been updated; no cache outlives a call, so only the version changes."""
        self.version = version

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        """One episode per request, in order. Greedy ones have no ``support``.

        Every end-of-sequence id of the model and tokenizer ends a response, and so does a stop string. A response ends
        at ``max_tokens`` or at the model's context, as ``length``, with the last token as sampled. Raises `InputError`
        for a prompt that is empty, too long or outside the vocabulary; `NonFiniteError` for NaN logits; `RunError`
        where a GPU's memory is too small for ``batch_tokens``.
        """
        self._check(requests)
        self.model.eval()
        found: dict[int, Episode] = {}
        for options in dict.fromkeys(r.options for r in requests):
            places = [i for i, r in enumerate(requests) if r.options == options]
            for chunk in self._chunks(requests, places, self.pads()):
                try:
                    made = self._run(requests, chunk, options)
                except torch.OutOfMemoryError:
                    raise RunError(
                        f"out of memory while sampling {len(chunk)} responses at once, up to {self.batch_tokens:,} "
                        f"tokens; give --sampling-tokens {max(1, self.batch_tokens // 2)} or less"
                    ) from None
                for i, episode in zip(chunk, made, strict=True):
                    found[i] = episode
                    if done is not None:
                        done(i, episode)
        return [found[i] for i in range(len(requests))]

    def _check(self, requests: Sequence[Request]) -> None:
        size, context = vocabulary_size(self.model), context_length(self.model)
        for i, r in enumerate(requests):
            check_prompt_fits(r.prompt, context, r.options.max_tokens, f"request {i}")
            if max(r.prompt) >= size or min(r.prompt) < 0:
                raise InputError(f"request {i}: id {max(r.prompt)} is outside the model's vocabulary of {size}")

    def _limit(self, request: Request) -> int:
        context, most = context_length(self.model), request.options.max_tokens
        return most if context is None else min(most, context - len(request.prompt))

    def _chunks(self, requests: Sequence[Request], places: Sequence[int], pads: bool) -> Iterator[list[int]]:
        """Requests to run together: those of one prompt next to each other, prompts in order of length, within the
        token budget."""
        first: dict[tuple[int, ...], int] = {}
        for i in places:
            first.setdefault(requests[i].prompt, i)
        chunk: list[int] = []
        longest = 0
        for i in sorted(places, key=lambda i: (len(requests[i].prompt), first[requests[i].prompt], i)):
            length = len(requests[i].prompt) + self._limit(requests[i])
            widest = max(longest, length)
            mixed = not pads and chunk and len(requests[chunk[0]].prompt) != len(requests[i].prompt)
            if chunk and (mixed or widest * (len(chunk) + 1) > self.batch_tokens):
                yield chunk
                chunk, widest = [], length
            longest = widest
            chunk.append(i)
        if chunk:
            yield chunk

    def pads(self) -> bool:
        """Whether prompts of different lengths may run together."""
        return choose(self.model).pads

    def decoder(self, options: SamplingOptions) -> Decoder:
        """What gives the logits of one batch, token by token."""
        return choose(self.model)(self.model)

    def _run(self, requests: Sequence[Request], chunk: Sequence[int], options: SamplingOptions) -> list[Episode]:
        device = self.model.get_input_embeddings().weight.device
        rows = [requests[i] for i in chunk]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(r.prompt for r in rows))}
        owner = torch.tensor([place[r.prompt] for r in rows], device=device)
        decoder = self.decoder(options)
        limits = torch.tensor([self._limit(r) for r in rows], device=device)
        u = uniforms([r.seed for r in rows], int(limits.max())).to(device)
        greedy = torch.tensor([r.greedy for r in rows], device=device)
        mixed = bool(greedy.any()) and not bool(greedy.all())
        tight = bool((limits < options.max_tokens).any())
        book = _Book(len(chunk), int(limits.max()), device)
        stopper = _Stopper(self, options, len(chunk), device)
        live = torch.arange(len(chunk), device=device)  # rows the decoder holds, by their place in the chunk
        done = torch.zeros(len(chunk), dtype=torch.bool, device=device)
        logits = decoder.start([list(prompt) for prompt in place], owner)
        for t in range(int(limits.max())):
            if mixed:
                drawn = draw(logits, u[live, t], options).where(~greedy[live], take_best(logits, options))
            else:
                drawn = take_best(logits, options) if rows[0].greedy else draw(logits, u[live, t], options)
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
                kept = going.nonzero().squeeze(-1)
                decoder.keep(kept)
                live, ids = live[kept], ids[kept]
            logits = decoder.step(ids)
        return self._episodes(book, rows, options, stopper)

    def _episodes(
        self, book: _Book, rows: Sequence[Request], options: SamplingOptions, stopper: _Stopper
    ) -> list[Episode]:
        tokens, logps, supports = book.lists()
        top_ids, top_logp = book.likeliest()
        truncated = book.truncated.tolist()
        spoken = [t[:-1] if t and t[-1] in stopper.ids else t for t in tokens]
        whole = decode_all(self.tokenizer, spoken, keep_special=options.keep_special)
        texts = [cut_text(text, options.stop)[0] for text in whole]
        made = []
        for r, request in enumerate(rows):
            support = None if supports is None or request.greedy else supports[r]
            top = {} if top_ids is None else {"top_ids": top_ids[r], "top_logp": top_logp[r]}
            said = Segment(tokens[r], sampled=True, logp=logps[r], version=self.version, support=support, **top)
            finish = "length" if truncated[r] else "stop"
            made.append(Episode((given(request.prompt), said), finish=finish, text=texts[r]))
        return made


def _refuse(bad: Tensor, chunk: Sequence[int], live: Tensor, t: int) -> None:
    """NaN logits in a row that still runs are an error; a row that is done may hold anything."""
    if bool(bad.any()):
        raise NonFiniteError(
            f"request {chunk[int(live[bad.nonzero()[0, 0]])]}, response position {t}: the model's logits are NaN; its "
            "weights are damaged, or training has diverged (lower --lr)"
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
    top: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = torch.zeros((self.rows, self.limit), dtype=torch.long, device=self.device)
        self.logp = torch.zeros((self.rows, self.limit), dtype=torch.float64, device=self.device)
        self.length = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.truncated = torch.zeros(self.rows, dtype=torch.bool, device=self.device)

    def write(self, live: Tensor, t: int, drawn: Draw, done: Tensor) -> None:
        self.tokens[live, t] = drawn.ids
        self.logp[live, t] = drawn.logp.double()
        going = ~done[live]
        if drawn.top is not None:
            ids, logp = drawn.top
            self.top.append((live[going], ids[going], logp[going]))
        if drawn.support is not None:
            self.support.append((live[going], drawn.support[going]))

    def end(self, rows: Tensor, length: int, truncated: Tensor) -> None:
        self.length[rows] = length
        self.truncated[rows] = truncated

    def likeliest(self) -> tuple[list[Any] | None, list[Any]]:
        """Recorded ids and log-probs of the likeliest tokens as lists, by row and token; None: none were recorded."""
        ids: list[Any] = [[] for _ in range(self.rows)]
        logps: list[Any] = [[] for _ in range(self.rows)]
        for rows, some, values in self.top:
            for row, known, logp in zip(rows.tolist(), some.tolist(), values.tolist(), strict=True):
                count = sum(i >= 0 for i in known)
                ids[row].append(known[:count])
                logps[row].append(logp[:count])
        return (ids if self.top else None), logps

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
