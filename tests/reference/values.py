"""PPO and VAPO: advantages from a critic (GAE), the value loss, entropy, and the auxiliary likelihood term.

"Next token" means the next trained token: masked positions are stepped over, gamma and lambda count trained tokens.
`ppo` and `vapo` also give d loss / d values and d loss / d entropy, as a fifth item.
"""

from __future__ import annotations

import math

from .batch import Batch, clipped, saturate, token_mean
from .mixed_policy import whitened
from .scalar import Value, clamp, gradients, maximum


def gae(rewards: list[float], values: list[float], gamma: float, lam: float, last: float = 0.0) -> list[float]:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; V after the last token is `last`."""
    A, ahead, following = [], 0.0, last
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        ahead = r + gamma * following - v + gamma * lam * ahead
        following = v
        A.append(ahead)
    return A[::-1]


def verdict(y, tau: float = 0.5215) -> float:
    """RFPO, arXiv 2609.37119, without a length offset: 1 if the critic's value at the last token exceeds tau."""
    return float(y.of_row("score_old") > tau)


ESTIMATORS = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}


def token_rewards(y, kl_coef: float, estimator: str = "k1") -> list[float]:
    """Given `token_rewards`, or -kl_coef (log pi_old - log pi_ref) on each token and the reward on the last."""
    if y.case["rollouts"].get("token_rewards") is not None:
        return y.take("token_rewards")
    r = [0.0] * y.n
    if kl_coef:
        cost = ESTIMATORS[estimator]
        r = [-kl_coef * cost(saturate(q - o)) for o, q in zip(y.old, y.take("logp_ref"), strict=True)]
    if r:
        r[-1] += y.reward
    return r


def value_loss(v, v_old: float, target: float, clip: float | None):
    """1/2 max( (V - R)^2, (V_clipped - R)^2 ), V clipped to v_old +- clip; no clip: 1/2 (V - R)^2."""
    plain = (v - target) * (v - target)
    if clip is None:
        return plain * 0.5
    held = clamp(v, v_old - clip, v_old + clip)
    return maximum(plain, (held - target) * (held - target)) * 0.5


def ppo(
    case,
    gamma=1.0,
    lam=0.95,
    kl_coef=0.05,
    low=0.2,
    high=0.2,
    value_clip=0.2,
    vf_coef=0.1,
    entropy_coef=0.0,
    whiten=True,
    critic_lam=None,
    alpha=None,
    nll=0.0,
    ptx=0.0,
    frozen=False,
    terminal=None,
    estimator="k1",
):
    """PPO, arXiv 1707.06347, with GAE: token mean of the clipped surrogate + vf_coef value loss - entropy_coef entropy.

    Returns (advantages + old values) are taken before whitening, with `critic_lam` if given. `alpha` makes lambda
    length-adaptive (VAPO); `nll` adds nll times the mean -log pi_theta over tokens of responses with positive reward,
    `ptx` ptx times that over rows of origin 4. `frozen`: no value loss, and `verdict` judges. `terminal`: per row, V
    after the last token.
    """
    batch = Batch(case)
    rewards = [token_rewards(y, kl_coef, estimator) for y in batch]
    V_old = [y.take("values_old") for y in batch]
    lams = [lam if alpha is None else adaptive_lambda(y.n, alpha) for y in batch]
    if frozen:
        rewards = [[0.0] * (y.n - 1) + [verdict(y)] if y.n else [] for y in batch]
    last = [0.0 if terminal is None else terminal(y) for y in batch]
    A = [gae(r, v, gamma, x, z) for r, v, x, z in zip(rewards, V_old, lams, last, strict=True)]
    critic = A
    if critic_lam is not None:
        critic = [gae(r, v, gamma, critic_lam, z) for r, v, z in zip(rewards, V_old, last, strict=True)]
    targets = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(critic, V_old, strict=True)]
    A = whitened(A) if whiten else A
    V = [[Value(x) for x in y.take("values")] for y in batch] if not frozen else [[] for _ in batch]
    H = [[Value(x) for x in y.take("entropy")] for y in batch] if entropy_coef else [[] for _ in batch]
    J, E = [], []
    for y, a, v, v_old, target in zip(batch, A, V, V_old, targets, strict=True):
        J.append([clipped(r, x, low, high) for r, x in zip(y.ratios(), a, strict=True)])
        E.append([value_loss(*t, value_clip) for t in zip(v, v_old, target, strict=True)] if not frozen else [])
    loss = vf_coef * token_mean(batch, E) - token_mean(batch, J) - entropy_coef * token_mean(batch, H)
    right = [y for y in batch if nll and y.reward > 0]
    if any(y.n for y in right):
        loss = loss - nll * sum(sum(y.logp) for y in right) / sum(y.n for y in right)
    given = [y for y in batch.everyone if ptx and y.of_row("origin") == 4]
    if any(y.n for y in given):
        loss = loss - ptx * sum(sum(y.logp) for y in given) / sum(y.n for y in given)
    slopes = {
        n: batch.spread([gradients(loss, row) for row in rows])
        for n, rows in (("values", V), ("entropy", H))
        if any(rows)
    }
    return *batch.result(loss, A), slopes


def adaptive_lambda(n: int, alpha: float) -> float:
    """VAPO: max(0, 1 - 1/(alpha n)); 0 for an empty response."""
    return max(0.0, 1 - 1 / (alpha * n)) if n else 0.0


def vapo(case, low=0.2, high=0.28, alpha=0.05, critic_lam=1.0, nll=0.1, **numbers):
    """VAPO, arXiv 2504.05118: PPO with decoupled, length-adaptive GAE, clip-higher, and NLL on correct responses."""
    numbers = {"kl_coef": 0.0} | numbers
    return ppo(case, low=low, high=high, alpha=alpha, critic_lam=critic_lam, nll=nll, **numbers)
