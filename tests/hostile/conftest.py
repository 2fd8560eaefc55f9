"""Tiny models, a graded verifier and runs in processes of their own, from the trainer's tests."""

from tests.trainer.conftest import models, options, spawn, verifier  # noqa: F401
