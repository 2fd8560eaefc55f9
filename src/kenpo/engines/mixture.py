"""Sampling with a teacher: from it alone, or token by token from a mixture of the policy and it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kenpo.engines.base import Done, Request, SamplingOptions
from kenpo.engines.decoding import Decoder, choose
from kenpo.engines.hf import HFEngine
from kenpo.episode import Episode
from kenpo.errors import InputError
from kenpo.models.scorer import Scorer


class MixtureDecoder(Decoder):
    """Two decoders in step. Its logits over the temperature are ``log(share·q + (1−share)·p)``, p and q the two models'
    distributions at that temperature."""

    def __init__(self, policy: Decoder, teacher: Decoder, chosen: Scorer, share: float, temperature: float) -> None:
        self.policy, self.teacher, self.chosen = policy, teacher, chosen
        self.share, self.temperature = share, temperature
        self.pads = policy.pads and teacher.pads

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        return self._mixed(self.policy.start(prompts, owner), self._theirs("start", prompts, owner))

    def step(self, ids: Tensor) -> Tensor:
        return self._mixed(self.policy.step(ids), self._theirs("step", ids))

    def keep(self, rows: Tensor) -> None:
        self.policy.keep(rows)
        self.teacher.keep(rows)

    def _theirs(self, name: str, *arguments: object) -> Tensor:
        with self.chosen.reading():
            return getattr(self.teacher, name)(*arguments)

    def _mixed(self, policy: Tensor, teacher: Tensor) -> Tensor:
        p, q = ((x.float() if x.dtype.itemsize < 4 else x) / self.temperature for x in (policy, teacher))
        whole = torch.logaddexp(
            p.log_softmax(-1) + math.log1p(-self.share), q.to(p).log_softmax(-1) + math.log(self.share)
        )
        return whole * self.temperature


class TeacherEngine(HFEngine):
    """`HFEngine` of the model that a scorer reads with: its own, or the policy's with another adapter or none."""

    def __init__(self, teacher: Scorer, tokenizer: Any) -> None:
        super().__init__(teacher.model, tokenizer)
        self.teacher = teacher

    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        with self.teacher.reading():
            return super().sample(requests, done)


class MixtureEngine(HFEngine):
    """`HFEngine` whose samples come from ``share·teacher + (1−share)·policy``; greedy ones from the policy alone.

    ``logp`` of a segment is the mixture's, of which the token was drawn. Source: MiniLLM, arXiv:2306.08543.
    Raises `InputError` for a share outside (0, 1) and for vocabularies of different sizes.
    """

    def __init__(self, policy: HFEngine, teacher: Scorer, share: float) -> None:
        super().__init__(policy.model, policy.tokenizer, policy.batch_tokens)
        if not 0 < share < 1:
            raise InputError(f"mixture: the teacher's share must lie in (0, 1), got {share}")
        width = policy.model.get_output_embeddings().weight.shape[0]
        other = teacher.model.get_output_embeddings().weight.shape[0]
        if width != other:
            raise InputError(f"mixture: the teacher's vocabulary has {other} entries, the policy's {width}")
        self.teacher, self.share = teacher, share

    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        found: dict[int, Episode] = {}
        for greedy in (False, True):
            places = [i for i, r in enumerate(requests) if r.greedy is greedy]
            self._mixes = not greedy

            def told(i: int, episode: Episode, places: list[int] = places) -> None:
                if done is not None:
                    done(places[i], episode)

            if places:
                episodes = super().sample([requests[i] for i in places], told)
                found |= dict(zip(places, episodes, strict=True))
        return [found[i] for i in range(len(requests))]

    def pads(self) -> bool:
        return super().pads() and choose(self.teacher.model).pads

    def decoder(self, options: SamplingOptions) -> Decoder:
        own = super().decoder(options)
        if not self._mixes:
            return own
        theirs = choose(self.teacher.model)(self.teacher.model)
        return MixtureDecoder(own, theirs, self.teacher, self.share, options.temperature)
