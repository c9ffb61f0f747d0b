"""Repeated calls: a call like an earlier one goes straight to its backend.

Which arguments are legal, and the Problem, Plan, backend and kernel of a call, depend on properties of the arguments alone (``checks``),
never on values. So a call whose properties equal those of one that went through needs no check, no planning and no dispatcher; only its
addresses are new. That holds in plain eager mode, with gradients or without: whatever else listens (a compiler, a tracer, torch.func, a
dispatch or function mode, the profiler) is served by the operator.

The table is bounded, belongs to one thread (a bound call fills an argument block of its own), and holds no tensor of a caller. The code
here runs in every call and counts in microseconds: that is why it is written out.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from tandem_attn.api import ops
from tandem_attn.api.backends import Bound
from tandem_attn.spec.masks import Full, Window

LARGEST = 1024  # calls that a thread remembers; the oldest makes room
_PLAIN_MASKS = (Full, Window)  # equal by value, and without tensors
Key = tuple[Any, ...]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_traced = torch._C._get_tracing_state
_profiled = torch.autograd._profiler_enabled


class _Table(threading.local):
    def __init__(self) -> None:
        self.calls: dict[Key, Bound | None] = {}


_table = _Table()


def key(q: Any, k: Any, v: Any, others: tuple[Any, ...], options: tuple[Any, ...]) -> Key | None:
    """What the outcome of a call depends on, or None where the call has to go the whole way.

    Args:
        q, k, v: whatever the caller gave.
        others: the other tensors; empty where there are none.
        options: window first, mask second, then any hashable values.
    """
    window, mask = options[0], options[1]
    if (
        not (type(q) is type(k) is type(v) is Tensor)
        or _dispatch_modes() or _transforms() or _traced() or _profiled() or forward_ad._current_level >= 0
        or (_function_modes() and not _only_default_devices())
        or q.is_neg() or k.is_neg() or v.is_neg()  # the sign is then no part of the data
        or (mask is not None and type(mask) not in _PLAIN_MASKS) or (window is not None and type(window) is not tuple)
    ):  # fmt: skip
        return None
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        found = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            needs_grad, options, *map(type, options),  # types: 1, 1.0 and True are equal, but not equally legal
        )  # fmt: skip
    except RuntimeError:  # a layout without strides, which the checks refuse
        return None
    if window is not None:
        found += tuple(map(type, window))
    if not others:
        return found
    properties = _properties(others)
    return None if properties is None else found + properties


def _only_default_devices() -> bool:
    """Whether all function modes are of ``torch.set_default_device`` or ``torch.device``, which only change what makes new tensors."""
    return all(type(torch._C._get_function_stack_at(i)) is DeviceContext for i in range(_function_modes()))


def _properties(tensors: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Of the optional tensors; None where one is anything but a plain tensor or parameter."""
    grad = torch.is_grad_enabled()
    found: list[Any] = []
    for x in tensors:
        if x is None:
            found.append(None)
        elif (type(x) is not Tensor and type(x) is not Parameter) or x.layout is not torch.strided or x.is_neg():
            return None
        else:
            found += (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad)
    return tuple(found)


def find(key: Key | None) -> Bound | None:
    """The bound form of calls like an earlier one; None where a call has to go the whole way."""
    try:
        return None if key is None else _table.calls.get(key)
    except TypeError:  # an option that is not hashable: the checks will refuse it
        return None


def remember(key: Key, arguments: tuple[Any, ...]) -> None:
    """Binds a call that went through, for the next one like it. ``arguments``: the operator's."""
    calls = _table.calls
    if key in calls:  # its backend binds nothing, or the bound form declined this time
        return
    if arguments[0].is_cuda and torch.cuda.is_current_stream_capturing():  # what binding does would become part of the graph
        return
    if len(calls) >= LARGEST:
        del calls[next(iter(calls))]
    with contextlib.suppress(torch.OutOfMemoryError):  # binding allocates once more what the call did; perhaps there is room next time
        calls[key] = ops.bind(arguments)


def forget() -> None:
    """Empties this thread's table."""
    _table.calls.clear()
