"""Random cases: plain `random`, seeded, the same on every machine. Everything a rollout batch may hold, and junk where
no result may look.

    case = make_case(seed)                            # {"rollouts": {...}, "policy": {...}}
    case = make_case(seed, gap="extreme", fresh=True)

`cases(n, **options)` yields n of them. `equal_groups` and the like narrow the shapes down.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

JUNK = (math.nan, math.inf, -math.inf, -1e9, 3.0, 0.0, -50.0)
TAME_JUNK = (-1e9, 3.0, 0.0, -50.0)  # where JSON is written
HIGHEST = -1e-4  # a log-probability that is drawn is never exactly 0


def make_case(
    seed: int,
    *,
    gap: str = "usual",
    sampler_gap: float = 0.15,
    fresh: bool = False,
    uneven: bool = True,
    interleaved: bool = True,
    empty_rows: bool = True,
    uniform_group: bool = True,
    single_group: bool = True,
    holes: bool = True,
    no_verdict: bool = False,
    finite_junk: bool = False,
    prompt: int | None = None,
    topk: int = 0,
    router: tuple[int, int] | None = None,
    experts: bool = False,
    query: bool = False,
    critic: bool = False,
    decisions: bool = False,
    supervised: bool = False,
    binary: bool = False,
    answers: bool = False,
    parts: bool = False,
    groups: int = 4,
    width: int | None = None,
) -> dict:
    """One case.

    gap           how far pi_theta is from pi_old: "none" (on-policy, also pi_old = mu), "usual", or "extreme" (now and
                  then a token is +-50 or +-120 off, in all three policies)
    sampler_gap   standard deviation of log pi_old - log mu
    fresh         no logp_old
    no_verdict    one rollout has reward NaN
    finite_junk   no NaN or inf at masked positions (for JSON)
    topk, router  adds topk_ids, topk_logp_* [B,T,K] and tokens; router scores [B,T,L,K]
    experts       one rollout of each group is an expert's (origin 2)
    query         prompt positions after the first are scored: prompt_mask, with numbers in logp and logp_ref
    decisions     each response is one token, chosen from a menu: tokens, support_ids
    critic        values_old, score_old, and the policy's values
    supervised    one row has no reward and origin 4
    binary        rewards are 0 or 1
    answers       prompt_id, answer, the prompt's target_ids and target_prob, drift
    parts         reward_parts: two named ones, NaN here and there, and a confidence
    """
    rng = random.Random(f"kenpo-{seed}")
    start = (rng.randint(1, 3) if prompt is None else prompt) + (1 if query else 0)
    width = width or start + rng.randint(3, 8)
    group, rewards = _groups(rng, groups, uneven, uniform_group, single_group)
    if interleaved:
        order = rng.sample(range(len(group)), len(group))
        group, rewards = [group[k] for k in order], [rewards[k] for k in order]
    B = len(group)
    mask = [_mask_row(rng, start, width, holes) for _ in range(B)]
    if empty_rows:
        mask[rng.randrange(B)] = [0] * width
    if decisions:
        mask = [[int(t == start and any(row)) for t in range(width)] for row in mask]
    if no_verdict:
        rewards[rng.randrange(B)] = math.nan
    junk = TAME_JUNK if finite_junk else JUNK

    def field(make):
        return [[make(b, t) if mask[b][t] else rng.choice(junk) for t in range(width)] for b in range(B)]

    def near(base, sigma):
        return field(lambda b, t: min(base[b][t] + (rng.gauss(0.0, sigma) if sigma else 0.0), HIGHEST))

    old = field(lambda b, t: min(-rng.expovariate(0.7), HIGHEST) if rng.random() < 0.85 else -rng.uniform(4, 9))
    sampler = near(old, 0.0 if gap == "none" else sampler_gap)
    logp = near(old, 0.0 if gap == "none" else 0.3)
    ref = near(old, 0.4)
    if gap == "extreme":
        for target in (logp, sampler, ref):
            _throw_far(rng, target, mask)
    rollouts = {"mask": mask, "group": group, "rewards": rewards, "logp_sampler": sampler, "logp_ref": ref}
    if not fresh:
        rollouts["logp_old"] = old
    policy = {"logp": logp, "entropy": field(lambda b, t: rng.uniform(0.02, 3.0))}
    policy["kl_ref"] = field(lambda b, t: rng.expovariate(4.0))
    rollouts["logp_prox"] = near(old, 0.1)
    rollouts["logp_guided"] = near(old, 0.6)
    rollouts["baseline"] = [rng.choice([0.0, 0.5, 1.0]) for _ in range(B)]
    policy["kl_sampler"] = field(lambda b, t: rng.expovariate(60.0))
    rollouts["logp_source"] = [_source(rng, old[b], mask[b], finite_junk) for b in range(B)]
    if topk:
        _add_topk(rng, rollouts, policy, mask, topk)
    if router:
        _add_router(rng, rollouts, policy, mask, router)
    if experts:
        rollouts["origin"] = [2 if group.index(g) == b else 0 for b, g in enumerate(group)]
    if decisions:
        rollouts["support_ids"] = [[[3, 5, 8] if m else [-1] * 3 for m in row] for row in mask]
        rollouts["tokens"] = [[rng.choice([3, 5, 8]) if m else 7 for m in row] for row in mask]
    if query:
        rollouts["prompt_mask"] = [[int(0 < t < start) for t in range(width)] for _ in range(B)]
        for b in range(B):
            for t in range(1, start):
                logp[b][t], ref[b][t] = -rng.expovariate(0.7) - 0.01, -rng.expovariate(0.7) - 0.01
    _add_pairs_and_teachers(random.Random(f"kenpo-more-{seed}"), rollouts, policy, old, junk)
    if critic:
        rollouts["values_old"] = field(lambda b, t: rng.gauss(0.3, 0.5))
        policy["values"] = field(lambda b, t: rollouts["values_old"][b][t] + rng.gauss(0.0, 0.3))
        rollouts["score_old"] = [rng.uniform(0.2, 0.9) for _ in range(B)]
    if supervised:
        row = rng.randrange(B)
        rewards[row] = math.nan
        rollouts["origin"] = [4 if b == row else 0 for b in range(B)]
    if binary:
        rollouts["rewards"] = [r if math.isnan(r) else float(r > 0.2) for r in rewards]
    if answers:
        _add_answers(rng, rollouts)
    if parts:
        rollouts["reward_parts"] = {
            "format": [rng.choice([0.0, 1.0, 0.5, math.nan]) for _ in range(B)],
            "outcome": [r if math.isnan(r) else float(r > 0.2) for r in rewards],
            "confidence": [rng.choice([rng.random(), rng.random(), math.nan]) for _ in range(B)],
        }
    return {"rollouts": rollouts, "policy": policy}


def _add_pairs_and_teachers(rng, rollouts, policy, old, junk):
    """Scores and margins of responses, turns, a teacher's log-probs and divergence, and which rows had a hint."""
    mask = rollouts["mask"]
    B = len(mask)
    policy["score"] = [rng.gauss(0.0, 2.0) for _ in range(B)]
    rollouts["margin"] = [rng.choice([0.0, 0.5, 1.0]) for _ in range(B)]
    rollouts["turn"] = [[rng.choice([0, 9]) if not m else t // 3 for t, m in enumerate(row)] for row in mask]

    def field(make):
        return [[make(b, t) if m else rng.choice(junk) for t, m in enumerate(row)] for b, row in enumerate(mask)]

    rollouts["logp_teacher"] = field(lambda b, t: min(old[b][t] + rng.gauss(0.0, 0.8), HIGHEST))
    policy["kl_teacher"] = field(lambda b, t: rng.expovariate(3.0))
    rollouts["hinted"] = [rng.random() < 0.6 for _ in range(B)]


def cases(n: int, first: int = 0, **options) -> Iterator[dict]:
    """n cases with seeds first, first + 1, ..."""
    return (make_case(first + k, **options) for k in range(n))


def on_policy(case: dict) -> dict:
    """The same case with logp = logp_old = logp_sampler."""
    logp = case["policy"]["logp"]
    return {"rollouts": case["rollouts"] | {"logp_old": logp, "logp_sampler": logp}, "policy": case["policy"]}


def _source(rng, old, mask, finite):
    """The writer's mean log-prob of a response: near this model's own; NaN where this model wrote it."""
    trained = [x for x, m in zip(old, mask, strict=True) if m]
    if not trained or (not finite and rng.random() < 0.4):
        return -1.0 if finite else math.nan
    return math.fsum(trained) / len(trained) + rng.gauss(0.0, 0.25)


def _groups(rng, count, uneven, uniform_group, single_group):
    """Group names (not 0, 1, 2 in order) and rewards: mixed ones, one with equal rewards, one with one member."""
    group, rewards = [], []
    names = rng.sample(range(100), count)
    for k, name in enumerate(names):
        size = rng.randint(2, 5) if uneven else 4
        if single_group and k == count - 1:
            size = 1
        values = [rng.choice([0.0, 1.0, round(rng.uniform(-1, 1), 3)]) for _ in range(size)]
        if size > 1 and all(v == values[0] for v in values):
            values[0] += 1.0
        if uniform_group and k == count - 2:
            values = [rng.choice([0.0, 1.0, 0.1])] * size
        group += [name] * size
        rewards += values
    return group, rewards


def _mask_row(rng, start, width, holes):
    """Prompt, then a response of random length, now and then with a tool's tokens inside."""
    length = rng.randint(1, width - start)
    row = [0] * start + [1] * length + [0] * (width - start - length)
    if holes and length > 2 and rng.random() < 0.5:
        row[start + rng.randrange(1, length - 1)] = 0
    return row


def _throw_far(rng, field, mask):
    """Some trained entries moved by +-50 or +-120 (log-probs stay at most 0, so upward moves end just below it)."""
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            if m and rng.random() < 0.15:
                field[b][t] = min(field[b][t] + rng.choice([-120.0, -50.0, -25.0, 50.0]), HIGHEST)


def _add_topk(rng, rollouts, policy, mask, K):
    """A made-up vocabulary of 3K ids per position: the sampler's K likeliest, with log-probs under all policies."""
    shape = [[None] * len(row) for row in mask]
    ids, mu, old, new, tokens = ([row[:] for row in shape] for _ in range(5))
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            V = 3 * K
            base = [rng.gauss(0, 1.5) for _ in range(V)]
            p_mu, p_old, p_new = (_log_softmax([x + rng.gauss(0, s) for x in base]) for s in (0.05, 0.1, 0.4))
            top = sorted(range(V), key=lambda v: -p_mu[v])[:K]
            token = rng.choices(range(V), [math.exp(x) for x in p_mu])[0]
            ids[b][t], tokens[b][t] = top, token
            mu[b][t], old[b][t], new[b][t] = ([p[v] for v in top] for p in (p_mu, p_old, p_new))
            if m:
                rollouts["logp_sampler"][b][t], policy["logp"][b][t] = p_mu[token], p_new[token]
                if "logp_old" in rollouts:
                    rollouts["logp_old"][b][t] = p_old[token]
    rollouts |= {"topk_ids": ids, "topk_logp_sampler": mu, "topk_logp_old": old, "tokens": tokens}
    policy["topk_logp"] = new


def _add_router(rng, rollouts, policy, mask, shape):
    layers, K = shape
    old = [[[[-rng.uniform(0.3, 3.0) for _ in range(K)] for _ in range(layers)] for _ in row] for row in mask]
    rollouts["router_logp_old"] = old
    rollouts["routes"] = [[[rng.sample(range(4 * K), K) for _ in layer] for layer in row] for row in old]
    policy["router_logp"] = [
        [[[x + rng.gauss(0, 0.2) for x in layer] for layer in token] for token in row] for row in old
    ]


def _add_answers(rng, rollouts):
    """Each prompt has four valid answers and their target shares; rows answer one of them, another, or nothing."""
    targets, shares, answer = {}, {}, []
    for name in dict.fromkeys(rollouts["group"]):
        targets[name] = rng.sample(range(1, 50), rng.randint(2, 4))
        raw = [rng.random() + 0.1 for _ in targets[name]]
        shares[name] = [x / math.fsum(raw) for x in raw]
    for name in rollouts["group"]:
        answer.append(rng.choice([*targets[name], targets[name][0], 77, -1]))
    rollouts["prompt_id"] = [1000 + name for name in rollouts["group"]]
    rollouts["answer"] = answer
    rollouts["target_ids"] = [targets[n] + [-1] * (4 - len(targets[n])) for n in rollouts["group"]]
    rollouts["target_prob"] = [shares[n] + [0.0] * (4 - len(shares[n])) for n in rollouts["group"]]
    rollouts["drift"] = [rng.choice([math.nan, 0.0, rng.expovariate(60.0)]) for _ in answer]


def _log_softmax(x):
    top = max(x)
    total = math.log(math.fsum(math.exp(v - top) for v in x)) + top
    return [v - total for v in x]
