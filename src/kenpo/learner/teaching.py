"""Who teaches in a run, and what it is shown."""

from __future__ import annotations

from typing import Any

from kenpo.contexts import HINT
from kenpo.errors import InputError
from kenpo.learner.average import Average
from kenpo.learner.options import CompanyOptions
from kenpo.models.loading import load_model
from kenpo.models.lora import is_adapted
from kenpo.models.scorer import Scorer
from kenpo.models.teaching import check_vocabulary
from kenpo.stages.teachers import Hinted

TAUGHT = frozenset({"logp_teacher", "kl_teacher"})


def check_teacher(algorithm: Any, config: CompanyOptions, group_size: int) -> None:
    """InputError for a teacher or a hint that nothing reads, and for a teacher that is read and missing."""
    reads, teacher = sorted(algorithm.needs & TAUGHT), config.teacher
    if teacher is not None and not reads:
        raise InputError(f"--teacher {teacher}: no stage of {algorithm.name!r} reads a teacher; leave it out")
    if reads and teacher is None:
        raise InputError(
            f"algorithm {algorithm.name!r} reads {reads[0]!r}; name the teacher: --teacher MODEL, --teacher base (the "
            "policy without its adapter) or --teacher hint (the policy, shown a hint)"
        )
    if "hinted" in algorithm.needs and teacher not in (None, "hint"):
        raise InputError(
            f"--teacher {teacher}: {algorithm.name!r} learns from the policy itself, shown a hint: --teacher hint"
        )
    if teacher != "hint" and "logp_guided" not in algorithm.needs:
        for option, value in (("--hint-column", config.hint_column), ("--hint-template", config.hint_template)):
            if value is not None:
                raise InputError(f"{option} {value!r}: shown to --teacher hint only; leave it out")
    elif teacher != "hint":
        return
    elif algorithm.advantage.mixture:
        raise InputError(
            f"--teacher hint: {algorithm.name!r} samples from a mixture with its teacher, which reads the same prompt; "
            "name a model"
        )
    elif hint_column(algorithm, config.hint_column) is None and group_size == 1:
        raise InputError("--group-size 1: a hint is another sample of the group; use at least 2, or --hint-column NAME")


def hint_column(algorithm: Any, given: str | None) -> str | None:
    """The column that holds a teacher's hints: the one that is named, else as the algorithm says (without a word of it:
    "hint"). None: the hint is another sample of the group."""
    return given or ("hint" if hinted_stage(algorithm).by == "column" else None)


def hinted_stage(algorithm: Any) -> Hinted:
    """What the algorithm says of hints and of the weights that read them."""
    return next((w for w in algorithm.weights if isinstance(w, Hinted)), Hinted(by="column", average=0.0))


def add_teacher(
    teacher: str, algorithm: Any, scorer: Scorer, tokenizer: Any, start: Scorer | None, how: dict[str, Any]
) -> Average | None:
    """Give the policy's scorer its teacher. ``start`` is the policy as the run began, where one is held already.

    Returns the moving average that teaches, if one does.
    """
    scorer.term = algorithm.terms.get("kl_teacher")
    if teacher == "base":
        if not is_adapted(scorer.model):
            raise InputError(
                "--teacher base: the policy has no adapter to leave off; give --lora-rank, or name a model"
            )
        scorer.teacher = scorer.without_adapter()
    elif teacher == "hint":
        scorer.teacher_context = HINT
        rate = hinted_stage(algorithm).average
        if 0 < rate < 1:
            average = Average(scorer, rate)
            scorer.teacher = average.scorer
            return average
        scorer.teacher = scorer.as_it_goes() if rate == 1 else start
    else:
        model, theirs = load_model(teacher, trainable=False, **how)
        check_vocabulary(tokenizer, theirs, f"--teacher {teacher}")
        scorer.teacher = Scorer(model, temperature=scorer.temperature, packing=scorer.packing)
    return None


def starts_as_it_began(teacher: str | None, algorithm: Any) -> bool:
    """Whether the hinted teacher is the policy as the run began."""
    return teacher == "hint" and hinted_stage(algorithm).average == 0
