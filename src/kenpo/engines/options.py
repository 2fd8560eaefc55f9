"""Options of what samples, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kenpo.engines.base import SamplingOptions
from kenpo.engines.server import Client
from kenpo.engines.vllm import ServerOptions, check_options
from kenpo.errors import InputError
from kenpo.options import Limits, Options, Paths, absolute, code_path

#: Options that say where a server is, and change no sample.
PLACE = frozenset({"engine_python", "engine_url", "engine_limit"})

GATE = 20  # batches between two looks of the parity gate, with vLLM


@dataclass(frozen=True)
class EngineOptions(Options):
    """The engine, the distribution that it samples from, and by which weights."""

    LIMITS: ClassVar[Limits] = {
        "sampling_tokens": 1,
        "max_tokens": 1,
        "top_k": 0,
        "gate_every": 0,
        "lag": 0,
        "max_staleness": 0,
    }
    PATHS: ClassVar[Paths] = {"engine": code_path, "engine_python": absolute}

    engine: str = "hf"
    """What samples: hf (transformers, in this process), vllm (a server on this machine), or your own as file.py:NAME,
    called with (model, tokenizer)."""
    engine_python: str | None = None
    """The interpreter that has vLLM installed, to start a server with; default: this one."""
    engine_url: str | None = None
    """A vLLM server that runs already, http://127.0.0.1:PORT, started on the same model (docs/guides/vllm.md)."""
    engine_limit: float = 600.0
    """Seconds that a sample, a reload or the start of a vLLM server may take before the run stops."""
    sampling_tokens: int | None = None
    """Tokens that the embedded engine holds at once; default: what free memory allows, recorded and kept on resume."""
    lag: int = 0
    """Sample batch n with the weights after batch n-1-LAG (0: with those of the moment)."""
    max_staleness: int | None = None
    """Drop rows whose oldest token was sampled more than so many optimizer updates ago."""
    sampler_noise: str | None = None
    """A known mismatch of the sampler, to try corrections on: bf16, or temperature=X."""
    gate_every: int | None = None
    """Compare the sampler's log-probs with the trainer's on the first two batches and every N-th, and stop above the
    bound before training on them; 0: never (default: 20 with vllm, else 0)."""
    gate_bound: float | None = None
    """The largest difference that the gate lets pass (default: 1e-4 in float32 and float64, 0.23 in bfloat16)."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in every log-prob."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of this mass, over which log-probs are renormalised on both sides; 1: all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: all."""
    max_tokens: int | None = None
    """Longest response (recipe 40, else 256)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's end-of-sequence ids."""
    keep_special_tokens: bool = False
    """Let verifiers see all special tokens of a response; tags in pairs, as <answer> and </answer>, are always kept."""

    def sampling(self, top_logprobs: int = 0) -> SamplingOptions:
        """How training samples are drawn; ``top_logprobs`` likeliest tokens are recorded with them."""
        assert self.max_tokens is not None
        return SamplingOptions(
            self.temperature, self.top_p, self.top_k, self.max_tokens, self.stop, self.keep_special_tokens,
            top_logprobs,
        )  # fmt: skip

    def server(self) -> ServerOptions:
        """Where vLLM's server is."""
        return ServerOptions(self.engine_python, self.engine_url, self.engine_limit)

    @property
    def gate(self) -> int:
        """Batches from one look of the parity gate to the next; 0: it never looks."""
        return (GATE if self.engine == "vllm" else 0) if self.gate_every is None else self.gate_every

    def _check_gate(self) -> None:
        if self.gate_bound is not None and not 0 < self.gate_bound < float("inf"):
            raise InputError(f"--gate-bound: {self.gate_bound} is not a number above 0")
        if self.gate_bound is not None and not self.gate:
            raise InputError(f"--gate-bound {self.gate_bound}: the gate never looks; give --gate-every N")
        if self.gate and self.sampler_noise is not None:
            raise InputError(f"--gate-every with --sampler-noise {self.sampler_noise}: that noise would stop the run")

    def _check_server(self) -> None:
        for option, given in (("--engine-python", self.engine_python), ("--engine-url", self.engine_url)):
            if given is not None and self.engine != "vllm":
                raise InputError(f"{option} is for --engine vllm, not {self.engine}; leave it out")
        if self.engine_python is not None and self.engine_url is not None:
            raise InputError("--engine-python starts a server and --engine-url uses one that runs; give one of them")
        if self.engine_python is not None and not Path(self.engine_python).expanduser().is_file():
            raise InputError(f"--engine-python {self.engine_python}: no such file")
        if self.engine_url is not None:
            Client(self.engine_url)
        if not 0 < self.engine_limit < float("inf"):
            raise InputError(f"--engine-limit: {self.engine_limit} is not a number of seconds above 0")
        if self.engine == "vllm":
            check_options(SamplingOptions(self.temperature, self.top_p, self.top_k))

    def check(self) -> None:
        """A distribution is sampled from, and only the embedded engine has a room."""
        if not self.temperature > 0:
            raise InputError(
                f"--temperature: {self.temperature} is not above 0; greedy decoding is for evaluation only"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p: {self.top_p} is not in (0, 1]")
        self._check_server()
        self._check_gate()
        if self.sampling_tokens is not None and self.engine != "hf":
            raise InputError(f"--sampling-tokens bounds the embedded engine, not {self.engine}; leave it out")
