"""The checks that a run can be asked for."""

from __future__ import annotations

from collections.abc import Iterable

from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.report import KINDS

ALWAYS = frozenset(
    ("deadlock", "trap", "assert", "out-of-bounds", "misaligned", "undefined")
)  # a run cannot go on, or its values mean nothing
RACES = frozenset(("race", "missing-proxy-fence", "missing-tcgen05-fence", "nondeterministic"))  # need the race tracker
CHECKS = frozenset(KINDS)
BY_NAME = frozenset(
    ("tmem-load-use", "uninitialised-register", "register-pressure", "missing-tcgen05-fence", "nondeterministic")
)  # never part of "default" or "all"


def chosen(checks: str | Iterable[str]) -> frozenset[str]:
    """The report kinds that a value of `checks` asks for. Raises LaunchError for an unknown name."""
    if checks == "none":
        return ALWAYS
    if checks == "default":
        return CHECKS - RACES - BY_NAME
    if checks == "all":
        return CHECKS - BY_NAME
    names = frozenset((checks,) if isinstance(checks, str) else checks)
    unknown = names - CHECKS
    if unknown:
        raise LaunchError(f"checks: {sorted(unknown)} unknown; there are {sorted(CHECKS)}")
    return names | ALWAYS
