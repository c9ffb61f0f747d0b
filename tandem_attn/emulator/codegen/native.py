"""Compiles IR to machine code, keeps it on disk by the hash of the PTX, and calls it.

llvmlite is used because it takes IR text and gives object code in one small wheel: Numba adds type inference per segment (seconds for a
softmax loop) and a dependency four times its size; a C compiler is not there on a user's machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def generator() -> str:
    """What the IR of a segment depends on, as part of the cache key: the sources of semantics, code generator, parser and register file."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted(path for folder in ("codegen", "memory", "ops", "ptx") for path in package.glob(f"{folder}/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def available() -> bool:
    """Whether llvmlite can be imported."""
    return importlib.util.find_spec("llvmlite") is not None


def cache_directory() -> Path:
    """`TANDEM_CACHE_DIR`, else `XDG_CACHE_HOME`/tandem or ~/.cache/tandem."""
    given = os.environ.get("TANDEM_CACHE_DIR")
    if given:
        return Path(given) / "emulator"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "emulator"


class Compiler:
    """Object code of one PTX text."""

    def __init__(self, ptx: str, opt: int = 0) -> None:
        import llvmlite.binding as llvm  # noqa: PLC0415 - optional, and slow to import

        self.llvm = llvm
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features().flatten()
        target = llvm.Target.from_default_triple()
        self.machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=opt
        )  # measured: 1 takes a quarter off the run time of a segment and triples its compilation
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.machine)
        key = hashlib.sha256(
            "\0".join((generator(), llvm.get_host_cpu_name(), features, str(llvm.llvm_version_info), str(opt), ptx)).encode()
        ).hexdigest()
        self.directory = cache_directory() / key[:32]
        self.kept: list[Any] = []
        self.compiled = 0

    def cached(self, name: str) -> bool:
        return (self.directory / f"{name}.o").exists()

    def function(self, name: str, text: Callable[[], str]) -> Callable[..., None]:
        """The function `name`, from the disk or compiled from `text()`."""
        path = self.directory / f"{name}.o"
        try:
            code = path.read_bytes()
        except OSError:
            code = self.compile(text())
            self.save(path, code)
        self.engine.add_object_file(self.llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        address = self.engine.get_function_address(name)
        made: Callable[..., None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
        return made

    def compile(self, text: str) -> bytes:
        self.compiled += 1
        module = self.llvm.parse_assembly(text)
        module.verify()
        return bytes(self.machine.emit_object(module))

    def save(self, path: Path, code: bytes) -> None:
        """Write so that another process never sees half a file; a cache that cannot be written is no error."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(code)
            os.replace(file.name, path)
        except OSError:
            return
