"""verl's synchronous trainer with Kenpo's coefficients in its column of advantages. Import it to register ``kenpo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_to_nested

from kenpo.errors import InputError
from kenpo.integrations.state import load_stream, save_stream
from kenpo.integrations.verl import coefficient_column, resolve, state_file
from kenpo.integrations.verl_config import check_one_step, why_not_coefficients

#: verl's columns -> the argument of `coefficient_column`.
COLUMNS = {
    "response_mask": "response_mask", "rm_scores": "scores", "old_log_probs": "logp", "entropy": "entropy",
    "rollout_log_probs": "logp_sampler", "ref_log_prob": "logp_ref",
}  # fmt: skip
FIELDS = {"entropy": "entropy", "logp_sampler": "logp_sampler", "logp_ref": "logp_ref"}


@register_trainer("kenpo")
class KenpoTrainer(PPOTrainerSync):
    """Any algorithm that the whole batch can feed, two phases and selection included; one optimizer step per batch."""

    def __init__(self, config: Any) -> None:
        self.algorithm, self.stream = resolve(str(config.algorithm.adv_estimator)), None
        check_one_step(config, f"kenpo:{self.algorithm.name}")
        config.trainer.v1.trainer_mode = "sync"  # what this trainer is in all but its advantages
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        names = ["uid", *COLUMNS]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        nested, present = data["response_mask"], set(data.keys())
        uid = [str(u) for u in data.pop("uid").tolist()] if "uid" in present else _uids(batch.keys)
        padded = data.to_padded_tensor()
        columns: dict[str, Any] = {COLUMNS[n]: padded[n] for n in COLUMNS if n in present}
        supplied = {"mask", "group", "rewards", "prompt_id", "logp", *(FIELDS[n] for n in columns if n in FIELDS)}
        if reason := why_not_coefficients(self.algorithm, frozenset(supplied)):
            raise InputError(f"kenpo:{self.algorithm.name}: {reason} by this configuration of verl")
        column, self.stream, figures = coefficient_column(self.algorithm, self.stream, uid=uid, **columns)
        metrics.update(figures)
        made = response_to_nested(column.to(torch.float32), nested)
        fields = TensorDict({"advantages": made, "returns": made}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        if self.stream is not None:
            save_stream(self._folder(), self.algorithm, self.stream)

    def _load_checkpoint(self) -> Any:
        found = super()._load_checkpoint()
        self.stream = load_stream(self._folder(), self.algorithm)
        return found

    def _folder(self) -> Path:
        return state_file(self.config.trainer.default_local_dir, self.global_steps)


def _uids(keys: list[str]) -> list[str]:
    """The prompt's part of verl's row keys, UID_SESSION_INDEX."""
    return [key.rsplit("_", 2)[0] for key in keys]
