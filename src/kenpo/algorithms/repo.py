"""RePO — rephrasing policy optimization (arXiv:2602.10819): GRPO on groups in which a restated answer took a place.

An expert's solution is foreign to the policy. Asked to restate it in its own words, the policy writes what it could
have written; where nearly all of a group failed, that answer takes the place of the worst one.

    if the share of R < delta is at least rho, the rephrased response replaces the one of lowest R, if it is better

The update is GRPO's, name for name: what differs is the data, so the coefficients of one batch are the same. Advantages
are those of the group as it is after the swap. The ratio is taken on the bare prompt, where the text was not sampled:
it is biased. `kenpo.experience.exchange.replaced` is the rule. delta (.5) and rho (.75) are ours, not public; so are:
the first of equal failures goes, a truncated or no better answer is rejected, one per group.
"""

from kenpo.algorithms.grpo import GRPO

REPO = GRPO.but(name="repo", source="arXiv:2602.10819", status="our reading")
