"""What the catalogue's pages say of methods whose signal is not a group's verdict: critics, trackers, teachers, pairs.

See `kenpo.commands.notes`.
"""

from __future__ import annotations

from kenpo.commands.note import NOBODY, Note

SIGNALS: dict[str, Note] = {
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
        (NOBODY,),
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
    "ttpo": Note(
        "No labels, a policy whose majority is mostly right, and long answers that a vote alone says little about.",
        "What the majority gets wrong is imitated token by token. `--teacher hint`; with groups of 64 only 8 train.",
        (NOBODY,),
    ),
    "gapo": Note(
        "Tasks with a known set of valid answers, all equally welcome.",
        "The pull towards rare answers costs accuracy where they are not all right.",
        (NOBODY,),
    ),
    "mad_rl": Note(
        "A stated distribution of answers: dice, labels in proportion, calibrated choices.",
        "Frequencies of a small group are noise; forward KL divides by them.",
        (NOBODY,),
    ),
    "rlcr": Note(
        "Answers that come with a stated confidence, where a confident mistake costs.",
        "Nobody states a confidence unasked: the prompt, or a start that was trained to, has to bring it.",
        (NOBODY,),
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
    "luffy": Note(
        "Prompts the policy never solves, with an expert's trace at hand.",
        "The trace joins the group's mean: with it no group is all wrong.",
        (
            "The authors' fork is the reference. Renderings elsewhere put a clip and a KL on it, which is another "
            "method.",
        ),
    ),
    "grin": Note("Injecting knowledge from documents.", "The KL's weight of 5 is deliberate."),
    "graft": Note("Two policies training side by side.", "The exchange is the loop's; this is the update."),
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
        (NOBODY,),
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
