"""A launch from a compiled Triton or Gluon kernel: `kernel.asm["ptx"]`, `.metadata` and `.src.signature`. Triton is not imported.

Parameters as Triton 3.9 passes them: each non-constexpr argument in order (a tensor descriptor is its 128 bytes, then shape as i32 and
strides as i64), then the global and the profile scratch pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem_attn.emulator.errors import LaunchError
from tandem_attn.emulator.launch.tensormap import from_descriptor
from tandem_attn.emulator.launch.tensors import register
from tandem_attn.emulator.memory.globalmem import GlobalMemory


def is_compiled(kernel: Any) -> bool:
    return hasattr(kernel, "asm") and hasattr(kernel, "metadata")


def signature(kernel: Any) -> dict[str, Any]:
    """Argument name -> type, constexprs left out; tuples keep their nesting."""
    return {name: kind for name, kind in kernel.src.signature.items() if kind != "constexpr"}


def arguments(kernel: Any, args: Sequence[Any] | Mapping[str, Any]) -> tuple[list[str], list[Any], list[Any]]:
    """Names, types and values of the kernel's arguments. Raises LaunchError for missing or unknown ones."""
    kinds = signature(kernel)
    if isinstance(args, Mapping):
        unknown, missing = [n for n in args if n not in kinds], [n for n in kinds if n not in args]
        if unknown or missing:
            raise LaunchError(f"arguments: unknown {unknown}, missing {missing}; the kernel takes {list(kinds)}")
        args = [args[name] for name in kinds]
    if len(args) != len(kinds):
        raise LaunchError(f"the kernel takes {len(kinds)} arguments {list(kinds)}, {len(args)} given")
    return list(kinds), list(kinds.values()), list(args)


def flatten(name: str, kind: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Tuples become their items, constexpr items vanish."""
    if isinstance(kind, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(kind):
            raise LaunchError(f"argument {name}: a tuple of {len(kind)} is expected")
        for i, (k, v) in enumerate(zip(kind, value, strict=True)):
            yield from flatten(f"{name}[{i}]", k, v)
    elif kind != "constexpr":
        yield name, str(kind), value


def expand(kernel: Any, args: Sequence[Any] | Mapping[str, Any], memory: GlobalMemory) -> tuple[list[Any], list[str]]:
    """The values for the PTX parameters, without the two scratch pointers, and their names."""
    metas = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    values: list[Any] = []
    labels: list[str] = []
    for top, top_kind, given in zip(*arguments(kernel, args), strict=True):
        for name, kind, value in flatten(top, top_kind, given):
            if not kind.startswith("tensordesc"):
                values.append(value)
                labels.append(name)
                continue
            if not hasattr(value, "block_shape"):
                raise LaunchError(f"argument {name}: a tensor descriptor is expected, {type(value).__name__} given")
            register(memory, name, value.base)
            meta = next(metas, None)
            if meta is None:
                raise LaunchError(f"argument {name}: the kernel takes its descriptor apart in software, which is not supported")
            parts = [from_descriptor(value, meta), *value.shape, *value.strides]
            values += parts
            labels += [name] * len(parts)
    return values, labels
