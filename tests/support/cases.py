"""A Case describes one call of the public API in numbers and names; ``build(case)`` gives its tensors, the same ones every time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tandem_attn
from tandem_attn.spec.inputs import Inputs
from tests.support.masks import MASKS, Sees

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # of q, k and v; forward only
DESCALES = ("", "bh", "b1", "1h", "11", "number")
NAN = float("nan")
INPUT_NAMES = tuple(f.name for f in dataclasses.fields(Inputs))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Tuples of lengths have one entry a sequence; ``None`` leaves the argument out."""

    layout: str = "padded"  # padded: attention; packed: attention_varlen; cache: attention_kvcache
    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53  # cache: its capacity
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "fp32"  # of DTYPES or FLOAT8
    descale: str = ""  # of DESCALES: letters of b and h (KV heads), or 1 where it broadcasts; or a tensor without dimensions
    mask: str = "full"  # of support.masks.MASKS
    scale: float | None = None
    softcap: float = 0.0
    sink: bool = False
    alibi: int = 0  # dimensions of alibi_slopes
    bias: str = ""  # letters of b, h, q, k, or 1 where it broadcasts: "1h1k"
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None  # cache: cache_seqlens before appending
    lengths_q: tuple[int, ...] = ()  # packed
    lengths_k: tuple[int, ...] = ()
    tail_q: int = 0  # packed: rows behind the last sequence
    tail_k: int = 0
    page_size: int = 0
    leftpad: tuple[int, ...] | None = None
    batch_idx: tuple[int, ...] | None = None
    new: int = 0  # tokens appended to the cache
    backward: bool = True
    grad_lse: bool = False
    deterministic: bool = False
    strides: str = "contiguous"  # of STRIDES
    grad_out: str = "contiguous"  # or expanded (stride 0), transposed, last (non-unit last stride)
    amplify: float = 1.0
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return (DTYPES | FLOAT8)[self.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of O; sinks, slopes and biases have it too."""
        return torch.bfloat16 if self.dtype in FLOAT8 else self.torch_dtype

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Of LSE."""
        return torch.promote_types(self.out_dtype, torch.float32)

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def needs_backward(self) -> bool:
        return self.backward and self.layout != "cache" and not self.page_size and self.dtype not in FLOAT8

    def __str__(self) -> str:
        """What differs from a plain case."""
        changed = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ",".join(str(x) if isinstance(x, str) else f"{name}={x}".replace(" ", "") for name, x in changed) or "plain"


@dataclass
class Call:
    """The tensors of a case. ``leaves`` are the floating inputs by argument name; ``sequences`` say where each lies."""

    case: Case
    leaves: dict[str, Tensor]
    keywords: dict[str, Any]
    sees: Sees
    sequences: list[tuple[int, Any, Any]] = field(default_factory=list)  # b, index of its rows in q, index of its rows in k
    arguments: dict[str, Any] = field(default_factory=dict)  # integer tensors and other arguments of the layout
    grad_out: Tensor | None = None
    grad_lse: Tensor | None = None
    cache_after: tuple[Tensor, Tensor] | None = None  # what an append must have written

    def problem(self) -> tandem_attn.Problem:
        """The description that ``supports`` takes."""
        case, q, k = self.case, self.leaves["q"], self.leaves["k"]
        packed, cached = case.layout == "packed", case.layout == "cache" or bool(case.page_size)
        used = case.used_q is not None or case.used_k is not None or case.layout == "cache"
        bias_dtype = str(case.out_dtype).removeprefix("torch.") if case.bias else ""
        return tandem_attn.Problem(
            batch=case.batch,
            seqlen_q=q.shape[0] if packed else case.seqlen_q,
            seqlen_k=k.shape[0] if packed and not cached else case.seqlen_k,
            heads=case.heads, heads_kv=case.heads_kv, head_dim=case.head_dim, head_dim_v=case.width_v,
            dtype=str(case.torch_dtype).removeprefix("torch."),
            mask=problem_mask(self.keywords), scale=case.scale, softcap=case.softcap,
            sink=case.sink, alibi=case.alibi > 0, bias=bool(case.bias), bias_dtype=bias_dtype,
            descale=bool(case.descale), varlen=packed, total_q=q.shape[0] if packed else 0,
            total_k=k.shape[0] if packed and not cached else 0, seqused=used, page_size=case.page_size, cache=cached,
            backward=case.needs_backward, deterministic=case.deterministic,
            return_lse=case.grad_lse or not case.needs_backward, device=self.device,
        )  # fmt: skip

    @property
    def device(self) -> str:
        return self.leaves["q"].device.type

    def on(self, device: str) -> Call:
        """The same call with its tensors on another device, strides kept."""
        tensors = lambda xs: {name: placed(x, device) if isinstance(x, Tensor) else x for name, x in xs.items()}  # noqa: E731
        changed = {"leaves": tensors(self.leaves), "arguments": tensors(self.arguments), "keywords": _keywords(self.case, device)}
        changed |= {name: placed(x, device) for name in ("grad_out", "grad_lse") if (x := getattr(self, name)) is not None}
        return dataclasses.replace(self, **changed)

    def inputs(self) -> Inputs:
        """The tensors as backends get them; a cache call's page table and lengths are made by the API and are not here."""
        tensors = {name: x for name, x in self.arguments.items() if isinstance(x, Tensor) and name in INPUT_NAMES}
        return Inputs(**self.leaves, **tensors)

    def run(self, backend: str) -> dict[str, Tensor]:
        """Calls the public function on fresh leaves and returns ``out``, ``lse`` and the gradients by name."""
        fixed = {name: x.detach() for name, x in self.leaves.items()}
        if not self.case.needs_backward:
            out, lse = self.call(fixed, backend, return_lse=True)
            return {"out": out, "lse": lse}
        leaves = {name: x.detach().requires_grad_() for name, x in self.leaves.items()}  # same storage and strides
        if self.case.grad_lse:
            out, lse = self.call(leaves, backend, return_lse=True)
        else:  # a backend may serve O's gradient and lack LSE's
            out, lse = self.call(leaves, backend, return_lse=False), self.call(fixed, backend, return_lse=True)[1]
        pairs = [(x, g) for x, g in ((out, self.grad_out), (lse, self.grad_lse)) if g is not None]
        grads = torch.autograd.grad([x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs])
        return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    def call(self, leaves: dict[str, Tensor], backend: str, return_lse: bool) -> Any:
        """The public function on these tensors."""
        case = self.case
        extras = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
        options = extras | self.arguments | self.keywords
        options |= {"scale": case.scale, "softcap": case.softcap, "deterministic": case.deterministic, "backend": backend}
        function: Callable[..., Any] = {
            "padded": tandem_attn.attention, "packed": tandem_attn.attention_varlen, "cache": tandem_attn.attention_kvcache
        }[case.layout]  # fmt: skip
        return function(leaves["q"], leaves["k"], leaves["v"], return_lse=return_lse, **options)


def problem_mask(keywords: dict[str, Any]) -> tandem_attn.Mask:
    mask = keywords.get("mask", tandem_attn.Full())
    mask = mask if isinstance(mask, tandem_attn.Mask) else tandem_attn.Predicate(mask)
    left, right = keywords.get("window", (None, None))
    return mask & tandem_attn.Window(left, 0 if keywords.get("causal") else right)


def build(case: Case) -> Call:
    g = torch.Generator().manual_seed(case.seed)
    keywords, sees = MASKS[case.mask]((case.batch, *_longest(case)), g, "cpu")
    call = Call(case, {}, dict(keywords), sees)
    {"padded": _padded, "packed": _packed, "cache": _cache}[case.layout](case, call, g)
    _extras(case, call, g)
    if case.needs_backward:
        _gradients(case, call, g)
    return call


def _keywords(case: Case, device: str) -> dict[str, Any]:
    """The mask's keywords with their tensors on ``device``: drawn again, since predicates capture theirs."""
    return MASKS[case.mask]((case.batch, *_longest(case)), torch.Generator().manual_seed(case.seed), device)[0]


def placed(x: Tensor, device: str) -> Tensor:
    """x on a device with its strides and its offset into the storage."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def _longest(case: Case) -> tuple[int, int]:
    if case.layout == "packed":
        paged = -(-max(case.lengths_k, default=0) // case.page_size) * case.page_size if case.page_size else 0
        return max(case.lengths_q, default=0), max(case.lengths_k, default=0) or paged
    return case.seqlen_q, case.seqlen_k


def random(case: Case, g: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return (torch.randn(*shape, generator=g, dtype=torch.float64) * case.amplify).to(dtype or case.torch_dtype)


# --- strides of (B, S, H, D) or (rows, H, D) tensors -------------------------------------------------------------------------------------


def _contiguous(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    return [random(case, g, *shape) for shape in (q, k, v)]


def _packed_qkv(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """Slices of one tensor (..., H + 2 Hkv, D), as a fused projection gives them."""
    whole = random(case, g, *q[:-2], q[-2] + 2 * k[-2], q[-1])
    return list(whole.split([q[-2], k[-2], k[-2]], dim=-2))


def _transposed(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """(B, H, S, D) in memory."""
    return [random(case, g, *shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3) for shape in (q, k, v)]


def _expanded(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """Keys and values of one sequence for the whole batch, stride 0."""
    return [random(case, g, *q), *(random(case, g, 1, *shape[1:]).expand(shape) for shape in (k, v))]


def _every_second(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """Last stride 2."""
    return [random(case, g, *shape[:-1], 2 * shape[-1])[..., ::2] for shape in (q, k, v)]


def _last_first(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """head_dim has the largest stride."""
    return [random(case, g, shape[-1], *shape[:-1]).movedim(0, -1) for shape in (q, k, v)]


def _unaligned(case: Case, g: torch.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[Tensor]:
    """Starts one element into its storage, rows one element apart from alignment."""
    return [random(case, g, *shape[:-1], shape[-1] + 1)[..., 1:] for shape in (q, k, v)]


STRIDES = {
    "contiguous": _contiguous,
    "packed_qkv": _packed_qkv,
    "transposed": _transposed,
    "expanded": _expanded,
    "every_second": _every_second,
    "last_first": _last_first,
    "unaligned": _unaligned,
}


# --- layouts -----------------------------------------------------------------------------------------------------------------------------


def _int32(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _padded(case: Case, call: Call, g: torch.Generator) -> None:
    shapes = [
        (case.batch, case.seqlen_q, case.heads, case.head_dim),
        (case.batch, case.seqlen_k, case.heads_kv, case.head_dim),
        (case.batch, case.seqlen_k, case.heads_kv, case.width_v),
    ]
    q, k, v = STRIDES[case.strides](case, g, *shapes)
    for b in range(case.batch):
        n_q = case.seqlen_q if case.used_q is None else case.used_q[b]
        n_k = case.seqlen_k if case.used_k is None else case.used_k[b]
        q[b, n_q:] = NAN
        if case.strides != "expanded":
            k[b, n_k:] = NAN
            v[b, n_k:] = NAN
        call.sequences.append((b, (b, slice(0, n_q)), (b, slice(0, n_k))))
    call.leaves |= {"q": q, "k": k, "v": v}
    call.arguments |= {f"seqused_{s}": _int32(u) for s, u in (("q", case.used_q), ("k", case.used_k)) if u is not None}


def _packed(case: Case, call: Call, g: torch.Generator) -> None:
    assert len(case.lengths_q) == len(case.lengths_k) == case.batch
    cu_q, cu_k = ([0, *itertools.accumulate(lengths)] for lengths in (case.lengths_q, case.lengths_k))
    total_q, total_k = cu_q[-1] + case.tail_q, cu_k[-1] + case.tail_k
    used_q, used_k = case.used_q or case.lengths_q, case.used_k or case.lengths_k
    if case.page_size:
        q = random(case, g, total_q, case.heads, case.head_dim)
        k, v, table, rows = _pages(case, g, used_k, case.lengths_k)
        call.arguments["page_table"] = table
    else:
        shapes = [(total_q, case.heads, case.head_dim), (total_k, case.heads_kv, case.head_dim), (total_k, case.heads_kv, case.width_v)]
        q, k, v = STRIDES[case.strides](case, g, *shapes)
        rows = [slice(cu_k[b], cu_k[b] + used_k[b]) for b in range(case.batch)]
        _nan_outside(k, rows)
        _nan_outside(v, rows)
    rows_q = [slice(cu_q[b], cu_q[b] + used_q[b]) for b in range(case.batch)]
    _nan_outside(q, rows_q)
    call.sequences += [(b, rows_q[b], rows[b]) for b in range(case.batch)]
    call.leaves |= {"q": q, "k": k, "v": v}
    call.arguments |= {"cu_seqlens_q": _int32(cu_q), "cu_seqlens_k": _int32(cu_k)}
    call.arguments |= {f"seqused_{s}": _int32(u) for s, u in (("q", case.used_q), ("k", case.used_k)) if u is not None}


def _nan_outside(x: Tensor, rows: list[slice]) -> None:
    inside = torch.zeros(x.shape[0], dtype=torch.bool)
    for r in rows:
        inside[r] = True
    x[(~inside).nonzero()[:, 0]] = NAN  # 8-bit tensors take no mask as an index


def _pages(case: Case, g: torch.Generator, lengths: Any, room: Any, first: Any = None) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
    """Pages in random order, NaN where no sequence has a key, table entries nobody reads wildly wrong."""
    size = case.page_size
    pages_of = [-(-n // size) for n in room]
    count = sum(pages_of) + 3
    order = torch.randperm(count, generator=g).tolist()
    table = torch.full((case.batch, max(pages_of, default=0) + 1), -(2**31), dtype=torch.int32)
    k = torch.full((count, size, case.heads_kv, case.head_dim), NAN, dtype=case.torch_dtype)
    v = torch.full((count, size, case.heads_kv, case.width_v), NAN, dtype=case.torch_dtype)
    rows: list[Any] = []
    for b in range(case.batch):
        mine = [order.pop() for _ in range(pages_of[b])]
        table[b, : len(mine)] = _int32(mine)
        positions = range(first[b] if first else 0, lengths[b])
        at = (
            torch.tensor([mine[j // size] for j in positions], dtype=torch.long),
            torch.tensor([j % size for j in positions], dtype=torch.long),
        )
        k[at], v[at] = random(case, g, len(positions), *k.shape[2:]), random(case, g, len(positions), *v.shape[2:])
        rows.append(at)
    return k, v, table, rows


def _cache(case: Case, call: Call, g: torch.Generator) -> None:
    used = case.used_k or (case.seqlen_k,) * case.batch
    first = case.leftpad or (0,) * case.batch
    q = random(case, g, case.batch, case.seqlen_q, case.heads, case.head_dim)
    if case.page_size:
        after_k, after_v, table, rows = _pages(case, g, [n + case.new for n in used], [case.seqlen_k] * case.batch, first)
        call.arguments["page_table"] = table
    else:
        lines = case.batch_idx or tuple(range(case.batch))
        shape = (max(lines, default=-1) + 1 if case.batch_idx is None else max(lines) + 2, case.seqlen_k, case.heads_kv)
        after_k, after_v = (torch.full((*shape, width), NAN, dtype=case.torch_dtype) for width in (case.head_dim, case.width_v))
        rows = [(line, slice(first[b], used[b] + case.new)) for b, line in enumerate(lines)]
        for at in rows:
            for x in (after_k, after_v):
                x[at] = random(case, g, *x[at].shape)
        if case.batch_idx is not None:
            call.arguments["cache_batch_idx"] = _int32(lines)
    if case.leftpad is not None:
        call.arguments["cache_leftpad"] = _int32(case.leftpad)
    k, v = after_k, after_v
    if case.new:
        k, v = after_k.clone(), after_v.clone()
        call.cache_after = (after_k, after_v)
        call.arguments["k"], call.arguments["v"] = (_take_new(case, x, rows) for x in (k, v))
    if case.used_k is not None:
        call.arguments["cache_seqlens"] = _int32(used)
    call.sequences += [(b, (b, slice(None)), rows[b]) for b in range(case.batch)]
    call.leaves |= {"q": q, "k": k, "v": v}


def _take_new(case: Case, cache: Tensor, rows: list[Any]) -> Tensor:
    """Cuts the last ``new`` tokens of each sequence out of the cache: what the call must put back."""
    tokens = []
    for at in rows:
        if isinstance(at[1], slice):
            last: Any = (at[0], slice(at[1].stop - case.new, at[1].stop))
        else:
            last = (at[0][-case.new :], at[1][-case.new :])
        tokens.append(cache[last].clone())
        cache[last] = NAN
    return torch.stack(tokens)


# --- score inputs and gradients ----------------------------------------------------------------------------------------------------------


def _extras(case: Case, call: Call, g: torch.Generator) -> None:
    if case.descale:  # each between 1/2 and 3/2
        sizes = {"b": case.batch, "h": case.heads_kv, "1": 1}
        shape = [] if case.descale == "number" else [sizes[letter] for letter in case.descale]
        call.arguments |= {f"{name}_descale": torch.rand(shape, generator=g) + 0.5 for name in "qkv"}
    if case.sink:
        call.leaves["sink"] = random(case, g, case.heads, dtype=case.out_dtype)
    if case.alibi:
        shape = (case.heads,) if case.alibi == 1 else (case.batch, case.heads)
        call.leaves["alibi_slopes"] = (torch.rand(*shape, generator=g) * 0.3).to(case.out_dtype)
    if case.bias:
        longest = _longest(case) if case.layout != "cache" else (case.seqlen_q, _capacity(call, case))
        sizes = dict(zip("bhqk", (case.batch, case.heads, *longest), strict=True))
        call.leaves["bias"] = random(case, g, *(1 if letter == "1" else sizes[letter] for letter in case.bias), dtype=case.out_dtype)


def _capacity(call: Call, case: Case) -> int:
    table = call.arguments.get("page_table")
    return case.seqlen_k if table is None else table.shape[1] * case.page_size


def _gradients(case: Case, call: Call, g: torch.Generator) -> None:
    shape = (*call.leaves["q"].shape[:-1], case.width_v)
    if case.grad_out == "expanded":
        call.grad_out = random(case, g, 1).expand(shape)
    elif case.grad_out == "transposed":
        call.grad_out = random(case, g, *shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)
    elif case.grad_out == "last":
        call.grad_out = random(case, g, *shape[:-1], 2 * shape[-1])[..., 1::2]
    else:
        call.grad_out = _nan_outside_sequences(random(case, g, *shape), call)
    if case.grad_lse:
        rows = _nan_outside_sequences(torch.randn(*shape[:-1], 1, generator=g, dtype=torch.float64), call)
        call.grad_lse = rows[..., 0].transpose(-1, -2).to(case.accumulator_dtype)


def _nan_outside_sequences(x: Tensor, call: Call) -> Tensor:
    """Rows that no sequence has may hold NaN also in the gradients that arrive."""
    kept = torch.full_like(x, NAN)
    for _, at_q, _ in call.sequences:
        kept[at_q] = x[at_q]
    return kept


def size_of(case: Case) -> int:
    return math.prod((case.batch, case.heads, max(case.seqlen_q, 1), max(case.seqlen_k, 1)))
