"""Options of what a run learns from: its data, what judges the samples, what joins them, how a batch is filled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kenpo.errors import InputError
from kenpo.experience.shards import is_path
from kenpo.experience.tasks import BUILT_IN
from kenpo.options import (
    FilesSpec,
    Limits,
    Options,
    Paths,
    TaskSpec,
    TemplateArgs,
    VerifierSpec,
    absolute,
    check_share,
    code_path,
)  # fmt: skip

BUNDLED_TASK = "addition"


def data_path(spec: str) -> str:
    """A data file's whole path; a task's name is none."""
    return absolute(spec) if is_path(str(Path(spec).expanduser())) and spec not in BUILT_IN else spec


def template_path(spec: str) -> str:
    """A template's whole path; auto and none are no paths."""
    return spec if spec in ("auto", "none") else absolute(spec)


@dataclass(frozen=True)
class DataOptions(Options):
    """Where prompts, answers and responses come from."""

    LIMITS: ClassVar[Limits] = {"eval_problems": 0, "eval_batch": 1}
    PATHS: ClassVar[Paths] = {"task": data_path, "eval_file": data_path, "template": template_path}

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
    eval_problems: int = 500
    """Held-out problems of each set; 0: no evaluation at all."""
    eval_batch: int = 256
    """Held-out prompts generated at once."""
    system: str | None = None
    """System prompt, used with a chat template."""
    template: str = "auto"
    """Chat template: auto (the model's own), none (prompts are rendered already, or the model has no use for one), or a
    file. It goes into checkpoints."""
    template_args: TemplateArgs = None
    """What the chat template reads besides the messages: --template-args enable_thinking=false."""
    long_prompts: Literal["refuse", "skip"] = "refuse"
    """Rows of a data file that leave no room in the model's context: refuse them, or leave them out and count them."""

    def check(self) -> None:
        """Shares lie between 0 and 1."""
        check_share(self, "dropped_carry", "flipped_pairs")


@dataclass(frozen=True)
class JudgeOptions(Options):
    """What gives a sample its reward."""

    LIMITS: ClassVar[Limits] = {"verifier_workers": 1, "verifier_memory": 0}
    PATHS: ClassVar[Paths] = {"verifier": code_path}

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

    def check(self) -> None:
        """A verifier gets some time."""
        if not self.time_limit > 0:
            raise InputError(f"--time-limit: {self.time_limit} is not above 0")


@dataclass(frozen=True)
class MixingOptions(Options):
    """What joins the policy's own samples."""

    LIMITS: ClassVar[Limits] = {"expert_rows": 1, "corpus_rows": 1, "rephrase_buffer": 0, "guided_rows": 0}
    PATHS: ClassVar[Paths] = {"expert": absolute, "corpus": absolute}

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
    guided_rows: int | None = None
    """Samples of a group drawn under the hint (--hint-column) by an algorithm that corrects for it; default: all."""
    guided_share: float = 1.0
    """How much of the hint they are shown, from its beginning."""


@dataclass(frozen=True)
class CollectOptions(Options):
    """How a rollout batch is filled."""

    LIMITS: ClassVar[Limits] = {"prompts": 1, "group_size": 1, "max_refills": 0, "replay_limit": 1}

    prompts: int | None = None
    """Prompts per step (16)."""
    group_size: int | None = None
    """Samples per prompt (8)."""
    max_refills: int = 9
    """Further rounds of generation that dynamic sampling may ask for in one step."""
    refill: Literal["next", "same"] = "next"
    """In place of a group that can't be trained on: the next problem, or the same one sampled again."""
    replay: float | None = None
    """Share of each batch's groups that comes from earlier batches, as they were sampled; each is replayed once."""
    replay_limit: int | None = None
    """Groups held for that, the newest ones (256)."""
    replay_order: Literal["oldest", "newest", "priority"] | None = None
    """Which of them come first (oldest); priority: those whose rewards differ most."""
    seed: int = 0
    """Of the order of problems, the samples and the minibatches; one seed gives one run."""

    def check(self) -> None:
        """A seed fits."""
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"--seed: {self.seed} does not fit into 64 bits")


@dataclass(frozen=True)
class ExperienceOptions(CollectOptions, MixingOptions, JudgeOptions, DataOptions):
    """All that says what a run learns from."""
