"""Tokens that other policies wrote, or that are measured against a third one: LUFFY, GRIN, Off-Context GRPO, GRAFT,
Missing Old Logits, ERPO's query side, and the REINFORCE forms with a KL in the reward."""

from __future__ import annotations

import math

from .batch import (
    Batch,
    centred,
    clipped,
    mean,
    saturate,
    sequence_mean,
    token_mean,
    variance,
    z_score,
)
from .grpo_family import k3
from .scalar import clamp, exp

EXPERT = 2  # rollouts.origin


def expert(y) -> bool:
    """The response is a teacher's trace."""
    return y.of_row("origin") == EXPERT


def luffy_objective(y, a: float, gamma: float, behaviour: str | None) -> list:
    """J per token: r A on-policy (no clip); p/(p+gamma) A on a trace; p/(mu + 1e-6) A if `behaviour` names its mu."""
    if not expert(y):
        return [r * a for r in y.ratios()]
    p = [exp(lp) for lp in y.logp]
    if behaviour is None:
        return [x / (x + gamma) * a for x in p]
    return [x / (math.exp(mu) + 1e-6) * a for x, mu in zip(p, y.take(behaviour), strict=True)]


def luffy(case, gamma=0.1, average="sum_over_width", behaviour=None, width=None):
    """LUFFY, arXiv 2504.14945: `luffy_objective` with A = R - mean, the trace inside the group.

    Averages: "sum_over_width" (token sum / width, as released), "sum_over_rows_and_width", "token_mean".
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    J = [luffy_objective(y, a, gamma, behaviour) for y, a in zip(batch, A, strict=True)]
    width = width or len(case["rollouts"]["mask"][0])
    total = sum(sum(row) for row in J)
    divisor = {"sum_over_width": width, "sum_over_rows_and_width": width * batch.N, "token_mean": batch.tokens}[average]
    return batch.result(-total / divisor if divisor else 0.0, A)


def grin(case, low=0.2, high=0.2, beta=5.0, floor=None):
    """Golden-GRPO, arXiv 2608.25243: min( r A, clip(r) A ) on own tokens, A* log pi_theta on the golden answer's (no
    ratio, no clip), A = R - mean over all members. Ours: clip .2, token mean, k3 to the reference on every token.

    `floor` (0 suggested) holds the golden answer's advantage from below.
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    if floor is not None:
        A = [max(a, floor) if expert(y) else a for y, a in zip(batch, A, strict=True)]
    J = []
    for y, a in zip(batch, A, strict=True):
        row = [a * lp for lp in y.logp] if expert(y) else [clipped(r, a, low, high) for r in y.ratios()]
        if beta:
            row = [j - beta * k3(lp, ref) for j, lp, ref in zip(row, y.logp, y.take("logp_ref"), strict=True)]
        J.append(row)
    return batch.result(-token_mean(batch, J), A)


def context_weights(y, floor: float, cap: float, level: str = "token") -> list[float]:
    """Off-Context GRPO's clamp( pi_old(y|x)/pi_old(y|guided x), floor, cap ), per token or by the response's mean."""
    d = [saturate(g - o) for g, o in zip(y.take("logp_guided"), y.old, strict=True)]
    if level == "sequence" and d:
        d = [mean(d)] * y.n
    return [clamp(math.exp(-x), floor, cap) for x in d]


def oc_grpo(case, floor=0.01, cap=1.0, level="token", low=0.2, high=0.2, eps=1e-6):
    """Off-Context GRPO, arXiv 2607.19313: J = token mean of w min( r A, clip(r) A ), w as `context_weights`, r on the
    plain prompt. Ours: A is GRPO's z-score."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = [context_weights(y, floor, cap, level) for y in batch]
    J = [
        [w * clipped(r, a, low, high) for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J), A, W)


def sft_mixture(case, coef=1.0, low=0.2, high=0.2, eps=1e-6):
    """GRPO without KL on the rows that no expert wrote, z-scores among them, and the mean of -log pi over the experts'
    tokens. Rows without a trained token leave the first mean."""
    batch = Batch(case)
    A = [0.0] * batch.N
    for i, y in enumerate(batch):
        if not expert(y):
            own = [j for j in batch.group_of(y) if not expert(batch.responses[j])]
            A[i] = z_score(eps)([batch.rewards[j] for j in own], own.index(i))
    rows = [
        sum(clipped(r, a, low, high) for r in y.ratios()) / y.n
        for y, a in zip(batch, A, strict=True)
        if y.n and not expert(y)
    ]
    loss = -(sum(rows) / len(rows)) if rows else 0.0
    tokens = [x for y in batch if expert(y) for x in y.logp]
    loss = loss + (coef * -(sum(tokens) / len(tokens)) if tokens else 0.0)
    return batch.result(loss, A, [float(not expert(y)) for y in batch])


def rlid(case, low=0.2, high=0.2):
    """One decision per response: clipped ratio, A = R - mean, mean over decisions. A reconstruction."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    J = [[clipped(r, a, low, high) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-sequence_mean(batch, J), A)


def compatibility_weight(receiver: float, source: float, threshold: float) -> float:
    """GRAFT: s = exp(receiver's mean logp - source's); min(s, 1) where s > threshold, else 0."""
    s = math.exp(receiver - source)
    return min(s, 1.0) if s > threshold else 0.0


def graft(case, receiver, source, threshold=0.8, low=0.2, high=0.28, eps=1e-6):
    """GRAFT, arXiv 2609.37868, the receiver's update: w_i min( r A, clip(r) A ) over all tokens, rejected ones counted.
    `receiver`, `source` [B]: mean log-prob of each response under either policy (equal for own responses)."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = [compatibility_weight(receiver[y.row], source[y.row], threshold) for y in batch]
    J = [[w * clipped(r, a, low, high) for r in y.ratios()] for y, a, w in zip(batch, A, W, strict=True)]
    return batch.result(-token_mean(batch, J), A, W)


def missing_old_logits(case, low=0.2, high=0.2, eps=1e-6):
    """Missing Old Logits, arXiv 2605.12070 (PPO-EWMA): J = token mean of sg[pi_prox/mu] min( q A, clip(q) A ),
    q = pi_theta/pi_prox, pi_prox an exponential average of the weights. The two factors' product is pi_theta/mu."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = [
        [math.exp(saturate(p - m)) for p, m in zip(y.take("logp_prox"), y.take("logp_sampler"), strict=True)]
        for y in batch
    ]
    J = [
        [w * clipped(q, a, low, high) for w, q in zip(row, y.ratios("prox"), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J), A, W)


def ewma(weights: list[list[float]], decay: float) -> list[list[float]]:
    """phi <- decay phi + (1 - decay) theta after each further weight vector; the first is the start."""
    phi, out = weights[0], []
    for theta in weights[1:]:
        phi = [decay * p + (1 - decay) * x for p, x in zip(phi, theta, strict=True)]
        out.append(phi)
    return out


def interpolated_bounds(clip: float, a: float) -> tuple[float, float]:
    """Clip bounds on pi/pi_prox, log pi_prox = (1-a) log mu + a log pi, as bounds on the full ratio pi/mu."""
    return (1 - clip) ** (1 / (1 - a)), (1 + clip) ** (1 / (1 - a))


def query_weight(surprisal: float, average: float) -> float:
    """ERPO's clip(average / s, 0, 2), s = -log p_0(query)."""
    return clamp(average / surprisal, 0.0, 2.0)


def erpo(case, alpha=0.01, average_surprisal=None, low=0.2, high=0.2, eps=1e-6):
    """ERPO-env, arXiv 2608.23311: GRPO without its KL, each response's term times w(query), plus alpha k3 to the
    reference on the query tokens (`prompt_mask`), averaged over a row's query tokens, then over rows (ours).

    w is `query_weight` from `average_surprisal` (the dataset's mean); None: 1.
    """
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    J, R, W = [], [], []
    for y, a in zip(batch, A, strict=True):
        ref = [case["rollouts"]["logp_ref"][y.row][t] for t in y.query]
        w = 1.0 if average_surprisal is None else query_weight(-math.fsum(ref), average_surprisal)
        W.append(w)
        J.append([w * clipped(r, a, low, high) for r in y.ratios()])
        R.append([k3(lp, q) for lp, q in zip(y.query_logp, ref, strict=True)])
    return batch.result(alpha * sequence_mean(batch, R) - sequence_mean(batch, J), A, W)


# ---- REINFORCE with a KL --------------------------------------------------------------------------------------------


def return_to_go(y, reward: float, kl_coef: float) -> list[float]:
    """-kl_coef (log pi_old - log pi_ref) on each token, the reward on the last, summed from each token to the end."""
    r = [-kl_coef * saturate(o - q) for o, q in zip(y.old, y.take("logp_ref"), strict=True)] if kl_coef else [0.0] * y.n
    if r:
        r[-1] += reward
    return [math.fsum(r[t:]) for t in range(y.n)]


def whitened(rows: list[list[float]], eps: float = 1e-8) -> list[list[float]]:
    """(x - mean)/sqrt(var + eps) over all tokens, ddof 1; 0 if they are constant or fewer than two."""
    flat = [x for row in rows for x in row]
    if len(flat) < 2 or all(x == flat[0] for x in flat):
        return [[0.0] * len(row) for row in rows]
    m, v = mean(flat), variance(flat)
    return [[(x - m) / math.sqrt(v + eps) for x in row] for row in rows]


def reinforce_pp_kl(case, kl_coef=0.0, low=0.2, high=0.2):
    """REINFORCE++ with its KL in the reward: `return_to_go` per token, whitened over the batch, clipped, token mean."""
    batch = Batch(case)
    A = whitened([return_to_go(y, y.reward, kl_coef) for y in batch])
    J = [
        [clipped(r, a, low, high) for r, a in zip(y.ratios(), row, strict=True)]
        for y, row in zip(batch, A, strict=True)
    ]
    return batch.result(-token_mean(batch, J), A)


def remax(case, kl_coef=0.0):
    """ReMax, arXiv 2310.10505: J = (1/B) sum_it (return-to-go - greedy score) log pi_theta; `baseline` has it."""
    batch = Batch(case)
    A = [[g - y.of_row("baseline") for g in return_to_go(y, y.reward, kl_coef)] for y in batch]
    J = [sum(a * lp for a, lp in zip(row, y.logp, strict=True)) for y, row in zip(batch, A, strict=True)]
    return batch.result(-sum(J) / batch.N if batch.N else 0.0, A)
