"""A server of samples on loopback: calls with a time limit each, and its process where Kenpo starts it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kenpo.errors import InputError, RunError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WORDS = 4000  # bytes of a server's log that an error shows
POLL = 0.2  # seconds between two looks at a server that starts


class ServerGone(RunError):
    """The server closed the connection, does not listen, or failed inside (HTTP 5xx): what was asked may be asked
    again once it is back."""


class Client:
    """Calls on one server. A call ends within its limit of seconds, with an answer or an error that names it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname not in LOOPBACK or parts.port is None:
            raise InputError(
                f"--engine-url {url}: expected http://127.0.0.1:PORT; the server reads weights from this machine's "
                "files, and nothing is sent to another one"
            )
        self.url, self.host, self.port = url.rstrip("/"), parts.hostname, parts.port

    def ask(self, method: str, path: str, body: Any = None, limit: float = 60.0) -> Any:
        """The answer, read as JSON where it is that. ServerGone, or RunError for a time limit or a refusal."""
        call = f"{method} {self.url}{path}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=limit)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data, status = response.read(), response.status
        except TimeoutError:
            raise RunError(
                f"{call}: no answer within {limit:g} s; the engine hangs or is too slow for its load: look at its log, "
                "or raise --engine-limit"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{call}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if status >= 500:
            raise ServerGone(f"{call}: HTTP {status}: {_told(data)}")
        if status != 200:
            raise RunError(f"{call}: HTTP {status}: {_told(data)}")
        try:
            return json.loads(data) if data else None
        except ValueError:
            raise RunError(f"{call}: the answer is no JSON: {_told(data)}") from None

    def wait(self, limit: float, process: Process | None = None) -> None:
        """Return once the server says that it is well. RunError after `limit` seconds, or when its process ended."""
        until = time.monotonic() + limit
        while True:
            with contextlib.suppress(RunError):
                self.ask("GET", "/health", limit=min(5.0, limit))
                return
            if process is not None and not process.alive():
                raise RunError(f"the engine's server ended while it started:\n{process.last_words()}")
            if time.monotonic() > until:
                words = "" if process is None else f":\n{process.last_words()}"
                raise RunError(f"GET {self.url}/health: the engine's server is not up after {limit:g} s{words}")
            time.sleep(POLL)


def _told(data: bytes) -> str:
    """A server's own words, cut and without control characters."""
    return "".join(c if c.isprintable() else " " for c in data[:300].decode("utf-8", "replace"))


class Process:
    """A server's process group, which ends with this object, with this process, or when it is stopped."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        # Closed in `stop`, when the group is gone.
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        keeper = str(Path(__file__).with_name("keeper.py"))
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", keeper, *command], env=_environment(environment), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip
        assert self.keeper.stdout is not None
        self.pid = int(self.keeper.stdout.readline() or -1)

    def alive(self) -> bool:
        """Whether the server still runs."""
        return self.keeper.poll() is None

    def last_words(self) -> str:
        """The end of what it printed."""
        self.log.flush()
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), WORDS, max(0, size - WORDS)).decode("utf-8", "replace").strip()

    def stop(self) -> None:
        """End the group and wait until it is gone."""
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        with contextlib.suppress(OSError):
            self.keeper.stdin.close()
        try:
            self.keeper.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            self.keeper.wait()
        self.keeper.stdout.close()
        self.log.close()


def _environment(more: dict[str, str]) -> dict[str, str]:
    """This process's, with what is set in `more` unless the user has set it, without what would lead another
    interpreter to this one's packages."""
    own = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**more, **own}


def free_port() -> int:
    """A port on loopback that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
