"""Range-GRPO — rewards as intervals (arXiv:2610.01548): its point limit only, a reconstruction.

A judge's score is uncertain; Range-GRPO compares intervals around scores instead of the scores. What overlapping
intervals contribute is not public. For intervals of width 0 the comparison is a difference, and

    A_i = mean_j (R_i − R_j) = R_i − mean(R)

which is Dr. GRPO, stage for stage. (Independent uniform rewards on the intervals would give the same with midpoints and
ignore the widths, so the paper's rule must be another.)
"""

from kenpo.algorithms.dr_grpo import DR_GRPO

RANGE_GRPO = DR_GRPO.but(name="range_grpo", source="arXiv:2610.01548", status="reconstruction")
