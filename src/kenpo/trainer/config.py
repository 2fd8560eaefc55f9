"""The configuration of a run: one frozen dataclass, read by the command line, written to ``config.json``.

Fields whose default is None have no fixed default: `resolve` fills them, from the recipe of the bundled model when both
the model and the task are the bundled ones, else from `USUAL`. The resolved configuration is what a run records.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kenpo.errors import InputError, UnknownNameError, unknown_name
from kenpo.jsonfile import read_json
from kenpo.kinds import check_kinds
from kenpo.runs.continuing import ANEW
from kenpo.trainer.defaults import BUNDLED_MODEL, BUNDLED_TASK, PAIRED, RECIPE, RECIPE_SETTINGS, SUPERVISED, USUAL
from kenpo.trainer.feeding import GIVEN, SOURCE_OF, check_source
from kenpo.trainer.ranges import check, flag
from kenpo.trainer.specs import FilesSpec, Settings, Stages, TaskSpec, TemplateArgs, VerifierSpec

# Fields that say how this process behaves, not what the run is: they are neither recorded nor compared on resume.
PROCESS_FIELDS = frozenset({"recipe", "out", "series", "resume", "accept_changes", "dry_run", "quiet"})
TAKEN_ON_RESUME = ("accept_changes", "dry_run", "quiet")  # from the command line that resumes
# Recorded, yet free to differ when a run is resumed: they change no number (a sampling room at most last bits).
FREE_ON_RESUME = ANEW | {"loggers", "keep", "max_refills", "sampling_tokens", "verifier_workers", "verifier_memory"}

_SEVERAL = ("stages", "stop", "task", "eval_file", "verifier", "loggers", "betas", "lora_targets")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that defines a training run. None: filled by `resolve`, printed, and recorded."""

    model: str = BUNDLED_MODEL
    """Model folder or hub name of any causal LM; "bundled" is the small model in the package."""
    task: TaskSpec = BUNDLED_TASK
    """"addition", "reasoning_gym:NAME", or problems (sft: demonstrations) in .jsonl, .json, .csv, .tsv or .parquet
    files, each perhaps with .gz; a folder of such files; hub:NAME:SPLIT."""
    source: str | None = None
    """on_policy (samples of the policy), demonstrations (prompts and responses), pairs (prompts with a chosen and a
    rejected response), or your own as file.py:NAME; default: what the algorithm learns from."""
    prompt_column: str = "prompt"
    """Column of a data file that holds the prompt."""
    answer_column: str = "answer"
    """Column of a data file that holds the answer, a part of an object as a.b, or last-turn of a conversation."""
    response_column: str = "response"
    """Column of a file of demonstrations that holds the response."""
    chosen_column: str = "chosen"
    """Column of a file of pairs that holds the better response, or the whole conversation with it."""
    rejected_column: str = "rejected"
    """Column of a file of pairs that holds the worse one."""
    unusable_pairs: Literal["skip", "refuse"] = "skip"
    """Pairs of equal responses, or with an empty one: left out and counted, or an error that names the row."""
    flipped_pairs: float | None = None
    """Share of the addition pairs whose two responses are swapped (0.1)."""
    dropped_carry: float | None = None
    """Share of the addition demonstrations that ignore every carry (0.6)."""
    eval_task: str | None = None
    """With demonstrations or pairs: the task whose held-out greedy accuracy is measured (addition for its own data)."""
    eval_file: FilesSpec = None
    """File with the held-out problems; several are sets with figures of their own. Without it: rows of the task."""
    system: str | None = None
    """System prompt, used with a chat template."""
    template: str = "auto"
    """Chat template: auto (the model's own), none (prompts are rendered already, or the model has no use for one), or a
    file. It goes into checkpoints."""
    template_args: TemplateArgs = None
    """What the chat template reads besides the messages: --template-args enable_thinking=false."""
    long_prompts: Literal["refuse", "skip"] = "refuse"
    """Rows of a data file that leave no room in the model's context: refuse them, or leave them out and count them."""
    verifier: VerifierSpec = None
    """exact, numeric, math_verify, gsm8k, reasoning_gym, file.py:function, or model:FOLDER, a trained reward model;
    default: the task's own. Several, with weights (a.py:f=1 b.py:g=0.2), are parts of one reward, their sum."""
    time_limit: float = 10.0
    """Seconds that a verifier may take for one call; after that its samples are dropped and counted."""
    verifier_workers: int = 2
    """Processes that judge with own functions, math_verify or reasoning_gym."""
    verifier_memory: int = 8 << 30
    """Bytes of address space of each of them; 0: no limit (a function that uses a GPU needs that)."""
    sandbox: bool = False
    """Run them under bubblewrap: no network, no writing outside a /tmp of their own."""
    correct_at: float = 1.0
    """A sample counts as correct, in accuracy and pass@k, when its reward is at least this."""

    algorithm: str = "grpo"
    """A catalogued name (`kenpo list`) or your own as file.py:NAME."""
    critic: str | None = None
    """What predicts values: a scalar head on the policy's trunk (where they are read), on a copy of the policy as it
    begins (copy), or on this model, apart."""
    critic_lr: float | None = None
    """Learning rate of the critic: of its head on the trunk, of its whole model otherwise (10 times --lr)."""
    critic_warmup: int = 0
    """Rollout batches at first in which the critic learns alone; the policy's learning rate takes its course after."""
    teacher: str | None = None
    """Model whose log-probs or divergence a distilling algorithm reads (same vocabulary); base: the policy without its
    adapter; hint: the policy, shown a hint (a folder of one of these names is written ./base)."""
    hint_column: str | None = None
    """Column with what --teacher hint is shown (hint; sdpo: another right answer of the group)."""
    hint_template: str | None = None
    """Text that holds {prompt} and {hint} once (the task's own, else one in English)."""
    expert: str | None = None
    """File of expert traces (prompt, trace, perhaps trace_logp) for algorithms that read who wrote a response;
    default: the task's own column trace."""
    expert_rows: int = 1
    """Traces that join each group, beside its --group-size samples."""
    corpus: str | None = None
    """File of prompts and responses (--prompt-column, --response-column) whose likelihood ppo-ptx, or any algorithm
    --with supervised_nll, keeps up beside its reward."""
    corpus_rows: int | None = None
    """Rows of the corpus beside each batch (as many as --prompts)."""
    rephrase: bool = False
    """Where nearly all of a group failed, the policy restates the trace; its answer replaces the worst (repo: on)."""
    rephrase_explain: str | None = None
    """First request, with {prompt} and {trace} (the task's own, else one in English)."""
    rephrase_answer: str | None = None
    """Second request, with {prompt} and {explanation}."""
    rephrase_below: float = 0.5
    """A reward below this is a failure."""
    rephrase_share: float = 0.75
    """Share of failures that makes a prompt hard."""
    rephrase_buffer: int = 0
    """Restated answers kept, one a prompt, for when a fresh one is refused; 0: none."""
    partner: str | None = None
    """Second policy, of the same vocabulary, that trains beside this one and exchanges groups with it (graft)."""
    guided_rows: int | None = None
    """Samples of a group drawn under the hint (--hint-column) by an algorithm that corrects for it; default: all."""
    guided_share: float = 1.0
    """How much of the hint they are shown, from its beginning."""
    settings: Settings = None
    """Change slots of the algorithm: --set surrogate.high=0.3 regularizers=[]."""
    stages: Stages = ()
    """Append stages by name: --with untruncated."""

    steps: int | None = None
    """Rollout batches to train on (recipe 12, else 200)."""
    prompts: int | None = None
    """Prompts per step (16)."""
    group_size: int | None = None
    """Samples per prompt (8)."""
    minibatches: int = 1
    """Optimizer steps per pass over a rollout batch, each on its share of the groups."""
    epochs: int = 1
    """Passes over each rollout batch."""
    microbatch_tokens: int = 16384
    """Padded tokens that one forward and backward holds at once; changes memory and speed only."""
    max_refills: int = 9
    """Further rounds of generation that dynamic sampling may ask for in one step."""
    refill: Literal["next", "same"] = "next"
    """In place of a group that can't be trained on: the next problem, or the same one sampled again."""

    engine: str = "hf"
    """What samples: hf (transformers, in this process), or your own as file.py:NAME, called with (model, tokenizer)."""
    sampling_tokens: int | None = None
    """Tokens that the embedded engine holds at once; default: what free memory allows, recorded and kept on resume."""

    lag: int = 0
    """Sample batch n with the weights after batch n-1-LAG (0: with those of the moment)."""
    max_staleness: int | None = None
    """Drop rows whose oldest token was sampled more than so many optimizer updates ago."""
    sampler_noise: str | None = None
    """A known mismatch of the sampler, to try corrections on: bf16, or temperature=X."""

    temperature: float = 1.0
    """Logits are divided by it, in sampling and in every log-prob."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of this mass, over which log-probs are renormalised on both sides; 1: all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: all."""
    max_tokens: int | None = None
    """Longest response (recipe 40, else 256)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's end-of-sequence ids."""
    keep_special_tokens: bool = False
    """Let verifiers see all special tokens of a response; tags in pairs, as <answer> and </answer>, are always kept."""

    optimizer: Literal[
        "adamw", "torchao_adamw_8bit", "torchao_adamw_4bit", "bnb_adamw_8bit", "bnb_paged_adamw", "bnb_paged_adamw_8bit"
    ] = "adamw"
    """adamw is torch's; the others need torchao or bitsandbytes and save memory."""
    lr: float | None = None
    """Learning rate (recipe 1e-4, else 1e-6)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine go towards 0."""
    warmup: int | None = None
    """Steps of linear warm-up (recipe 10, else 0)."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    betas: tuple[float, float] | None = None
    """AdamW's (recipe 0.9 0.99, else 0.9 0.999)."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0: off."""

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
    seed: int = 0
    """Of the order of problems, the samples and the minibatches; one seed gives one run."""
    threads: int | None = None
    """CPU threads, fixed because the order of additions depends on them; default: those torch would use."""

    eval_every: int | None = None
    """Steps between two measurements of held-out accuracy (recipe 4, else 20); 0: only before and after."""
    eval_problems: int = 500
    """Held-out problems of each set; 0: no evaluation at all."""
    eval_batch: int = 256
    """Held-out prompts generated at once."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints (recipe 4, else 20); 0: only at the end."""
    keep: int = 2
    """Checkpoints kept; 0: all."""
    keep_best: str | None = None
    """Keep one more: the best by a held-out figure, such as eval/accuracy (highest; of a loss the lowest)."""
    record_batches: bool | None = None
    """Record each step's rollouts under batches/; default: yes up to 65,536 tokens per step."""
    log_samples: int = 256
    """Completions written to samples.jsonl per step."""
    loggers: tuple[str, ...] = ()
    """tensorboard, wandb, trackio."""

    out: str | None = None
    """Run folder; it must not exist. Default: runs/ALGORITHM-TASK-N."""
    recipe: str | None = None
    """Named options: on-policy, several-updates, long-answers, sparse-reward, ppo, vapo; options beside it win."""
    series: str | None = None
    """Run folder of a series: RUN, RUN-2, RUN-3 ...; an unfinished last one is resumed. --out goes before it."""
    resume: bool = False
    """Go on with the run in --out, or in the folder given right here (--resume RUN), from its last checkpoint."""
    accept_changes: bool = False
    """Resume although rows, a verifier, an algorithm or a model changed since; changes.jsonl names them."""
    dry_run: bool = False
    """Print the plan and stop."""
    quiet: bool = False
    """No progress, errors only."""

    def __post_init__(self) -> None:
        for name in _SEVERAL:  # lists from JSON or from Python callers
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name, value in vars(self).items():
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        check_kinds(self, flag)
        check(self)

    def but(self, **changes: Any) -> TrainConfig:
        """A copy with some fields changed; UnknownNameError for a field that does not exist."""
        return from_dict({**vars(self), **changes})


FIELDS = tuple(f.name for f in dataclasses.fields(TrainConfig))


def resolve(config: TrainConfig) -> TrainConfig:
    """The configuration with every None filled in: from the recipe for the bundled model on its task, else `USUAL`."""
    source = config.source or SOURCE_OF.get(config.algorithm, "on_policy")
    check_source(config, source, BUNDLED_TASK)
    given = source in GIVEN
    bundled = config.model == BUNDLED_MODEL and config.task == BUNDLED_TASK
    recipe = bundled and not given
    special = {"demonstrations": SUPERVISED, "pairs": PAIRED if bundled else {}}
    defaults = {**USUAL, **(RECIPE if recipe else special.get(source, {}))}
    defaults["group_size"] = GIVEN.get(source, defaults["group_size"])
    filled = {n: v for n, v in defaults.items() if getattr(config, n) is None}
    filled["source"] = source
    if config.algorithm == "repo":
        filled["rephrase"] = True
    if given and config.task == BUNDLED_TASK and config.eval_task is None and config.algorithm != "reward_model":
        filled["eval_task"] = BUNDLED_TASK
    filled["settings"] = resolve_settings(config.settings, recipe and config.algorithm == "grpo")
    from kenpo.trainer.machine import best_device, free_threads

    if config.device is None:
        filled["device"] = best_device()
    on_gpu = (config.device or filled.get("device") or "").startswith("cuda")
    if config.dtype is None:
        filled["dtype"] = "bfloat16" if on_gpu else "float32"
    if config.deterministic == "off" and not on_gpu:
        raise InputError("--deterministic off: kernels on a CPU are deterministic as they are; leave it out")
    if config.threads is None:
        filled["threads"] = free_threads()
    resolved = config.but(**filled)
    if resolved.lora_rank and resolved.lora_alpha is None:
        resolved = resolved.but(lora_alpha=2.0 * resolved.lora_rank)
    if resolved.record_batches is None:
        assert resolved.prompts
        assert resolved.group_size
        assert resolved.max_tokens
        tokens = resolved.prompts * resolved.group_size * resolved.max_tokens
        resolved = resolved.but(record_batches=tokens <= 65536)
    if resolved.minibatches > (resolved.prompts or 0):
        raise InputError(
            f"--minibatches {resolved.minibatches} exceeds --prompts {resolved.prompts}: a minibatch holds whole groups"
        )
    return resolved


def resolve_settings(given: Mapping[str, Any] | None, recipe: bool) -> dict[str, Any]:
    """The settings in force. The recipe's stand unless one of `given` names the same slot, whole or in part."""
    given = dict(given or {})
    if not recipe:
        return given
    mine = {k: v for k, v in RECIPE_SETTINGS.items() if k not in given and not any(_covers(k, g) for g in given)}
    return {**mine, **given}


def _covers(recipe_key: str, given_key: str) -> bool:
    return given_key.startswith(recipe_key + ".") or recipe_key.startswith(given_key + ".")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """What ``config.json`` holds: every field but those that say how a process behaves."""
    return {n: list(v) if isinstance(v := getattr(config, n), tuple) else v for n in FIELDS if n not in PROCESS_FIELDS}


def from_dict(values: Mapping[str, Any], where: str = "") -> TrainConfig:
    """A configuration from its dict. UnknownNameError for a key that is not a field, InputError for a wrong value."""
    for key in values:
        if key not in FIELDS:
            raise UnknownNameError(f"{where + ': ' if where else ''}{unknown_name('option', str(key), FIELDS)}")
    try:
        return TrainConfig(**values)
    except TypeError as error:
        raise InputError(f"{where + ': ' if where else ''}a value has the wrong kind ({error})") from None


def load(path: str | os.PathLike[str]) -> TrainConfig:
    """A configuration from a JSON file. InputError if it can't be read."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected one JSON object of options")
    return from_dict(values, str(path))


def differences(recorded: TrainConfig, given: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """{name: (recorded, given)} where a run to be resumed differs from what was recorded. None counts as not given."""
    resolved = resolve(given)
    different = {}
    for name in FIELDS:
        if name in PROCESS_FIELDS | FREE_ON_RESUME or getattr(given, name) is None:
            continue
        was, now = getattr(recorded, name), getattr(resolved, name)
        if now != was:
            different[name] = (was, now)
    return different
