"""How much memory a run may take: sizes of the model, what a step holds of them, an estimate by purpose."""

from __future__ import annotations

from dataclasses import dataclass

from kenpo.models.backward import head_chunk
from kenpo.models.head import FEW_LOGITS
from kenpo.models.scorer import Scorer


@dataclass(frozen=True)
class ModelFacts:
    """Sizes that the memory estimate needs."""

    parameters: int
    bytes_each: int
    layers: int
    hidden: int
    vocabulary: int
    kv_width: int
    chunk: int | None  # positions that a fused head takes at a time; None: its logits are made whole
    trainable: int  # parameters
    unshared: str | None  # why prompts can't be shared in training; None: they can
    context: int | None  # tokens that the model takes, where it names a limit
    padded: str | None  # why rows are padded; None: they are packed
    critic: int = 0  # bytes of a critic's own model

    @classmethod
    def of(cls, scorer: Scorer) -> ModelFacts:
        """Read them off a loaded model."""
        model = scorer.model
        c = model.config.get_text_config(decoder=True)
        heads = getattr(c, "num_attention_heads", None) or 1
        hidden = getattr(c, "hidden_size", None) or 1
        width = (getattr(c, "head_dim", None) or hidden // heads) * (getattr(c, "num_key_value_heads", None) or heads)
        parameters = list(model.parameters())
        return cls(
            sum(p.numel() for p in parameters), parameters[0].element_size(),
            getattr(c, "num_hidden_layers", None) or 1, hidden,
            int(model.get_input_embeddings().weight.shape[0]), width, head_chunk(scorer.head),
            sum(p.numel() for p in parameters if p.requires_grad), scorer.why_unshared(),
            scorer.context, scorer.padded,
        )  # fmt: skip


#: Bytes of one moment, where it is not held in the parameter's own precision.
MOMENT_BYTES = {
    "torchao_adamw_8bit": 1.0,
    "torchao_adamw_4bit": 0.5,
    "bnb_adamw_8bit": 1.0,
    "bnb_paged_adamw_8bit": 1.0,
}


@dataclass(frozen=True)
class Load:
    """What a step holds at once. ``sampled``: tokens while sampling; ``reference``: a model beside the policy's."""

    microbatch_tokens: int
    sampled: int
    optimizer: str
    reference: bool = False
    entropy: bool = False
    checkpointing: bool = False


def memory_estimate(load: Load, facts: ModelFacts) -> dict[str, int]:
    """Bytes by purpose; rough (activations at about 34 numbers per hidden unit and layer), on one process."""
    n, each, moved = facts.parameters, facts.bytes_each, facts.trainable
    adapted = moved < n
    full = max(each, 4)
    master = 4 * moved if each < 4 and not adapted else 0
    rows = load.microbatch_tokens
    at_once = rows if facts.chunk is None or rows * facts.vocabulary <= FEW_LOGITS else min(rows, facts.chunk)
    return {
        "weights": n * each,
        "gradients": moved * each + master,
        "optimizer": round(MOMENT_BYTES.get(load.optimizer, full) * 2 * moved) + master,
        "reference": n * each if load.reference and not adapted else 0,
        "critic": facts.critic,
        "key-value cache while sampling": 2 * facts.layers * facts.kv_width * each * load.sampled,
        "activations of a microbatch": rows
        * facts.hidden
        * each
        * (facts.layers + 17 if load.checkpointing else 17 * facts.layers),
        "logits of a microbatch": (4 if load.entropy else 3) * at_once * facts.vocabulary * full,
    }
