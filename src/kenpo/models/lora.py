"""LoRA adapters through peft: putting one in, opening and saving them, and the policy that training started from.

The model stays a plain transformers model whose linear layers hold the adapter, so sampling, scoring and training run
it as any other. Its output head never holds one: the fused log-probs read the head's weight.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.models.foreign import nobody_asked, refuse_modules

ACTIVE, STARTING, AVERAGE = "default", "starting", "average"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(path: str | Path) -> bool:
    """Whether `path` is a folder that peft saved an adapter to."""
    return (Path(path).expanduser() / _CONFIG).is_file()


def is_adapted(model: Any) -> bool:
    """Whether the model holds an adapter that this module put in."""
    return hasattr(model, "_kenpo_adapter")


def add_adapter(model: Any, rank: int, *, alpha: float, targets: Sequence[str] = (), seed: int = 0) -> None:
    """Put a fresh adapter into the model and freeze everything else: it changes nothing yet (B = 0).

    ``targets`` are names of linear layers such as q_proj; none: all but the head. `InputError` for names that fit no
    layer, for the head, and without peft.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with _quiet():
                wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise InputError(f"--lora-targets {' '.join(targets)}: {str(error).splitlines()[0][:200]}") from None
    _settle(model, wrapped, "--lora-targets")


def base_of(folder: Path) -> str:
    """The model that an adapter folder belongs to. `InputError` if the folder does not say, or peft can't use it."""
    try:
        config = json.loads((folder / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: {_CONFIG} can't be read ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{folder}: {_CONFIG} holds no JSON object; it is not an adapter that peft saved")
    refuse_modules(str(folder), _CONFIG, config)
    kind = "DoRA (use_dora)" if config.get("use_dora") else config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{folder}: only plain LoRA adapters can be opened, this is {kind}")
    if config.get("lora_bias") or config.get("bias", "none") != "none":
        raise InputError(f"{folder}: an adapter with biases of its own; only weights can be merged and compared")
    base = config.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise InputError(f"{folder}: {_CONFIG} names no base model; put its path at base_model_name_or_path")
    beside = folder / base
    return str(beside) if not Path(base).exists() and beside.is_dir() else base


def open_adapter(model: Any, folder: Path, trainable: bool) -> None:
    """Put a saved adapter into its base model. `InputError` if it does not fit."""
    peft = _peft()
    try:
        with _quiet(), nobody_asked():
            wrapped = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if "weights_only" in str(error):  # torch's own advice is to run what the file holds
            reason = "the file holds Python objects beside tensors, which may be code; save it as safetensors"
        raise InputError(f"{folder}: the adapter can't be opened ({reason})") from None
    _settle(model, wrapped, str(folder))


def _settle(model: Any, wrapped: Any, where: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer) or any(isinstance(m, AuxiliaryTrainingWrapper) for m in model.modules()):
        raise InputError(f"{where}: an adapter on the output head or on whole modules is not supported; leave them out")
    object.__setattr__(model, "_kenpo_adapter", wrapped)  # not as a submodule: it holds the model
    model.eval()


# -- the policy that training started from ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Chosen:
    """Which adapter of a model is read in a pass: the one named, or None, the base alone."""

    model: Any
    adapter: str | None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it the model reads that one. Nothing else is switched: no parameter's requires_grad."""
        layers = list(_layers(self.model))
        before = [(m._active_adapter, m._disable_adapters) for m in layers]
        for m in layers:
            m._active_adapter, m._disable_adapters = [self.adapter or ACTIVE], self.adapter is None
        try:
            yield
        finally:
            for m, (name, off) in zip(layers, before, strict=True):
                m._active_adapter, m._disable_adapters = name, off


def policy_as_it_is(model: Any) -> Chosen:
    """The policy that a model with an adapter is now, to be kept while the adapter goes on being trained.

    An adapter that changes nothing yet (every B is 0) is left off; of any other a frozen copy is put beside it.
    """
    own = dict(model.named_parameters())
    if not any(bool(p.any()) for n, p in own.items() if ".lora_B." in n or ".lora_embedding_B." in n):
        return Chosen(model, None)
    return copied_adapter(model, STARTING)


def copied_adapter(model: Any, to: str) -> Chosen:
    """A frozen copy of the trained adapter beside it, called `to`."""
    own = dict(model.named_parameters())
    wrapped, trained = model._kenpo_adapter, {n: p.requires_grad for n, p in own.items()}
    with _quiet():
        wrapped.add_adapter(to, wrapped.peft_config[ACTIVE])
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in own.items():
            if f".{to}." in name:
                source_name = name.replace(f".{to}.", f".{ACTIVE}.")
                source = own[source_name]
                p.data = source.detach().clone()
                p.requires_grad_(False)
                source.requires_grad_(trained[source_name])
    for m in _layers(model):
        m._active_adapter = [ACTIVE]
    return Chosen(model, to)


def _layers(model: Any) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (m for m in model.modules() if isinstance(m, BaseTunerLayer))


# -- saving -----------------------------------------------------------------------------------------------------------


def merged_state(model: Any) -> dict[str, Tensor]:
    """The model's state dict with the adapter added to the weights, under the names of a model without one.

    The model itself is left alone: merging in place and back again would round its weights.
    """
    tensors = {}
    for name, value in model.state_dict().items():
        if ".lora_" not in name:
            tensors[name.replace(".base_layer.", ".")] = value
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = tensors[f"{name}.weight"]
            delta = module.get_delta_weight(ACTIVE).detach()
            tensors[f"{name}.weight"] = (weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta).to(
                weight.dtype
            )
    return tensors


def save_adapter(model: Any, folder: Path) -> None:
    """The adapter alone, as peft opens it."""
    model._kenpo_adapter.save_pretrained(str(folder), selected_adapters=[ACTIVE])
    _name_base_absolutely(folder / _CONFIG)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card


def _name_base_absolutely(path: Path) -> None:
    """A base model that is a folder is named by its whole path, so that the adapter opens from any working folder."""
    config = json.loads(path.read_text())
    base = config.get("base_model_name_or_path")
    if base and Path(base).is_dir():
        path.write_text(json.dumps(config | {"base_model_name_or_path": str(Path(base).resolve())}, indent=2))


def restore_adapter(model: Any, checkpoint: Path) -> None:
    """Take up the adapter of a checkpoint. `InputError` if it holds none."""
    from safetensors.torch import load_file

    peft = _peft()
    places = [p / _WEIGHTS for p in (checkpoint / "trainer" / "adapter", checkpoint)]
    file = next((p for p in places if p.is_file()), None)
    if file is None:
        raise InputError(f"{checkpoint}: holds no adapter to go on from")
    peft.set_peft_model_state_dict(model._kenpo_adapter, load_file(str(file)), adapter_name=ACTIVE)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without peft's warnings: it reads deprecated names of transformers, and sets by itself what it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError(
            "LoRA needs peft, which is not installed; in Kenpo's checkout: pip install '.[lora]'"
        ) from None
    return peft
