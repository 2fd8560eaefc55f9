"""Under which titles the commands list their options."""

from __future__ import annotations

from kenpo.commands.help import Beside, Groups

TRAIN: Groups = {
    "model and data": (
        "model", "task", "source", "eval_file", "eval_task", "prompt_column", "answer_column", "response_column",
        "system", "dropped_carry",
    ),
    "algorithm": (
        "algorithm", "settings", "stages", "recipe", "critic", "critic_lr", "critic_warmup", "teacher", "hint_column",
        "hint_template",
    ),
    "experts, a corpus, privileged prompts": (
        "expert", "expert_rows", "rephrase", "rephrase_explain", "rephrase_answer", "rephrase_below", "rephrase_share",
        "rephrase_buffer", "guided_rows", "guided_share", "partner", "corpus", "corpus_rows",
    ),
    "batch and updates": (
        "steps", "prompts", "group_size", "minibatches", "epochs", "microbatch_tokens", "max_refills", "refill",
        "replay", "replay_limit", "replay_order",
    ),
    "sampling": (
        "temperature", "top_p", "top_k", "max_tokens", "stop", "keep_special_tokens", "engine", "engine_python",
        "engine_url", "engine_limit", "gate_every", "gate_bound", "sampling_tokens", "lag", "max_staleness",
        "sampler_noise",
    ),
    "reward": (
        "verifier", "correct_at", "time_limit", "verifier_workers", "verifier_memory", "sandbox",
    ),
    "optimizer": ("lr", "schedule", "warmup", "optimizer", "betas", "weight_decay", "grad_clip"),
    "adapter": ("lora_rank", "lora_alpha", "lora_targets", "save_adapter"),
    "precision and speed": (
        "device", "dtype", "head_dtype", "attention", "packing", "gradient_checkpointing", "deterministic", "threads",
    ),
    "measuring and writing": (
        "eval_every", "eval_problems", "eval_batch", "checkpoint_every", "keep", "record_batches", "log_samples",
        "loggers",
    ),
    "the run": (
        Beside("--config", "FILE", "Start from a recorded configuration (RUN/config.json); options beside it win."),
        "out", "series", "resume", "accept_changes", "seed", "dry_run", "quiet",
    ),
}  # fmt: skip

EVAL: Groups = {
    "what is measured": ("task", "eval_file", "prompt_column", "answer_column", "system", "problems", "samples", "k"),
    "sampling": (
        "temperature", "top_p", "top_k", "max_tokens", "stop", "keep_special_tokens", "batch", "sampling_tokens",
        "seed",
    ),
    "reward": ("verifier", "correct_at", "time_limit", "verifier_workers", "verifier_memory", "sandbox"),
    "machine and output": ("device", "dtype", "threads", "json"),
}  # fmt: skip

SAMPLE: Groups = {
    "prompts": ("prompt", "system"),
    "sampling": (
        "greedy", "samples", "temperature", "top_p", "top_k", "max_tokens", "stop", "keep_special_tokens", "seed",
    ),
    "machine and output": ("device", "dtype", "json"),
}  # fmt: skip
