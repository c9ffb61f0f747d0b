"""A mask as a kernel sees it: a structure to compile from, taken apart as a tree, and the data that the tree's leaves read.

``lower`` turns a mask into one without tensors and functions, whose code is the structure: a document mask tells its ids' types, a
predicate its expression (``spec.predicates``). Two calls whose masks have one structure share a kernel.

The data of a kernel are a flat list of arguments, leaf after leaf. A table of d dimensions takes 1 + 2 d of them: its address, d sizes, d
strides in elements. A document mask has two tables, (batch, seqlen) ids of queries and keys, and then the address of the key ranges that a
launch before works out (``kernels.common.documents``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem_attn.spec.bands import Band, Bounds
from tandem_attn.spec.masks import And, Document, Mask, Or, Predicate
from tandem_attn.spec.predicates import OPERATIONS, TABLE_TYPES, UntraceableError, trace

POINTER, SIZE, STRIDE = "pointer", "i32", "i64"  # kinds of arguments; a pointer's names its elements' type too: "pointer i64"
RANGES = f"{POINTER} i32"
_TABLE = re.compile(r"#(\d+):(\w+)\(")


@dataclass(frozen=True)
class Opaque(Mask):
    """A leaf that reads data, known by its structure alone."""

    text: str

    def bounds(self, seqlen_q: int, seqlen_k: int) -> Bounds:  # noqa: ARG002
        return Bounds(Band(), None)

    @property
    def code(self) -> str:
        return self.text


def lower(mask: Mask) -> tuple[Mask, tuple[Any, ...]]:
    """The mask without its data, and the tensors of its leaves, in order: a document's two, a predicate's tables.

    Raises:
        UntraceableError: a predicate, or ids of a type, that kernels cannot read.
    """
    if isinstance(mask, (And, Or)):
        a, of_a = lower(mask.a)
        b, of_b = lower(mask.b)
        return type(mask)(a, b), of_a + of_b
    if isinstance(mask, Document):
        return Opaque(f"document({','.join(_ids_type(ids) for ids in mask.tensors)})"), mask.tensors
    if isinstance(mask, Predicate):
        traced = trace(mask.fn)
        return Opaque(f"predicate({traced.code})"), traced.tables
    return mask, ()


def has_data(mask: Mask) -> bool:
    return any(isinstance(leaf, (Document, Predicate)) for leaf in mask.leaves())


def _ids_type(ids: Any) -> str:
    dtype = str(getattr(ids, "dtype", "int64")).removeprefix("torch.")  # lists become int64 tensors
    found = TABLE_TYPES.get(dtype)
    if found is None or found == "fp32":
        raise UntraceableError(f"document ids of {dtype}")
    return "i64" if found == "i64" else "i32"  # narrower ones are widened before


@dataclass(frozen=True)
class Expression:
    """An operation of ``OPERATIONS``, a leaf ``b``, ``h``, ``i``, ``j``, ``constant``, or ``table``: its element at ``args``."""

    kind: str
    args: tuple[Expression, ...] = ()
    number: int | float | bool = 0  # of a constant
    wide: bool = False  # computed in 64 bits
    element: str = ""  # of a table: its type
    at: int = 0  # of a table: its place in the data


@dataclass(frozen=True)
class Node:
    """A mask structure, taken apart."""

    kind: str  # full, window, and, or, document, predicate
    a: Node | None = None
    b: Node | None = None
    left: str = ""  # window bounds: "None", a number, or "#i", the runtime bound number i
    right: str = ""
    align: str = ""
    seen: Expression | None = None  # whether a pair sees each other, of a document and a predicate
    ranges: int = 0  # of a document: the place of its key ranges in the data
    document: int = 0  # of a document: its number


@dataclass(frozen=True)
class Tree:
    """A mask's tree, and the kinds of the arguments that its leaves read."""

    root: Node
    data: tuple[str, ...]
    documents: int
    scalars: int  # window bounds known at run time


def parse(structure: str) -> Tree:
    """The tree of a mask's structure.

    Raises:
        ValueError: the text is no structure.
    """
    reader = _Reader(structure)
    root = reader.mask()
    if reader.text:
        raise ValueError(f"structure has trailing text {reader.text!r}: {structure!r}")
    return Tree(root, tuple(reader.data), reader.documents, reader.scalars)


class _Reader:
    """Reads a structure from the left; collects what its leaves read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data: list[str] = []
        self.scalars = 0
        self.documents = 0

    def mask(self) -> Node:
        kind = self._until("(")
        if kind in ("and", "or"):
            a = self.mask()
            self._until(",")
            b = self.mask()
            self._until(")")
            return Node(kind, a, b)
        if kind == "predicate":
            node = Node(kind, seen=self.expression({}))
            self._until(")")
            return node
        body = self._until(")")
        if kind == "window":
            left, right, align = body.split(",")
            return Node(kind, left=self._bound(left), right=self._bound(right), align=align)
        return self._document(body) if kind == "document" else Node(kind)

    def _document(self, body: str) -> Node:
        of_queries, of_keys = (
            Expression("table", (Expression("b"), Expression(index)), element=kind, at=self._table(kind, 2))
            for index, kind in zip("ij", body.split(","), strict=True)
        )
        self.data.append(RANGES)
        self.documents += 1
        seen = Expression("eq", (of_queries, of_keys))
        return Node("document", seen=seen, ranges=len(self.data) - 1, document=self.documents - 1)

    def expression(self, tables: dict[str, int]) -> Expression:
        """``tables`` knows the places of the predicate's tables by number."""
        table = _TABLE.match(self.text)
        if table is not None:
            self.text = self.text[table.end() :]
            args = tuple(self._arguments(tables))
            if table[1] not in tables:
                tables[table[1]] = self._table(table[2], len(args))
            return Expression("table", args, element=table[2], at=tables[table[1]])
        word = re.match(r"[^(),]+", self.text)
        if word is None:
            raise ValueError(f"structure needs an expression, got {self.text!r}")
        self.text = self.text[word.end() :]
        if self.text.startswith("("):
            self.text = self.text[1:]
            name = word[0].removesuffix("64")
            if name not in OPERATIONS:
                raise ValueError(f"structure holds an unknown operation {name!r}")
            return Expression(name, tuple(self._arguments(tables)), wide=word[0] != name)
        return Expression(word[0]) if word[0] in ("b", "h", "i", "j") else Expression("constant", number=_constant(word[0]))

    def _arguments(self, tables: dict[str, int]) -> Iterator[Expression]:
        while not self.text.startswith(")"):
            yield self.expression(tables)
            if self.text.startswith(","):
                self.text = self.text[1:]
        self.text = self.text[1:]

    def _table(self, kind: str, dims: int) -> int:
        self.data += [f"{POINTER} {kind}", *[SIZE] * dims, *[STRIDE] * dims]
        return len(self.data) - 1 - 2 * dims

    def _bound(self, text: str) -> str:
        if text != "#":
            return text
        self.scalars += 1
        return f"#{self.scalars - 1}"

    def _until(self, end: str) -> str:
        found, _, self.text = self.text.partition(end)
        return found


def _constant(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    return float.fromhex(text) if "0x" in text or text in ("inf", "-inf", "nan") else int(text)
