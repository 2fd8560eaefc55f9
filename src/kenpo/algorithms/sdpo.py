"""SDPO — self-distillation policy optimization (arXiv:2601.20802): the policy taught by itself, shown a hint.

A right answer of the same group, or the environment's feedback, is put before the model; read so, the model scores the
response that it wrote without the hint. Where the two disagree, it learns from itself.

    L = Σ over hinted tokens of min(sg[π/π_old], 2)·min(π_old/μ, 2)·JSD_½(q, p)  /  number of hinted tokens

From GKD: the weights and the token mean over hinted rows, the divergence on the student's top 100 with a tail. The hint
of a row (`rollouts.hinted`) is the group's first *other* response of reward ≥ .5; a lone success has none. Teacher:
a moving average (.05 per update); one that is the live model diverges. That is the released default; the paper prints
KL(π‖q) over the vocabulary. `sdpo-sampled`: sg(log π − log q)·log π on the sampled token (reverse KL only).
"""

from kenpo.algorithms.gkd import GKD
from kenpo.stages import (
    CappedRatio,
    Hinted,
    MinimiseTerm,
    ScoreFunction,
    TeacherGap,
    TeacherTerm,
    TokenMean,
    TruncatedIS,
)

SDPO = GKD.but(
    name="sdpo",
    source="arXiv:2601.20802",
    weights=(Hinted(), CappedRatio(cap=2.0), TruncatedIS(cap=2.0)),
    surrogate=MinimiseTerm(TeacherTerm(kind="jsd", weight=0.5, top=100, owner="student", rest="tail")),
    aggregate=TokenMean(over="kept"),
)

SDPO_SAMPLED = SDPO.but(name="sdpo-sampled", advantage=TeacherGap(anchor="current"), surrogate=ScoreFunction())
