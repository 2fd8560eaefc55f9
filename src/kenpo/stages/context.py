"""The read-only view of a batch that every stage gets.

A stage may read what it declares in ``needs`` and nothing else; each optional field is cleaned once (raised to at least
float32, masked entries selected away) and cached with its graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kenpo.errors import MissingFieldError, UndeclaredFieldError
from kenpo.ops import masked, ratios
from kenpo.types import ANCHORS, POLICY_FIELDS, ROLLOUT_FIELDS, FieldSpec, Policy, Rollouts

#: Fields that every batch has; a stage reads them without declaring them.
_FREE = {"mask", "group", "rewards"}

#: What `prepare` hands on and a stage reads like a field, if it declares it.
_HANDED_ON = {"returns": FieldSpec("BT", "float")}

_HOW = {
    "logp": "pass Policy(logp=...), the log-probs of the sampled tokens",
    "returns": "use an advantage that makes returns",
    "logp_sampler": "record the sampler's log-probs (kenpo's engines do)",
    "logp_old": "score the batch with the weights before the update",
    "logp_ref": "score the batch with a reference model, or drop the stage that needs it",
    "entropy": "pass Policy(entropy=...), the full-vocabulary entropy at each position",
    "truncated": "mark which responses hit the length limit",
    "prompt_id": "give each prompt a stable identity",
    "baseline": "score a greedy response per prompt",
    "routes": "record the experts chosen while sampling",
}


def raised(x: Tensor) -> Tensor:
    """bf16 and fp16 as float32; everything else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Core:
    """What all views of one batch share: the data and the cache."""

    def __init__(
        self,
        rollouts: Rollouts,
        selected: Tensor,
        mask: Tensor,
        policy: Policy | None,
        advantages: Tensor | None,
        returns: Tensor | None,
    ) -> None:
        self.rollouts = rollouts
        self.selected = selected
        self.mask = mask
        self.policy = policy
        self.advantages = advantages
        self.returns = returns
        self.cache: dict[str, Tensor] = {}


class Context:
    """One stage's view of the batch.

    ``mask`` [B,T]: trainable tokens of selected rollouts. ``selected`` [B]: rollouts with a reward that take part.
    ``supervised`` [B]: rows without one, which only a regularizer that names them reads. ``group`` [B]. ``rewards``
    [B]: the raw outcome. ``advantages``, ``returns`` [B,T], constants. ``logp`` [B,T], the policy's, with its graph.
    Everything else by `read`.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        selected: Tensor,
        policy: Policy | None = None,
        advantages: Tensor | None = None,
        returns: Tensor | None = None,
    ) -> None:
        mask = rollouts.mask & selected.unsqueeze(-1)
        self._core = _Core(rollouts, selected, mask, policy, advantages, returns)
        self._owner: str | None = None
        self._allowed: frozenset[str] | None = None

    def of(self, owner: str, needs: frozenset[str]) -> Context:
        """The same batch as the stage named `owner` may see it: only the fields in `needs`."""
        view = object.__new__(Context)
        view._core, view._owner, view._allowed = self._core, owner, needs
        return view

    def over(self, mask: Tensor) -> Context:
        """The same view with other positions [B,T] in the mask's place: what stands there is read, all else is 0."""
        core, view = self._core, object.__new__(Context)
        view._core = _Core(core.rollouts, core.selected, mask, core.policy, core.advantages, core.returns)
        view._owner, view._allowed = self._owner, self._allowed
        return view

    @property
    def mask(self) -> Tensor:
        return self._core.mask

    @property
    def selected(self) -> Tensor:
        return self._core.selected

    @property
    def supervised(self) -> Tensor:
        """[B] bool: rows without a reward (``origin`` 4); they are in no mask but `trainable`."""
        return self._core.rollouts.supervised

    @property
    def elsewhere(self) -> Tensor:
        """[B] bool: rows that the policy did not sample after their own prompt (`Rollouts.elsewhere`)."""
        return self._core.rollouts.elsewhere

    @property
    def trainable(self) -> Tensor:
        """[B,T] bool: trainable tokens of every row, with or without a reward, selected or not."""
        return self._core.rollouts.mask

    @property
    def trajectory(self) -> Tensor | None:
        """[B] the number of the episode that each row belongs to; None: each row is one."""
        return self._core.rollouts.trajectory

    @property
    def group(self) -> Tensor:
        return self._core.rollouts.group

    @property
    def rewards(self) -> Tensor:
        return self._cached("rewards", lambda: raised(self._core.rollouts.rewards.detach()))

    @property
    def reward_parts(self) -> dict[str, Tensor]:
        return dict(self._core.rollouts.reward_parts)

    @property
    def hinted(self) -> Tensor:
        """[B] bool: rows that a teacher has scored; every row where the batch does not say (``rollouts.hinted``)."""
        hinted = self._core.rollouts.hinted
        return torch.ones_like(self.selected) if hinted is None else hinted

    @property
    def advantages(self) -> Tensor:
        if self._core.advantages is None:
            raise UndeclaredFieldError(f"{self._owner}: advantages are not known before the advantage stage has run")
        return self._core.advantages

    @property
    def returns(self) -> Tensor:
        """[B,T] what a critic learns to predict; 0 off the mask. The stage names ``returns`` in its needs."""
        return self.read("returns")

    @property
    def logp(self) -> Tensor:
        """[B,T] log π_θ with its graph; 0 off the mask."""
        return self.read("logp", declared=True)

    @property
    def lengths(self) -> Tensor:
        """[B] trainable tokens of each rollout, in the dtype of the rewards."""
        return self._cached("lengths", lambda: masked.count(self.mask, self.rewards, -1))

    def has(self, name: str) -> bool:
        """Whether the batch carries this optional field."""
        return self._found(name) is not None

    def read(self, name: str, *, declared: bool = False) -> Tensor:
        """An optional field, cleaned: [B,T] floats are at least float32 and 0 off the mask.

        ``logp_old`` that is absent is the policy's own log-prob, detached (one optimizer step consumes the batch).
        Raises `UndeclaredFieldError` if the stage does not name the field in ``needs`` and `MissingFieldError` if the
        batch does not have it.
        """
        if not declared:
            self._may_read(name)
        return self._cached(name, lambda: self._clean(name))

    def _may_read(self, name: str) -> None:
        if self._allowed is not None and name not in self._allowed and name not in _FREE:
            raise UndeclaredFieldError(f"{self._owner} reads {name!r} but does not declare it in needs")

    def log_ratio(self, anchor: str) -> Tensor:
        """[B,T] log π_θ − log anchor, saturated at ±20, 0 off the mask; `anchor` is old, sampler, guided or prox."""
        base = ANCHORS[anchor]
        self._may_read(base)
        return self._cached(f"log_ratio.{anchor}", lambda: self._saturated_difference("logp", base))

    def log_correction(self, anchor: str = "old") -> Tensor:
        """[B,T] log π_old − log μ (or log π_prox − log μ), saturated at ±20, 0 off the mask; a constant."""
        proximal = ANCHORS[anchor]
        self._may_read(proximal)
        self._may_read("logp_sampler")
        make = lambda: self._saturated_difference(proximal, "logp_sampler").detach()  # noqa: E731
        return self._cached(f"log_correction.{anchor}", make)

    def _saturated_difference(self, name: str, other: str) -> Tensor:
        """`ratios.log_ratio` of two log-probs; junk is selected away once, after the difference."""
        difference = self._raised(name) - self._raised(other)
        if ratios.within_limit(difference):  # then 0 times junk is 0, and a product is quicker than a choice
            return difference * self.unit_mask(difference.dtype)
        return ratios.saturate(masked.select(difference, self.mask))

    def unit_mask(self, dtype: torch.dtype) -> Tensor:
        """[B,T] the mask as 1.0 and 0.0."""
        return self._cached(f"mask.{dtype}", lambda: self.mask.to(dtype))

    def per_token(self, x: Tensor) -> Tensor:
        """[B] -> [B,T]: a rollout's number on each of its trainable tokens, 0 elsewhere."""
        return masked.select(x.unsqueeze(-1), self.mask)

    def _cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        cache = self._core.cache
        if name not in cache:
            with torch.enable_grad():  # a stage under no_grad may be the first to ask
                cache[name] = make()
        return cache[name]

    def _clean(self, name: str) -> Tensor:
        value = self._raised(name)
        spec = _spec(name)
        if spec.kind != "float" or spec.axes[:2] != "BT":
            return value
        keep = self.mask.reshape(self.mask.shape + (1,) * (value.dim() - 2))
        return masked.select(value, keep)

    def _raised(self, name: str) -> Tensor:
        """The field as it came, floats of half precision as float32; junk off the mask is still there."""
        core = self._core
        if name == "logp_old" and core.rollouts.logp_old is None and core.policy is not None:
            return self._raised("logp").detach()
        value = self._found(name)
        if value is None:
            how = _HOW.get(name, "provide it")
            where = "the policy terms" if name in POLICY_FIELDS else "the rollouts"
            raise MissingFieldError(
                f"{self._owner or 'the algorithm'} needs {name!r}, which {where} do not have: {how}"
            )
        value = value if name in POLICY_FIELDS else value.detach()  # rollouts are constants, whoever made them
        return raised(value) if _spec(name).kind == "float" else value

    def _found(self, name: str) -> Tensor | None:
        if name in _HANDED_ON:
            return self._core.returns
        return getattr(self._core.policy if name in POLICY_FIELDS else self._core.rollouts, name, None)


def _spec(name: str) -> FieldSpec:
    return _HANDED_ON.get(name) or (POLICY_FIELDS if name in POLICY_FIELDS else ROLLOUT_FIELDS)[name]
