"""Kernel arguments that only some plans have, and their types.

Each is a tuple argument of the kernel, empty where the plan does without, so a kernel without a feature has no parameter of it.
"""

from __future__ import annotations

from tandem_attn.spec import mask_tree
from tandem_attn.spec.plan import Plan

NAMES = ("mask_data",)  # in the kernel's order, behind all other arguments


def types(name: str, plan: Plan) -> tuple[str, ...]:
    """Types of one of ``NAMES`` in Triton's notation."""
    return tuple(_triton_type(kind) for kind in mask_tree.parse(plan.mask).data)


def _triton_type(kind: str) -> str:
    """Of an argument's kind, see ``spec.mask_tree``. Booleans and unsigned bytes are loaded as signed ones."""
    if kind.startswith(mask_tree.POINTER):
        element = kind.removeprefix(mask_tree.POINTER).strip()
        return f"*{'i8' if element in ('i1', 'u8') else element}"
    return kind
