"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import kenpo.ops
import kenpo.stages

MODULES = [
    f"{package.__name__}.{m.name}"
    for package in (kenpo.ops, kenpo.stages)
    for m in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, extraglobs={"torch": torch})
    assert outcome.failed == 0


def test_there_are_examples():
    assert (
        sum(doctest.testmod(importlib.import_module(n), extraglobs={"torch": torch}).attempted for n in MODULES) >= 10
    )
