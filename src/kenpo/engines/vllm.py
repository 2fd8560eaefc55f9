"""vLLM as the engine: one request per sample on a loopback server, log-probs as sampled, weights by files in memory."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from kenpo.engines.base import Done, Engine, Request, SamplingOptions, Weights, check_prompt_fits
from kenpo.engines.handover import Handover, present_weights
from kenpo.engines.sampling import cut_text
from kenpo.engines.server import Client, Process, ServerGone, free_port
from kenpo.engines.text import decode_all
from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError, NonFiniteError, RunError
from kenpo.models.loading import context_length, stop_ids

NAME = "policy"  # what a server that Kenpo starts calls the model
SUPPORTED = ("0.32",)
TRIES = 5  # times that one sample is asked for before the run gives up
AT_ONCE = 128  # requests in flight
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Chunked prefill is off: on a CPU a seeded request whose prompt is cut in chunks ends the worker.
FLAGS = (
    "--enforce-eager", "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill",
    "--generation-config", "vllm", "--served-model-name", NAME,
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on a CPU only
}  # fmt: skip
PREFILL = 8192


@dataclass(frozen=True)
class ServerOptions:
    """Where the server is: one that runs at ``url``, or one to be started with the interpreter ``python`` (None: this
    one). ``limit``: seconds for a sample, or for the server to start."""

    python: str | None = None
    url: str | None = None
    limit: float = 600.0


class VLLMEngine(Engine):
    """Samples on a vLLM server of this machine. Seeds, ids and log-probs are per request; ids go in and come out.

    ``submit`` hands out a future per request. `update` waits until nothing is in flight, writes the weights, has them
    loaded and the prefix cache emptied; requests that come meanwhile wait. A server that dies is started again (one at
    ``url``: awaited) and given the weights in force, and what it owed is asked again: with its own seed a request gives
    the same sample. A segment's ``version`` is that of the weights in force when it was asked.

    Nothing is started before the first request. Raises `InputError` for mixtures of experts (a reload leaves their
    experts behind), several processes, top-k, top-p, recorded likeliest tokens and another vLLM than `SUPPORTED`;
    `RunError` for a call that outlasts its limit, a refusal, or a server that dies again and again.
    """

    def __init__(self, model: Any, tokenizer: Any, how: ServerOptions | None = None) -> None:
        _check_model(model)
        self.model, self.tokenizer, self.how = model, tokenizer, how or ServerOptions()
        self.version, self.restarts = 0, 0
        self.stops = stop_ids(model, tokenizer)
        self.context = context_length(model)
        self.handover = Handover(model, tokenizer)
        self.client: Client | None = Client(self.how.url) if self.how.url else None
        self.name = NAME
        self.process: Process | None = None
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="vllm")
        self.turn = threading.Condition()
        self.flying, self.held = 0, False  # requests in flight; whether new ones wait for an update
        self.started, self.era, self.failed_at = False, 0, math.inf
        self.reviving = threading.Lock()
        self.lost: RunError | None = None  # why there is no server any more
        self._cleaned = weakref.finalize(self, Handover.close, self.handover)

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        """One episode per request, in order; ``done`` as each of them ends."""
        futures = self.submit(requests)
        places = {future: i for i, future in enumerate(futures)}
        try:
            for future in as_completed(futures):
                episode = future.result()
                if done is not None:
                    done(places[future], episode)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def submit(self, requests: Sequence[Request]) -> list[Future[Episode]]:
        """A handle per request, at once."""
        for i, request in enumerate(requests):
            check_prompt_fits(request.prompt, self.context, request.options.max_tokens, f"request {i}")
            check_options(request.options)
        self._start()
        return [self.pool.submit(self._one, request) for request in requests]

    def _one(self, request: Request) -> Episode:
        """One sample, asked for until the server has given it."""
        with self.turn:
            self.turn.wait_for(lambda: not self.held)
            self.flying += 1
            version = self.version
        try:
            said = ""
            for _ in range(TRIES):
                era, began = self.era, time.monotonic()
                try:
                    answer = self._ask("POST", "/v1/completions", self._body(request), self.how.limit)
                    # A server that came back by itself holds other weights until they are handed over again.
                    if began < self.failed_at and era == self.era:
                        return self._episode(request, answer, version)
                except ServerGone as gone:
                    self.failed_at, said = min(self.failed_at, time.monotonic()), str(gone)
                self._revive(era)
            raise RunError(f"the engine failed {TRIES} times on one sample; the last time: {said}")
        finally:
            with self.turn:
                self.flying -= 1
                self.turn.notify_all()

    def _body(self, request: Request) -> dict[str, Any]:
        """The request as the server reads it. What a server might fill in by itself is said."""
        o = request.options
        room = o.max_tokens if self.context is None else min(o.max_tokens, self.context - len(request.prompt))
        special = set(self.tokenizer.all_special_tokens)
        ends = self.stops | {self.tokenizer.convert_tokens_to_ids(s) for s in o.stop if s in special}
        return {
            "model": self.name, "prompt": list(request.prompt), "max_tokens": room, "seed": request.seed % 2**63,
            "temperature": 0.0 if request.greedy else o.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop": [s for s in o.stop if s not in special], "include_stop_str_in_output": True,
            "stop_token_ids": sorted(ends), "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip

    def _episode(self, request: Request, answer: Any, version: int) -> Episode:
        """A server's answer as an episode. RunError for one that is not about this request."""
        try:
            choice = answer["choices"][0]
            ids, logps, finish = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
            count = len(ids), len(logps)
        except (KeyError, IndexError, TypeError):
            raise RunError(
                f"POST {self._url}/v1/completions: the answer has no token_ids and token_logprobs; is it vLLM?"
            ) from None
        if choice.get("prompt_token_ids", list(request.prompt)) != list(request.prompt):
            raise RunError(f"{self._url}: the engine read another prompt than it was sent; ids must stay ids")
        if count[0] != count[1]:
            raise RunError(f"{self._url}: {count[0]} ids came with {count[1]} log-probs; each id has one of its own")
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in logps):
            raise NonFiniteError(f"{self._url}: the engine sampled with a log-prob that is no finite number")
        spoken = ids[:-1] if ids and ids[-1] in self.stops else ids
        text = decode_all(self.tokenizer, [spoken], keep_special=request.options.keep_special)[0]
        said = Segment(ids, sampled=True, logp=logps, version=version)
        finish = finish if finish in ("stop", "length") else "abort"
        return Episode((given(request.prompt), said), finish=finish, text=cut_text(text, request.options.stop)[0])

    # -- weights ------------------------------------------------------------------------------------------------------

    def update(self, weights: Weights, version: int) -> None:
        """Let what is in flight end, then load these weights and empty the prefix cache."""
        with self.turn:
            self.held = True
            if not self.turn.wait_for(lambda: self.flying == 0, timeout=self.how.limit):
                self.held = False
                raise RunError(f"{self.flying} samples are still in flight after {self.how.limit:g} s")
        try:
            self.handover.write(weights())
            if self.started:
                self._reload()
            self.version = version
        finally:
            with self.turn:
                self.held = False
                self.turn.notify_all()

    def _reload(self) -> None:
        """The server reads the folder, and only then forgets what it computed with older weights."""
        for attempt in range(TRIES):
            era = self.era
            try:
                self._load()
                return
            except ServerGone as gone:
                if attempt == TRIES - 1:
                    raise RunError(f"the engine did not take the weights: {gone}") from None
                self._revive(era)

    def _load(self) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.handover.folder)}}
        self._ask("POST", "/collective_rpc", body, self.how.limit)
        self._ask("POST", "/reset_prefix_cache", None, self.how.limit)

    # -- the server ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Once: a server that answers, of a version that is known, with the weights of the moment."""
        if self.started:
            return
        if not (self.handover.folder / "config.json").exists():
            self.handover.write(present_weights(self.model))
        if self.how.url is None:
            self._launch()
        assert self.client is not None
        self.client.wait(self.how.limit, self.process)
        found = str((self._ask("GET", "/version") or {}).get("version"))
        if not found.startswith(tuple(v + "." for v in SUPPORTED)):
            raise InputError(f"{self._url}: vLLM {found}; tested with {', '.join(SUPPORTED)}: install one of these")
        served = self._ask("GET", "/v1/models")["data"][0]
        self.name = served["id"]
        self.context = min(x for x in (self.context, served.get("max_model_len")) if x is not None)
        if self.how.url is not None:
            self._reload()
        self.started = True

    def _launch(self) -> None:
        """Start a server of the folder, in a process group of its own."""
        if self.process is not None:
            self.process.stop()
        python = self.how.python or sys.executable
        if self.how.python is None and importlib.util.find_spec("vllm") is None:
            raise InputError(
                "--engine vllm: vllm is not installed beside Kenpo; name an interpreter that has it (--engine-python "
                "PATH) or a server that runs (--engine-url http://127.0.0.1:PORT)"
            )
        port = free_port()
        length = [] if self.context is None else ["--max-model-len", str(self.context)]
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.handover.folder), "--host",
            "127.0.0.1", "--port", str(port), "--dtype", dtype, *length, "--max-num-batched-tokens",
            str(max(PREFILL, self.context or 0)), *FLAGS,
        ]  # fmt: skip
        self.client = Client(f"http://127.0.0.1:{port}")
        self.process = Process(command, ENVIRONMENT)

    def _revive(self, era: int) -> None:
        """Bring a server that died back, once for all who noticed. `era` counts the servers so far."""
        with self.reviving:
            if self.lost is not None:
                raise self.lost
            if self.era != era:
                return
            try:
                if self.how.url is None:
                    self._launch()
                assert self.client is not None
                self.client.wait(self.how.limit, self.process)
                if self.how.url is not None:  # it holds what it was started with
                    self._load()
            except RunError as error:
                self.lost = error
                raise
            self.restarts += 1
            self.failed_at = math.inf
            self.era += 1

    def _ask(self, method: str, path: str, body: Any = None, limit: float = 60.0) -> Any:
        assert self.client is not None
        return self.client.ask(method, path, body, limit)

    @property
    def _url(self) -> str:
        return self.client.url if self.client else "the engine"

    def close(self) -> None:
        """End the server that was started, and remove the weights from the memory disk."""
        self.lost = RunError("the engine is closed")
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.process is not None:
            self.process.stop()
            self.process = None
        self._cleaned()


def _check_model(model: Any) -> None:
    """InputError for a model that this engine would sample wrongly, or a run that it can't serve."""
    text = model.config.get_text_config()
    if any((getattr(text, name, None) or 0) > 1 for name in EXPERTS):
        raise InputError(
            "--engine vllm: a mixture of experts; vLLM leaves stale experts behind when it reloads weights. Use the "
            "embedded engine (--engine hf)"
        )
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InputError("--engine vllm runs with one training process; start kenpo without torchrun")


def check_options(options: SamplingOptions) -> None:
    """InputError for what vLLM does not tell about its samples."""
    if options.truncates:
        raise InputError(
            "--engine vllm with --top-k or --top-p: vLLM does not say which ids it kept, so log-probs can't be "
            "renormalised over them; leave these out, or use --engine hf"
        )
    if options.top_logprobs:
        raise InputError("--engine vllm: the likeliest tokens of each position are recorded by --engine hf only")
