"""Run as a script: starts a server in a process group of its own, and ends the whole group when the starter is gone.

    python -I keeper.py COMMAND...

The first line of standard output is the server's process id. Standard input is held open by the starter: its end, also
by a kill, ends the group. A server that ends by itself takes the rest of its group along: engine cores outlive it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys


def keep(command: list[str]) -> int:
    """Start the server and wait for either end; returns the server's exit status."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    print(server.pid, flush=True)
    while server.poll() is None:
        if select.select([sys.stdin], [], [], 0.2)[0] and not os.read(sys.stdin.fileno(), 4096):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    return server.wait()


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
