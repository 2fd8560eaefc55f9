"""What only sounds like an answer: remarks about it, conditions, placeholders, headings; and where an answer ends and
its explanation begins."""

from __future__ import annotations

import re

from kenpo.experience.wrappers import unwrap

PLACEHOLDER = re.compile(
    r"(?:\.{2,}|…|_+|\?+|(?:(?:your|the|my|insert|put|write|final|numeric(?:al)?|short|correct)\s)*"
    r"(?:answer|result|solution|number)(?:\s(?:here|goes here|only))?|<[^<>]{0,40}>"
    r"|\[[^\[\]\d]{0,12}answer[^\[\]\d]{0,12}\])?",
    re.IGNORECASE,
)
_ADVERBS = (
    r"(?:indeed|also|thus|therefore|then|hence|clearly|certainly|definitely|really|very|quite|always|probably|likely|now"
    r"|almost|surely|obviously|still|again|in fact|of course|actually|most|so|both|truly|well|mathematically|fully)"
)
_ADJECTIVES = (
    r"right|correct|incorrect|wrong|final|verified|confirmed|checked|double-checked|validated|valid|proven|proved|sound"
    r"|fine|good|great|ok|okay|reasonable|plausible|consistent|clear|obvious|simple|easy|exact|accurate|precise|unique"
    r"|positive|negative|non-?zero|non-?negative|finite|real|whole|integral|rational|irrational|even|odd|prime|composite"
    r"|complete|ready|done|found|known|shown|boxed|expected|sensible|certain|sure|justified|supported|satisfied"
    r"|satisfactory|satisfying|rounded|expressed|written|derived|obtained|calculated|computed|determined|based|as|not"
    r"|never|less|greater|more|fewer|larger|smaller|bigger|higher|lower|between|within|under|over|above|below|close|near"
    r"|at (?:least|most)|in|on|from|by|to|what|that|this|which|because|since|it|we|i|you|there|here|same|similar"
    r"|trivial|possible|impossible|hidden|important|interesting|unchanged|independent|identical|equivalent|ambiguous|unclear"
    r"|supposed|given|provided|stated|simplified|acceptable|the same|the one|looking|perfect|true|false"
)
_REMARK = re.compile(rf"(?:{_ADVERBS}[\s,]+)*(?:{_ADJECTIVES})(?![\w-])(?!\s*[$\\(]*\s*[-+]?\d)", re.IGNORECASE)
_FIRM_REMARK = re.compile(  # these stay remarks with digits behind them
    rf"(?:{_ADVERBS}[\s,]+)*(?:not|less|greater|more|fewer|larger|smaller|higher|lower|between|within|at (?:least|most)"
    r"|under|over|above|below|as|in|from|what|to|by)\b",
    re.IGNORECASE,
)
_LED = re.compile(
    r"(?:an?|the|one|some|our|your|my)\s+(?:[a-z-]+\s+){0,3}(?:numbers?|integers?|fractions?|decimals?|values?|multiple"
    r"|divisor|factor|one|ones|answer|solution|result|same|digit|expression|square|cube|option|choice|case)\b",
    re.IGNORECASE,
)
_EXPLICIT_REMARK = re.compile(
    rf"(?:{_ADVERBS}\s+)*(?:correct|verified|confirmed|checked|done|final answer|q\.?e\.?d)[.!]?", re.IGNORECASE
)
_CONDITIONAL = re.compile(
    r"\b(?:if|whether|suppose|supposing|assume|assuming|unless|pretend|guess)\b[^.;\n]{0,50}\Z", re.I
)
_HEADING = re.compile(
    r"(?:step|solution|final\s+answer|answer|conclusion|explanation|verification|verify|check(?:ing)?|notes?|summary"
    r"|result|part|case|analysis|reasoning|proof|approach|method|problem|question|given|calculations?|working|understand"
    r"|thought|breakdown|setup|set up|details)\b",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"(?:(?:as follows|the following|given by|(?:shown |stated |written )?below|equal to|simply|just|exactly|precisely"
    r"|approximately|approx\.?|about|roughly|around|indeed|therefore|thus|then|hence|clearly|definitely|really|probably"
    r"|obviously|actually|also|now|not [^,.;\n]{1,40}? but(?: rather)?"
    r"|(?:the )?(?:option|choice|letter|number|value)(?: of)?)"
    r"(?=[\s:,*(])[:,\s*]{1,12})+(?=[^\s.,;:!?])",
    re.IGNORECASE,
)
_EXPLANATION = re.compile(
    r"(?:\s*[,;—–]|\s-(?=\s))?(?:\s|\\[ ,;:]|~)*(?:\\(?:text|mathrm|mbox)\{\s*)?"
    r"(?<![A-Za-z])(?:where|when(?:ever)?|which|because|since|as|for|if|with|given|so|that is|i\.e\.|provided|assuming"
    r"|not|and not|but not|rather than|instead of|after|before|due to|according to|obtained|based on|using|whose|while"
    r"|although|but|per our|as required)(?![A-Za-z])",
    re.IGNORECASE,
)
_PARENTHESIS = re.compile(r"\s+\(([^()]*(?:\([^()]*\)[^()]*)?)\)\s*\.?\s*$")
_SYMBOL = re.compile(
    r"\\(?!text)[A-Za-z]+|\b(?:mod|inf|infty|oo|pi|sqrt|sin|cos|tan|log|ln|exp|gcd|lcm|min|max|abs)\b", re.I
)


def is_remark(content: str, *, explicit: bool = False) -> bool:
    """Whether a statement says something about the answer instead of the answer.

    In an explicit form only a few words are remarks. After "the answer is" they are: an adjective of answers (`right`,
    `positive`), a comparison (`less than 100`), a described thing without a number (`a whole number`).
    """
    text = unwrap(content)
    if explicit:
        return _EXPLICIT_REMARK.fullmatch(text) is not None
    if _FIRM_REMARK.match(text) or _REMARK.match(text):
        return True
    return _LED.match(text) is not None and not re.search(r"[\d\\$=]", text)


def is_conditional(before: str) -> bool:
    """Whether the words before "the answer is" make it a condition: `if the answer is 5`."""
    return _CONDITIONAL.search(before) is not None


def is_heading(line: str) -> bool:
    """Whether what follows `####` is a Markdown heading: `#### Step 3: add up`."""
    return _HEADING.match(line.strip("*_ ")) is not None and not re.search(r"answer\W{1,6}[^\W_]", line, re.IGNORECASE)


def without_filler(text: str) -> str:
    """`text` without words that only lead up to an answer: `approximately 42`, `as follows: 42`, `not 41 but 42`."""
    match = _FILLER.match(text)
    return text[match.end() :] if match else text


def without_explanation(content: str) -> str:
    """`content` up to where it is explained or contrasted: `42, where x = 7`, `42 when n = 5`, `42 (for k = 3)`.

    >>> without_explanation("42, not 41"), without_explanation("x + 1"), without_explanation("42 (since k = 3)")
    ('42', 'x + 1', '42')
    """
    for end in explanations(content):
        kept = content[: _aside(content[:end])]
        if re.search(r"[^\W_]", kept):
            return kept
    return content


def explanations(content: str) -> list[int]:
    """Where explanations may begin in `content`, in order; its end is the last place."""
    places = [m.start() for m in _EXPLANATION.finditer(content[:2_000]) if m.start() and m[0][:1] in " ,;—–-\\~\t\n("]
    return sorted({*places, _aside(content), len(content)})


def _aside(content: str) -> int:
    """Where a remark in parentheses at the end begins: `(for k = 3)`, not `(2, oo)`; the content's end without one."""
    match = _PARENTHESIS.search(content[:2_000])
    words = (
        match and not re.search(r"\bmod\b", match[1]) and re.search(r"[A-Za-z]{2,}|[=≈%]", _SYMBOL.sub(" ", match[1]))
    )
    return match.start() if match and words else len(content)
