"""How many tokens the embedded engine holds at once: what it is read off, its bounds, and the message of a full GPU."""

import pytest
import tiny
import torch

from kenpo.engines import room
from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.hf import HFEngine
from kenpo.engines.open import open_engine
from kenpo.errors import RunError


@pytest.fixture(scope="module")
def model():
    return tiny.llama(300)


def test_a_tokens_bytes(model):
    c = model.config
    width = c.num_key_value_heads * c.hidden_size // c.num_attention_heads
    cache = c.num_hidden_layers * width * 4 * 2 * 2  # float32; keys and values; copied when rows leave
    assert room.token_bytes(model, 8) == cache + 8 * 4 * 300 // 8
    assert room.token_bytes(model, 10**6) == cache


@pytest.mark.parametrize("fits", [1, 1024, 4095, 4096, 10**9])
def test_half_of_the_free_memory_in_powers_of_two(model, fits, monkeypatch):
    each = room.token_bytes(model, 16)
    monkeypatch.setattr(room, "free_memory", lambda device: 2 * fits * each + 10_000)
    got = room.sampling_room(model, 16, reserved=10_000)
    assert got == {1: 1024, 1024: 1024, 4095: 2048, 4096: 4096, 10**9: 65536}[fits]
    assert room.sampling_room(model, 16, reserved=10**15) == 1024


def test_memory_that_can_not_be_read_is_taken_for_enough(model, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda device: None)
    assert room.sampling_room(model, 16) == 65536


def test_free_memory_of_this_machine(monkeypatch):
    alone = room.free_memory(torch.device("cpu"))
    if alone is None:
        pytest.skip("neither /proc/meminfo nor a cgroup here")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert room.free_memory(torch.device("cpu")) < alone / 2
    assert room.free_memory(torch.device("meta")) is None


def test_what_the_kernel_and_a_container_say(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    7 kB\n")
    assert room._available(tmp_path / "meminfo") == 7 * 1024
    assert room._available(tmp_path / "none") is None
    assert room._left(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("30\n")
    assert room._left(tmp_path) is None
    (tmp_path / "memory.max").write_text("100\n")
    assert room._left(tmp_path) == 70
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("50\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("60\n")
    assert room._left(tmp_path) == 0


def test_a_full_gpu_is_one_line_that_says_how_much_to_try(model, monkeypatch):
    engine = open_engine("hf", model, tiny.byte_tokenizer(), 512)
    assert engine.batch_tokens == 512

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(HFEngine, "_run", full)
    with pytest.raises(RunError, match=r"sampling 1 responses at once, up to 512 tokens; .*--sampling-tokens 256"):
        engine.sample([Request((5, 6), 1, SamplingOptions(max_tokens=4))])
