"""What the catalogue's pages say beside a declaration: when a method serves, and what other trainers do under its name.

By the file that declares it. Statements about other trainers were read in their sources in mid-2026 and may have been
mended since.
"""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """``use``: when to take it. ``mind``: what goes wrong with it. ``elsewhere``: what others do under the name."""

    use: str
    mind: str
    elsewhere: tuple[str, ...] = ()


_NOBODY = "No other trainer's main tree has it; its reference here is written from the formula."

NOTES: dict[str, Note] = {
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
    "rloo": Note(
        "Strictly one update per batch, when a plain unbiased policy gradient is wanted.",
        "There is no ratio: a second update on the same batch is biased.",
        ("NeMo-RL builds it from three flags; some trainers add a sequence-level REINFORCE term under the same name.",),
    ),
    "sft": Note(
        "Demonstrations exist: a warm start before reinforcement learning, or all that is needed.",
        "The loss of held-out text says little about what greedy decoding will do; give an --eval-task.",
        ("Several trainers average per microbatch or per rank, so their loss depends on the cut; here it does not.",),
    ),
    "reinforce_pp": Note(
        "One sample per prompt, or rewards whose scale differs little between prompts.",
        "Prompts of different difficulty share one mean; the baseline form mends that.",
        (
            "OpenRLHF calls it reinforce; TRL documents it as GRPO with the batch's deviation, which is not a "
            "whitening over tokens.",
            "verl's whitening adds 1e-8 to the count, so it differs in the ninth digit.",
        ),
    ),
    "remax": Note(
        "One sample per prompt, prompts of very different difficulty, no memory for a critic.",
        "One more greedy decode per prompt; a second update on the same batch is biased.",
        ("verl puts the same advantage under PPO's clip and whitens nothing.",),
    ),
    "ppo": Note(
        "Rewards that arrive late or in several places, and memory for a second model.",
        "A critic that has not learned yet misleads the policy: warm it up. The last value decides what a cut response "
        "is worth: 0 (as here) teaches that running out of tokens ends all, `advantage.terminal=truncated` does not.",
        (
            "verl whitens without setting masked entries back to 0; TRL's experimental PPO whitens over the local "
            "batch only.",
            "verl's and OpenRLHF's value loss have the ½, TRL's multiplies by vf_coef .1 besides.",
        ),
    ),
    "vapo": Note(
        "Long answers with a verifier, where GRPO's one number per answer is too coarse.",
        "It stands on a critic that was trained before the policy moves. Answers of 20 tokens and fewer have λ = 0: "
        "the critic alone judges them.",
        ("NeMo-RL has the weight .1 of the likelihood term; no main tree has all parts together.",),
    ),
    "rfpo": Note(
        "A critic from an earlier run and no verifier, or a verifier that can't judge cut responses.",
        "What the critic gets wrong is trained on. The unbinarised value drifts towards length.",
        (_NOBODY,),
    ),
    "spo": Note(
        "One sample per prompt, prompts that come back, long tails of length: nobody waits for a group.",
        "A first visit is judged against one half. Records of prompts that never return are dead weight. Rewards "
        "outside [0, 1] need the moving average.",
        (
            "verl's recipe overwrites a prompt's record where it occurs twice in a batch; here both rows are folded.",
            "Its constant forgetting is .875, its bounds .875 and .96 are hard-coded; here they are numbers.",
        ),
    ),
    "ttrl": Note(
        "Prompts without labels that the policy answers rightly more often than in any other one way.",
        "Where the majority is wrong, it is reinforced.",
        ("In TRL and verl it is a reward function; the released code breaks ties by the order of samples.",),
    ),
    "gapo": Note(
        "Tasks with a known set of valid answers, all equally welcome.",
        "The pull towards rare answers costs accuracy where they are not all right.",
        (_NOBODY,),
    ),
    "mad_rl": Note(
        "A stated distribution of answers: dice, labels in proportion, calibrated choices.",
        "Frequencies of a small group are noise; forward KL divides by them.",
        (_NOBODY,),
    ),
    "rlcr": Note(
        "Answers that come with a stated confidence, where a confident mistake costs.",
        "Nobody states a confidence unasked: the prompt, or a start that was trained to, has to bring it.",
        (_NOBODY,),
    ),
    "gprl": Note(
        "Rewards of several parts whose spreads differ, where the largest would decide alone.",
        "A part that hardly varies in a group is blown up to the weight of all others.",
        ("TRL's normalize-then-sum option for several rewards has the same shape.",),
    ),
    "riskpo": Note(
        "Hard problems that are seldom solved, where the mean reward is earned elsewhere.",
        "Advantages are never positive: what is above the upper quantile is left alone, all else is pushed down "
        "less or more.",
        ("The released code works out quantiles per bundle; here they are tracked over batches.",),
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
        (_NOBODY,),
    ),
    "sapo": Note(
        "A smooth gate in place of a clip.",
        "The objective's value is 2/τ on policy, not 1: losses do not compare with other methods'.",
        ("One re-implementation lost the sign of the advantage for a while (unsloth-zoo).",),
    ),
    "sspo": Note(
        "SAPO at the level of responses.",
        "Later versions are reported to have another gate; its formula is not public.",
        (_NOBODY,),
    ),
    "dhpo": Note(
        "Token-level credit with a sequence's steadiness.",
        "Both bands are at work: watch both clip fractions.",
        (_NOBODY,),
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
        (_NOBODY,),
    ),
    "ripo": Note("Rare tokens should be able to rise.", "Bounds depend on π_old: keep its log-probs in float32."),
    "minpro": Note(
        "Stale batches of long answers.",
        "With one fresh batch per update every ratio is 1 and it does nothing (a warning says so).",
        (_NOBODY,),
    ),
    "off_policy_grpo": Note(
        "Samplers that lag by several updates.",
        "Needs both the sampler's and π_old's log-probs.",
        ("Many trainers mean any stale GRPO by the name; few centre the clip.",),
    ),
    "rspo": Note(
        "Mixtures of experts whose routers move between sampling and training.",
        "Needs the router scores of the pass that scored π_old, kept beside those of the current pass.",
        (_NOBODY,),
    ),
    "luffy": Note(
        "Prompts the policy never solves, with an expert's trace at hand.",
        "The trace joins the group's mean: with it no group is all wrong.",
        (
            "The authors' fork is the reference. Renderings elsewhere put a clip and a KL on it, which is another "
            "method.",
        ),
    ),
    "grin": Note("Injecting knowledge from documents.", "The KL's weight of 5 is deliberate."),
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
        (_NOBODY,),
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
    "graft": Note("Two policies training side by side.", "The exchange is the loop's; this is the update."),
    "range_grpo": Note("Only to compare: it is Dr. GRPO.", "The paper's rule for intervals is not public."),
    "conspo": Note("To study contrastive objectives.", "A reconstruction, not the paper's objective."),
    "ggpo": Note("To study ratio-free objectives.", "A reconstruction, not the paper's objective."),
    "reward_model": Note(
        "Judgements exist, a verifier does not: a score for `ppo`, `grpo` or `rloo` to maximise.",
        "Only differences within a prompt are learnt. A policy that maximises the score leaves the data "
        "it was fitted on.",
        (
            "TRL prints the centring term inside the logarithm; its code adds the square, as here.",
            "OpenRLHF's LogExpLoss is the same function and overflows for a far wrong pair.",
        ),
    ),
    "dpo": Note(
        "Pairs of good and bad answers, one model and one set of reference log-probs, no sampling.",
        "The likelihood of the chosen answer may fall too. Sums favour no length by themselves, but are "
        "not normalised.",
        (
            "TRL: the sigmoid loss ignores label_smoothing, which lives in its robust loss. OpenRLHF and SimPO smooth.",
            "SimPO's tuned DPO baselines use beta .01, TRL .1.",
        ),
    ),
    "ipo": Note(
        "Pairs whose labels are certain, where DPO drifts without end.",
        "Summed and per-token forms need other values of beta.",
        ("TRL divides each side's log-ratio by its length, OpenRLHF does not.",),
    ),
    "simpo": Note(
        "Preferences without a reference model: half the forward passes of DPO.",
        "Nothing but a small learning rate (3e-7 to 1e-6) holds the policy near its start.",
        (
            "In TRL it is a loss of the CPO trainer: set cpo_alpha to 0 (1 adds a likelihood term), beta "
            "and simpo_gamma.",
        ),
    ),
    "mdre": Note(
        "Pairs of agent trajectories that differ in few turns.",
        "Taken literally the chosen side stops training on long trajectories.",
        (_NOBODY,),
    ),
    "opd": Note(
        "A stronger model of the same vocabulary can score the student's tokens.",
        "It learns the teacher, mistakes included. Temperature, template and tokeniser of both must agree.",
        (
            "Whose log-prob stands in the gap: μ in tinker; π_old in slime, miles, NeMo and SkyRL; π_θ in "
            "prime-rl and verl.",
            "k3 as a supervised loss (verl's YAML default) trains the other direction, KL(teacher‖student).",
            "A divergence's value used as an advantage trains nothing at its own position (miles, issue 2362).",
        ),
    ),
    "opsa": Note(
        "Beside every distillation run: what pushing unlikely tokens down does alone.",
        "No teacher and no reward: it sharpens. A positive value collapses.",
        ("The authors cut within one worker; here within the minibatch.",),
    ),
    "gkd": Note(
        "A teacher's whole distribution is at hand.",
        "b near 0 or 1 is a small learning rate, not a direction.",
        (
            "TRL averages over tokens and does not pass the sampling temperature to the loss; its JSD ends "
            "once were wrong.",
            "torch's kl_div(a, b) is KL(b‖a).",
        ),
    ),
    "minillm": Note(
        "A small student that should pick one of the teacher's ways.",
        "Paper and code are two methods; the mixture must be what sampled.",
        ("TRL leaves the gap undetached and counts it twice by default.",),
    ),
    "sdpo": Note(
        "A verifier, several samples per prompt, no teacher.",
        "A teacher that is the live model diverges; hints shorten long reasoning. A lone success teaches nothing.",
        (
            "The authors' denominator is per microbatch, here the minibatch's. TRL: sampled token, "
            "threshold 1, no tail.",
        ),
    ),
    "opsd": Note(
        "Verified solutions are at hand and the base model reads them well.",
        "The clip of the third release may turn the gradient: off here.",
        ("The authors sample with top-k and top-p, which makes μ another policy than the one that is scored.",),
    ),
    "teacher_mixed": Note(
        "A verifier and a teacher, neither enough alone.",
        "A gap of several nats drowns a group's advantage. What mixes losses and what mixes advantages "
        "differ off policy.",
        ("SkyRL refuses batch normalisation with a teacher (2256).",),
    ),
    "repo": Note(
        "Expert solutions of foreign style, and a policy that can restate them.",
        "The ratio is taken on the bare prompt, where the text was not sampled: biased. rho and delta are not public.",
        ("Not the replay method of the same name (arXiv:2506.09340). The update is GRPO's.",),
    ),
    "oc_grpo": Note(
        "Problems that the policy solves with part of the solution before it, and not without.",
        "The weight only shrinks: hinted responses that are far from the plain prompt teach little.",
        ("The authors' default floor is .3, their runs use .01.",),
    ),
    "sft_mixture": Note(
        "The baseline that LUFFY, GRIN and RePO are held against.",
        "Two losses without a common unit: coef is a choice.",
    ),
    "rlid": Note(
        "Agents that choose from a menu: one pass per decision.",
        "A reconstruction. Labels have priors of their own: permute them and watch the label marginal.",
    ),
}
