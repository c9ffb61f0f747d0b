"""Predicates as expressions: what a mask function computes, found by calling it with symbols.

``trace`` calls the function with four symbols that note every operation. No source is needed, helper functions and closures are followed,
and Python numbers become constants of the expression. Tensors that the function indexes are its *tables*; a 0-d tensor is a table without
indices, so its value may change from call to call without a new kernel.

An expression is text, the part of a mask's structure that a kernel is compiled from. Its grammar:

    b  h  i  j              batch entry, query head, query, key
    -7  0.5  true  false    constants (floats in hexadecimal, exact)
    mul(x,y)                an operation of ``OPERATIONS``; a name with ``64`` behind it is computed in 64 bits
    #2:i32(x,y)             the element of table 2, of this type, at these indices

Integers have 64 bits, as PyTorch's indices: where 32 might not hold a result, the operation is marked. Floating-point operations are
single ones in float32. ``//`` and ``%`` round down, as PyTorch's do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INDEX_LIMIT = 1 << 28  # indices are below: the largest tensors that kernels take
OPERATIONS = {  # name: number of operands
    **dict.fromkeys("add sub mul div floordiv mod min max lt le gt ge eq ne and or xor shl shr".split(), 2),  # noqa: SIM905
    **dict.fromkeys("neg abs not".split(), 1),  # noqa: SIM905
    "where": 3,
}
TABLE_TYPES = {"bool": "i1", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "float32": "fp32"}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_LIMITS = {"i1": 1, "u8": 1 << 8, "i8": 1 << 7, "i16": 1 << 15, "i32": 1 << 31, "i64": 1 << 63}
BOOL, INT, FLOAT = "a boolean", "an integer", "a float"


class UntraceableError(TypeError):
    """What a predicate does that no kernel can be compiled for, in words."""


@dataclass(frozen=True)
class Traced:
    """An expression and the tables it reads, in the order of their numbers."""

    code: str
    tables: tuple[Any, ...]


def trace(fn: Callable[..., Any]) -> Traced:
    """The expression of a mask function (b, h, q_idx, kv_idx) -> bool.

    It may use +, -, *, /, //, %, <<, >>, abs, comparisons, &, |, ^, ~, ``torch.where``, ``minimum``, ``maximum`` and ``logical_*``, and
    index tensors with one integer a dimension.

    Raises:
        UntraceableError: it does something else.
    """
    tables: list[Any] = []
    arguments = [Symbol(name, INT, INDEX_LIMIT, tables) for name in "bhij"]
    try:
        result = fn(*arguments)
    except UntraceableError:
        raise
    except Exception as error:  # the function may do anything with a symbol
        raise UntraceableError(f"{type(error).__name__}: {error}") from error
    if isinstance(result, bool):
        return Traced("true" if result else "false", ())
    found = _operand(result, tables, BOOL)
    if found.kind is not BOOL:
        raise UntraceableError(f"a result that is {found.kind}")
    numbers = list(dict.fromkeys(int(number) for number in re.findall(r"#(\d+)", found.code)))  # in the order of the text
    return Traced(re.sub(r"#(\d+)", lambda m: f"#{numbers.index(int(m[1]))}", found.code), tuple(tables[n] for n in numbers))


class Symbol:
    """A value that is not known yet. ``limit`` bounds an integer's magnitude."""

    def __init__(self, code: str, kind: str, limit: int, tables: list[Any]) -> None:
        self.code, self.kind, self.limit, self.tables = code, kind, limit, tables

    __hash__ = None  # type: ignore[assignment] # == makes a symbol

    def __bool__(self) -> bool:
        raise UntraceableError("a decision by value (if, and, or, not, a chained comparison); use &, |, ~ and torch.where")

    def __index__(self) -> int:
        raise UntraceableError("an index's value where a number is needed")

    __int__ = __float__ = __len__ = __iter__ = __index__

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return lambda *others: _named(name, self.tables, (self, *others))
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"the attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Symbol:
        """PyTorch hands over its functions that got a symbol (PyTorch documentation, Extending torch)."""
        name = getattr(function, "__name__", str(function))
        flat = [x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,))]
        tables = next(x.tables for x in flat if isinstance(x, Symbol))
        if name == "__getitem__":
            return _element(args[0], args[1] if isinstance(args[1], tuple) else (args[1],), tables)
        if name.strip("_") not in _NAMES or kwargs:
            raise UntraceableError(f"torch.{name}" + (f" with {', '.join(kwargs)}" if kwargs else ""))
        return _named(name.strip("_"), tables, args)


def _named(name: str, tables: list[Any], args: tuple[Any, ...]) -> Symbol:
    """The operation that PyTorch knows by a name."""
    operands = tuple(_operand(x, tables) for x in args)
    if name.startswith("logical_") and any(x.kind is not BOOL for x in operands):
        raise UntraceableError(f"{name} of what is no boolean")
    return _apply(_NAMES[name], tables, operands[::-1] if name in _REFLECTED else operands)


def _binary(operation: str, reflected: bool = False) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: _apply(operation, self.tables, (other, self) if reflected else (self, other))


_SPECIAL = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod", "lshift": "shl"}
_SPECIAL |= {"rshift": "shr", "and": "and", "or": "or", "xor": "xor"}
_REFLECTED = {f"r{name}" for name in _SPECIAL}
# Names of PyTorch's methods and functions.
_NAMES = {name: name for name in OPERATIONS if name not in ("not", "and", "or", "xor", "shl", "shr", "floordiv", "mod")}
_NAMES |= _SPECIAL | {f"r{name}": operation for name, operation in _SPECIAL.items()}
_NAMES |= {"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "floor_divide": "floordiv", "remainder": "mod"}
_NAMES |= {"minimum": "min", "maximum": "max", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}
_NAMES |= {"not_equal": "ne", "negative": "neg", "absolute": "abs", "invert": "not"}
_NAMES |= {f"{kind}_{name}": name for kind in ("logical", "bitwise") for name in ("and", "or", "xor", "not")}
_NAMES |= {"bitwise_left_shift": "shl", "bitwise_right_shift": "shr"}
for _name, _operation in _SPECIAL.items():
    setattr(Symbol, f"__{_name}__", _binary(_operation))
    setattr(Symbol, f"__r{_name}__", _binary(_operation, reflected=True))
for _name in _COMPARISONS:
    setattr(Symbol, f"__{_name}__", _binary(_name))
for _name, _operation in (("neg", "neg"), ("abs", "abs"), ("invert", "not")):
    setattr(Symbol, f"__{_name}__", lambda self, operation=_operation: _apply(operation, self.tables, (self,)))


def _operand(x: Any, tables: list[Any], beside: str = INT) -> Symbol:
    """A symbol for whatever stands in an operation."""
    if isinstance(x, Symbol):
        return x
    if isinstance(x, bool):
        return Symbol("true" if x else "false", BOOL, 1, tables)
    if isinstance(x, int):
        if abs(x) >= 1 << 63:
            raise UntraceableError(f"the number {x}, which needs more than 64 bits")
        return Symbol(str(x), INT, abs(x) + 1, tables)
    if isinstance(x, float):
        return Symbol(x.hex(), FLOAT, 0, tables)
    if getattr(x, "ndim", None) == 0 and hasattr(x, "stride"):
        return _element(x, (), tables)
    raise UntraceableError(f"{type(x).__name__} beside {beside}" + (" (index it first)" if hasattr(x, "ndim") else ""))


def _element(table: Any, indices: tuple[Any, ...], tables: list[Any]) -> Symbol:
    """``table[indices]``."""
    kind = TABLE_TYPES.get(str(getattr(table, "dtype", "")).removeprefix("torch."))
    if kind is None:
        raise UntraceableError(
            f"a captured tensor of {getattr(table, 'dtype', type(table).__name__)} (it may be of {', '.join(TABLE_TYPES)})"
        )
    if len(indices) != table.ndim:
        raise UntraceableError(f"{len(indices)} indices of a captured tensor with {table.ndim} dimensions")
    operands = [_operand(x, tables, "an index") for x in indices]
    if any(x.kind is not INT for x in operands):
        raise UntraceableError("an index that is no integer")
    number = next((n for n, known in enumerate(tables) if known is table or _same(known, table)), len(tables))
    if number == len(tables):
        tables.append(table)
    code = f"#{number}:{kind}({','.join(x.code for x in operands)})"
    if kind == "fp32":
        return Symbol(code, FLOAT, 0, tables)
    return Symbol(code, BOOL if kind == "i1" else INT, _LIMITS[kind] + 1, tables)


def _same(a: Any, b: Any) -> bool:
    """Views of the same elements: ``t[0]`` is a new object each time."""
    return bool(a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype)


def _apply(operation: str, tables: list[Any], given: tuple[Any, ...]) -> Symbol:
    if len(given) != OPERATIONS[operation]:
        raise UntraceableError(f"{operation} of {len(given)} operands")
    x = [_operand(value, tables) for value in given]
    kinds = {value.kind for value in (x[1:] if operation == "where" else x)}
    if operation == "where" and x[0].kind is not BOOL:
        raise UntraceableError(f"where with a condition that is {x[0].kind}")
    if len(kinds) > 1 and BOOL in kinds:
        raise UntraceableError(f"{operation} of {' and '.join(sorted(kinds))}")
    kind = FLOAT if FLOAT in kinds else INT if INT in kinds else BOOL
    _check_kind(operation, kind)
    result = BOOL if operation in _COMPARISONS else FLOAT if operation == "div" else kind
    limit = min(_limit(operation, x), 1 << 63) if result is INT else 0
    wide = kind is INT and max(limit, *(value.limit for value in x)) > 1 << 31
    return Symbol(f"{operation}{'64' if wide else ''}({','.join(value.code for value in x)})", result, limit, tables)


def _check_kind(operation: str, kind: str) -> None:
    wrong = {
        BOOL: ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "shl", "shr", "neg", "abs", "lt", "le", "gt", "ge"),
        FLOAT: ("floordiv", "mod", "and", "or", "xor", "not", "shl", "shr"),
        INT: (),
    }
    if operation in wrong[kind]:
        raise UntraceableError(f"{operation} of {kind}")


def _limit(operation: str, x: list[Symbol]) -> int:
    """Bound of an integer result's magnitude (exclusive)."""
    a, b = x[0].limit, x[-1].limit
    bounds = {
        **dict.fromkeys(("add", "sub"), a + b),
        **dict.fromkeys(("floordiv", "shr", "neg", "abs"), a + 1),
        **dict.fromkeys(("and", "or", "xor"), 1 << max(a, b).bit_length()),
        "mul": a * b,
        "mod": b,
    }
    if operation == "shl":
        by = int(x[1].code) if x[1].code.isdigit() else 63
        return a << min(by, 63)
    return bounds.get(operation) or max(value.limit for value in x)
