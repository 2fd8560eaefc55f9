"""CASE files that can't be used are refused in one line; large identities are kept exactly."""

import json

import pytest

from kenpo.casefile import rollouts_from, run_file
from kenpo.errors import InputError

ROLLOUTS = {"mask": [[0, 1], [0, 1]], "group": [0, 0], "rewards": [1.0, 0.0]}
CASE = {"rollouts": ROLLOUTS, "policy": {"logp": [[0, -1.0], [0, -2.0]]}}


def test_identities_above_the_precision_of_a_float():
    ids = [2**60, 2**60 + 1]
    assert rollouts_from({**ROLLOUTS, "answer": ids}).answer.tolist() == ids
    for large in (10**30, 1e300):
        with pytest.raises(InputError, match=r"rollouts.group: .* 64 bits"):
            rollouts_from({**ROLLOUTS, "group": [large, 0]})


@pytest.mark.parametrize("adding", [3, None, "untruncated", [3]])
def test_what_is_no_list_of_stages(tmp_path, adding):
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"algorithm": "gspo", "with": adding, "cases": [CASE]}))
    with pytest.raises(InputError, match="list of stage names"):
        run_file(path)


def test_unusable_and_unusual_json(tmp_path):
    with pytest.raises(InputError, match="reward_parts"):
        rollouts_from({**ROLLOUTS, "reward_parts": [1]})
    path = tmp_path / "case.json"
    path.write_text('{"cases": [1' + "0" * 5000 + "]}")
    with pytest.raises(InputError, match="too many digits"):
        run_file(path)
    path.write_text('{"cases": [], "algorithm": "gspo", "algorithm": "grpo"}')
    with pytest.raises(InputError, match="'algorithm' is given twice"):
        run_file(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"algorithm": "gspo", "cases": [CASE]}).encode())
    assert len(run_file(path)["results"]) == 1
