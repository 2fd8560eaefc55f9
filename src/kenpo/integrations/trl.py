"""Any Kenpo algorithm inside TRL's GRPOTrainer.

    from kenpo.integrations.trl import KenpoGRPOTrainer

    trainer = KenpoGRPOTrainer(algorithm="m2po", settings={"weights.second_moment.budget": 0.02},
                               model=…, reward_funcs=…, args=GRPOConfig(…), train_dataset=…)

TRL samples, rewards, batches, steps and logs; the algorithm takes the place of its advantages and its loss. `prepare`
sees the whole generation of all ranks, `weigh` the rows of one optimizer step, and a microbatch gives its exact share,
so the gradient is the one of `kenpo.evaluate` on that step's rows. See docs/guides/from-trl.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

import kenpo
from kenpo.algorithm import Algorithm
from kenpo.errors import HostWarning, InputError
from kenpo.integrations.host import Figures, merged, prompt_ids, shuffled_by_group
from kenpo.integrations.state import load_stream, save_stream
from kenpo.integrations.trl_config import check_config, check_fed, check_windows, defaults_of, with_length
from kenpo.types import Policy, Prepared, Rollouts

Inputs = dict[str, Any]


class KenpoGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose advantages and loss are those of ``algorithm`` (a catalogue name, ``"my.py:MINE"`` or an
    `Algorithm`), with ``settings`` by dotted key and further ``stages`` by name, as `kenpo train` takes them.

    All other arguments are TRL's. Raises `InputError` at construction for a knob of GRPOConfig that the algorithm
    replaces, for a field that TRL can't supply, and for batch sizes under which a step would not be exact. Where the
    algorithm reads log μ and TRL recorded none (its own ``generate``), the batch is scored again with the weights that
    sampled, and a `HostWarning` says so. Dropped groups are not drawn again: another `HostWarning`.
    """

    def __init__(
        self,
        *positional: Any,
        algorithm: str | Algorithm = "grpo",
        settings: Mapping[str, Any] | None = None,
        stages: Sequence[str] = (),
        args: GRPOConfig | None = None,
        **named: Any,
    ) -> None:
        args = GRPOConfig() if args is None else args
        a = kenpo.resolve(algorithm, dict(settings or {}), tuple(stages)) if isinstance(algorithm, str) else algorithm
        if not isinstance(a, Algorithm):
            raise InputError(f"algorithm: expected a name or an Algorithm, got {type(a).__name__}")
        if not isinstance(algorithm, str):
            a = a.with_settings(settings or {})
            for name in stages:
                a = a.adding(name)
        a = with_length(a, args.max_completion_length)
        check_config(args, defaults_of(GRPOConfig), a)
        check_windows(args, a)
        check_fed(a, args)
        _say(a, args)
        if "logp_ref" in a.needs:
            args.beta = 1.0  # makes TRL keep a reference and score with it; the number itself is never read
        args.vllm_importance_sampling_correction = False  # corrections are stages
        self.algorithm, self._stream, self._figures = a, None, {"train": Figures(), "eval": Figures()}
        super().__init__(*positional, args=args, **named)
        self._check_model()

    def _check_model(self) -> None:
        """What can only be seen once TRL has built its models."""
        if getattr(self, "aux_loss_enabled", False):
            raise InputError(
                "the model adds a router loss of its own (output_router_logits), which Kenpo's loss does not hold; "
                "load it with output_router_logits=False"
            )
        if getattr(self, "_is_vlm", False):
            raise InputError("the model takes images, which Kenpo's rows do not hold; pass a model of text alone")
        dropping = [n for n, m in self.model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        if dropping:
            raise InputError(
                f"the model drops units while it trains ({dropping[0]}): its log-probs would differ from those scored "
                "before; set GRPOConfig(disable_dropout=True)"
            )
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            own = dict(self.accelerator.unwrap_model(self.model).named_parameters())
            for name, p in self.accelerator.unwrap_model(reference).named_parameters():
                if name in own and not torch.equal(p.detach().to(own[name]), own[name].detach()):
                    raise InputError(
                        f"TRL loaded the reference from {self.model.config._name_or_path!r}, and its {name} differs "
                        "from the model you passed: save that model to a folder and pass the folder's path"
                    )

    # -- one generation ---------------------------------------------------------------------------------------------

    def _calculate_rewards(self, *positional: Any, **named: Any) -> Tensor:
        self._parts: Tensor = super()._calculate_rewards(*positional, **named)  # [N, functions], all ranks
        return self._parts

    def _generate_and_score_completions(self, inputs: list[Inputs]) -> Inputs:
        """TRL's columns and one more: the number of each row in the generation of all ranks."""
        out = super()._generate_and_score_completions(inputs)
        pad = self._tokenizer.pad_token_id
        for name, filler in (("prompt_ids", pad), ("prompt_mask", 0), ("completion_ids", pad), ("completion_mask", 0)):
            out[name] = self.accelerator.pad_across_processes(
                out[name], dim=1, pad_index=filler, pad_first=name.startswith("prompt")
            )
        ranks = gather_object([self._columns(out)])
        rollouts = self._rollouts({n: torch.cat([r[n] for r in ranks]) for n in ranks[0]})
        self.prepared = kenpo.prepare(self.algorithm, rollouts, self._stream)
        if self.model.training:
            self._stream = self.prepared.state
        here = len(out["prompt_ids"])
        first = here * self.accelerator.process_index
        out["kenpo_row"] = torch.arange(first, first + here, device=out["prompt_ids"].device)
        return out

    def _columns(self, out: Inputs) -> dict[str, Tensor]:
        """This rank's rows as `Rollouts` holds them, on the CPU."""
        prompt, width = out["prompt_ids"].shape[1], out["completion_ids"].shape[1]

        def place(x: Tensor, filler: float = 0) -> Tensor:
            return F.pad(x, (prompt, width - x.shape[1]), value=filler).cpu()

        real = torch.cat([out["prompt_mask"], out["completion_mask"]], 1).bool()
        trained = out["completion_mask"] * out["tool_mask"] if "tool_mask" in out else out["completion_mask"]
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1).masked_fill(~real, -1).cpu()
        made = {"tokens": ids, "mask": place(trained).bool(), "truncated": self._truncated(out).cpu()}
        sampler = out.get("sampling_per_token_logps")
        if sampler is None and "logp_sampler" in self.algorithm.needs:
            sampler = self._scored(out)[:, prompt:]
        for name, value in (
            ("logp_sampler", sampler),
            ("logp_old", out.get("old_per_token_logps")),
            ("logp_ref", out.get("ref_per_token_logps")),
        ):
            if value is not None:
                made[name] = place(value)
        return made

    def _rollouts(self, columns: dict[str, Any]) -> Rollouts:
        """The whole generation. A row on which every reward function returned None has the reward NaN: no verdict."""
        parts = self._parts.cpu()
        rewards = (parts * self.reward_weights.to(parts)).nansum(1)
        rewards[parts.isnan().all(1)] = math.nan
        size = self.num_generations if self.model.training else self.num_generations_eval
        tokens, mask = columns["tokens"], columns["mask"]
        version = torch.where(mask, self.state.global_step, -1).to(torch.int32)
        return Rollouts(
            group=torch.arange(len(rewards)) // size, rewards=rewards, prompt_id=prompt_ids(tokens, mask),
            policy_version=version, reward_parts=dict(zip(self.reward_func_names, parts.T, strict=True)), **columns,
        )  # fmt: skip

    def _truncated(self, out: Inputs) -> Tensor:
        """[B] bool: the response ends in no end-of-sequence id."""
        lengths = out["completion_mask"].sum(1)
        last = out["completion_ids"].gather(1, (lengths - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        ends = torch.tensor(self.eos_token_ids, device=last.device)
        return ~torch.isin(last, ends) & (lengths > 0)

    @torch.no_grad()
    def _scored(self, out: Inputs) -> Tensor:
        """[B,P+C] log-probs of a whole generation, a microbatch at a time."""
        size = self.args.per_device_train_batch_size
        names = [n for n in out if n.endswith(("_ids", "_mask"))]
        cuts = range(0, len(out["prompt_ids"]), size)
        return torch.cat([self._terms(self.model, {n: out[n][i : i + size] for n in names})[0] for i in cuts])

    # -- one optimizer step -------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Inputs:
        """A microbatch. Rows are shuffled by group, and each step's window is opened at its first microbatch."""
        if not self.model.training:
            inputs = self._generate_and_score_completions(generation_batch)
            self._open([inputs])
            return inputs
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            made = self._generate_and_score_completions(generation_batch)
            order = shuffled_by_group(self.prepared.rollouts.group[made["kenpo_row"].cpu()])
            made = {n: _rows(v, order) for n, v in made.items()}
            self._buffered_inputs: list[Inputs] | None = split_tensor_dict(made, steps)
        at, window = self._step % steps, self.args.gradient_accumulation_steps
        if self._step % window == 0:
            self._open(self._buffered_inputs[at : at + window])
        return self._buffered_inputs[at]

    def _open(self, slices: Sequence[Inputs]) -> None:
        """Weights and totals of one optimizer step: the rows of `slices` on all ranks."""
        a = self.algorithm
        own = [row for s in slices for row in s["kenpo_row"].tolist()]
        self._window = sorted(gather_object(own))
        minibatch: Prepared = self.prepared[self._window]
        self._known: dict[str, Tensor] | None = None
        if not a.two_phase(minibatch.rollouts):
            self._batch = kenpo.weigh(a, minibatch)
            return
        policy = self._whole_terms(slices, own)
        self._batch = kenpo.weigh(a, minibatch, policy)
        loss, self._known = kenpo.coefficients(a, self._batch, policy)
        if self.accelerator.is_main_process:  # every rank holds the same figures
            self._figures[self._mode].note(loss)

    def _whole_terms(self, slices: Sequence[Inputs], own: list[int]) -> Policy:
        """The policy's terms of the window's rows on all ranks, without graph."""
        with torch.no_grad(), self.compute_loss_context_manager():
            found = [self._terms(self.model_wrapped, s) for s in slices]
        mine = {"logp": torch.cat([x for x, _ in found]).cpu()}
        if "entropy" in self.algorithm.needs:
            mine["entropy"] = torch.cat([h for _, h in found if h is not None]).cpu()
        everyone = gather_object([(own, mine)])
        order = torch.tensor([r for rows, _ in everyone for r in rows]).argsort()
        return Policy(**{n: torch.cat([m[n] for _, m in everyone])[order] for n in mine})

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        """The microbatch's share of the step's loss. Ranks' gradients are averaged by DDP while shares add up, hence
        the number of processes as a factor."""
        rows = torch.searchsorted(torch.tensor(self._window), inputs["kenpo_row"].cpu())
        logp, entropy = self._terms(model, inputs)
        if self._known is not None:
            pairs = [(logp, self._known["logp"]), (entropy, self._known.get("entropy"))]
            loss = sum((x * c[rows].to(x)).sum() for x, c in pairs if x is not None and c is not None)
        else:
            batch = self._batch[rows].to(logp.device)
            share = kenpo.objective(self.algorithm, batch, Policy(logp, entropy=entropy))
            self._figures[self._mode].note(share)
            loss = share.loss
        return loss * self.accelerator.num_processes

    def _terms(self, model: Any, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Log-probs and, if a stage reads it, entropy, [B,P+C]: 0 before the response."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attend = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attend, inputs["completion_ids"].shape[1], compute_entropy="entropy" in self.algorithm.needs
        )
        before = (inputs["prompt_ids"].shape[1], 0)
        return F.pad(logp, before), None if entropy is None else F.pad(entropy, before)

    # -- figures and checkpoints --------------------------------------------------------------------------------------

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        """TRL's log line with Kenpo's figures, sums over counts of all ranks and microbatches since the last one."""
        mode = self._mode
        mine, self._figures[mode] = self._figures[mode], Figures()
        prefix = "eval_kenpo/" if mode == "eval" else "kenpo/"
        logs |= {prefix + name: value for name, value in merged(gather_object([mine.plain()])).items()}
        super().log(logs, *rest, **named)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save and self._stream is not None:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            save_stream(folder, self.algorithm, self._stream)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._stream = load_stream(Path(checkpoint), self.algorithm)


def _rows(value: Any, order: Tensor) -> Any:
    """Rows in another order; a 0-d tensor (a count) stays as it is."""
    return value if not isinstance(value, Tensor) or value.dim() == 0 else value[order.to(value.device)]


def _say(a: Algorithm, args: GRPOConfig) -> None:
    """What TRL does otherwise than the algorithm asks, said once."""
    if a.selection:
        warnings.warn(
            f"{a.name} drops groups; TRL does not draw others in their place, so steps train on fewer rows",
            HostWarning, stacklevel=3,
        )  # fmt: skip
    if "logp_sampler" in a.needs and not args.use_vllm:
        warnings.warn(
            f"{a.name} reads the sampler's log-probs, and TRL's own generate records none: they are scored again with "
            "the weights that sampled (a rollout_func's 'logprobs' are taken as they are), so no mismatch of an engine "
            "is seen", HostWarning, stacklevel=3,
        )  # fmt: skip
    if args.use_vllm:
        warnings.warn("TRL's vLLM path was tested against a stub only", HostWarning, stacklevel=3)
