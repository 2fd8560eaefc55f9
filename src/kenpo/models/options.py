"""Options of the model that is trained: which one, its adapter, its precision, where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kenpo.errors import InputError
from kenpo.options import Limits, Options, Paths, absolute

BUNDLED_MODEL = "bundled"


def model_path(name: str) -> str:
    """A model folder's whole path; ``bundled`` and a hub's names are none."""
    return absolute(name) if name != BUNDLED_MODEL and Path(name).expanduser().is_dir() else name


@dataclass(frozen=True)
class ModelOptions(Options):
    """The policy's model."""

    LIMITS: ClassVar[Limits] = {"lora_rank": 0, "lora_alpha": 0, "threads": 1}
    PATHS: ClassVar[Paths] = {"model": model_path}

    model: str = BUNDLED_MODEL
    """Model folder or hub name of any causal LM; "bundled" is the small model in the package."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Of the model (bfloat16 on a GPU, else float32); the optimizer keeps float32 masters of a bfloat16 model."""
    head_dtype: Literal["model", "float32"] = "model"
    """Of the output head: float32 keeps the logits of a bfloat16 model exact, in sampling and training."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Implementation of attention; auto is transformers' choice, flash needs its package, a GPU and bfloat16."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Rows end to end instead of padded; auto: with flash attention. The others compute and drop what lies between."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward pass: less memory, a third more time."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank instead of the model; 0: off. A model folder that is an adapter needs none."""
    lora_alpha: float | None = None
    """Scale of the adapter, over its rank (twice the rank)."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as q_proj v_proj; default: all but the head."""
    save_adapter: bool = False
    """Checkpoints hold the adapter alone instead of a whole model with the adapter merged in."""
    device: str | None = None
    """cpu, cuda or cuda:N; default: cuda where there is one."""
    deterministic: Literal["on", "off"] = "on"
    """Deterministic kernels on a GPU; off: faster ones, and a resumed run no longer repeats bit for bit."""
    threads: int | None = None
    """CPU threads, fixed because the order of additions depends on them; default: those torch would use."""

    def check(self) -> None:
        """Every option has an effect."""
        if self.head_dtype == "float32" and self.dtype == "float64":
            raise InputError("--head-dtype float32: the model is float64 already; leave it out")
        if self.lora_alpha == 0:
            raise InputError(
                "--lora-alpha 0: the adapter would change nothing and get no gradient; give a number above 0"
            )
        if not self.lora_rank and (self.lora_alpha is not None or self.lora_targets):
            raise InputError("--lora-alpha and --lora-targets shape a new adapter: give its --lora-rank too")
