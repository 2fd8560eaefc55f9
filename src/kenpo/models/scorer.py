"""A loaded model and everything proven about it: it scores rollouts and takes gradients. It knows no loss.

Policy, reference, critic, reward model and teacher are all scorers; what trains has a learner around it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kenpo.contexts import at_own_places, in_context
from kenpo.divergence import Divergence, Term
from kenpo.errors import InputError, MissingFieldError
from kenpo.models import backward as head_walk
from kenpo.models import packing as packed_rows
from kenpo.models import shared_prompt
from kenpo.models.checkpointing import checkpointed, enable_checkpointing
from kenpo.models.head import Reference, find_head
from kenpo.models.loading import context_length, vocabulary_size
from kenpo.models.lora import AVERAGE, Chosen, copied_adapter, is_adapted, policy_as_it_is
from kenpo.models.passes import Rows, call, check_vocabulary, compact, on_host, prompt_keys, to_device
from kenpo.models.terms import OF_THE_VOCABULARY, Forward, nothing, terms_of
from kenpo.models.value_head import ScalarHeads
from kenpo.types import Policy, Rollouts

LOGP = frozenset({"logp"})
LISTED = LOGP | {"topk_logp"}


class Scorer:
    """One model's terms of rollouts, and their gradients.

    `model` is a transformers causal LM. ``temperature`` divides its logits. ``packing`` ("auto", "on", "off") lays rows
    that share no prompt end to end instead of padding them. ``checkpointing`` keeps only the layers' inputs for the
    backward pass. ``reference`` is the scorer that ``kl_ref`` compares with. ``heads`` are scalar heads (`new_heads`)
    that make ``values`` and ``score``; with ``scalars_only`` it makes nothing else: a critic, a reward model.
    ``teacher`` is the scorer that ``kl_teacher`` compares with, by the divergence of ``term``; ``sampler`` the one that
    ``kl_sampler``, KL(sampler‖policy) at the scorer's temperature, does.

    What the model can do is tried when the scorer is made: whether decoder and head give its own logits, whether
    prompts can be shared (``unshared`` says why not), whether rows can be packed (``padded``). So a change of the
    model's head or attention asks for a new scorer. The model is put into eval mode: dropout is no part of a policy.
    Raises `InputError` for a temperature that is not above 0 and for what the model can't do but was told to.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        packing: str = "auto",
        checkpointing: bool = False,
        reference: Scorer | None = None,
        heads: ScalarHeads | None = None,
        scalars_only: bool = False,
    ) -> None:
        if not temperature > 0:
            raise InputError(f"temperature: {temperature} is not above 0")
        self.model, self.temperature, self.packing, self.reference = model.eval(), temperature, packing, reference
        self.heads = ScalarHeads() if heads is None else heads
        self.scalars_only = scalars_only
        self.teacher: Scorer | None = None
        self.teacher_context: str | None = None  # the context under which the teacher reads; None: the rows as they are
        self.term: Term | None = None
        self.sampler: Scorer | None = None
        self.device = next(model.parameters()).device
        self.context, self.vocabulary = context_length(model), vocabulary_size(model)
        self.head = find_head(model)
        if self.heads and self.head is None:
            raise InputError(
                f"{type(model).__name__}: a scalar head reads the decoder's states, and those do not give its logits"
            )
        self.module = model if self.head is None else self.head.decoder
        self.unshared = shared_prompt.reason_against(model, self.module)
        self.padded = packed_rows.why_padded(model, self.module, packing)
        self.layers: list[Any] = enable_checkpointing(model) if checkpointing else []
        self.chosen: Chosen | None = None  # which adapter it reads; None: the one that is trained, if there is one
        self._told = False

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def makes(self) -> frozenset[str]:
        """The Policy fields that it can make."""
        if self.scalars_only:
            return frozenset(self.heads)
        absent = {"kl_ref"} if self.reference is None else set()
        absent |= {"kl_teacher"} if self.teacher is None or self.term is None else set()
        absent |= {"kl_sampler"} if self.sampler is None else set()
        return (OF_THE_VOCABULARY - absent) | frozenset(self.heads)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters by their own names, then those of the scalar heads."""
        yield from self.model.named_parameters()
        yield from self.heads.named_parameters(prefix="scalar_heads")

    def why_unshared(self) -> str | None:
        """None where prompts that rows share run once, with gradients as they are switched now; else the reason."""
        if self.layers and torch.is_grad_enabled():
            return "gradient checkpointing runs layers twice, which would fill a cache twice"
        return self.unshared

    def frozen(self) -> Scorer:
        """The policy that the model is now, to be asked after the model has moved on: the same model with its adapter
        off or with a frozen copy of it, or a frozen copy of the model."""
        twin = self.as_it_goes()
        if is_adapted(self.model):
            twin.chosen = policy_as_it_is(self.model)
            return twin
        return twin._with_a_copy()

    def averaged(self) -> Scorer:
        """A frozen copy whose weights may be moved: a second adapter in the same model, or a second model."""
        twin = self.as_it_goes()
        if is_adapted(self.model):
            twin.chosen = copied_adapter(self.model, AVERAGE)
            return twin
        return twin._with_a_copy()

    def as_it_goes(self) -> Scorer:
        """The same model as it is at each moment, read without a reference or teacher of its own."""
        twin = copy.copy(self)
        twin.reference, twin.teacher, twin.teacher_context, twin.layers, twin.sampler = None, None, None, [], None
        twin.heads = copy.deepcopy(self.heads).requires_grad_(False)
        return twin

    def _with_a_copy(self) -> Scorer:
        self.model = copy.deepcopy(self.model).requires_grad_(False)
        self.head = find_head(self.model)
        self.module = self.model if self.head is None else self.head.decoder
        return self

    def without_adapter(self) -> Scorer:
        """The same model with its adapter left off, whatever that is trained to."""
        twin = self.as_it_goes()
        twin.chosen = Chosen(self.model, None)
        return twin

    # -- terms and gradients ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def terms(
        self, rollouts: Rollouts, want: frozenset[str] = LOGP, prompts: Sequence[int] | None = None,
        context: str | None = None,
    ) -> Policy:  # fmt: skip
        """The wanted Policy fields of the rollouts' trainable tokens, without graph, on the model's device.

        ``rollouts.tokens`` [B,T] holds -1 where there is no token, anywhere in the row. ``logp`` [B,T] in nats,
        ``entropy`` [B,T], ``topk_logp`` [B,T,K] at ``rollouts.topk_ids``, ``kl_ref`` [B,T] the full-vocabulary
        KL(π_θ‖reference); ``values`` [B,T] is V before token t, ``score`` [B] stands at the last trainable token; 0 off
        the mask. ``rollouts.support_ids`` [B,T,K], if present, are the ids that top-k or top-p sampling kept: terms of
        the vocabulary are then those of the distribution renormalised over them (a position with none keeps it whole).
        `prompts` [B] are numbers, equal for rows with the same prompt (None: found by their tokens). ``context`` names
        another prompt, under which the responses are read (`in_context`); `prompts` then number the contexts.

        Logits are raised to float32 before the temperature, float64 stays. A batch without trainable token gives zeros.
        Raises `InputError` for a trainable position without token or predecessor, ids outside the vocabulary, rows
        longer than the context, a sampled token outside its support, and a field that this scorer does not make.
        """
        if context is not None:
            terms = self.graph(in_context(rollouts, context), want, prompts)
            return Policy(**at_own_places(terms.tensors(), rollouts))
        return self.graph(rollouts, want, prompts)

    def graph(self, rollouts: Rollouts, want: frozenset[str] = LOGP, prompts: Sequence[int] | None = None) -> Policy:
        """`terms` with a graph to the model's parameters (one with gradient 0, for a batch with nothing to train)."""
        made = self.forward(rollouts, want, prompts)
        if made is None:
            return nothing(self._anchor(), rollouts, want)
        return terms_of(made, rollouts, self.temperature, want)

    def backward(
        self,
        rollouts: Rollouts,
        coefficients: head_walk.Coefficients,
        want: frozenset[str] = LOGP,
        prompts: Sequence[int] | None = None,
        *,
        divisible: bool = False,
        units: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> None:
        """Add to ``.grad`` the gradient of a loss whose derivatives in the wanted terms `coefficients` tells.

        `coefficients` gets slices of the batch's rows with their terms (without graph, on the model's device), every
        row in exactly one call with ``measure`` true, and returns d loss / d field by name. `units` are numbers of
        rows, in order, that must be in one call together (None: each row by itself). What is longer than `chunk`
        positions (default: by the logits' bytes) is scored first and its chunks are made again (four products); if
        `divisible`, `coefficients` is asked for each of its chunks instead, with zeros in the terms not yet known:
        right where a token's coefficient depends on that token alone.

        The gradient is that of the backward pass through `graph`, up to rounding, and so are errors.
        """
        made = self.forward(rollouts, want, prompts)
        if made is None:
            coefficients(slice(0, len(rollouts)), nothing(self._anchor(), rollouts, want).detach(), True)
            return
        head_walk.backward(
            made, rollouts, coefficients, self.temperature, want, divisible=divisible, units=units, chunk=chunk
        )

    def idle_pass(self) -> None:
        """One token through the model, and back where gradients are on, that adds nothing: a rank that has no rows left
        makes the call that the other ranks make."""
        with self.reading(), checkpointed(self.layers):
            states = call(self.module, torch.zeros((1, 1), dtype=torch.int64, device=self.device))
        if states.requires_grad:
            states.backward(torch.zeros_like(states))

    def forward(self, rollouts: Rollouts, want: frozenset[str], prompts: Sequence[int] | None = None) -> Forward | None:
        """Everything that comes before the heads, checked as `terms` says; None without a trainable token."""
        self._check_want(want, rollouts)
        rows = self.rows(rollouts, ends="score" in want)
        if rows is None:
            return None
        where = (rows.row, rows.column)
        support = topk = other = None
        if rollouts.support_ids is not None and want & OF_THE_VOCABULARY:
            _check_support(rollouts)
            support = to_device(rollouts.support_ids, self.device)[where]
        if "topk_logp" in want:
            assert rollouts.topk_ids is not None
            check_vocabulary("topk_ids", on_host(rollouts.topk_ids), self.vocabulary)
            topk = to_device(rollouts.topk_ids, self.device)[where]
        keys = prompt_keys(rollouts) if prompts is None else prompts
        states, ends = self.states(rows, keys)
        if "kl_ref" in want:
            assert self.reference is not None
            with torch.no_grad():
                other = Reference(self.reference.states(rows, keys)[0], self.reference.head)
        return Forward(
            rows, states, ends if "score" in want else None, self.head, self.heads, support, topk, other,
            self.others(rollouts, rows, keys, want),
        )  # fmt: skip

    def rows(self, rollouts: Rollouts, ends: bool = False) -> Rows | None:
        """The rows as this model runs them, checked (`compact`)."""
        return compact(rollouts, self.device, self.context, self.vocabulary, ends)

    @torch.no_grad()
    def others(
        self, rollouts: Rollouts, rows: Rows, keys: Sequence[int], want: frozenset[str]
    ) -> dict[str, tuple[Reference, Term]]:
        """What the models beside the policy say about the same predictions, by the wanted field."""
        found = {}
        if "kl_teacher" in want and self.term is not None:
            found["kl_teacher"] = self.taught(rollouts, rows, keys), self.term
        if "kl_sampler" in want:
            assert self.sampler is not None
            theirs = Reference(self.sampler.states(rows, keys)[0], self.sampler.head)
            found["kl_sampler"] = theirs, Term("kl_sampler", "sampler", Divergence("forward"), self.temperature)
        return found

    @torch.no_grad()
    def taught(self, rollouts: Rollouts, rows: Rows, prompts: Sequence[int]) -> Reference:
        """What the teacher says about the same predictions, a constant."""
        assert self.teacher is not None
        if self.teacher_context is not None:  # the same targets in the same order, after other prompts
            hinted = in_context(rollouts, self.teacher_context)
            found = self.rows(hinted)
            assert found is not None
            rows, prompts = found, prompt_keys(hinted)
        return Reference(self.teacher.states(rows, prompts)[0], self.teacher.head)

    def states(self, rows: Rows, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states [N,H] that predict the targets, or the model's own logits [N,V]; and the states [R,H] of the
        last token that each row runs."""
        self.model.eval()
        with self.reading(), checkpointed(self.layers):
            outputs, start = self._run(rows, prompts)
        last = to_device(np.array(rows.lengths) - 1, outputs.device)
        return outputs[start[rows.source_row] + rows.source], outputs[start + last]

    def _run(self, rows: Rows, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """All passes' outputs [M,·] laid end to end, and where each row [R] would begin in them at its position 0."""
        families = self._families(rows, prompts)
        if not families:
            return self._whole_rows(rows.ids, rows.lengths)
        shared = shared_prompt.run(self.module, rows.ids, rows.lengths, families)
        size, width = shared.states.shape[:2]
        start = rows.source.new_zeros(len(rows.ids))
        start[shared.rows] = torch.arange(size, device=start.device) * width - shared.offset
        outputs = shared.states.flatten(0, 1)
        together = {r for family in families for r in family.rows}
        alone = [r for r in range(len(rows.lengths)) if r not in together]
        if alone:
            wide = [rows.lengths[r] for r in alone]
            places = to_device(np.array(alone), start.device)
            rest, begin = self._whole_rows(rows.ids[places, : max(wide)], wide)
            start[places] = len(outputs) + begin
            outputs = torch.cat([outputs, rest])
        return outputs, start

    def _whole_rows(self, ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Output states of rows that each run whole, and where each row starts in them."""
        if self.padded is None and len(lengths) > 1:
            return packed_rows.run(self.module, ids, lengths)
        return call(self.module, ids).flatten(0, 1), torch.arange(len(ids), device=ids.device) * ids.shape[1]

    def _families(self, rows: Rows, prompts: Sequence[int]) -> list[shared_prompt.Family]:
        """Rows whose prompt is to run once, but for its last token, which stays with the row."""
        keys = [(prompts[p], n) for p, n in zip(rows.places, rows.first, strict=True)]
        families, saved = shared_prompt.families(keys, rows.first, rows.lengths)
        if saved < shared_prompt.LEAST_TOKENS:
            return []
        reason = self.why_unshared()
        if reason is None:
            return families
        if not self._told:
            self._told = True
            name = type(self.model).__name__
            warnings.warn(f"{name}: prompts run once per sample, exact but slower ({reason})", stacklevel=6)
        return []

    def _check_want(self, want: frozenset[str], rollouts: Rollouts) -> None:
        if "kl_teacher" in want and self.teacher is None:
            raise MissingFieldError("kl_teacher needs a teacher to compare with")
        for name in sorted(want & {"kl_teacher", "kl_sampler"}):
            if rollouts.support_ids is not None:
                raise InputError(f"{name}: a divergence over the whole vocabulary, but sampling kept only a part of it")
        for name in sorted(want - self.makes - {"kl_ref"}):
            raise InputError(f"{name}: this scorer makes {', '.join(sorted(self.makes))}")
        if "topk_logp" in want and rollouts.topk_ids is None:
            raise MissingFieldError("topk_logp needs topk_ids in the rollouts, and the batch holds none")
        if "kl_ref" in want and self.reference is None:
            raise MissingFieldError("kl_ref needs a reference model to compare with")

    def _anchor(self) -> Tensor:
        own: Mapping[str, Tensor] = dict(self.named_parameters())
        return next((p for p in own.values() if p.requires_grad), next(iter(own.values())))

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model is the one that this scorer reads with: it has its adapter, or none."""
        return contextlib.nullcontext() if self.chosen is None else self.chosen.active()


def _check_support(rollouts: Rollouts) -> None:
    """InputError for a trained token that sampling can't have drawn."""
    assert rollouts.tokens is not None
    assert rollouts.support_ids is not None
    mask = on_host(rollouts.mask)
    support, targets = on_host(rollouts.support_ids)[mask], on_host(rollouts.tokens)[mask]
    strange = (support >= 0).any(-1) & ~(support == targets[:, None]).any(-1)
    if strange.any():
        at = int(strange.nonzero()[0][0])
        raise InputError(
            f"support_ids: trained token {int(targets[at])} (the {at + 1}. of the microbatch) is outside the ids that "
            "sampling kept there; it was not sampled with these top-k / top-p options"
        )
