"""Fixtures of the contract's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tandem_attn.api import backends, repeated
from tests.support.recorder import Recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()
    reference = dataclasses.replace(backends.BACKENDS["reference"], name="recorder", bind=found.bind)
    monkeypatch.setitem(backends.BACKENDS, "recorder", reference)
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "recorder"))
    repeated.forget()
    yield found
    repeated.forget()
