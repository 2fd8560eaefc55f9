"""Chat templates: another one, none, or the model's own under given arguments; templates without a system role."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kenpo.errors import InputError

_MARK = "Kenpo's mark"  # a text that no template writes by itself
_SYSTEM_ROLE: dict[str, bool] = {}  # by the template's text
_OURS = {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token",
         "strftime_now", "raise_exception"}  # fmt: skip


def set_template(tokenizer: Any, template: str = "auto", arguments: Mapping[str, Any] | None = None) -> None:
    """Give the tokenizer the template of a file, or none (``none``), or leave its own (``auto``); then the arguments.

    Arguments (``enable_thinking=false``) become the template's own defaults, so that they go into checkpoints with it
    and a caller's value still wins. InputError for a file that is no template and for an argument that the template
    does not read.
    """
    if template == "none":
        tokenizer.chat_template = None
    elif template != "auto":
        tokenizer.chat_template = _read(Path(template).expanduser())
    if not arguments:
        return
    own = tokenizer.chat_template
    if not isinstance(own, str):
        raise InputError("--template-args: the tokenizer has no chat template that could read them; leave them out")
    start = "".join(_default(name, value) for name, value in sorted(arguments.items()))
    if own.startswith(start):  # a checkpoint's
        return
    read = variables(own)
    for name in arguments:
        if name not in read:
            listed = ", ".join(sorted(read - _OURS)) or "none"
            raise InputError(f"--template-args {name}: the chat template does not read it (it reads: {listed})")
    tokenizer.chat_template = start + ("\n" if own.startswith("\n") else "") + own  # the first line break is eaten


def variables(template: str) -> set[str]:
    """The names that a template reads and does not set. InputError for a text that is no template."""
    import jinja2
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)  # transformers' own tag
    try:
        return meta.find_undeclared_variables(
            ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        )
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise InputError(f"the chat template can't be read{f' (line {line})' if line else ''}: {error}") from None


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"--template {path}: can't be read ({error})") from None
    try:
        if "messages" not in variables(text):
            raise InputError("it does not read `messages`, so prompts would not appear in it")
    except InputError as error:
        raise InputError(f"--template {path}: {error}") from None
    return text


def _default(name: str, value: Any) -> str:
    if not name.isidentifier() or not isinstance(value, str | int | float):
        raise InputError(f"--template-args {name}={value!r}: write NAME=VALUE with a text, a number, true or false")
    text = json.dumps(value, ensure_ascii=False)
    return f"{{% if {name} is not defined %}}{{% set {name} = {text} %}}{{% endif %}}"


def fitting(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the template takes them: where it has no system role, what the system says stands at the head of
    the first user message, a blank line between."""
    if not messages or messages[0].get("role") != "system" or has_system_role(tokenizer):
        return messages
    said, *rest = messages
    first = next((i for i, m in enumerate(rest) if m.get("role") == "user"), None)
    if first is None:
        return messages
    joined = f"{said['content']}\n\n{rest[first]['content']}"
    return [*rest[:first], {**rest[first], "content": joined}, *rest[first + 1 :]]


def has_system_role(tokenizer: Any) -> bool:
    """Whether the chat template writes a system message. True where it can't be told: not even a question renders."""
    template = str(tokenizer.chat_template)
    if template not in _SYSTEM_ROLE:
        _SYSTEM_ROLE[template] = _renders(tokenizer, _MARK) or not _renders(tokenizer, None)
    return _SYSTEM_ROLE[template]


def _renders(tokenizer: Any, system: str | None) -> bool:
    messages = [{"role": "user", "content": "Q"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # whatever a template raises on purpose
        return False
    return system is None or system in text


def rendered_already(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> str | None:
    """The special token in a prompt that tells that a template was applied to it before, or None."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    texts = [prompt] if isinstance(prompt, str) else [str(m.get("content", "")) for m in prompt]
    known = [t for t in tokenizer.all_special_tokens if len(t) > 2 and t != tokenizer.unk_token]
    return next((token for token in known for text in texts if token in text), None)
