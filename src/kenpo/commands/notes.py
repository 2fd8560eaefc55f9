"""What the catalogue's pages say beside a declaration: when a method serves, and what other trainers do under its name.

By the file that declares it. Statements about other trainers were read in their sources in mid-2026 and may have been
mended since.
"""

from __future__ import annotations

from kenpo.commands.note import NOBODY, Note
from kenpo.commands.notes_signals import SIGNALS

NOTES: dict[str, Note] = SIGNALS | {
    "grpo": Note(
        "The baseline: several samples per prompt, a verifier, short runs.",
        "The mean over a response's own length favours short right and long wrong answers; a group that is all right "
        "or all wrong teaches nothing.",
        (
            "Only slime and torchforge take the paper's mean per response by default. TRL, verl, OpenRLHF and SkyRL "
            "take the token mean; open-instruct, prime-rl and Tinker leave out the standard deviation; NeMo-RL's "
            "default is leave-one-out.",
            "verl adds a dual clip at 3 unasked: with A = −1 and r = 4 its loss is 3, GRPO's 4.",
            "eps beside the deviation is 1e-4 in TRL, 1e-6 in verl, 1e-9 in OpenRLHF. A group of one keeps its raw "
            "reward as advantage in verl and SkyRL; here it is 0.",
        ),
    ),
    "dapo": Note(
        "Long answers with a verifier, and enough generation budget to refill dropped groups.",
        "Dropped groups cost samples: compare runs at equal generated tokens. Long responses weigh more.",
        (
            "TRL's dapo is the token mean and the wider clip; it has no dynamic sampling with refill.",
            "NeMo-RL filtered on the shaped reward, so a length penalty hid uniform groups; here the raw one decides.",
            "verl's length penalty goes on below −1; here, as printed, it does not.",
        ),
    ),
    "dr_grpo": Note(
        "When response length drifts without need.",
        "Without the deviation the step depends on the reward's scale; the constant length rescales the learning rate.",
        (
            "OpenRLHF, NeMo-RL and AReaL change the advantage only and keep a token or sequence count below.",
            "ROLL divides by the padded width of the microbatch at hand, which is no constant.",
        ),
    ),
    "gspo": Note(
        "Mixtures of experts and long answers, where token ratios are noise.",
        "Its clip range is 500 to 700 times narrower than GRPO's: numbers do not carry over. A clipped "
        "response has no gradient at all.",
        (
            "AReaL's sequence level has LUSPO's gradient, not GSPO's (its cosine with GSPO was .825).",
            "TRL pairs the sequence level with any loss type and only warns; with its default loss it is LUSPO.",
        ),
    ),
    "luspo": Note(
        "GSPO where answers have grown too short.",
        "Long responses weigh more by design; the learning rate means something else than with GSPO.",
        ("A former TRL and Unsloth's copy lack the token mask, which weighs responses by length squared.",),
    ),
    "gmpo": Note(
        "Token ratios with outliers.",
        "A bounded token has no gradient but still holds the mean back.",
        (
            "verl's geo_mean ignores the global count: four microbatches multiply its gradient by four.",
            "There a token of weight 0 enters through a log with a floor and scales the whole answer, instead of "
            "dropping out.",
        ),
    ),
    "pmpo": Note(
        "Between GRPO and GMPO, decided per response.",
        "How the share of bounded tokens sets the exponent is our reading.",
        (NOBODY,),
    ),
    "sapo": Note(
        "A smooth gate in place of a clip.",
        "The objective's value is 2/τ on policy, not 1: losses do not compare with other methods'.",
        ("One re-implementation lost the sign of the advantage for a while (unsloth-zoo).",),
    ),
    "sspo": Note(
        "SAPO at the level of responses.",
        "Later versions are reported to have another gate; its formula is not public.",
        (NOBODY,),
    ),
    "dhpo": Note(
        "Token-level credit with a sequence's steadiness.",
        "Both bands are at work: watch both clip fractions.",
        (NOBODY,),
    ),
    "cispo": Note(
        "When a clip silences the rare tokens that begin a reflection.",
        "The loss depends on absolute log-probs and is no measure of progress; the cap decides the step.",
        (
            "TRL, Liger, Unsloth and ms-swift read epsilon_high as the cap itself, verl, NeMo-RL, slime, SkyRL and "
            "open-instruct as a distance from 1: at .28 the gradients differ by 3.6 on policy.",
        ),
    ),
    "gppo": Note(
        "DAPO with a gradient beyond the clip.",
        "Log-ratios beyond 20 saturate, and with them the gradient. Generalized PPO is another method.",
        (NOBODY,),
    ),
    "ripo": Note("Rare tokens should be able to rise.", "Bounds depend on π_old: keep its log-probs in float32."),
    "minpro": Note(
        "Stale batches of long answers.",
        "With one fresh batch per update every ratio is 1 and it does nothing (a warning says so).",
        (NOBODY,),
    ),
    "off_policy_grpo": Note(
        "Samplers that lag by several updates.",
        "Needs both the sampler's and π_old's log-probs.",
        ("Many trainers mean any stale GRPO by the name; few centre the clip.",),
    ),
    "rspo": Note(
        "Mixtures of experts whose routers move between sampling and training.",
        "Needs the router scores of the pass that scored π_old, kept beside those of the current pass.",
        (NOBODY,),
    ),
    "sis": Note("Stale batches with recorded top-K log-probs.", "The corrected weight is biased."),
    "reco": Note("Saturated policies.", "u and v are not bounded: rare responses can weigh much."),
    "zcpo": Note(
        "A KL to the reference that must not act where rewards agree.",
        "Needs the full-vocabulary KL of the whole minibatch before the update: two passes.",
    ),
    "erpo": Note("Narrow training prompts.", "Prompt tokens must be scored by both models."),
    "tis": Note(
        "An inference engine that differs a little from the trainer.",
        "Record the sampler's own log-probs; scored again they equal π_old and the weight is 1.",
        (
            "Some apply it to rollout against current, some against old; OpenRLHF's seq-mask-tis filters responses "
            "and leaves a kept token's ratio unbounded (54.6 where TIS gives 5).",
        ),
    ),
    "mis": Note(
        "As TIS, where distant tokens should not count at all.",
        "Masked tokens stay in the denominator unless told otherwise.",
        ("TRL's default is the sequence form with a cap of 3.",),
    ),
    "icepop": Note(
        "Mixtures of experts with engine mismatch.",
        "A masked share of more than a few per cent points to a defect in the engine.",
        ("verl writes it as a threshold of two numbers, slime as a custom function.",),
    ),
    "kpop": Note(
        "As IcePop with a band that fits the token's probability.",
        "The threshold is ours: sweep it.",
        ("AReaL's default of 2.0 masks almost nothing.",),
    ),
    "dppo": Note(
        "In place of the ratio's clip, with the sampler's log-probs recorded.",
        "Log-probs scored again make every divergence 0.",
        (
            "prime-rl's default is this binary mask at .2 with a squared log-ratio beside it; its ipo is a symmetric "
            "mask, not Identity-PO. TRL had a subclass and removed it.",
        ),
    ),
    "trm": Note(
        "Long horizons, where one bad token taints the response.",
        "The maximum over a long response rejects almost everything: use the mean.",
        ("verl, slime and others form the mask once per batch from π_old against the sampler: close, not the same.",),
    ),
    "m2po": Note(
        "Data many updates old.",
        "The budget is over outward tokens of the whole minibatch: it needs two phases.",
        (
            "AReaL takes all tokens, of old against sampler, and decides per microbatch: on one batch it dropped 44 "
            "tokens where the algorithm drops 30.",
        ),
    ),
    "stapo": Note(
        "Runs that collapse after a few spurious rare tokens.",
        "Candidates are few: a quantile over them moves much from batch to batch.",
        (NOBODY,),
    ),
    "mini_rl": Note(
        "Mixtures of experts, one response-level objective made token-level.",
        "Sums over tokens: the learning rate depends on length.",
        ("One implementation weighs by π_old/μ and so leaves out staleness: mini_rl-old.",),
    ),
    "opsm": Note(
        "Bad responses that have drifted far.",
        "TRL's example threshold and slime's default are four orders of magnitude apart.",
        ("TRL: off_policy_mask_threshold; slime: --use-opsm.",),
    ),
    "rejection": Note(
        "Dropping tokens or responses by a statistic of the mismatch.",
        "A band on the ratio and one on its inverse differ.",
        ("verl's k1 bounds act on μ/π and rejected tokens leave its denominator; slime's stay.",),
    ),
    "stare": Note(
        "Falling entropy.",
        "The choice is over the whole minibatch: two phases.",
        ("The authors' code chooses inside each microbatch.",),
    ),
    "gmc_grpo": Note("Trajectory weights without losing their order.", "On policy every weight is C/G when G > C."),
    "missing_old_logits": Note(
        "Asynchronous training where π_old was never scored.",
        "The average of weights costs a second copy of the model.",
    ),
    "range_grpo": Note("Only to compare: it is Dr. GRPO.", "The paper's rule for intervals is not public."),
    "conspo": Note("To study contrastive objectives.", "A reconstruction, not the paper's objective."),
    "ggpo": Note("To study ratio-free objectives.", "A reconstruction, not the paper's objective."),
}
