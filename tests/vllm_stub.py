"""A server with the calls of vLLM's that Kenpo uses; it samples with transformers from the weights that it was handed.

    python vllm_stub.py --model FOLDER --host 127.0.0.1 --port N [what vLLM takes besides]

Its faults are set by a test: `die` closes that many connections without an answer, `fail` answers 500, `hang` waits.
`stale` takes a reload's call and keeps the weights. `calls` lists what was asked, with the moments of begin and end.
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class Stub(ThreadingHTTPServer):
    """The server. `folder`: the weights that it begins with, None: those of the first reload."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder=None, port=0, version="0.32.0", context=64):
        super().__init__(("127.0.0.1", port), Handler)
        self.version, self.context, self.engine = version, context, None
        self.lock, self.calls = threading.Lock(), []
        self.die = self.fail = 0
        self.hang, self.stale, self.lie = 0.0, False, {}
        self.loaded, self.cache_reset, self.mixed = 0, 0, 0
        if folder is not None:
            self.load(folder)

    def handle_error(self, request, client_address):
        pass  # a client that has gone

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def load(self, folder):
        from kenpo.engines.hf import HFEngine
        from kenpo.models.loading import load_model

        self.mixed += any(end is None for path, _, end in map(tuple, self.calls) if path == "/v1/completions")
        if not (self.stale and self.engine is not None):
            model, tokenizer = load_model(str(folder), trainable=False, dtype=dtype_of(folder), device="cpu")
            self.engine = HFEngine(model, tokenizer)
        self.loaded += 1

    def take(self, name):
        """Whether this call is one of those that a fault is planted in."""
        with self.lock:
            left = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            return left > 0

    def complete(self, body):
        from kenpo.engines.base import Request, SamplingOptions

        greedy = body["temperature"] == 0
        options = SamplingOptions(
            temperature=1.0 if greedy else body["temperature"], max_tokens=body["max_tokens"],
            stop=tuple(body["stop"]),
        )  # fmt: skip
        with self.lock:
            episode = self.engine.sample([Request(tuple(body["prompt"]), body["seed"], options, greedy)])[0]
        choice = {
            "token_ids": episode.tokens, "logprobs": {"token_logprobs": episode.logp},
            "finish_reason": episode.finish, "prompt_token_ids": body["prompt"], **self.lie,
        }  # fmt: skip
        return {"choices": [choice]}


def dtype_of(folder):
    from pathlib import Path

    from safetensors.torch import load_file

    first = next(iter(load_file(str(Path(folder) / "model.safetensors")).values()))
    return str(first.dtype).removeprefix("torch.")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, value, status=200):
        data = json.dumps(value).encode() if value is not None else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        stub = self.server
        models = {"data": [{"id": "tiny", "max_model_len": stub.context}]}
        found = {"/health": None, "/version": {"version": stub.version}, "/v1/models": models}
        self.answer(found.get(self.path, {"error": "no such path"}), 200 if self.path in found else 404)

    def do_POST(self):
        stub = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        call = [self.path, time.monotonic(), None]
        with stub.lock:
            stub.calls.append(call)
        try:
            if self.path == "/v1/completions":
                if stub.take("die"):
                    self.close_connection = True
                    return
                if stub.take("fail"):
                    self.answer({"error": "EngineCore died"}, 500)
                    return
                time.sleep(stub.hang)
                value = stub.complete(body)
                call[2] = time.monotonic()
                self.answer(value)
            elif self.path == "/collective_rpc":
                with stub.lock:
                    stub.load(body["kwargs"]["weights_path"])
                self.answer({"results": [None]})
            elif self.path == "/reset_prefix_cache":
                stub.cache_reset += 1
                self.answer(None)
            else:
                self.answer({"error": "no such path"}, 404)
        finally:
            call[2] = call[2] or time.monotonic()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=64)
    known, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    Stub(known.model, known.port, context=known.max_model_len).serve_forever()


if __name__ == "__main__":
    main()
