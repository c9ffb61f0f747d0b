"""Errors that are not about a wrong argument. Wrong arguments raise ValueError or TypeError."""

from __future__ import annotations

import functools
from typing import Any


class UnsupportedError(RuntimeError):
    """A correct request that the backend does not cover.

    Attributes:
        backend: name of the backend that was asked.
        missing: what it lacks, in words.
        nearest: what works instead, in words.
    """

    def __init__(self, *, backend: str, missing: str, nearest: str) -> None:
        super().__init__(f"backend {backend!r} does not cover {missing}; nearest that works: {nearest}")
        self.backend = backend
        self.missing = missing
        self.nearest = nearest

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are pickled by position, to come back from a worker process; this one has keywords only."""
        return (functools.partial(type(self), backend=self.backend, missing=self.missing, nearest=self.nearest), ())
