"""TRL's trainer on a tiny float64 model, with its gradients compared before every optimizer step. Run where TRL is.

    python -m tests.hosts.trl_run --names gspo m2po --out FILE      (also under torchrun)

For each name: the relative error of the gradient at every step against one whole-minibatch evaluation of the same rows,
or the refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

import kenpo
from kenpo.errors import KenpoError
from kenpo.integrations.trl import KenpoGRPOTrainer
from kenpo.models.loading import BUNDLED
from tests.tiny import gpt2

PROMPTS = [f"{a}+{b}=" for a, b in ((12, 34), (7, 118), (250, 31), (5, 6), (99, 1), (23, 4), (77, 77), (301, 2))]


def reward(completions, **_):
    """Any function of the text that differs within groups."""
    return [c.count("1") * 0.5 + len(c) * 0.125 for c in completions]


def reward_of_length(completions, **_):
    """Differs by the last character."""
    return [float(ord(c[-1])) for c in completions]


def logits_of(model, ids, mask):
    """Plain float64 logits of left-padded rows."""
    place = (mask.cumsum(1) - 1).clamp_min(0)
    return model(input_ids=ids, attention_mask=mask, position_ids=place).logits


class PlainHead(KenpoGRPOTrainer):
    """TRL computes log-probs in float32 whatever the model's dtype; here they are plain float64."""

    plain = True

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kw):
        if not self.plain:
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kw)
        table = F.log_softmax(logits_of(model, input_ids, attention_mask)[:, :-1] / self.temperature, -1)
        table = table[:, -logits_to_keep:]
        logp = table.gather(2, input_ids[:, -logits_to_keep:, None]).squeeze(2)
        entropy = -(table.exp() * table).sum(2) if kw.get("compute_entropy") else None
        return logp, entropy, None


class Compare(TrainerCallback):
    """Before each optimizer step: the gradient of the whole window in one pass, beside what the microbatches added."""

    def __init__(self):
        self.errors, self.trainer, self.versions = [], None, []

    def on_pre_optimizer_step(self, args, state, control, **kw):
        t = self.trainer
        model = t.accelerator.unwrap_model(t.model)
        got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if hasattr(model, "peft_config"):
            return
        twin = type(model)(model.config).double().eval()  # a copy would share TRL's patched forward with the original
        twin.load_state_dict(model.state_dict())
        twin.get_input_embeddings().padding_idx = model.get_input_embeddings().padding_idx  # TRL sets it in the config
        minibatch = t.prepared[sorted(t._window)]
        check_rows(t, minibatch.rollouts)
        policy = terms(twin, minibatch.rollouts, t.temperature)
        a = t.algorithm
        two = a.two_phase(minibatch.rollouts)
        batch = kenpo.weigh(a, minibatch, policy.detach() if two else None)
        if two:
            _, grads = kenpo.coefficients(a, batch, policy.detach())
            sum((getattr(policy, n) * g).sum() for n, g in grads.items()).backward()
        else:
            kenpo.objective(a, batch, policy).loss.backward()
        want = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        size = torch.cat([g.flatten() for g in want.values()]).norm()
        off = torch.cat([(got[n] - want[n]).flatten() for n in want]).norm()
        self.errors.append(float(off / size) if size > 0 else float(off))


def check_rows(trainer, rollouts):
    """Groups are prompts, and a row's reward is that of its own text."""
    tokenizer = trainer.processing_class
    for tokens, mask, r, identity, group in zip(
        rollouts.tokens, rollouts.mask, rollouts.rewards, rollouts.prompt_id, rollouts.group, strict=True
    ):
        text = tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)
        assert abs(trainer.reward_funcs[0]([text])[0] - float(r)) < 1e-6, (text, float(r))
        twins = rollouts.prompt_id[rollouts.group == group]
        assert bool((twins == identity).all())


def terms(model, rollouts, temperature):
    """Log-probs and entropies of rows with their padding moved away, in plain operations."""
    rows_p, rows_h = [], []
    for tokens, mask in zip(rollouts.tokens, rollouts.mask, strict=True):
        real = tokens >= 0
        table = F.log_softmax(model(input_ids=tokens[real][None]).logits[0] / temperature, -1)
        place = real.cumsum(0)[mask] - 2
        p = table[place, tokens[mask]]
        h = -(table[place].exp() * table[place]).sum(1)
        rows_p.append(torch.zeros(len(mask), dtype=p.dtype).index_put((mask.nonzero().squeeze(1),), p))
        rows_h.append(torch.zeros(len(mask), dtype=p.dtype).index_put((mask.nonzero().squeeze(1),), h))
    return kenpo.Policy(torch.stack(rows_p), entropy=torch.stack(rows_h))


def model_folder(root: Path, make=gpt2) -> str:
    """A random model in float64 with the bundled tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED))
    model = make(vocab=len(tokenizer), dtype=torch.float64, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    return str(root)


def run(
    name,
    folder,
    *,
    steps=2,
    plain=True,
    settings=None,
    peft=None,
    out=None,
    resume=None,
    model=None,
    reward=reward,
    **config,
):
    """Gradient errors of `steps` optimizer steps of two microbatches, two steps a generation."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options = {
        "per_device_train_batch_size": 8 // ranks, "num_generations": 4, "gradient_accumulation_steps": 2,
        "steps_per_generation": 4, "max_completion_length": 8, "max_steps": steps, "learning_rate": 1e-2,
        "max_grad_norm": 0.0, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "fp16": False,
        "logging_steps": 1, "disable_tqdm": True, "disable_dropout": True, "lr_scheduler_type": "constant",
        "gradient_checkpointing": False, "seed": 3,
    }  # fmt: skip
    compare, extra = Compare(), {}
    if callable(config.get("rollout_func")):
        extra["rollout_func"] = config.pop("rollout_func")
    trainer = PlainHead(
        model=model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=out or tempfile.mkdtemp(), **(options | config)),
        train_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS]),
        eval_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS[:4]]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        algorithm=name,
        settings=settings or {},
        callbacks=[compare],
        peft_config=peft,
        **extra,
    )
    trainer.plain = plain
    compare.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return compare.errors, trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--out")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = {}
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root))
        for name in a.names or kenpo.names():
            try:
                result[name] = run(name, folder)[0]
            except KenpoError as error:
                result[name] = f"refused: {error}"
            print(name, result[name], file=sys.stderr)
    if a.out and int(os.environ.get("RANK", "0")) == 0:
        Path(a.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
