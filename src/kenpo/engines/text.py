"""Text of sampled ids, as the tokenizer has it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


def decode(tokenizer: Any, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Text of ids as `decode_all` has it."""
    return decode_all(tokenizer, [list(ids)], keep_special=keep_special)[0]


def decode_all(tokenizer: Any, rows: Sequence[Sequence[int]], *, keep_special: bool = False) -> list[str]:
    """Texts of several rows of ids, spaces as they are.

    Special tokens decode to nothing but tags: special tokens in pairs, such as `<answer>` and `</answer>`, which
    verifiers look for. With `keep_special` all of them are kept. Ids that the tokenizer doesn't know (gaps between
    known ids, a padded vocabulary) decode to nothing.
    """
    known = len(tokenizer)
    hidden = _hidden(tokenizer, known)
    skip = not keep_special and hidden is None
    dropped = frozenset() if keep_special or hidden is None else hidden
    clean = [[i for i in ids if i not in dropped and (i < known or _token(tokenizer, i))] for ids in rows]
    texts = [tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for ids in clean]
    return [t if isinstance(t, str) else "".join(t) for t in texts]


def _token(tokenizer: Any, index: int) -> str | None:
    """The token of an id beyond the number of entries, as ids with gaps have; None if there is none."""
    token: str | None = tokenizer.convert_ids_to_tokens(index)
    return token


@functools.lru_cache(maxsize=8)
def _hidden(tokenizer: Any, entries: int) -> frozenset[int] | None:
    """The special ids that are no tags; None where no special token is a tag, and the tokenizer's own rule does.

    `entries` is the number of tokens, so that a token added later is seen. A tag is a special token `<name>` whose
    `</name>` is special too; the tokenizer's own begin, end, padding and unknown tokens are none.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {index: token.content for index, token in added.items() if token.special}
    own = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)} if special else set()
    texts = set(special.values()) - own
    names = {text[1:-1] for text in texts if text[:1] == "<" and text[-1:] == ">" and f"</{text[1:-1]}>" in texts}
    tags = {f"<{name}>" for name in names} | {f"</{name}>" for name in names}
    return frozenset(index for index, text in special.items() if text not in tags) if tags else None
