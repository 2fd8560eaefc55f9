"""What samples in a run: the engine, a mixture with a teacher, a known noise, older weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kenpo.engines.base import Engine
from kenpo.engines.hf import HFEngine
from kenpo.engines.lagged import LaggedEngine
from kenpo.engines.mixture import MixtureEngine
from kenpo.engines.noise import NoisyEngine, parse_noise
from kenpo.engines.options import EngineOptions
from kenpo.errors import InputError
from kenpo.models.scorer import Scorer


def check_sampling(config: EngineOptions, source: str, updates: int, needs: Collection[str]) -> None:
    """InputError for options that would have no effect, or leave no row to train on. ``updates``: those per batch."""
    if config.sampler_noise is not None:
        parse_noise(config.sampler_noise)
    for option, given in (("--lag", config.lag), ("--sampler-noise", config.sampler_noise)):
        if given and config.engine != "hf":
            raise InputError(f"{option} {given}: only the embedded engine (--engine hf) simulates that; leave it out")
        if given and source == "demonstrations":
            raise InputError(f"{option} {given}: nothing is sampled from demonstrations; leave it out")
    other = config.engine if config.engine != "hf" else None
    for option, given in (("--lag", config.lag), ("--sampler-noise", config.sampler_noise), ("--engine", other)):
        if given and "kl_sampler" in needs:
            raise InputError(
                f"{option} {given}: a divergence from the sampler over the whole vocabulary needs the sampler's own "
                "weights, and those are known for the policy of the moment only; leave it out"
            )
    age = config.lag * updates
    if config.max_staleness is not None and config.max_staleness < age:
        raise InputError(
            f"--max-staleness {config.max_staleness}: with --lag {config.lag} and {updates} "
            f"update(s) per batch every row is {age} updates old, so all would be dropped; allow at least {age}"
        )


def sampling_engine(config: EngineOptions, engine: Engine, algorithm: Any, scorer: Scorer) -> Engine:
    """What the training samples come from. Evaluation asks `engine` itself, with the weights of the moment."""
    sampler = engine
    share = algorithm.advantage.mixture
    if share:
        if not isinstance(engine, HFEngine) or scorer.teacher is None:
            raise InputError(f"{algorithm.name!r} samples from a mixture of two models, which only --engine hf does")
        sampler = MixtureEngine(engine, scorer.teacher, share)
    if config.sampler_noise is not None:
        assert isinstance(sampler, HFEngine)
        sampler = NoisyEngine(sampler, config.sampler_noise)
    if config.lag:
        assert isinstance(engine, HFEngine)
        sampler = LaggedEngine(engine, config.lag, sampler)
    return sampler
