"""Errors of the compat layer: they name the arguments that the caller wrote, not those they became."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tandem_attn.api import checks
from tandem_attn.spec.errors import UnsupportedError

T = TypeVar("T")


def call(function: Callable[..., T], names: Mapping[str, str], *args: Any, **kwargs: Any) -> T:
    """``function(*args, **kwargs)``; an error about one of its arguments names the caller's, by ``names`` (function's name -> caller's)."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(renamed(str(error), names)) from error


def renamed(message: str, names: Mapping[str, str]) -> str:
    """``message`` with its argument names replaced. A name counts where it opens the message or stands before "'s"."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    if not pattern:
        return message
    return re.sub(rf"^({pattern})\b|\b({pattern})(?='s\b)", lambda match: names[match[0]], message)


def refuse_dropout(name: str, probability: Any, nearest: str) -> None:
    """Dropout inside attention is not computed: 0 is the only probability that works.

    Raises:
        TypeError, ValueError: ``probability`` is no number in [0, 1].
        UnsupportedError: it is above 0.
    """
    value = checks.number(name, probability)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value:g}")
    if value > 0:
        raise UnsupportedError(backend="auto", missing=f"dropout of attention probabilities ({name}={value:g})", nearest=nearest)
