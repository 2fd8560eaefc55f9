"""TTRL — Test-Time Reinforcement Learning (arXiv:2504.16084).

No labels: the group's most frequent answer stands in for the right one.

    R = 1 if the answer equals the group's majority, else 0;   then GRPO

Unparsable answers have no vote and reward 0. On a tie the released code takes the answer seen first; here the smallest
identity, which no order of rows changes (``shaping.majority_vote.ties=first`` is the code's). Everyone votes and
trains; the paper's larger vote is not offered.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import MajorityVote

TTRL = GRPO.but(name="ttrl", source="arXiv:2504.16084", shaping=(MajorityVote(),), regularizers=())
