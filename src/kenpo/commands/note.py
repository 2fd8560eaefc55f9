"""What a page says beside a declaration."""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """``use``: when to take it. ``mind``: what goes wrong with it. ``elsewhere``: what others do under the name."""

    use: str
    mind: str
    elsewhere: tuple[str, ...] = ()


NOBODY = "No other trainer's main tree has it; its reference here is written from the formula."
