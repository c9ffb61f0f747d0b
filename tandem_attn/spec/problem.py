"""Problem: what is asked of attention, free of any decision how."""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass, field
from typing import Any

from tandem_attn.spec.masks import Full, Mask, is_integer

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}  # bytes an element
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # of q, k and v; forward only
DEVICES = ("cpu", "cuda", "meta")  # meta: shapes only
_FLAGS = ("sink", "alibi", "bias", "descale", "varlen", "seqused", "cache", "leftpad", "backward", "deterministic", "return_lse")
HEAD_DIM_MAX = 256  # the largest head dimension any peer trains with; absorbed MLA (512 + 64) is another algorithm


def output_dtype(dtype: str) -> str:
    """Element type of O: that of q, k and v, bfloat16 for 8-bit ones."""
    return "bfloat16" if dtype in FLOAT8 else dtype


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call.

    Sizes are those of the tensors: with packed variable length, ``seqlen_q`` and ``seqlen_k`` are the largest sequence (or an upper
    bound) and ``total_q``, ``total_k`` the packed rows. ``lengths`` holds each sequence's (seqlen_q, seqlen_k) where the host knows
    them; plans for schedules use it, results never depend on it.

    Raises:
        TypeError, ValueError: from the constructor, naming the field, its value and what is required.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bfloat16"
    mask: Mask = field(default_factory=Full)
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0  # 0: off; else logits become softcap * tanh(logits / softcap)
    sink: bool = False
    alibi: bool = False
    bias: bool = False
    bias_dtype: str = ""  # "": dtype
    descale: bool = False  # q, k and v stand for themselves times a number a sequence and KV head; 8-bit dtypes only
    varlen: bool = False
    total_q: int = 0  # 0: batch * seqlen_q
    total_k: int = 0
    seqused: bool = False
    page_size: int = 0  # 0: not paged
    cache: bool = False
    leftpad: bool = False
    backward: bool = False
    deterministic: bool = False
    return_lse: bool = False
    device: str = "cpu"
    lengths: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _fill(self, "head_dim_v", self.head_dim_v or self.head_dim)
        _check_sizes(self)
        _fill(self, "total_q", self.total_q or self.batch * self.seqlen_q)
        _fill(self, "total_k", self.total_k or self.batch * self.seqlen_k)
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype must be the name of one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask must be a Mask, got {type(self.mask).__name__}")
        _check_scores(self)
        _fill(self, "scale", 1.0 / math.sqrt(self.head_dim) if self.scale is None else float(self.scale))
        if not math.isfinite(self.scale_value):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap must be finite and >= 0 (0 is off), got {self.softcap}")

    @property
    def scale_value(self) -> float:
        return float(self.scale or 0.0)

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key/value head (1: MHA, heads: MQA)."""
        return self.heads // self.heads_kv

    @property
    def bias_type(self) -> str:
        """Element type of the bias, empty where there is none."""
        return (self.bias_dtype or self.dtype) if self.bias else ""

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype]

    @property
    def out_dtype(self) -> str:
        return output_dtype(self.dtype)

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d({self.head_dim},{self.head_dim_v})"
        flags = [
            n
            for n in ("sink", "alibi", "bias", "descale", "varlen", "seqused", "cache", "leftpad", "backward", "deterministic")
            if getattr(self, n)
        ]
        flags += [f"softcap={self.softcap:g}"] if self.softcap else []
        flags += [f"page_size={self.page_size}"] if self.page_size else []
        size = f"B{self.batch} Sq{self.seqlen_q} Sk{self.seqlen_k} H{self.heads}/{self.heads_kv} {dims}"
        return " ".join([size, self.dtype, self.mask.code, *flags, self.device])


def _fill(problem: Problem, name: str, value: object) -> None:
    object.__setattr__(problem, name, value)


def _check_sizes(p: Problem) -> None:
    for name in ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "head_dim_v", "total_q", "total_k", "page_size"):
        value = getattr(p, name)
        if not is_integer(value):
            raise TypeError(f"{name} must be an int, got {value!r}")
        _fill(p, name, operator.index(value))
        minimum = 1 if name in ("heads", "heads_kv", "head_dim", "head_dim_v") else 0
        if value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")
    if p.heads % p.heads_kv:
        raise ValueError(f"heads must be a multiple of heads_kv, got heads={p.heads}, heads_kv={p.heads_kv}")
    for length in _pairs(p.lengths):
        if min(length) < 0:
            raise ValueError(f"lengths must be >= 0, got {length}")


def _pairs(lengths: Any) -> Any:
    is_pairs = isinstance(lengths, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in lengths)
    if not is_pairs or not all(is_integer(length) for pair in lengths for length in pair):
        raise TypeError(f"lengths must be a tuple of (seqlen_q, seqlen_k), got {lengths!r}")
    return lengths


def _check_scores(p: Problem) -> None:
    for name in ("scale", "softcap"):
        value = getattr(p, name)
        is_default = name == "scale" and value is None
        if not is_default and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    for name in _FLAGS:
        if not isinstance(getattr(p, name), bool):
            raise TypeError(f"{name} must be a bool, got {getattr(p, name)!r}")
    if p.descale and p.dtype not in FLOAT8:
        raise ValueError(f"descale must be False for dtype {p.dtype} (only {' and '.join(FLOAT8)} have descales)")
    if p.device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {p.device!r}")
