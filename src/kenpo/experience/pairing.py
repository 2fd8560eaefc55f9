"""What a run on pairs is made of: the pairs, the fields they bring, and where reference log-probs come from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from kenpo.errors import InputError
from kenpo.experience.options import BUNDLED_TASK
from kenpo.experience.pairs import FLIPPED, Columns, PairStream, bundled_pairs, file_pairs
from kenpo.experience.preferences import PairOptions
from kenpo.types import POLICY_FIELDS

#: Fields that only pairs bring: the responses' turns, by how much one is better, and the score of a head.
FIELDS = frozenset({"turn", "margin", "score"})


def supplied_by(config: Any) -> frozenset[str]:
    """What pairs supply beyond what samples do."""
    return FIELDS if config.source == "pairs" else frozenset()


def keeps_reference(config: Any, needs: Collection[str]) -> bool:
    """Whether reference log-probs are computed once: rows of pairs don't change. A divergence over the vocabulary is no
    log-prob of a row, so that it needs the model itself."""
    return config.source == "pairs" and "logp_ref" in needs and "kl_ref" not in needs


def open_pairs(config: Any, algorithm: Any) -> PairStream:
    """The pairs of a run. InputError for data that can't be used and for an accuracy that a reward model has not."""
    if not algorithm.uses_logp and config.eval_task is not None:
        raise InputError(f"--eval-task: {algorithm.name!r} learns a score, it answers nothing; leave it out")
    if config.task == BUNDLED_TASK:
        return bundled_pairs(
            config.seed, FLIPPED if config.flipped_pairs is None else config.flipped_pairs, config.eval_problems
        )
    columns = Columns(config.prompt_column, config.chosen_column, config.rejected_column)
    return file_pairs(config.task, columns, config.seed, config.eval_problems, config.eval_file, config.unusable_pairs)


def pair_options(config: Any, algorithm: Any, dtype: torch.dtype) -> PairOptions:
    """How a batch of pairs is made and measured."""
    speaks = algorithm.uses_logp
    kept = "logp_ref" in algorithm.needs
    return PairOptions(
        batch=config.prompts, reach=config.prompts * config.steps, measured=config.eval_batch, system=config.system,
        terms=frozenset(algorithm.needs & POLICY_FIELDS.keys()), margin="margin" in algorithm.needs,
        reference="all" if kept else "heldout" if speaks else "none",
        numbers=f"{config.dtype}, head {config.head_dtype}, temperature {config.temperature:g}", dtype=dtype,
    )  # fmt: skip
