"""One decision per response: an action chosen from a menu of labels at a single position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops import masked
from kenpo.stages.base import Ratio
from kenpo.stages.context import Context
from kenpo.stages.ratios import Anchor


@dataclass(frozen=True)
class DecisionRatio(Ratio):
    """``π_θ(a|menu) / anchor(a|menu)``: one ratio per decision, both log-probs over the same menu.

    A response is one trainable token, its label, which stands on the menu (``rollouts.support_ids``, −1 padded, to
    which ``logp`` and the anchor's log-probs are restricted). Another number of trainable tokens, or a label off the
    menu, is an `InputError`: its ratio would be of something else. Source: RLiD, a reconstruction.
    """

    anchor: Anchor = "old"

    _needs = frozenset({"logp", "tokens", "support_ids"})

    def __call__(self, ctx: Context) -> Tensor:
        several = masked.count(ctx.mask, ctx.rewards, -1) > 1
        if bool(several.any()):
            raise InputError(
                f"decision_ratio: response {int(several.nonzero()[0])} has more than one trainable token; a decision "
                "is one label, chosen from its menu"
            )
        on_menu = (ctx.read("support_ids") == ctx.read("tokens").unsqueeze(-1)).any(-1)
        if bool((ctx.mask & ~on_menu).any()):
            row = int((ctx.mask & ~on_menu).any(-1).nonzero()[0])
            raise InputError(f"decision_ratio: the label of response {row} is not on its menu (rollouts.support_ids)")
        return torch.exp(ctx.log_ratio(self.anchor))
