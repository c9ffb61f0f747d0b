"""Kernel arguments that only some plans have, and their types.

Each is a tuple argument of the kernel, empty where the plan does without, so a kernel without a feature has no parameter of it.
"""

from __future__ import annotations

from tandem_attn.spec import mask_tree
from tandem_attn.spec.plan import Plan

NAMES = ("bounds", "mask_data", "bias_data", "pages", "parts", "descales")  # in the kernel's order, behind all other arguments
SCALARS = 4  # runtime window bounds that every kernel takes
_BIAS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}


def types(name: str, plan: Plan) -> tuple[str, ...]:
    """Types of one of ``NAMES`` in Triton's notation; none where the plan does without."""
    if name == "bounds":  # of windows, beyond the few that every kernel takes
        return ("i32",) * max(0, mask_tree.parse(plan.mask).scalars - SCALARS)
    if name == "mask_data":
        return tuple(_triton_type(kind) for kind in mask_tree.parse(plan.mask).data)
    if name == "bias_data":  # address, rows, columns, strides of batch, head, row, column
        return (_BIAS[plan.bias], "i32", "i32", "i64", "i64", "i64", "i64") if plan.bias else ()
    if name == "pages":  # table, its stride of sequences, pages of a sequence, keys a page, and the first keys' places
        return ("*i32", "i64", "i32", "i32", *(["*i32"] if plan.leftpad else [])) if plan.page_size else ()
    if name == "descales":  # of q, k and v, and their strides of sequence and KV head
        return ("*fp32",) * 3 + ("i64",) * 6 if plan.descale else ()
    return ("*fp32", "*fp32", "i32", "i32") if plan.num_splits > 1 else ()  # O and statistics of the parts, parts, rows


def _triton_type(kind: str) -> str:
    """Of an argument's kind, see ``spec.mask_tree``. Booleans and unsigned bytes are loaded as signed ones."""
    if kind.startswith(mask_tree.POINTER):
        element = kind.removeprefix(mask_tree.POINTER).strip()
        return f"*{'i8' if element in ('i1', 'u8') else element}"
    return kind
