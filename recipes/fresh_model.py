"""A fresh, randomly initialised causal LM from a short description of its architecture.

python recipes/fresh_model.py --out runs/fresh
python recipes/fresh_model.py --out runs/tiny --shape.family llama --shape.hidden 128 --shape.layers 2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenpo.errors import InputError, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = ("qwen3", "llama", "gpt2")


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder: `hidden` and `ffn` widths, `layers`, `heads`, `kv_heads` (not GPT-2), `context` in tokens.

    Raises `InputError` for an unknown family or sizes that do not divide. `ffn` None: 8/3 of `hidden` rounded up to a
    multiple of 64 (Qwen3, Llama: three matrices) or 4 times `hidden` (GPT-2: two matrices).
    """

    family: str
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    ffn: int | None = None
    context: int = 256

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            raise unknown_name("architecture", self.family, ARCHITECTURES)
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} is not a size; give a positive integer")
        if self.hidden % self.heads:
            raise InputError(f"hidden: {self.hidden} is not a multiple of heads ({self.heads})")
        if self.family == "gpt2" and self.kv_heads not in (None, self.heads):
            raise InputError("kv-heads: GPT-2 has one key-value head per head; leave --kv-heads out")
        if self.family != "gpt2" and (self.hidden // self.heads) % 2:
            raise InputError(
                f"hidden: {self.hidden // self.heads} per head is odd; rotary positions need an even number"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise InputError(f"heads: {self.heads} is not a multiple of kv-heads ({self.kv_heads})")

    def resolved_ffn(self) -> int:
        """The feed-forward width in use."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.family == "gpt2" else -(-8 * self.hidden // (3 * 64)) * 64

    def build(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
        """A float32 model on the CPU whose weights depend on the sizes, the vocabulary and `seed` alone.

        The output head is not tied to the embeddings, so that a saved folder always holds `lm_head.weight`.
        """
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if eos is None:
            raise InputError("tokenizer: has no end-of-sequence token, so no response could ever end; add one to it")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(self._config(len(tokenizer), eos, pad), dtype=torch.float32)
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=True)
        return model

    def _config(self, vocabulary: int, eos: int, pad: int | None) -> Any:
        from transformers import GPT2Config, LlamaConfig, Qwen3Config

        ids: dict[str, Any] = {"vocab_size": vocabulary, "eos_token_id": eos, "pad_token_id": pad, "bos_token_id": None}
        if self.family == "gpt2":
            return GPT2Config(
                n_embd=self.hidden, n_layer=self.layers, n_head=self.heads, n_inner=self.resolved_ffn(),
                n_positions=self.context, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                tie_word_embeddings=False, **ids,
            )  # fmt: skip
        family = Qwen3Config if self.family == "qwen3" else LlamaConfig
        return family(
            hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads, head_dim=self.hidden // self.heads,
            intermediate_size=self.resolved_ffn(), max_position_embeddings=self.context,
            tie_word_embeddings=False, **ids,
        )  # fmt: skip


def write(shape: Architecture, out: str, seed: int = 0, tokenizer: str | None = None) -> None:
    """Write the model folder `out`. ``tokenizer``: a folder; default: one token per character of the addition task."""
    from transformers import AutoTokenizer

    from kenpo.experience.addition import character_tokenizer

    if Path(out).exists():
        raise InputError(f"--out: {out} exists; choose another folder")
    words = character_tokenizer() if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    shape.build(words, seed).save_pretrained(out)
    words.save_pretrained(out)


def main(
    out: str, shape: Architecture = Architecture("qwen3", kv_heads=2), seed: int = 0, tokenizer: str | None = None
):
    """Write a fresh model."""
    write(shape, out, seed, tokenizer)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
