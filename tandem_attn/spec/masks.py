"""Masks: which keys a query sees.

A mask is a pure predicate of (b, h, q_idx, kv_idx) and the two sequence lengths, combined with ``&`` and ``|``. The indices are local
to their sequence and count from 0; h is the query head. They may be Python integers or any arrays that broadcast (torch, numpy): the
same predicate serves the brute-force proofs and the backends.
"""

from __future__ import annotations

import itertools
import numbers
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_attn.spec.bands import Band, BlockRange, Bounds, block_range

BOTTOM_RIGHT = "bottom-right"
TOP_LEFT = "top-left"
_ALIGNMENTS = (BOTTOM_RIGHT, TOP_LEFT)
_FAR = 2**31 - 2  # the largest window bound that is one

Index = Any  # int, or an integer array that broadcasts with the other indices
Allowed = Any  # bool, or a boolean array
PredicateFn = Callable[[Index, Index, Index, Index], Allowed]


class Mask:
    """Base of all masks. Instances are immutable; two masks with the same ``code`` and tensors are the same mask.

    ``a & b`` allows what both allow, ``a | b`` what either does. A plain function is combined as ``Predicate(fn)``; there is no ``~``.
    ``print(mask.draw(8, 8))`` shows a mask.
    """

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:
        """Whether query ``q_idx`` of sequence ``b`` and head ``h`` sees key ``kv_idx``."""
        raise NotImplementedError

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:
        """Outer and inner diagonal band of the mask for these lengths."""
        raise NotImplementedError

    @property
    def code(self) -> str:
        """The mask as text; what is data stands as ``#`` and is found, in order, in ``tensors``."""
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Arrays the predicate reads, in the order of their ``#`` in ``code``."""
        return ()

    def leaves(self) -> Iterator[Mask]:
        """The masks it is combined from; itself when it is not a combination."""
        yield self

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & and |, not with and, or, not")  # `and` would drop one silently

    def __and__(self, other: object) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        if isinstance(self, Full) or isinstance(other, Full):
            return other if isinstance(self, Full) else self
        if isinstance(self, Window) and isinstance(other, Window) and self.align == other.align:
            return Window(_tighter(self.left, other.left), _tighter(self.right, other.right), self.align)
        return And(self, other)

    def __or__(self, other: object) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return self if isinstance(self, Full) else other if isinstance(other, Full) else Or(self, other)

    def n_block_range(self, m_start: int, m_stop: int, tile_n: int, seqlen_q: int, seqlen_k: int) -> BlockRange:
        """Key blocks of ``tile_n`` keys that query rows ``[m_start, m_stop)`` must visit."""
        return block_range(self.bounds(seqlen_q, seqlen_k), m_start, min(m_stop, seqlen_q) - 1, tile_n, seqlen_k)

    def m_block_range(self, n_start: int, n_stop: int, tile_m: int, seqlen_q: int, seqlen_k: int) -> BlockRange:
        """Query blocks of ``tile_m`` rows that keys ``[n_start, n_stop)`` must visit (backward)."""
        bounds = self.bounds(seqlen_q, seqlen_k).transposed()
        return block_range(bounds, n_start, min(n_stop, seqlen_k) - 1, tile_m, seqlen_q)

    def draw(self, seqlen_q: int, seqlen_k: int, *, b: int = 0, h: int = 0) -> str:
        """The mask as text, one line a query: ``#`` sees the key, ``.`` does not."""
        rows = range(seqlen_q)
        return "\n".join("".join("#" if self._sees(b, h, i, j, seqlen_q, seqlen_k) else "." for j in range(seqlen_k)) for i in rows)

    def _sees(self, b: int, h: int, i: int, j: int, seqlen_q: int, seqlen_k: int) -> bool:
        return bool(self.allowed(b, h, i, j, seqlen_q, seqlen_k))


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:  # noqa: ARG002
        return True

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:  # noqa: ARG002
        return Bounds(Band(), Band())

    @property
    def code(self) -> str:
        return "full()"


@dataclass(frozen=True)
class Window(Mask):
    """Keys at most ``left`` before and ``right`` after the diagonal, the diagonal included; ``None`` is unbounded.

    The diagonal of query i is key ``i + seqlen_k - seqlen_q`` (``align="bottom-right"``) or key i (``align="top-left"``). A negative
    bound is legal and moves that edge past the diagonal: ``right=-1`` hides the diagonal itself.
    """

    left: int | None = None
    right: int | None = None
    align: str = BOTTOM_RIGHT

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None:
                object.__setattr__(self, name, reachable(_integer(name, value)))
        if self.align not in _ALIGNMENTS:
            raise ValueError(f"align must be one of {_ALIGNMENTS}, got {self.align!r}")

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:  # noqa: ARG002
        diagonal = q_idx + (seqlen_k - seqlen_q) if self.align == BOTTOM_RIGHT else q_idx
        sees: Allowed = True
        if self.left is not None:
            sees = sees & (diagonal - kv_idx <= self.left)  # differences of indices cannot overflow, sums with a bound can
        if self.right is not None:
            sees = sees & (kv_idx - diagonal <= self.right)
        return sees

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:
        shift = seqlen_k - seqlen_q if self.align == BOTTOM_RIGHT else 0
        band = Band(None if self.left is None else shift - self.left, None if self.right is None else shift + self.right)
        return Bounds(band, band)

    @property
    def code(self) -> str:
        return f"window({bound_text(self.left)},{bound_text(self.right)},{self.align})"


def _integer(name: str, value: Any) -> int:
    if not is_integer(value):
        raise TypeError(f"{name} must be an int or None (unbounded), got {value!r}")
    return operator.index(value)


def is_integer(x: Any) -> bool:
    """Python's integers and numpy's."""
    return not isinstance(x, bool) and isinstance(x, (int, numbers.Integral))


def bound_text(bound: int | None) -> str:
    """A window's bound as text. operator.index makes a number of torch.compile's symbolic integers, which have no text."""
    return "None" if bound is None else f"{operator.index(bound)}"


def reachable(bound: int) -> int | None:
    """No sequence has 2^31 keys, so such a bound (``sys.maxsize``, say) is none; kernels may add to it in 32 bits."""
    return None if bound > _FAR else max(bound, -_FAR)


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def Causal(align: str = BOTTOM_RIGHT) -> Window:
    """Query i sees keys ``j <= i + seqlen_k - seqlen_q`` (bottom-right), or ``j <= i`` with ``align="top-left"``."""
    return Window(None, 0, align)


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Query and key see each other when they carry the same document id. Not causal by itself: ``Causal() & Document(ids)``.

    Args:
        q_ids: integer ids, (seqlen_q,) or (batch, seqlen_q): a tensor, an array or (nested) list. In packed calls they are indexed
            within each sequence.
        kv_ids: the keys' ids, likewise; default: the same as ``q_ids``.
    """

    q_ids: Any
    kv_ids: Any = None

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:  # noqa: ARG002
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        return _lookup(self.q_ids, b, q_idx) == _lookup(kv_ids, b, kv_idx)

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:  # noqa: ARG002
        return Bounds(Band(), None)

    @property
    def code(self) -> str:
        return "document(#,#)"

    @property
    def tensors(self) -> tuple[Any, ...]:
        return (self.q_ids, self.q_ids if self.kv_ids is None else self.kv_ids)


def _lookup(ids: Any, b: Index, index: Index) -> Any:
    if hasattr(ids, "ndim"):
        return ids[b, index] if ids.ndim == 2 else ids[index]
    return ids[b][index] if isinstance(ids[0], Sequence) else ids[index]


_live: weakref.WeakValueDictionary[str, Predicate] = weakref.WeakValueDictionary()
_recent: deque[Predicate] = deque(maxlen=256)  # a backward pass may run after the caller dropped its mask
_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    """Any function of (b, h, q_idx, kv_idx) that returns a boolean.

    It gets integer arrays that broadcast and must return an array of their joint shape (use ``&``, ``|``, ``~`` and comparisons; ``if``,
    ``and``, ``or`` and ``not`` fail with "Boolean value of Tensor ... is ambiguous"). It may read tensors it
    captures. Under ``torch.compile`` create it outside the compiled function. Our GPU kernels compile it in, which takes the operations of
    ``spec.predicates``; there a captured number is a constant of the code, and a 0-d tensor a number that may change.
    """

    fn: PredicateFn
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn must be callable as fn(b, h, q_idx, kv_idx), got {self.fn!r}")
        label = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        clean = "".join(c if c.isalnum() or c == "_" else "_" for c in label)
        object.__setattr__(self, "name", f"{clean}:{next(_serial)}")
        _live[self.name] = self
        _recent.append(self)

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:  # noqa: ARG002
        return _boolean(self.fn(b, h, q_idx, kv_idx), (b, h, q_idx, kv_idx))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, is a predicate of its own: numbers in names count within one process."""
        return (Predicate, (self.fn, self.name.rpartition(":")[0]))

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:  # noqa: ARG002
        return Bounds(Band(), None)

    @property
    def code(self) -> str:
        return f"predicate({self.name})"


def _boolean(sees: Any, indices: tuple[Index, ...]) -> Allowed:
    """What a predicate returned, checked against the indices that it got."""
    if isinstance(sees, bool):
        return sees
    arrays = [index for index in indices if hasattr(index, "shape")]
    is_scalar = getattr(sees, "shape", None) == () and not (arrays and isinstance(sees, type(arrays[0])))
    if str(getattr(sees, "dtype", "")).removeprefix("torch.") != "bool" or not (is_scalar or isinstance(sees, type(arrays[0]))):
        kind = f"a {sees.dtype} tensor" if str(getattr(sees, "dtype", "")).startswith("torch.") else type(sees).__name__
        raise TypeError(f"mask predicate must return a bool tensor, got {kind}")
    if is_scalar:
        return bool(sees)
    for i, size in enumerate(reversed(sees.shape), 1):
        joint = max((index.shape[-i] for index in arrays if len(index.shape) >= i), key=lambda n: (n != 1, n), default=0)
        if size not in (1, joint) or not any(len(index.shape) >= i for index in arrays):
            raise ValueError(f"mask predicate must return a shape that broadcasts with its indices, got {tuple(sees.shape)}")
    return sees


class _Pair(Mask):
    a: Mask
    b: Mask

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.a.tensors + self.b.tensors

    def leaves(self) -> Iterator[Mask]:
        yield from self.a.leaves()
        yield from self.b.leaves()


@dataclass(frozen=True)
class And(_Pair):
    """Both masks allow the pair."""

    a: Mask
    b: Mask

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:
        at = (b, h, q_idx, kv_idx, seqlen_q, seqlen_k)
        return self.a.allowed(*at) & self.b.allowed(*at)

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:
        return self.a.bounds(seqlen_q, seqlen_k) & self.b.bounds(seqlen_q, seqlen_k)

    @property
    def code(self) -> str:
        return f"and({self.a.code},{self.b.code})"


@dataclass(frozen=True)
class Or(_Pair):
    """At least one of the masks allows the pair."""

    a: Mask
    b: Mask

    def allowed(self, b: Index, h: Index, q_idx: Index, kv_idx: Index, seqlen_q: Index, seqlen_k: Index) -> Allowed:
        at = (b, h, q_idx, kv_idx, seqlen_q, seqlen_k)
        return self.a.allowed(*at) | self.b.allowed(*at)

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:
        return self.a.bounds(seqlen_q, seqlen_k) | self.b.bounds(seqlen_q, seqlen_k)

    @property
    def code(self) -> str:
        return f"or({self.a.code},{self.b.code})"


def from_code(code: str, tensors: Sequence[Any] = ()) -> Mask:
    """The mask that ``mask.code`` and ``mask.tensors`` came from.

    Raises:
        ValueError: the text is no mask, or its predicate no longer exists.
    """
    mask, rest = _parse(code, iter(tensors))
    if rest:
        raise ValueError(f"code has trailing text {rest!r}: {code!r}")
    return mask


def _parse(text: str, tensors: Iterator[Any]) -> tuple[Mask, str]:
    kind, _, rest = text.partition("(")
    if kind in ("and", "or"):
        a, rest = _parse(rest, tensors)
        b, rest = _parse(rest[1:], tensors)
        return (a & b if kind == "and" else a | b), rest[1:]
    body, _, rest = rest.partition(")")
    if kind == "full":
        return Full(), rest
    if kind == "window":
        left, right, align = body.split(",")
        return Window(_bound(left), _bound(right), align), rest
    if kind == "document":
        return Document(next(tensors), next(tensors)), rest
    if kind == "predicate":
        return _find_predicate(body), rest
    raise ValueError(f"code holds an unknown mask {kind!r}: {text!r}")


def _bound(text: str) -> int | None:
    return None if text == "None" else int(text)


def _find_predicate(name: str) -> Predicate:
    found = _live.get(name)
    if found is None:
        raise ValueError(f"mask predicate {name!r} no longer exists: keep the Predicate object alive as long as calls that use it")
    return found
