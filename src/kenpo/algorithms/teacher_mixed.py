"""Reward and teacher together: three ways to mix them (SDPO, arXiv:2601.20802, eq. 3, and others).

A verifier says whether, a teacher says where. Their advantages can be mixed before the surrogate, added, or the two
losses summed; on policy, with equal denominators, that is one thing, and off policy three.

    A_t = share·A_GRPO + (1−share)·( log q(y_t) − log π_old(y_t) ),   share = .5 (ours);   Clip .2/.2, token mean

From OPD: the advantage. A row without a hint has a gap of 0. A_GRPO is about 1, a gap may be −10 nats.
`teacher_mixed-added`: A_GRPO + c·gap (tinker, slime, miles). `teacher_mixed-losses`: the clipped loss over all tokens
plus c·sg(log π − log q)·log π over the hinted rows' own tokens (TRL, whose weights w and 1 − w are a learning rate
and c = (1−w)/w here).
"""

from kenpo.algorithms.opd import OPD
from kenpo.stages import Added, GroupZScore, Mix, SampledGap, TeacherGap

TEACHER_MIXED = OPD.but(
    name="teacher_mixed",
    source="arXiv:2601.20802",
    status="our reading",
    advantage=Mix(GroupZScore(), TeacherGap(), share=0.5),
)

TEACHER_MIXED_ADDED = TEACHER_MIXED.but(name="teacher_mixed-added", advantage=Added(GroupZScore(), TeacherGap()))

TEACHER_MIXED_LOSSES = TEACHER_MIXED.but(
    name="teacher_mixed-losses", advantage=GroupZScore(), regularizers=(SampledGap(coef=1.0),)
)
