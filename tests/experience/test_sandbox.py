"""`--sandbox`: refused where bubblewrap is missing; what a worker can and can't do under it (where it is there)."""

import os
import shutil

import pytest

from kenpo.errors import InputError
from kenpo.experience import sandbox
from kenpo.experience.verdict import Sample
from kenpo.experience.verifiers import load_verifier

SOURCE = """
import os, socket, subprocess, sys, time
HERE = os.path.dirname(__file__)
TRIES = {
    "read": lambda: open(__file__).read(),
    "write beside the file": lambda: open(os.path.join(HERE, "written"), "w"),
    "write at home": lambda: open(os.path.expanduser("~/kenpo-written"), "w"),
    "write to tmp": lambda: open("/tmp/kenpo-written", "w"),
    "network": lambda: socket.create_connection(("127.0.0.1", int(open(os.path.join(HERE, "port")).read())), 2),
}
def f(completion):
    if completion == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        time.sleep(60)
    done = {}
    for name, act in TRIES.items():
        try: act(); done[name.replace(" ", "_")] = 1.0
        except OSError: done[name.replace(" ", "_")] = 0.0
    done["others"] = float(len([d for d in os.listdir("/proc") if d.isdigit()]))
    return {"reward": 1.0, "secret": float("SECRET_TOKEN" in os.environ), **done}
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "r.py").write_text(SOURCE)
    return f"{tmp_path / 'r.py'}:f"


def test_without_bubblewrap_it_is_refused_by_name(spec, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for verifier in (spec, "math_verify", "exact"):
        with pytest.raises(InputError, match=r"--sandbox needs bubblewrap \(the program bwrap\)"):
            load_verifier(verifier, sandbox=True)


def test_the_worker_is_started_through_it(spec, monkeypatch, tmp_path):
    """A stand-in that notes its arguments and runs what comes after them."""
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/args\nenv > {tmp_path}/env\n'
        'while [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    (tmp_path / "port").write_text("1")
    with load_verifier(spec, sandbox=True, workers=1) as verifier:
        (verdict,) = verifier.score([Sample(completion="", answer="")])
    assert verdict.reward == 1.0
    assert verdict.parts["secret"] == 0.0
    arguments = (tmp_path / "args").read_text()
    for needed in ("--die-with-parent", "--unshare-pid", "--unshare-net", "--ro-bind / /", "--tmpfs /tmp"):
        assert needed in arguments
    assert f"--ro-bind {tmp_path} {tmp_path}" in arguments
    assert "SECRET_TOKEN" not in (tmp_path / "env").read_text()


def test_the_environment_keeps_no_keys():
    whole = {"PATH": "p", "PYTHONPATH": "q", "LC_ALL": "C", "HF_TOKEN": "t", "WANDB_API_KEY": "k", "AWS_SECRET": "s"}
    assert sandbox.environment(whole) == {"PATH": "p", "PYTHONPATH": "q", "LC_ALL": "C"}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_what_a_worker_can_do_under_bubblewrap(spec, monkeypatch, tmp_path):
    import socket

    monkeypatch.setenv("SECRET_TOKEN", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "port").write_text(str(server.getsockname()[1]))
        with load_verifier(spec, sandbox=True, workers=1, time_limit=5.0) as verifier:
            (verdict,) = verifier.score([Sample(completion="", answer="")])
            assert verdict.reward == 1.0, verdict
            parts = dict(verdict.parts)
            assert 0 < parts.pop("others") < 10
            assert parts == {
                "read": 1.0, "write_to_tmp": 1.0, "write_beside_the_file": 0.0, "write_at_home": 0.0, "network": 0.0,
                "secret": 0.0,
            }  # fmt: skip
            assert not (tmp_path / "written").exists()
            (hung,) = verifier.score([Sample(completion="hang", answer="")])
            assert hung.status == "timeout"
