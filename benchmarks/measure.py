"""What the benchmarks share: interleaved timing, peak memory as the system counts it, peers' environments, printing."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"


def interleaved(sides: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each side, one after the other in every round, so that a busy moment hits all of them."""
    for _ in range(warmup):
        for run in sides.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            gc.collect()
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the rounds' ratios: both sides of a round saw the same machine."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def product_rate(rows: int, inner: int, outer: int) -> float:
    """Operations a second of one float32 product [rows,inner] @ [inner,outer] by itself."""
    import torch

    x, w, out = torch.randn(rows, inner), torch.randn(inner, outer), torch.empty(rows, outer)
    seconds = interleaved({"product": lambda: [torch.mm(x, w, out=out) for _ in range(10)]}, 5)["product"]
    return 10 * 2.0 * rows * inner * outer / statistics.median(seconds)


def peak_bytes() -> int:
    """The largest resident memory of this process so far (VmHWM)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def added_bytes(run: Callable[[], Any]) -> int:
    """By how much `run` raised the peak above what was resident before it. Once per process: peaks don't fall."""
    gc.collect()
    before = resident_bytes()
    run()
    return max(0, peak_bytes() - before)


def child(arguments: Sequence[str], python: str | Path = sys.executable, **environment: str) -> Any:
    """Run a script in a process of its own; its last line on standard output is JSON. RuntimeError if it fails."""
    done = subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, arguments))} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def environment(name: str, *installs: Sequence[str]) -> Path:
    """Python of ``.peers/NAME``, made if it is missing; each of `installs` is one pip command's packages, in order."""
    home = PEERS / name
    python, done = home / "bin" / "python", home / "installed.json"
    wanted = [list(i) for i in installs]
    if done.exists() and json.loads(done.read_text()) == wanted:
        return python
    print(f"installing {name} into {home} ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    for packages in wanted:
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-input", *packages], check=True)
    done.write_text(json.dumps(wanted))
    return python


def versions(*names: str) -> dict[str, str]:
    """Versions of this process's packages, and of the machine."""
    found = {"python": platform.python_version()}
    for name in ("kenpo", "torch", "transformers", *names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    return found


def table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
    """Columns of text, the first to the left, the others to the right."""
    text = [list(map(str, head)), *[list(map(str, r)) for r in rows]]
    widths = [max(len(r[i]) for r in text) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in text
    )


def finish(name: str, ratios: Mapping[str, float], found: Mapping[str, str], as_json: bool, **more: Any) -> None:
    """The last lines of a benchmark: command, versions and ratios, or all as one JSON object."""
    if as_json:
        print(json.dumps({"name": name, "ratios": dict(ratios), "versions": dict(found), **more}))
        return
    print("\nratios:   " + ", ".join(f"{k} {v:.3g}" for k, v in ratios.items()))
    print("versions: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    print("command:  python " + " ".join(sys.argv))
