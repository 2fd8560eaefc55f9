"""Named errors. Each message is one line that says what is wrong, where, and what to do about it.

Everything a caller may want to catch derives from :class:`KenpoError`. The command line prints the message on standard
error and exits with ``exit_status``: 2 for input that can be mended by the user, 1 for a run that could not go on.
"""

from __future__ import annotations


class KenpoError(Exception):
    """Base of all errors that Kenpo raises on purpose."""

    exit_status = 2


class InputError(KenpoError, ValueError):
    """A value, file, column or option that can't be used as given."""


class UnknownNameError(InputError, KeyError):
    """A name (algorithm, task, verifier, setting, column) that is not known; the message lists close matches."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class TooLongError(InputError):
    """A prompt, or a prompt with its response, that does not fit into the model's context."""


class MissingFieldError(InputError):
    """A stage needs an optional field that the batch does not have."""


class UndeclaredFieldError(KenpoError, AttributeError):
    """A stage read an optional field that it does not name in ``needs``. A fault in the stage, not in the data."""


class NonFiniteError(InputError):
    """A NaN or infinity at a trained position."""


class IllegalCombinationError(InputError):
    """Stages that can't stand in one algorithm, refused when the algorithm is built."""


class ScopeError(InputError):
    """A cut of the batch that splits what a stage must see whole, or a stage that needs two phases in a one-phase
    call."""


class VerifierError(KenpoError):
    """A verifier that failed on a whole batch (it raised, timed out, or returned no usable number for any sample)."""


class RunError(KenpoError):
    """A run that can't go on (disk full, no group left to train on). What was saved stays intact."""

    exit_status = 1


class RefillExhaustedError(RunError):
    """Dynamic sampling found too few usable groups within its bound."""


class NoDivergenceWarning(UserWarning):
    """A stage that acts on the distance from another policy saw none at all: every log-ratio of a batch was exactly 0.
    Usually the sampler's log-probs were scored again by the trainer instead of being recorded."""


class HostWarning(UserWarning):
    """A trainer of another library does something otherwise than the algorithm asks, and can't be made to."""


class LongResponseWarning(UserWarning):
    """A criterion that is known to fail on long responses is used alone on them."""


def unknown_name(kind: str, name: str, known, hint: str = "") -> UnknownNameError:
    """An :class:`UnknownNameError` that lists close matches, or, if none is close, the known names (at most 40)."""
    import difflib

    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    more = f" and {len(known) - 40} more" if len(known) > 40 else ""
    listed = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(known[:40])}{more}"
    return UnknownNameError(f"unknown {kind} {name!r}: {listed}{' ' + hint if hint else ''}")
