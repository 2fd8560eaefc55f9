"""GKD — generalized knowledge distillation (arXiv:2306.13649).

Imitating a teacher's texts leaves a student lost in states of its own making. GKD lets the student write and compares
the two distributions at each of its tokens, whole.

    L = mean over responses of the token mean of JSD_b(q, p),   b = .5,   no gradient through the sampling
    JSD_b = b·KL(q‖m) + (1−b)·KL(p‖m),   m = b·q + (1−b)·p;   b = 0: KL(q‖p), b = 1: KL(p‖q), by definition

No reward, no ratio: advantage 1 and the divergence as the objective. Near its ends JSD_b is a learning rate, not a
direction: 0 < b < .01 and .99 < b < 1 are refused. T = 1 for both models (the paper's teacher T is not established).
`gkd-mixed` adds rows that others wrote (a data set), each origin's mean with weight ½ (``weights.origin_share.own``).
"""

from kenpo.algorithm import Algorithm
from kenpo.stages import MinimiseTerm, Ones, OriginShare, SequenceMean, TeacherTerm

GKD = Algorithm(
    name="gkd",
    source="arXiv:2306.13649",
    advantage=Ones(),
    surrogate=MinimiseTerm(TeacherTerm(kind="jsd", weight=0.5, temperature=1.0)),
    aggregate=SequenceMean(),
)

GKD_MIXED = GKD.but(name="gkd-mixed", weights=(OriginShare(own=0.5),))
