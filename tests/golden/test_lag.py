"""Versions and ages by counting optimizer updates, batch by batch, even and uneven."""

import pytest
import tiny

from kenpo.engines.hf import HFEngine
from kenpo.engines.lagged import LaggedEngine

from .test_files import cases


@pytest.mark.parametrize(("i", "e"), cases("lag_versions"))
def test_versions_by_counting(i, e):
    counts = i["minibatches"] if isinstance(i["minibatches"], list) else [i["minibatches"]] * i["batches"]
    plain = HFEngine(tiny.llama(300), tiny.byte_tokenizer())
    engine = LaggedEngine(plain, i["lag"]) if i["lag"] else plain
    versions, ages, done = [], [], 0
    for n in counts:
        versions.append(engine.version)
        ages.append([done + k - engine.version for k in range(n)])
        done += n
        engine.update(lambda: iter(()), done)
    assert versions == e["policy_version"]
    assert ages == e["age"]
