"""The client of vLLM's server, against a stub of the same protocol: samples, versions, updates, deaths, refusals."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from vllm_stub import Stub

from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.hf import HFEngine
from kenpo.engines.server import Client, Process
from kenpo.engines.vllm import ServerOptions, VLLMEngine
from kenpo.errors import InputError, RunError

OPTIONS = SamplingOptions(temperature=0.8, max_tokens=12, stop=("7",))


@pytest.fixture(scope="module")
def policy():
    from fresh_model import Architecture

    from kenpo.experience.addition import character_tokenizer

    tokenizer = character_tokenizer()
    model = Architecture("qwen3", hidden=32, layers=2, heads=2, context=64).build(tokenizer, 0)
    return model.double().eval(), tokenizer


@pytest.fixture
def stub():
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def engine(policy, stub):
    with VLLMEngine(*policy, ServerOptions(url=stub.url, limit=20.0)) as made:
        yield made


def requests(policy, count=6):
    ids = policy[1]("12+34=", add_special_tokens=False)["input_ids"]
    return [Request(tuple(ids[: 3 + i % 3]), seed=100 + i, options=OPTIONS) for i in range(count)]


def moved(model, by=0.05):
    generator = torch.Generator().manual_seed(1)
    return {n: t + by * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in model.state_dict().items()}


def told(episode):
    return episode.tokens, episode.finish, episode.text, [round(x, 9) for x in episode.logp]


def test_samples_are_those_of_the_embedded_engine(policy, engine):
    asked = requests(policy)
    asked.append(Request(asked[0].prompt, options=OPTIONS, greedy=True))
    seen = []
    found = engine.sample(asked, lambda i, episode: seen.append(i))
    want = HFEngine(*policy).sample(asked)
    assert [told(e) for e in found[:-1]] == [told(e) for e in want[:-1]]
    assert found[-1].tokens == want[-1].tokens
    assert [e.prompt for e in found] == [list(r.prompt) for r in asked]
    assert sorted(seen) == list(range(len(asked)))
    assert all(e.version == 0 for e in found)


def test_an_update_hands_over_the_weights_and_empties_the_cache(policy, engine, stub):
    model, tokenizer = policy
    asked = requests(policy)
    before = engine.sample(asked)
    loaded = stub.loaded
    fresh = moved(model)
    engine.update(lambda: iter(fresh.items()), 7)
    after = engine.sample(asked)
    assert (stub.loaded, stub.cache_reset) == (loaded + 1, loaded + 1)
    assert {e.version for e in after} == {7}
    import copy

    other = copy.deepcopy(model)
    other.load_state_dict(fresh)
    assert [told(e) for e in after] == [told(e) for e in HFEngine(other, tokenizer).sample(asked)]
    assert [told(e) for e in after] != [told(e) for e in before]


def test_an_update_waits_for_what_is_in_flight_and_new_requests_wait_for_it(policy, engine, stub):
    engine.sample(requests(policy, 1))
    stub.hang = 0.3
    first = engine.submit(requests(policy, 4))
    deadline = time.monotonic() + 10
    while sum(c[0] == "/v1/completions" for c in stub.calls) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.update(lambda: iter(policy[0].state_dict().items()), 3)
    second = engine.submit(requests(policy, 4))
    assert {f.result().version for f in first} == {0}
    assert {f.result().version for f in second} == {3}
    assert stub.mixed == 0
    at = [i for i, c in enumerate(stub.calls) if c[0] == "/collective_rpc"][-1]
    begun = stub.calls[at][1]
    assert all(c[2] <= begun for c in stub.calls[:at] if c[0] == "/v1/completions")
    assert all(c[1] >= begun for c in stub.calls[at + 1 :] if c[0] == "/v1/completions")


@pytest.mark.parametrize("fault", ["die", "fail"])
def test_what_a_dead_engine_owed_is_asked_again(fault, policy, engine, stub):
    asked = requests(policy, 8)
    want = [told(e) for e in engine.sample(asked)]
    loaded = stub.loaded
    setattr(stub, fault, 3)
    assert [told(e) for e in engine.sample(asked)] == want
    assert engine.restarts >= 1
    assert stub.loaded > loaded  # a server that came back holds what it was started with


def test_a_server_that_fails_for_good_ends_the_run_by_name(policy, engine, stub):
    engine.sample(requests(policy, 1))
    stub.fail = 10**6
    with pytest.raises(RunError, match=r"failed 5 times on one sample; .*POST .*/v1/completions: HTTP 500"):
        engine.sample(requests(policy, 2))


def test_a_call_that_outlasts_its_limit_is_named(policy, stub):
    stub.hang = 2.0
    with (
        VLLMEngine(*policy, ServerOptions(url=stub.url, limit=0.5)) as engine,
        pytest.raises(RunError, match=r"POST .*/v1/completions: no answer within 0.5 s"),
    ):
        engine.sample(requests(policy, 1))


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        ({"prompt_token_ids": [1]}, "read another prompt"),
        ({"token_ids": None}, "no token_ids"),
        ({"token_ids": [3, 4]}, "2 ids came with"),
        ({"logprobs": {"token_logprobs": [float("nan")]}, "token_ids": [3]}, "no finite number"),
        ({"logprobs": None}, "no token_ids and token_logprobs"),
    ],
)
def test_an_answer_that_can_not_be_is_refused(lie, what, policy, engine, stub):
    stub.lie = lie
    with pytest.raises((RunError, InputError), match=what):
        engine.sample(requests(policy, 1))


def test_another_version_is_refused_at_the_start(policy, stub):
    stub.version = "0.7.3"
    with (
        VLLMEngine(*policy, ServerOptions(url=stub.url, limit=5)) as engine,
        pytest.raises(InputError, match=r"vLLM 0.7.3; tested with 0.32"),
    ):
        engine.sample(requests(policy, 1))


@pytest.mark.parametrize(
    ("options", "what"),
    [({"top_k": 5}, "which ids it kept"), ({"top_p": 0.5}, "which ids it kept"), ({"top_logprobs": 2}, "likeliest")],
)
def test_what_it_can_not_tell_is_refused(options, what, policy, engine):
    with pytest.raises(InputError, match=what):
        engine.sample([Request((1, 2), options=SamplingOptions(**options))])


def test_a_mixture_of_experts_is_refused(policy):
    from types import SimpleNamespace

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_experts=4))
    with pytest.raises(InputError, match="stale experts"):
        VLLMEngine(SimpleNamespace(config=config), policy[1])


@pytest.mark.parametrize("url", ["http://example.org:80", "https://127.0.0.1:1", "http://127.0.0.1", "127.0.0.1:80"])
def test_only_loopback_is_spoken_to(url):
    with pytest.raises(InputError, match=r"expected http://127.0.0.1:PORT"):
        Client(url)


def test_no_server_there(policy):
    from kenpo.engines.server import free_port

    url = f"http://127.0.0.1:{free_port()}"
    with (
        VLLMEngine(*policy, ServerOptions(url=url, limit=0.5)) as engine,
        pytest.raises(RunError, match="not up after"),
    ):
        engine.sample(requests(policy, 1))


# -- a server that is started ------------------------------------------------------------------------------------------


@pytest.fixture
def python(tmp_path):
    """What starts the stub in place of vLLM."""
    path = tmp_path / "python"
    stub = Path(__file__).parents[1] / "vllm_stub.py"
    path.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{stub}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def gone(pid):
    """Whether a process has ended (and been reaped or is a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_started_server_that_is_killed_is_started_again_and_none_is_left(policy, python):
    asked = requests(policy, 12)
    want = [told(e) for e in HFEngine(*policy).sample(asked)]
    with VLLMEngine(*policy, ServerOptions(python=python, limit=120)) as engine:
        assert [told(e) for e in engine.sample(asked)] == want
        first = engine.process.pid
        futures = engine.submit(asked * 4)
        wait_until(lambda: any(f.done() for f in futures))
        os.kill(first, signal.SIGKILL)
        assert [told(f.result()) for f in futures] == want * 4
        second, folder = engine.process.pid, engine.handover.folder
        assert engine.restarts == 1
        assert second != first
    wait_until(lambda: gone(first) and gone(second))
    assert not folder.exists()


def test_the_whole_group_ends_with_the_one_who_started_it():
    """Also by a kill: a child that the server has started does not stay."""
    script = (
        "import sys, time; from kenpo.engines.server import Process\n"
        "p = Process(['/bin/sh', '-c', 'sleep 300 & echo $! >&2; wait'], {})\n"
        "time.sleep(0.5); print(p.pid, p.last_words(), flush=True); time.sleep(300)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    server, child = map(int, starter.stdout.readline().split())
    assert not gone(server)
    assert not gone(child)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: gone(server) and gone(child))


def test_a_server_that_does_not_come_up_says_its_last_words(policy, tmp_path):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 1\n")
    path.chmod(0o755)
    with (
        VLLMEngine(*policy, ServerOptions(python=str(path), limit=30)) as engine,
        pytest.raises(RunError, match=r"(?s)ended while it started:.*no module named vllm"),
    ):
        engine.sample(requests(policy, 1))


def test_stopping_is_not_undone_by_a_late_request(policy, python):
    process = Process(["sleep", "300"], {})
    assert process.alive()
    process.stop()
    assert not process.alive()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, 0)
        assert gone(process.pid)
