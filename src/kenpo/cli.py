"""The `kenpo` command: finds the subcommand, runs it, and turns a named error into one line and an exit status."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

_FORMAT = warnings.formatwarning

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("kenpo.commands.training:train", "train a model with any algorithm on any task"),
    "sft": ("kenpo.commands.sft:sft", "supervised warm start on demonstrations"),
    "eval": (
        "kenpo.commands.evaluation:evaluate",
        "greedy accuracy, avg@k, maj@k and pass@k of a model on sets of problems",
    ),
    "check": ("kenpo.commands.check:check", "what is installed here, and one trial step"),
    "sample": ("kenpo.commands.training:sample", "talk to a checkpoint"),
    "loss": ("kenpo.commands.objectives:loss", "evaluate an algorithm on recorded numbers, in float64"),
    "list": ("kenpo.commands.objectives:list_", "the catalogue of algorithms"),
    "show": ("kenpo.commands.objectives:show", "one algorithm: slots, numbers, source"),
    "diff": ("kenpo.commands.objectives:diff", "the slots in which two algorithms differ"),
}

_EXAMPLES = """examples:
  kenpo train                                  train the bundled model on its task with grpo
  kenpo train --algorithm dapo --set surrogate.high=0.3
  kenpo diff grpo gspo
  kenpo COMMAND --help                         what a command does, by example"""


def usage() -> str:
    """The text of `kenpo --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: kenpo COMMAND [OPTIONS]", "", "commands:", *lines, "", _EXAMPLES])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status (0 done, 1 the run could not go on, 2 bad input)."""
    from kenpo.errors import KenpoError
    from kenpo.terminal import one_line

    warnings.formatwarning = _format_warning
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # what the terminal's encoding lacks is written as an escape
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(args)
        sys.stdout.flush()
        return status
    except KenpoError as error:
        print(f"kenpo {one_line(args[0])}: {one_line(str(error))}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # the reader of a pipe went away; nothing was lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end
        return 0


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    from kenpo.terminal import warning_line

    return warning_line(str(message), category, filename) or _FORMAT(message, category, filename, lineno, line)


def _run(args: list[str]) -> int:
    from kenpo.errors import unknown_name

    if not args or args[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"kenpo {version('kenpo')}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(args[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
