"""From Gluon to cubin: Triton's stages, run one by one, without what only costs time.

``triton.compile`` would first hash all of Triton, for a cache that ours makes needless (0.35 s in each process).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

BINARY = ("cubin", "ptx")  # stages whose results are kept
# Passes that order threads among each other and against TMA and MMA, where an operation of the compiler's own needs it.
FENCES = ("add_proxy_fence_insertion", "add_tmem_barrier_insertion")
BARRIERS = (*FENCES, "add_membar")
# Triton 3.9 always passes it, around a fault of ptxas 13 that it does not name. ptxas then stores on the stack what it keeps in registers
# otherwise: 3 to 16 loads and stores in 38 of 384 plans (docs/runtime.md). nvcc does without.
REG_ALLOC = "--regAllocOptLevel=2"
# Where shared memory is given out: to buffers, to the arguments of roles, and in sum.
_BUFFERS = re.compile(r"ttg\.local_alloc \{|ttg\.local_alloc : |ttg\.warp_specialize|tt\.func")


def translated(
    source: Any, capability: int, options: dict[str, Any], needless: tuple[str, ...] = (), *, reg_alloc: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Triton's cubin and PTX, by these names, and its metadata.

    Args:
        source: what Triton compiles, an ``ASTSource`` or ``GluonASTSource``.
        capability: of the chip, 10 major + minor.
        options: Triton's.
        needless: which of ``BARRIERS`` have nothing to add, since the source says itself where threads wait for each other. They run where
            an operation needs shared memory of its own.
        reg_alloc: whether ptxas gets ``REG_ALLOC``.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    _let_go_at_exit()
    target = GPUTarget("cuda", capability, 32)
    translator = make_backend(target)
    parsed = translator.parse_options({**options, **source.parse_options()})
    if needless:
        translator.make_llir = MethodType(_without(type(translator).make_llir, needless), translator)
    if not reg_alloc:
        translator.make_cubin = MethodType(_plainly(type(translator).make_cubin), translator)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    translator.add_stages(stages, parsed, source.language)
    context = ir.context()
    ir.load_dialects(context)
    translator.load_dialects(context)
    made = source.make_ir(target, parsed, translator.get_codegen_implementation(parsed), translator.get_module_map(), context)
    found, metadata = {}, {"target": target, **vars(parsed)}
    for name, stage in stages.items():
        made = stage(made, metadata)
        if name in BINARY:  # what other stages make must not outlive the context
            found[name] = made
    return found, metadata


def _without(stage: Any, needless: tuple[str, ...]) -> Any:
    """A copy of a stage of Triton's that adds its passes to a ``_Pipeline``; other compilations in this process use the original."""
    names = dict(stage.__globals__)
    names |= {name: _Recorded(names[name]) for name in ("passes", "nvidia")} | {"ir": _Pipelines(names["ir"], needless)}
    instrument = names["instrument"]
    names["instrument"] = lambda pipeline, **how: pipeline.added.append(("instrument", functools.partial(instrument, **how), ()))
    return FunctionType(stage.__code__, names, stage.__name__, stage.__defaults__, stage.__closure__)


def _plainly(stage: Any) -> Any:
    """A copy of Triton's stage that calls ptxas, without ``REG_ALLOC``."""
    return FunctionType(stage.__code__, {**stage.__globals__, "subprocess": _Plain(subprocess)}, stage.__name__, stage.__defaults__)


class _Plain:
    """The module ``subprocess``, whose ``run`` passes ``REG_ALLOC`` to nobody."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def run(self, command: list[str], **options: Any) -> Any:
        return self._module.run([each for each in command if each != REG_ALLOC], **options)


class _Recorded:
    """A module of Triton's passes whose ``add_...`` are noted down."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name.startswith("add_"):
            return lambda pipeline, *args: pipeline.added.append((name, found, args))
        return _Recorded(found) if isinstance(found, ModuleType) else found


class _Pipelines:
    """Triton's module ``ir`` with another ``pass_manager``."""

    def __init__(self, module: ModuleType, needless: tuple[str, ...]) -> None:
        self._module = module
        self.pass_manager = functools.partial(_Pipeline, module.pass_manager, needless)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Pipeline:
    """Passes in the order in which Triton adds them, of which ``needless`` are left out where no operation has scratch memory."""

    def __init__(self, make: Callable[[Any], Any], needless: tuple[str, ...], context: Any) -> None:
        self._make, self._needless, self._context, self._debug = make, needless, context, False
        self.added: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []

    def enable_debug(self) -> None:
        self._debug = True

    def run(self, module: Any, name: str) -> None:
        names = [added for added, *_ in self.added]
        first = min((names.index(each) for each in self._needless if each in names), default=len(names))
        self._run(self.added[:first], module, name)
        if first < len(names):
            left_out = () if has_scratch(str(module)) else self._needless
            self._run([each for each in self.added[first:] if each[0] not in left_out], module, name)

    def _run(self, chosen: list[tuple[str, Callable[..., Any], tuple[Any, ...]]], module: Any, name: str) -> None:
        manager = self._make(self._context)
        if self._debug:
            manager.enable_debug()
        for _, add, args in chosen:
            add(manager, *args)
        manager.run(module, name)


def has_scratch(module: str) -> bool:
    """Whether an operation of a module with allocated shared memory has some of its own, as conversions between layouts may have."""
    return any("allocation.offset" in line and not _BUFFERS.search(line) for line in module.splitlines())


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No collection of reference cycles meanwhile: each walks all that the process holds, PyTorch included (0.1 s)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _let_go_at_exit() -> None:
    atexit.register(_let_go)


def _let_go() -> None:
    """Ends the only path from what libtriton keeps for ever to an object of its Python bindings.

    The bindings list, on stderr, which of their objects outlive the interpreter. Triton 3.9 holds classes of Gluon's layouts in C++ without
    end, their module holds Gluon's semantics, and those hold the class of a builder, as a type annotation: forty lines after every process
    that compiled. Leaks of anything else are still told.
    """
    semantics = sys.modules.get("triton.experimental.gluon.language._semantic")
    if semantics is not None and hasattr(semantics, "GluonOpBuilder"):
        for annotated in (semantics.GluonSemantic, semantics.GluonSemantic.__init__):
            annotated.__annotations__.pop("builder", None)
        del semantics.GluonOpBuilder
