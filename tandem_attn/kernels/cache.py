"""Compiled kernels on disk: safe for many processes, for damaged files, and for directories that cannot be written.

One file a key: SHA-256 of the rest, then the rest. A file appears under its name only when it is whole. One process compiles, and the
others, which wait for its lock, find the file. Where the disk refuses, kernels live in memory, and a warning says so once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def directory() -> Path | None:
    """Where kernels are kept: ``TANDEM_CACHE_DIR``, by default ``~/.cache/tandem_attn``; None when that is set but empty."""
    setting = os.environ.get("TANDEM_CACHE_DIR")
    if setting is not None:
        return Path(setting) if setting else None
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "tandem_attn"
    except RuntimeError as error:  # there is no home
        _tell_once("~/.cache/tandem_attn", str(error))
        return None


def fetch(key: str, make: Callable[[], bytes]) -> bytes:
    """What is stored under ``key``, or else made now and stored."""
    root = directory()
    if root is None:
        return make()
    path = root / f"{key}.kernel"
    found = _read(path)
    if found is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{key}.lock").open("w")
    except OSError as error:
        _tell_once(str(root), _words(error))
        return make()
    with lock, _held(lock.fileno()):
        found = _read(path)
        return _write(path, make()) if found is None else found


def contains(key: str) -> bool:
    """Whether something whole is stored under ``key``."""
    root = directory()
    return root is not None and _read(root / f"{key}.kernel") is not None


def _read(path: Path) -> bytes | None:
    """None where there is no file, or not the one that was written."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    return stored[_DIGEST:] if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST] else None


def _write(path: Path, payload: bytes) -> bytes:
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        partial.write_bytes(hashlib.sha256(payload).digest() + payload)
        partial.replace(path)  # atomic: readers see all or nothing
    except OSError as error:  # a full disk, say
        _tell_once(str(path.parent), _words(error))
        with contextlib.suppress(OSError):
            partial.unlink()
    return payload


@contextlib.contextmanager
def _held(file: int) -> Iterator[None]:
    """The lock; without it (some network file systems have none) processes may compile the same kernel twice, no worse."""
    import fcntl  # not on Windows, where only ``directory`` is asked for

    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing the file lets go


def _words(error: OSError) -> str:
    return error.strerror or str(error)


@functools.cache
def _tell_once(where: str, why: str) -> None:
    warnings.warn(
        f"compiled kernels are kept in memory only, and compiled again by every process: {where} cannot be written ({why}). Set "
        "TANDEM_CACHE_DIR to a directory that can, or to nothing if that is what you want.",
        stacklevel=2,
    )
