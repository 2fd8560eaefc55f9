"""verl's real TrainingWorker with Kenpo's loss, its update compared with one whole evaluation. Run where verl is.

    torchrun --nproc-per-node 2 tests/hosts/verl_run.py --folder MODEL --names gspo m2po --out FILE

Plain gradient descent at rate 1 moves the weights by exactly the gradient. Prints the relative error by name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # verl installs a package called tests

import torch
import torch.distributed as dist
import torch.nn.functional as F
import verl_cpu  # noqa: F401  (before anything else of verl)
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

import kenpo
from kenpo.integrations import verl as plugin
from kenpo.integrations.verl_config import PREFIX

EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(FSDPEngineWithLMHead)
PROMPT, RESPONSE, ROWS = 5, 6, 8


def made_rows(model, seed=0):
    """Made-up rows: prompts with padding on the left, responses with padding on the right, groups of four."""
    g = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (ROWS, PROMPT + RESPONSE), generator=g)
    prompts = torch.randint(2, PROMPT + 1, (ROWS // 4,), generator=g).repeat_interleave(4)
    for first in range(0, ROWS, 4):
        ids[first : first + 4, :PROMPT] = ids[first, :PROMPT]
    lengths = torch.randint(2, RESPONSE + 1, (ROWS,), generator=g)
    at = torch.arange(PROMPT + RESPONSE)
    attention = (at >= PROMPT - prompts[:, None]) & (at < PROMPT + lengths[:, None])
    response_mask = attention[:, PROMPT:].long()
    rewards = torch.rand(ROWS, generator=g)
    scores = torch.zeros(ROWS, RESPONSE).scatter(1, lengths[:, None] - 1, rewards[:, None])
    with torch.no_grad():
        now = log_probs(model, ids, attention)
    noise = 0.3 * torch.randn(ROWS, RESPONSE, generator=g)
    return {
        "input_ids": ids, "attention_mask": attention.long(), "response_mask": response_mask, "rm_scores": scores,
        "old_log_probs": now, "rollout_log_probs": now + noise,
        "entropy": torch.rand(ROWS, RESPONSE, generator=g), "uid": [str(i // 4) for i in range(ROWS)],
        "position_ids": (attention.long().cumsum(1) - 1).clamp_min(0),
    }  # fmt: skip


def log_probs(model, ids, attention):
    """[B,R] log-probs of the responses, in plain operations."""
    place = (attention.long().cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=attention.long(), position_ids=place).logits[:, PROMPT - 1 : -1]
    return F.log_softmax(logits.float(), -1).gather(2, ids[:, PROMPT:, None]).squeeze(2)


def rollouts_of(rows, **fields):
    place = plugin.place
    return kenpo.Rollouts(
        mask=place(rows["response_mask"]).bool(), group=plugin.numbered(rows["uid"]),
        rewards=rows["rm_scores"].sum(1), **{n: place(v) for n, v in fields.items()},
    )  # fmt: skip


def compare(name, folder):
    """The relative error of one update of the worker, and which route it took."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = made_rows(model)
    a = kenpo.get(name)
    way = plugin.check_registered(name)
    old = rows["old_log_probs"] + 0.1 * torch.randn(ROWS, RESPONSE, generator=torch.Generator().manual_seed(1))
    logp = plugin.place(log_probs(model, rows["input_ids"], rows["attention_mask"]))
    if way == "registries":
        rows["old_log_probs"] = old
        want = rollouts_of(rows, logp_old=old)
        rows["advantages"], _ = plugin.advantage_of(a)(rows["rm_scores"], rows["response_mask"], index=rows["uid"])
        mode = PREFIX + name
    else:
        want = rollouts_of(rows, logp_sampler=rows["rollout_log_probs"])
        rows["advantages"], _, _ = plugin.coefficient_column(
            a, None, uid=rows["uid"], response_mask=rows["response_mask"], scores=rows["rm_scores"],
            logp=rows["old_log_probs"], logp_sampler=rows["rollout_log_probs"],
            entropy=rows["entropy"],
        )  # fmt: skip
        mode = PREFIX + "coefficients"
    result = kenpo.evaluate(a, want, kenpo.Policy(logp, entropy=plugin.place(rows["entropy"])))
    (logp * result.coefficients).sum().backward()
    gradient = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    after = updated(folder, rows, mode)
    moved = {n: before[n] - after[n] for n in gradient}
    off = torch.cat([(moved[n] - gradient[n]).flatten() for n in gradient]).norm()
    return {"route": way, "error": float(off / torch.cat([g.flatten() for g in gradient.values()]).norm())}


def updated(folder, rows, mode):
    """The weights after one update of verl's worker on this rank's share of the rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=folder, use_remove_padding=False, enable_gradient_checkpointing=False,
                                   override_config={"attn_implementation": "sdpa"}),
        engine_config=FSDPEngineConfig(strategy="fsdp2", dtype="float32", use_dynamic_bsz=False,
                                       micro_batch_size_per_gpu=2, max_token_len_per_gpu=256, fsdp_size=-1,
                                       infer_max_token_len_per_gpu=256, infer_micro_batch_size_per_gpu=2,
                                       mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"}),
        optimizer_config=FSDPOptimizerConfig(optimizer="SGD", lr=1.0, clip_grad=1e9, weight_decay=0.0,
                                             override_optimizer_config={}, total_training_steps=10),
    )  # fmt: skip
    worker = TrainingWorker(config)
    worker.reset()
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=2,
                        policy_loss=PolicyLossConfig(loss_mode=mode), use_dynamic_bsz=False)  # fmt: skip
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    names = ("input_ids", "attention_mask", "response_mask", "position_ids", "old_log_probs", "advantages")
    data = TensorDict({n: rows[n][own].clone() for n in names}, batch_size=ROWS // size)
    data["responses"] = rows["input_ids"][own, PROMPT:].clone()
    data["prompts"] = rows["input_ids"][own, :PROMPT].clone()
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, mini_batch_size=ROWS, epochs=1, seed=0, global_batch_size=ROWS, temperature=1.0,
                         dataloader_kwargs={"shuffle": False}, compute_loss=True)  # fmt: skip
    worker.train_mini_batch(data)
    weights, _ = worker.engine.get_per_tensor_param()
    return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).float().cpu() for n, w in weights}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--names", nargs="*", required=True)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name in options.names:
        found[name] = compare(name, options.folder)
        print(name, found[name], file=sys.stderr)
    if options.out and dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # verl leaves threads behind


if __name__ == "__main__":
    main()
