"""What every reference shares: reading a case, group statistics, averages, and the answer's shape.

A case is a dictionary `{"rollouts": {"mask", "group", "rewards", ...}, "policy": {"logp", ...}}` of nested lists. Only
positions with mask 1 are ever read: what stands elsewhere is junk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .scalar import Value, clamp, exp, gradients, minimum, stop

SATURATION = 20.0


def saturate(x):
    """A log-ratio held in +-20, in value and in gradient."""
    return clamp(x, -SATURATION, SATURATION)


class Response:
    """One rollout: its row, group and reward, and everything known about its trained tokens, in order."""

    def __init__(self, case: dict, row: int):
        self.case, self.row = case, row
        rollouts = case["rollouts"]
        self.group = rollouts["group"][row]
        self.reward = float(rollouts["rewards"][row])
        self.positions = [t for t, m in enumerate(rollouts["mask"][row]) if m]
        self.n = len(self.positions)
        self.logp = [Value(x) for x in self.take("logp")]
        asked = rollouts.get("prompt_mask")
        self.query = [t for t, m in enumerate(asked[row]) if m] if asked is not None else []
        self.query_logp = [Value(case["policy"]["logp"][row][t]) for t in self.query]
        self.old = self.take("logp_old") if rollouts.get("logp_old") is not None else [x.data for x in self.logp]

    def take(self, name: str) -> list:
        """A per-token field of the rollouts or the policy, at the trained tokens."""
        for part in ("policy", "rollouts"):
            field = self.case[part].get(name)
            if field is not None:
                return [field[self.row][t] for t in self.positions]
        raise KeyError(f"the case has no {name}")

    def of_row(self, name: str):
        """A per-rollout field (advantage, origin, ...)."""
        return self.case["rollouts"][name][self.row]

    def anchor(self, name: str) -> list[float]:
        """log-probs of the policy that a ratio is taken against: "old", "sampler", "ref" or "prox"."""
        return self.old if name == "old" else self.take(f"logp_{name}")

    def log_ratios(self, anchor: str = "old") -> list[Value]:
        """log pi_theta - log anchor per token, saturated."""
        return [saturate(lp - q) for lp, q in zip(self.logp, self.anchor(anchor), strict=True)]

    def ratios(self, anchor: str = "old") -> list[Value]:
        """pi_theta / anchor per token."""
        return [exp(d) for d in self.log_ratios(anchor)]

    def corrections(self) -> list[float]:
        """rho = pi_old / mu per token: what separates the trainer from the engine that sampled."""
        return [math.exp(saturate(o - m)) for o, m in zip(self.old, self.take("logp_sampler"), strict=True)]


class Batch:
    """The rollouts that enter the statistics: those with a verdict that `keep` (if any) accepts. N counts them all."""

    def __init__(self, case: dict, keep: Callable[[list[Response], Response], bool] | None = None):
        self.case = case
        everyone = [Response(case, b) for b in range(len(case["rollouts"]["mask"]))]
        self.everyone = everyone
        judged = [y for y in everyone if not math.isnan(y.reward)]
        self.responses = [y for y in judged if keep is None or keep([z for z in judged if z.group == y.group], y)]
        self.N = len(self.responses)
        self.tokens = sum(y.n for y in self.responses)

    def __iter__(self):
        return iter(self.responses)

    def group_of(self, y: Response) -> list[int]:
        """Indices (into the batch) of the responses to the same prompt, y's own included."""
        return [j for j, z in enumerate(self.responses) if z.group == y.group]

    def by_group(self, values: list[float], rule: Callable[[list[float], int], float]) -> list[float]:
        """rule(the group's values, place of this response in it) for every response."""
        out = []
        for i, y in enumerate(self.responses):
            members = self.group_of(y)
            out.append(rule([values[j] for j in members], members.index(i)))
        return out

    def advantages(self, rule: Callable[[list[float], int], float]) -> list[float]:
        """The case's own `advantages` [B] where it states them (golden numbers do), else `rule` on the rewards."""
        given = self.case["rollouts"].get("advantages")
        return self.by_group(self.rewards, rule) if given is None else [given[y.row] for y in self.responses]

    @property
    def rewards(self) -> list[float]:
        return [y.reward for y in self.responses]

    def result(self, loss, advantages, weights=None) -> tuple[float, list, list, list]:
        """(loss, coefficients, advantages, weights): a number and three [B][T] lists, 0 at masked positions and on
        rows outside the batch. `advantages` and `weights` hold, per response, a number or a list over its tokens."""
        width = [len(row) for row in self.case["rollouts"]["mask"]]
        leaves = [(y.row, t, x) for y in self.everyone for t, x in zip(y.positions, y.logp, strict=True)]
        leaves += [(y.row, t, x) for y in self.everyone for t, x in zip(y.query, y.query_logp, strict=True)]
        coefficients = [[0.0] * w for w in width]
        for (row, t, _), g in zip(leaves, gradients(loss, [x for _, _, x in leaves]), strict=True):
            coefficients[row][t] = g
        weights = [1.0] * self.N if weights is None else weights
        return stop(loss), coefficients, self.spread(advantages), self.spread(weights)

    def spread(self, values) -> list[list[float]]:
        """Per-response numbers or per-token lists as [B][T]."""
        out = [[0.0] * len(row) for row in self.case["rollouts"]["mask"]]
        for y, v in zip(self.responses, values, strict=True):
            for t, x in zip(y.positions, v if isinstance(v, list) else [v] * y.n, strict=True):
                out[y.row][t] = stop(x)
        return out


# ---- advantages -----------------------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: list[float], ddof: int = 1) -> float:
    m = mean(values)
    return math.fsum((v - m) ** 2 for v in values) / (len(values) - ddof)


def constant(values: list[float]) -> bool:
    """No spread at all: one value, or all the same. Such a group or batch teaches nothing, exactly 0."""
    return all(v == values[0] for v in values)


def z_score(eps: float = 1e-6, ddof: int = 1):
    """(R - mean) / (std + eps) within a group."""

    def rule(group, k):
        return 0.0 if constant(group) else (group[k] - mean(group)) / (math.sqrt(variance(group, ddof)) + eps)

    return rule


def centred(group: list[float], k: int) -> float:
    """R - mean of the group."""
    return 0.0 if constant(group) else group[k] - mean(group)


def leave_one_out(group: list[float], k: int) -> float:
    """R - mean of the others."""
    return 0.0 if constant(group) else group[k] - mean(group[:k] + group[k + 1 :])


def whiten_over_tokens(batch: Batch, outcome: list[float], eps: float = 1e-8) -> list[float]:
    """(x - mean) / sqrt(var + eps); mean and variance (ddof 1) over all trained tokens, each with its response's x."""
    tokens = [x for y, x in zip(batch, outcome, strict=True) for _ in range(y.n)]
    if len(tokens) < 2 or constant(tokens):
        return [0.0] * batch.N
    m, v = mean(tokens), variance(tokens)
    return [(x - m) / math.sqrt(v + eps) for x in outcome]


# ---- surrogates and averages ----------------------------------------------------------------------------------------


def clipped(r, A: float, low: float, high: float):
    """PPO's min( r A, clip(r, 1-low, 1+high) A )."""
    return minimum(r * A, clamp(r, 1 - low, 1 + high) * A)


def token_mean(batch: Batch, J: list[list], tokens: float | None = None):
    """Sum of J over all tokens, divided by their number (or by `tokens`). Nothing left: 0."""
    tokens = batch.tokens if tokens is None else tokens
    return sum(sum(row) for row in J) / tokens if tokens else 0.0


def sequence_mean(batch: Batch, J: list[list]):
    """(1/N) sum_i (1/n_i) sum_t J; a response without trained tokens adds 0 and is counted in N."""
    return sum(sum(row) / len(row) for row in J if row) / batch.N if batch.N else 0.0


def sequence_sum(batch: Batch, J: list[list]):
    """(1/N) sum_i sum_t J."""
    return sum(sum(row) for row in J) / batch.N if batch.N else 0.0


def group_token_mean(batch: Batch, J: list[list]):
    """Token mean within each group, then mean over groups; a group without trained tokens adds 0 and is counted."""
    total, groups = 0.0, 0
    for i, y in enumerate(batch):
        members = batch.group_of(y)
        if members[0] == i:
            groups += 1
            tokens = sum(batch.responses[j].n for j in members)
            total = total + (sum(sum(J[j]) for j in members) / tokens if tokens else 0.0)
    return total / groups if groups else 0.0


def dual_clipped(r, A: float, low: float, high: float, dual: float | None):
    """The clipped surrogate; for A < 0 never below dual * A (where it is constant)."""
    J = clipped(r, A, low, high)
    return dual * A if dual is not None and A < 0 and stop(J) < dual * A else J


def quantile(values: list[float], q: float) -> float:
    """The q-quantile with linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    k = min(int(place), len(ordered) - 1)
    upper = ordered[min(k + 1, len(ordered) - 1)]
    return ordered[k] + (upper - ordered[k]) * (place - k)
