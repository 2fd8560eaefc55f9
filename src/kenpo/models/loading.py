"""Models and tokenizers from a folder or a hub name, and how a prompt becomes token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kenpo.errors import InputError, unknown_name
from kenpo.jsonfile import read_json
from kenpo.models.clock import stopped
from kenpo.models.foreign import NO_CODE, nobody_asked, refuse_kernels, wants_code
from kenpo.models.lora import base_of, is_adapter, open_adapter
from kenpo.models.templates import fitting
from kenpo.models.wide_head import widen_head

#: Attention implementations; those named flash need their package and run packed rows without padding.
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
BUNDLED = Path(__file__).parent / "bundled" / "addition"

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_model(
    path_or_name: str | Path, *, dtype: str = "float32", device: str = "cpu", trainable: bool = True,
    head_dtype: str = "model", attention: str = "auto",
):  # fmt: skip
    """A causal language model and its tokenizer: ``(model, tokenizer)``.

    ``path_or_name`` is a transformers model folder, a hub name, or ``"bundled"`` (the model shipped in the package).
    ``dtype`` is float32, bfloat16 or float64; ``head_dtype`` "float32" raises the head alone (`widen_head`). With
    ``attention`` names the implementation (`ATTENTION`; "auto": transformers' choice). With
    ``trainable=False`` no parameter requires a gradient. The folder of a LoRA adapter opens its base model and puts the
    adapter in; only the adapter is then trainable.

    The model comes in eval mode, and sampling, scoring and training all run in it: dropout would give the scoring pass
    another policy than the one that sampled, so that the ratio of a fresh sample would not be 1.

    Raises `InputError` for a folder that is missing or holds no configuration, weights or tokenizer, for a hub name
    that can't be reached, for weights that don't fill the model, and for a model that is no causal language model.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    where = _device(device)
    _check_attention(attention, dtype, where)
    folder = Path(path_or_name).expanduser()
    if is_adapter(folder):
        base = base_of(folder)
        if is_adapter(base):
            raise InputError(f"{folder}: its base model {base} is an adapter as well; name a whole model there")
        try:
            model, tokenizer = load_model(
                base, dtype=dtype, device=device, trainable=False, head_dtype=head_dtype, attention=attention
            )
        except InputError as error:
            raise InputError(f"{error} (the base model that {folder}/adapter_config.json names)") from None
        open_adapter(model, folder, trainable)
        return model, _own_tokenizer(folder, model) or tokenizer
    source, local = _resolve(path_or_name)
    with _quiet(), nobody_asked():
        config = _config(source, local)
        refuse_kernels(source, config)
        _check_causal(config, source)
        tokenizer = load_tokenizer(source, local)
        model = _weights(source, config, DTYPES[dtype], attention)
    if head_dtype == "float32" and dtype == "bfloat16":
        widen_head(model)
    model.to(where)
    model.eval()
    model.requires_grad_(trainable)
    return model, tokenizer


def _own_tokenizer(folder: Path, model: Any) -> Any:
    """The tokenizer that an adapter's folder brings along, which it was trained with; None where it has none."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    tokenizer = load_tokenizer(str(folder), True)
    highest, rows = max(tokenizer.get_vocab().values(), default=-1), vocabulary_size(model)
    if highest >= rows:
        raise InputError(
            f"{folder}: the adapter's tokenizer has ids up to {highest}, its base model's embedding {rows} rows; it "
            "belongs to another base"
        )
    return tokenizer


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} can't be used here ({_first_line(error)}); use cpu") from None
    return device


def _resolve(path_or_name: str | Path) -> tuple[str, bool]:
    """What transformers is to open, and whether it is a local folder; local folders are checked here."""
    text = str(path_or_name)
    if text == "bundled":
        if not (BUNDLED / "config.json").is_file():
            raise InputError("the bundled model is not in this installation; name a model folder instead")
        return str(BUNDLED), True
    folder = Path(text).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return str(folder), True
    if folder.is_file():
        raise InputError(f"{text}: a file; a model is a folder with config.json, weights and a tokenizer")
    parts = text.split("/")
    if not text or text[0] in "./~" or text.endswith("/") or len(parts) > 2 or "\\" in text:
        raise InputError(f"{text or repr(text)}: no such model folder")
    if _hub_is_out_of_reach(text):
        raise InputError(
            f"{text}: no such folder, and the model hub can't be reached from here; give the path of a model folder"
        )
    return text, False


def _hub_is_out_of_reach(name: str) -> bool:
    """Whether the hub's host has no address and the model is in no cache: known at once, not after many tries.

    Where a proxy is set, it alone can tell; the answer is then no.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError as error:  # not a possible name
        raise InputError(f"{name}: no such model folder, and no name a hub could have ({_first_line(error)})") from None
    if cached or getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def _check_folder(folder: Path) -> None:
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    if checkpoints and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise InputError(f"{folder}: a run's folder, no model; name one of its checkpoints, such as {checkpoints[-1]}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json; a transformers model folder is needed")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise InputError(f"{folder}: no weights (model.safetensors or pytorch_model.bin)")
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json")  # transformers would leave a broken one out, and its ends with it
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError(f"{folder}: no tokenizer (tokenizer.json); save one there with tokenizer.save_pretrained")


def _config(source: str, local: bool):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, **NO_CODE)
    except Exception as error:
        if refusal := wants_code(source, "config.json", error):
            raise refusal from None
        if local:
            raise InputError(f"{source}: config.json can't be read ({_first_line(error)})") from None
        raise InputError(
            f"{source}: no such folder, and the model hub gave nothing by that name ({_first_line(error)}); "
            "give the path of a model folder, or check the name and the connection"
        ) from None


def _check_causal(config: Any, source: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    names = list(getattr(config, "architectures", None) or [])
    wrong = names and not any(n.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for n in names)
    if config.is_encoder_decoder or wrong or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = ", ".join(names) or config.model_type
        raise InputError(f"{source}: {what} is not a causal language model (AutoModelForCausalLM)")


def load_tokenizer(source: str, local: bool) -> Any:
    """The tokenizer of a folder or hub name. `InputError` if it can't be opened, or only with code of its own."""
    from transformers import AutoTokenizer

    try:
        with nobody_asked():
            return AutoTokenizer.from_pretrained(source, local_files_only=local, **NO_CODE)
    except Exception as error:
        if refusal := wants_code(source, "the tokenizer", error):
            raise refusal from None
        where = "its files" if local else "the hub"
        raise InputError(f"{source}: the tokenizer can't be loaded from {where} ({_first_line(error)})") from None


def _check_attention(name: str, dtype: str, device: torch.device) -> None:
    if name not in ATTENTION:
        raise unknown_name("attention", name, ATTENTION)
    if "flash" in name and (dtype != "bfloat16" or device.type == "cpu"):
        raise InputError(f"attention {name!r} runs on a GPU in bfloat16, not on {device.type} in {dtype}; use sdpa")


def _weights(source: str, config: Any, dtype: torch.dtype, attention: str):
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        model, info = loader.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **NO_CODE,
            **chosen,
        )  # tensors of another shape are refused below, by name
    except Exception as error:
        if refusal := wants_code(source, "the model", error):
            raise refusal from None
        how = "".join(f" with attention {a!r}" for a in chosen.values())
        raise InputError(f"{source}: the weights can't be loaded{how} ({_first_line(error)})") from None
    missing = sorted(info["missing_keys"])
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get("mismatched_keys", ()))
    if missing or wrong:
        named = (missing + wrong)[0]
        raise InputError(
            f"{source}: the weights don't fill the model ({len(missing) + len(wrong)} tensors missing or of another "
            f"shape, such as {named}); save the whole causal language model there"
        )
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or load reports: errors are raised as one line instead."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_level = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    if "weights_only" in str(error):  # torch's own advice is to run what the file holds
        return "the file holds Python objects beside tensors, which may be code; save the model as safetensors"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def encode_prompt(tokenizer: Any, prompt: str | list[dict], system: str | None = None) -> list[int]:
    """A prompt's token ids, always a flat list of ints, ready to be continued.

    With a chat template, text becomes one user message, ``system`` a system message before it (unless the messages
    bring their own; in the first user message where the template has no system role), and the template opens the
    assistant's turn. Without one, text is encoded as it is and the contents of messages are joined by blank lines;
    ``system`` is then not used. An end-of-sequence id that a tokenizer appends by itself is taken off, and a beginning
    that the text brings itself is not doubled. Raises `InputError` if the template refuses the messages or nothing is
    encoded.
    """
    for text in [prompt] if isinstance(prompt, str) else [str(m.get("content", "")) for m in prompt]:
        check_characters(text)
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if system and not (messages and messages[0].get("role") == "system"):
            messages.insert(0, {"role": "system", "content": system})
        try:
            with stopped(tokenizer.chat_template):
                messages = fitting(tokenizer, messages)
                encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        except Exception as error:
            raise InputError(f"the chat template refuses the prompt ({_first_line(error)})") from None
        ids = _flat(encoded)
    else:
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(m["content"]) for m in prompt)
        ids, bare = _flat(tokenizer(text)), _flat(tokenizer(text, add_special_tokens=False))
        eos, bos = tokenizer.eos_token_id, tokenizer.bos_token
        if bos and text.startswith(bos):  # rendered already: the text brings its own beginning
            ids = bare
        if len(ids) > len(bare) and ids[-1] == eos and (not bare or bare[-1] != eos) and len(ids) > 1:
            ids = ids[:-1]
    if not ids:
        raise InputError("the prompt is empty: it has no tokens")
    return ids


def check_characters(text: str, what: str = "the text") -> None:
    """InputError for text that holds half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} holds {ascii(text[error.start])[1:-1]} at character {error.start + 1}, half of a surrogate pair "
            f"or a byte that is not UTF-8; mend {what}"
        ) from None


def check_ends(model: Any, tokenizer: Any, stop: Sequence[str]) -> None:
    """InputError if nothing can end a response: no end-of-sequence id and no stop string."""
    if not stop and not stop_ids(model, tokenizer):
        raise InputError(
            "neither the model nor its tokenizer names an end-of-sequence id, so every response would be cut off; set "
            "eos_token_id in the folder's generation_config.json, or give --stop TEXT"
        )


def check_system(tokenizer: Any, system: str | None) -> None:
    """InputError for a system prompt that a tokenizer without chat template has no place for."""
    if system and not getattr(tokenizer, "chat_template", None):
        raise InputError("--system: the tokenizer has no chat template to put it in; write it into the prompts instead")


def _flat(encoded: Any) -> list[int]:
    """Token ids as a flat list, whatever a tokenizer wraps them in: a dict, a tensor, a batch of one."""
    ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    return [int(i) for i in ids]


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: those of the generation configuration, the model's and the tokenizer's."""
    config = model.config
    holders = [getattr(model, "generation_config", None), config, _text_config(config), tokenizer]
    found: set[int] = set()
    for holder in holders:
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            found.update(int(i) for i in (eos if isinstance(eos, list | tuple | set) else [eos]))
    return frozenset(i for i in found if i >= 0)


def context_length(model: Any) -> int | None:
    """The most tokens (prompt and response together) that the model takes, or None where it names no limit.

    Of a model with longrope positions only what it was first trained on: beyond that the whole forward pass changes to
    other frequencies, so that a sample's log-probs would depend on the rows beside it.
    """
    config = _text_config(model.config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        usual = getattr(config, "original_max_position_embeddings", None)
        first = rope.get("original_max_position_embeddings", usual)
        if first:
            return int(first)
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding: ids at or above it can't be fed to the model."""
    return int(model.get_input_embeddings().weight.shape[0])


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
