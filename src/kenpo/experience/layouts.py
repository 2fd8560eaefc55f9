"""The layouts in which people publish data: which columns hold the prompt, the known answer and the response.

Columns that the user names come first, then ``prompt`` with ``answer`` or ``response``; what neither gives is looked
for among the layouts below, by the columns that the data have. All rows of a file are read in one layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kenpo.errors import InputError, UnknownNameError
from kenpo.experience.rows import is_missing
from kenpo.experience.wrappers import braced

LAST_TURN = "last-turn"  # in place of a column: the last turn of the conversation, which is the assistant's
CONVERSATIONS = ("messages", "conversations")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
          "model": "assistant", "bot": "assistant", "system": "system"}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where a row's prompt and its ``target`` (known answer, or response to learn) stand; ``name`` for messages.

    ``input`` is a column that is put below the prompt where it is not empty; ``boxed`` takes the last \\boxed{…} of the
    target; `LAST_TURN` as the target takes it off the conversation.
    """

    prompt: str
    target: str
    name: str = ""
    input: str | None = None
    boxed: bool = False

    def read(self, values: Mapping[str, Any], where: str) -> tuple[Any, Any]:
        """(prompt, target) of a row, unchecked but for what the layout itself needs. InputError says where."""
        prompt = as_messages(pick(values, self.prompt), f"{where}: column {self.prompt!r}")
        if self.input is not None and isinstance(prompt, str) and not is_missing(values.get(self.input)):
            prompt = f"{prompt}\n\n{values[self.input]}"
        if (
            self.name == "ShareGPT"
            and isinstance(prompt, list)
            and isinstance(system := values.get("system"), str)
            and system
        ):
            prompt = [{"role": "system", "content": system}, *prompt]
        if self.target == LAST_TURN:
            return last_turn(prompt, f"{where}: column {self.prompt!r}")
        target = pick(values, self.target)
        return prompt, boxed(target, f"{where}: column {self.target!r}") if self.boxed else target

    @property
    def used(self) -> tuple[str, ...]:
        """Columns that are prompt or target as a whole."""
        return (self.prompt, self.target) if self.input is None else (self.prompt, self.target, self.input)


def find_layout(where: str, columns: Collection[str], prompt: str, target: str, supervised: bool = False) -> Layout:
    """The layout of data with these columns. ``prompt`` and ``target`` are what the user named, or the defaults.

    UnknownNameError that lists the columns where nothing fits; InputError for a conversation without known answer.
    """
    usual = "response" if supervised else "answer"
    given_prompt, given_target = prompt != "prompt", target != usual
    start = _prompt_column(columns, prompt, given_prompt, given_target or usual in columns, supervised)
    if start is None or not _there(columns, start):
        raise _unknown(where, "prompt", prompt, columns)
    extra = "input" if start == "instruction" and not given_prompt else None
    if given_target or target in columns:
        if target != LAST_TURN and not _there(columns, target):
            raise _unknown(where, usual, target, columns)
        return Layout(start, target, _name(start, target), extra)
    found = _target(columns, start, supervised)
    if found is None and start in CONVERSATIONS:
        raise InputError(
            f"{where}: conversations in column {start!r} and no answer; --answer-column {LAST_TURN} takes the last "
            "turn of each, --answer-column NAME another column"
        )
    if found is None:
        raise _unknown(where, usual, target, columns)
    return Layout(start, found, _name(start, found), extra, boxed=start == "problem" and not supervised)


def _prompt_column(columns: Collection[str], prompt: str, given: bool, target: bool, supervised: bool) -> str | None:
    if given or prompt in columns:
        return prompt
    answers = {"answer"} if not supervised else {"answer", "solution"}
    for name, beside in (("question", answers), ("problem", {"answer", "solution"}), ("instruction", {"output"})):
        if name in columns and (target or beside & set(columns)):
            return name
    return next((name for name in CONVERSATIONS if name in columns), None)


def _target(columns: Collection[str], prompt: str, supervised: bool) -> str | None:
    """The column beside a known prompt column; what is asked for by name comes before."""
    if not supervised and "reward_model" in columns:
        return "reward_model.ground_truth"
    beside = {"instruction": ("output",), "problem": ("solution",), "messages": (), "conversations": ()}
    if supervised:
        beside |= {"prompt": ("completion",), "question": ("answer",), "problem": ("solution", "answer")}
    for name in beside.get(prompt, ()):
        if name in columns:
            return name
    return LAST_TURN if supervised and prompt in CONVERSATIONS else None


def _name(prompt: str, target: str) -> str:
    if target.startswith("reward_model."):
        return "verl"
    return {"question": "GSM8K", "problem": "MATH", "instruction": "Alpaca", "conversations": "ShareGPT",
            "messages": "messages"}.get(prompt, "")  # fmt: skip


def _there(columns: Collection[str], name: str) -> bool:
    return name in columns or name.partition(".")[0] in columns


def _unknown(where: str, role: str, name: str, columns: Collection[str]) -> UnknownNameError:
    listed = ", ".join(sorted(columns)) or "none"
    return UnknownNameError(f"{where}: no column {name!r}; the columns are {listed}; choose one with --{role}-column")


def pick(values: Mapping[str, Any], name: str) -> Any:
    """A column by its name, or a part of an object by its path, as `reward_model.ground_truth`; None without it."""
    if name in values:
        return values[name]
    value: Any = values
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def keys_beside(values: Mapping[str, Any], name: str) -> str | None:
    """The keys of the object that a path such as `reward_model.ground_truth` ends in, where its last key is not among
    them; None where it is, or where there is no such object."""
    where, dot, last = name.rpartition(".")
    whole = pick(values, where) if dot and name not in values else None
    return None if not isinstance(whole, Mapping) or last in whole else ", ".join(map(str, whole)) or "none"


def as_messages(value: Any, where: str) -> Any:
    """ShareGPT's turns (from, value) as chat messages, anything else as it is. InputError for an unknown speaker."""
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "from" in m for m in value):
        return value
    messages = []
    for n, turn in enumerate(value, 1):
        role = _ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise InputError(
                f"{where}: turn {n} is from {turn['from']!r}; human, gpt and system are known; remove the row"
            )
        messages.append({"role": role, "content": turn.get("value")})
    return messages


def last_turn(prompt: Any, where: str) -> tuple[list[dict[str, Any]], Any]:
    """A conversation without its last turn, and what that turn says. InputError unless it is the assistant's."""
    turns = prompt if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt) else []
    if len(turns) < 2 or turns[-1].get("role") != "assistant":
        raise InputError(f"{where}: no conversation that ends with the assistant's turn; mend or remove the row")
    return turns[:-1], turns[-1].get("content")


def boxed(solution: Any, where: str) -> str:
    """What the last \\boxed{…} of a solution holds. InputError without one."""
    text = solution if isinstance(solution, str) else ""
    at = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    found = braced(text, text.index("{", at) + 1) if at >= 0 else None
    if not found or not found.strip():
        raise InputError(
            f"{where}: the solution has no \\boxed{{…}} answer; give the row an answer column, or remove it"
        )
    return found.strip()
