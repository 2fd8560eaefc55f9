"""`kenpo loss · list · show · diff` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kenpo.cli import main

CASE = {
    "algorithm": "gspo",
    "settings": {"surrogate.low": 0.1},
    "cases": [
        {
            "rollouts": {"mask": [[0, 1, 1], [0, 1, 0]], "group": [0, 0], "rewards": [1.0, 0.0],
                         "logp_old": [[0, -1.2, -0.4], [0, -1, 0]]},
            "policy": {"logp": [[0, -1.1, -0.5], [0, -1, 0]]},
        }
    ],
}  # fmt: skip


def changed(path: str, value) -> str:
    """CASE as text with the value at a dotted path replaced (None: removed)."""
    document = json.loads(json.dumps(CASE))
    at, (*parents, last) = document, path.split(".")
    for key in parents:
        at = at[int(key) if isinstance(at, list) else key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(document)


def test_loss_writes_results(tmp_path, capsys):
    case, out = tmp_path / "case.json", tmp_path / "out.json"
    case.write_text(json.dumps(CASE))
    assert main(["loss", str(case), "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert set(result) == {"loss", "coefficients", "advantages", "weights", "metrics"}
    assert main(["loss", str(case)]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == [result]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON at line 1"),
        ("[]", "'algorithm'"),
        (changed("algorithm", "gsspo"), "did you mean"),
        (changed("settings", {"surrogate.lo": 1}), "surrogate.low"),
        (changed("cases", []), "at least one case"),
        (changed("setting", {"surrogate.low": 0.1}), "unknown key 'setting': did you mean settings?"),
        (changed("cases.0.polcy", {}), "did you mean policy?"),
        (changed("set", {"surrogate.low": 0.1}), "unknown key 'set'"),
        (changed("SETTINGS", {"surrogate.low": 0.1}), "unknown key 'SETTINGS'"),
        (changed("settings", {"surrogate.low": 10**400}), "is not a number"),
        (changed("cases.0.rollouts.mask", [["0", "1", "1"], [0, 1, 0]]), "rollouts.mask: '0' is not a number"),
        (changed("settings", {"surrogate.low": "0.1"}), "setting surrogate.low: clip.low: '0.1' is not a number"),
        (changed("cases.0.rollouts.mask", None), "rollouts.mask is missing"),
        (changed("cases.0.rollouts.mask", [[1, 1, 1], [0, 1, 0]]), "position 0 is trainable"),
        (changed("cases.0.rollouts.mask", [[0, 2, 1], [0, 1, 0]]), "other than 0 and 1"),
        (changed("cases.0.rollouts.rewards", [1.0]), "rewards"),
        (changed("cases.0.rollouts.group", [0.5, 1]), "whole numbers"),
        (changed("cases.0.rollouts.logp_old", [[0, -1], [0, -1, 0]]), "different lengths"),
        (changed("cases.0.rollouts.logp_old", "x"), "expected a list"),
        (changed("cases.0.rollouts.logp_odl", [[0]]), "did you mean logp_old"),
        (changed("cases.0.policy", {}), "policy.logp is missing"),
        (changed("cases.0.policy.logp", [[0, -1, None], [0, -1, 0]]), "logp"),
        (changed("cases.0.policy.logp", [[0, -1], [0, -1]]), "logp"),
        (changed("cases.0.rollouts", 3), "expected an object"),
    ],
)
def test_bad_input_is_one_line_and_status_two(tmp_path, capsys, text, says):
    case = tmp_path / "case.json"
    case.write_text(text)
    assert main(["loss", str(case)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert "case.json" in error


def test_missing_file_and_unwritable_output(tmp_path, capsys):
    assert main(["loss", str(tmp_path / "no.json")]) == 2
    case = tmp_path / "case.json"
    case.write_text(json.dumps(CASE))
    assert main(["loss", str(case), "--out", str(tmp_path / "no" / "out.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 2


def test_list_show_and_diff(capsys):
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["name"] == "grpo"
    assert main(["list"]) == 0
    assert "gspo" in capsys.readouterr().out
    assert main(["show", "dapo", "--json", "--set", "surrogate.high=0.3"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["surrogate.high"] == 0.3
    assert main(["show", "dapo"]) == 0
    assert "DropUniformGroups" in capsys.readouterr().out
    assert main(["diff", "grpo", "gspo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["surrogate.low"] == [0.2, 0.0003]
    assert main(["diff", "grpo", "grpo"]) == 0
    assert "the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [["show", "nope"], ["diff", "grpo", "nope"], ["trian"], ["show", "dapo", "--set", "x"]]
)
def test_unknown_names_end_with_status_two(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_changed_algorithm_does_not_carry_the_papers_status(capsys, tmp_path):
    main(["show", "dapo", "--json"])
    assert json.loads(capsys.readouterr().out)["status"] == "paper"
    main(["show", "dapo", "--json", "--set", "surrogate.high=0.3"])
    assert json.loads(capsys.readouterr().out)["status"] == "changed from dapo"
    file = tmp_path / "my.py"
    file.write_text("import kenpo\nMINE = kenpo.get('dapo').but(name='mine')\n")
    main(["show", f"{file}:MINE", "--json"])
    assert "your own" in json.loads(capsys.readouterr().out)["status"]


@pytest.mark.parametrize("words", [["--help"], ["list"]])
def test_a_reader_that_goes_away_is_no_error(words):
    """As `kenpo list | head -1` does."""
    command = [
        sys.executable,
        "-c",
        "import sys; from kenpo.cli import main; sys.stdin.read(); sys.exit(main(sys.argv[1:]))",
    ]
    process = subprocess.Popen(
        [*command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
