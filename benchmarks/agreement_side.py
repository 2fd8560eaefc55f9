"""One peer's judgement, in the peer's own environment: `agreement_side.py PEER FILE`, started by agreement.py.

FILE holds a JSON list of [known answer, completion]; the last line printed is a JSON list of 1, 0 or null (an error).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def lm_eval(name: str, pairs: list[list[str]]) -> list[int | None]:
    """A GSM8K filter of lm-evaluation-harness and its exact match, as the task's own file configures them."""
    import lm_eval as package
    import yaml
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    path = Path(package.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
    task = yaml.safe_load(path.read_text())
    chosen = next(item for item in task["filter_list"] if item["name"] == name)
    given = {key: value for key, value in chosen["filter"][0].items() if key != "function"}
    metric = task["metric_list"][0]
    options = {key: metric[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    until = task["generation_kwargs"]["until"]
    said = [[_cut(completion, until)] for _, completion in pairs]
    found = [texts[0] for texts in RegexFilter(**given).apply(said, [{}] * len(said))]
    return [
        int(exact_match_hf_evaluate(predictions=[text], references=[gold], **options)["exact_match"])
        for (gold, _), text in zip(pairs, found, strict=True)
    ]


def _cut(text: str, until: list[str]) -> str:
    return text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))]


def math_verify(pairs: list[list[str]]) -> list[int | None]:
    """math-verify's parse and verify with their defaults, the known answer in math delimiters as its guide has it."""
    from math_verify import parse, verify

    found: list[int | None] = []
    for gold, completion in pairs:
        try:
            found.append(int(verify(parse(f"${gold}$"), parse(completion))))
        except Exception:
            found.append(None)
    return found


def main() -> None:
    """Judge the pairs of a file."""
    peer, path = sys.argv[1:]
    pairs = json.loads(Path(path).read_text(encoding="utf-8"))
    verdicts: Any = math_verify(pairs) if peer == "math-verify" else lm_eval(peer, pairs)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
