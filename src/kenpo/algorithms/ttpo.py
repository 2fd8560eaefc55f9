"""TTPO — test-time policy optimization (arXiv:2608.27448): TTRL's vote, with a dense signal for those who agree.

No labels. Who agrees with the group's majority imitates the model that was shown the majority's answer; who does not
unlearns its unlikely tokens.

    agreeing:  (1/T) Σ_t w_t·KL(q‖p),   others:  −λ·(A/T) Σ_t m_t·log π,   λ = .1;   mean over the responses that train
    w = H + D − H·D,  m = 1[−log π·(1 − H) ≥ median],   H, D: entropy and KL scaled to [0, 1] over the response

From TTRL: the vote. A is the z-score over all samples of the prompt (population, ours: not stated). Only the 4 shortest
of each side train, with their first 1,024 tokens. Teacher: the model as the run began, shown the answer (the appendix;
the text prints the current weights, ``weights.hinted.average=1``). Ours: w and m are constants, a constant H or D is 0,
an unparsable answer disagrees, a prompt without any answer does not train.
"""

from kenpo.algorithms.ttrl import TTRL
from kenpo.stages import AgreementSplit, AgreementSwitch, Hinted, SequenceMean, ShortestOfEach

TTPO = TTRL.but(
    name="ttpo",
    source="arXiv:2608.27448",
    advantage=AgreementSplit(coef=0.1),
    weights=(ShortestOfEach(), Hinted(by="majority", average=0.0)),
    ratio=None,
    surrogate=AgreementSwitch(),
    aggregate=SequenceMean(over="kept"),
    status="our reading",
)
