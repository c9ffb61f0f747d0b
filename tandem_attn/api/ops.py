"""The custom operators: what torch.compile, autograd and the dispatcher see of Tandem.

``tandem_attn::attention`` and ``tandem_attn::attention_backward`` serve padded, packed and cached calls; ``tandem_attn::append_kv``
writes new keys and values into a cache. Arguments are tensors, numbers and text only: a mask travels as its code and tensors
(``spec.masks``), and every None is spelled out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tandem_attn.api import backends, values
from tandem_attn.reference.numerics import accumulator_dtype, out_dtype
from tandem_attn.spec import masks
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import BACKWARD, FORWARD
from tandem_attn.spec.problem import Problem

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? alibi_slopes, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, Tensor? page_table, Tensor? leftpad, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor[] mask_tensors, str mask, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale, float softcap, bool needs_grad, bool deterministic, bool return_lse, str backend"
)
ARGUMENTS = tuple(part.split()[-1] for part in _SCHEMA.split(", "))
_INPUTS = tuple(field.name for field in dataclasses.fields(Inputs))
_DIFFERENTIABLE = ("q", "k", "v", "sink", "alibi_slopes", "bias")

_library = torch.library.Library("tandem_attn", "DEF")
_library.define(f"attention({_SCHEMA}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor q, Tensor k, Tensor v, Tensor sink, Tensor alibi_slopes, Tensor bias)"
)
_library.define("append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor page_table) -> ()")


def _read(args: tuple[Any, ...]) -> tuple[Problem, Inputs]:
    """Problem and tensors of the operators' common arguments; on a CPU every value is checked."""
    named = dict(zip(ARGUMENTS, args, strict=True))
    inputs = Inputs(**{name: named[name] for name in _INPUTS})
    problem = _problem(inputs, named)
    values.check(inputs, problem.mask, problem.seqlen_q, problem.seqlen_k)
    return problem, inputs


def _problem(inputs: Inputs, named: dict[str, Any]) -> Problem:
    q, k = inputs.q, inputs.k
    varlen = inputs.cu_seqlens_q is not None
    return Problem(
        batch=inputs.cu_seqlens_q.shape[0] - 1 if inputs.cu_seqlens_q is not None else q.shape[0],
        seqlen_q=named["max_seqlen_q"],
        seqlen_k=named["max_seqlen_k"],
        heads=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=inputs.v.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        mask=masks.from_code(named["mask"], named["mask_tensors"]),
        scale=named["scale"],
        softcap=named["softcap"],
        sink=inputs.sink is not None,
        alibi=inputs.alibi_slopes is not None,
        bias=inputs.bias is not None,
        descale=any(x is not None for x in (inputs.q_descale, inputs.k_descale, inputs.v_descale)),
        bias_dtype="" if inputs.bias is None else str(inputs.bias.dtype).removeprefix("torch."),
        varlen=varlen,
        total_q=q.shape[0] if varlen else 0,
        total_k=k.shape[0] if varlen else 0,
        seqused=inputs.seqused_q is not None or inputs.seqused_k is not None,
        page_size=k.shape[1] if inputs.page_table is not None else 0,
        cache=inputs.page_table is not None,
        leftpad=inputs.leftpad is not None,
        backward=named["needs_grad"],
        deterministic=named["deterministic"],
        return_lse=named["return_lse"],
        device=q.device.type,
    )


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    problem, inputs = _read(args)
    backend = backends.choose(problem, args[-1])
    with _exact_dtypes(inputs):
        return backend.forward(problem, backend.plan(problem, FORWARD), inputs)


def bind(arguments: tuple[Any, ...]) -> backends.Bound | None:
    """The forward of these arguments with all but its addresses decided, seen by autograd where it has to be; None where its backend has
    no such form."""
    named = dict(zip(ARGUMENTS, arguments, strict=True))
    inputs = Inputs(**{name: named[name] for name in _INPUTS})
    problem = _problem(inputs, named)
    backend = backends.choose(problem, named["backend"])
    bound = None if backend.bind is None else backend.bind(problem, backend.plan(problem, FORWARD), inputs)
    return _differentiable(bound, arguments) if bound is not None and named["needs_grad"] else bound


def _exact_dtypes(inputs: Inputs) -> torch.autocast:
    """Autocast, which the caller may have on, must not reach the products inside: they have the dtypes of the inputs."""
    return torch.autocast(inputs.q.device.type, enabled=False)


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    named = dict(zip(ARGUMENTS, args, strict=True))
    q = named["q"]
    lse_shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    out = q.new_empty(*q.shape[:-1], named["v"].shape[-1], dtype=out_dtype(q.dtype))
    return out, q.new_empty(lse_shape, dtype=accumulator_dtype(q.dtype))


def _attention_backward(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    problem, inputs = _read(args)
    backend = backends.choose(problem, args[-1])
    with _exact_dtypes(inputs):
        grads = backend.backward(problem, backend.plan(problem, BACKWARD), inputs, out, lse, grad_out, grad_lse)
    return tuple(_gradient(getattr(inputs, name), getattr(grads, name), inputs.q) for name in _DIFFERENTIABLE)


def _gradient(x: Tensor | None, grad: Tensor | None, q: Tensor) -> Tensor:
    """Operators return no None: a missing input's gradient is an empty tensor."""
    return q.new_empty(0) if x is None or grad is None else grad.to(x.dtype)


def _attention_backward_fake(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    named = dict(zip(ARGUMENTS, args, strict=True))
    q = named["q"]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (named[name] for name in _DIFFERENTIABLE))


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """A call's arguments without its tensors, which autograd saves."""

    is_tensor: tuple[bool, ...]
    plain: tuple[Any, ...]  # None in the places of tensors
    mask_tensors: int
    mask: masks.Mask  # keeps its predicates alive until backward
    return_lse: bool

    @staticmethod
    def of(arguments: tuple[Any, ...]) -> _Form:
        named = dict(zip(ARGUMENTS, arguments, strict=True))
        return _Form(
            tuple(isinstance(x, Tensor) for x in arguments),
            tuple(None if isinstance(x, (Tensor, list, tuple)) else x for x in arguments),
            len(named["mask_tensors"]),
            masks.from_code(named["mask"], named["mask_tensors"]),
            named["return_lse"],
        )

    def save(self, ctx: Any, output: tuple[Tensor, Tensor], mask_tensors: list[Tensor], tensors: Iterable[Tensor]) -> None:
        """What backward needs. ``tensors``: those among the arguments, in their order."""
        ctx.form = self
        ctx.set_materialize_grads(False)
        if not self.return_lse:
            ctx.mark_non_differentiable(output[1])  # nobody sees it; a backend may lack its gradient
        ctx.save_for_backward(*output, *mask_tensors, *tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _Form.of(inputs).save(ctx, output, inputs[ARGUMENTS.index("mask_tensors")], (x for x in inputs if isinstance(x, Tensor)))


def _saved_arguments(ctx: Any) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    form = ctx.form
    out, lse, *saved = ctx.saved_tensors
    mask_tensors, rest = saved[: form.mask_tensors], iter(saved[form.mask_tensors :])
    args = [next(rest) if is_tensor else plain for is_tensor, plain in zip(form.is_tensor, form.plain, strict=True)]
    args[ARGUMENTS.index("mask_tensors")] = mask_tensors
    return out, lse, tuple(args)


class _BoundAttention(torch.autograd.Function):
    """A bound forward as autograd sees it: what the operator saves, and the operator's backward.

    ``apply`` takes the bound form, the call's form, and the operator's tensors in their order, as many as it has; it returns O and LSE, or
    None twice where the bound form declines.
    """

    @staticmethod
    def forward(ctx: Any, bound: backends.Bound, form: _Form, *tensors: Tensor | None) -> Any:
        found = bound(tensors)
        if found is None:
            return None, None
        form.save(ctx, found, [], (x for x in tensors if x is not None))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *_autograd(ctx, *grads)[: len(_INPUTS)])


def _differentiable(bound: backends.Bound, arguments: tuple[Any, ...]) -> backends.Bound:
    """A bound form for calls that need a gradient. Their masks hold no tensors (see ``repeated``)."""
    form = _Form.of(arguments)

    def call(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor] | None:
        found = _BoundAttention.apply(bound, form, *tensors)
        return None if found[0] is None else found

    return call


def _autograd(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, args = _saved_arguments(ctx)
    named = dict(zip(ARGUMENTS, args, strict=True))
    if named["page_table"] is not None:
        raise UnsupportedError(
            backend=named["backend"], missing="a gradient through a KV cache", nearest="attention or attention_varlen without page_table"
        )
    grads: dict[str, Tensor] = {}
    if grad_out is not None or grad_lse is not None:
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = dict(zip(_DIFFERENTIABLE, torch.ops.tandem_attn.attention_backward(grad_out, grad_lse, out, lse, *args), strict=True))
    result: list[Any] = [grads.get(name) if named[name] is not None else None for name in ARGUMENTS]
    result[ARGUMENTS.index("mask_tensors")] = [None] * ctx.form.mask_tensors
    return tuple(result)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:  # noqa: ARG001
    raise UnsupportedError(
        backend="any", missing="a second derivative of attention", nearest="scaled_dot_product_attention's math kernel in PyTorch"
    )


def check_append(k: Tensor, k_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor, arguments: tuple[Any, ...]) -> None:
    """Raises what the call that follows an append would raise, before anything is written. Compiled code checks while it runs."""
    if torch.compiler.is_compiling() or torch._subclasses.fake_tensor.is_fake(k):
        return
    values.check_append(cache_seqlens, page_table, k, k_cache)
    problem, _ = _read(arguments)
    backends.choose(problem, arguments[-1])


def _append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor) -> None:
    """Writes k, v (B, new, Hkv, D) behind each sequence's ``cache_seqlens``.

    Without a host's checks, tokens beyond the pages are dropped.
    """
    values.check_append(cache_seqlens, page_table, k, k_cache)
    k, v, k_cache, v_cache = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (k, v, k_cache, v_cache))  # PyTorch moves bytes
    page_size, new = k_cache.shape[1], k.shape[1]
    room = page_table.shape[1] * page_size - cache_seqlens.long()
    # A token beyond the last place repeats the last one that fits, in its place, so that every write is in bounds and all to one
    # place agree.
    token = torch.minimum(torch.arange(new, device=k.device), room[:, None] - 1).clamp(min=0)
    at = (cache_seqlens.long()[:, None] + token).clamp(max=page_table.shape[1] * page_size - 1)
    page = page_table.long().gather(1, at // page_size).clamp(0, k_cache.shape[0] - 1)
    fits = (room > 0)[:, None, None, None]
    for x, cache in ((k, k_cache), (v, v_cache)):
        value = x.gather(1, token[:, :, None, None].expand(-1, -1, *x.shape[2:]))
        cache[page, at % page_size] = torch.where(fits, value, cache[page, at % page_size])


_library.impl("attention", _attention, "CPU")
_library.impl("attention", _attention, "CUDA")
_library.impl("attention_backward", _attention_backward, "CPU")
_library.impl("attention_backward", _attention_backward, "CUDA")
_library.impl("append_kv", _append_kv, "CPU")
_library.impl("append_kv", _append_kv, "CUDA")
torch.library.register_fake("tandem_attn::attention", _attention_fake, lib=_library)
torch.library.register_fake("tandem_attn::attention_backward", _attention_backward_fake, lib=_library)
torch.library.register_fake("tandem_attn::append_kv", lambda *_: None, lib=_library)
torch.library.register_autograd("tandem_attn::attention", _autograd, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tandem_attn::attention_backward", _no_second_derivative, lib=_library)
