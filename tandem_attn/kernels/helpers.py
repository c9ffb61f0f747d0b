"""Launches beside a forward's own: the order of packed sequences, the key ranges of document masks, and the combination of split keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem_attn.kernels.compile import Helper, compiled_helper
from tandem_attn.kernels.description import Extra, LaunchDescription
from tandem_attn.spec.plan import Plan

_COMMON = "tandem_attn.kernels.common"
_OWN, _CHUNK = 16, 256  # sequences a program ranks, and compares them with at a time
_KEYS = 1024  # of a document mask looked at together
_POINTERS = {"float16": "*fp16", "bfloat16": "*bf16"}  # in Triton's notation
RANGE_FIELDS = 4  # numbers that document_ranges writes for each query tile


def packed_tiles(
    plan: Plan, cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None, tiles_a_block: int
) -> tuple[Tensor, Tensor, LaunchDescription]:
    """Packed sequences in the order they are worked on, the number of tiles before each, and the launch that writes both."""
    batch = cu_q.shape[0] - 1
    order, starts = cu_q.new_empty(batch), cu_q.new_empty(batch + 1)
    pointers = ("cu_q", "cu_k", "used_k", "order", "starts")
    helper = Helper(
        arch=plan.arch, module=f"{_COMMON}.tile_order", entry="packed_tiles",
        types=(*((name, "*i32") for name in pointers), ("batch", "i32"), ("tiles_a_block", "i32")),
        constants=(("queries", plan.queries_per_tile), ("seqused", used_k is not None), ("own", _OWN), ("chunk", _CHUNK)),
    )  # fmt: skip
    grid = -(-batch // _OWN)
    launch = LaunchDescription(compiled_helper(helper), grid, (), (), (cu_q, cu_k, used_k, order, starts), (batch, tiles_a_block))
    return order, starts, launch


def document_ranges(
    plan: Plan, q_ids: Tensor, k_ids: Tensor, lengths: tuple[Tensor | None, ...], batch: int, total_q: int, seqlen_k: int
) -> tuple[Tensor, LaunchDescription]:
    """Key ranges of one document mask and the launch that writes them, see ``kernels.common.documents``.

    Args:
        q_ids, k_ids: (batch, seqlen).
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k; both or none of a kind.
        total_q: rows of q: of one sequence, or of all packed ones.
        seqlen_k: keys of a padded sequence.
    """
    queries = plan.queries_per_tile
    blocks = -(-total_q // queries)
    slots = total_q // queries + batch + 1 if plan.varlen else blocks * batch
    out = torch.empty(slots, RANGE_FIELDS, dtype=torch.int32, device=q_ids.device)
    ids = [(f"{name}_ids", _id_pointer(x)) for name, x in (("q", q_ids), ("k", k_ids))]
    numbers = ("q_batches", "q_size", "q_batch_stride", "q_stride", "k_batches", "k_size", "k_batch_stride", "k_stride")
    helper = Helper(
        arch=plan.arch, module=f"{_COMMON}.documents", entry="document_ranges",
        types=(
            *ids, *((name, "*i32") for name in ("cu_q", "cu_k", "used_q", "used_k", "out")),
            *((name, "i64" if name.endswith("stride") else "i32") for name in numbers),
            *((name, "i32") for name in ("batch", "seqlen_q", "seqlen_k", "blocks")),
        ),
        constants=(
            ("queries", queries), ("power", 1 << (queries - 1).bit_length()), ("chunk", _KEYS), ("varlen", plan.varlen),
            ("part_of_q", lengths[2] is not None), ("part_of_k", lengths[3] is not None),
        ),
    )  # fmt: skip
    sizes = tuple(n for x in (q_ids, k_ids) for n in (*x.shape, *x.stride()))
    launch = LaunchDescription(
        compiled_helper(helper), slots, (), (), (q_ids, k_ids, *lengths, out), (*sizes, batch, total_q, seqlen_k, blocks)
    )
    return out, launch


def _id_pointer(ids: Tensor) -> str:
    return "*i64" if ids.dtype == torch.int64 else "*i32"


def parts(
    plan: Plan, out: Tensor, lse: Tensor, sink: Tensor | None, seqlen_q: int
) -> tuple[tuple[Extra, ...], tuple[LaunchDescription, ...]]:
    """Where split keys leave their parts, and the launch that joins them to O and LSE, see ``kernels.common.splits``."""
    if plan.num_splits == 1:
        return (), ()
    heads, columns = out.shape[-2:]
    rows = out.numel() // (heads * columns)
    part_o = torch.empty(plan.num_splits, rows, heads, columns, dtype=torch.float32, device=out.device)
    statistics = torch.empty(plan.num_splits, rows, heads, 2, dtype=torch.float32, device=out.device)
    if plan.varlen:  # rows that no sequence has are not visited
        statistics.fill_(float("inf"))
    helper = Helper(
        arch=plan.arch, module=f"{_COMMON}.splits", entry="combine",
        types=(
            ("part_o", "*fp32"), ("statistics", "*fp32"), ("out", _POINTERS[plan.out_dtype]), ("lse", "*fp32"),
            ("sink", "*fp32"), ("splits", "i32"), ("rows", "i32"), ("heads", "i32"), ("seqlen_q", "i32"), ("unit", "fp32"),
        ),
        constants=(
            ("columns", columns), ("power", 1 << (columns - 1).bit_length()), ("most", 1 << (plan.num_splits - 1).bit_length()),
            ("has_sink", sink is not None), ("packed", plan.varlen),
        ),
        warps=1,
    )  # fmt: skip
    numbers = (plan.num_splits, rows, heads, seqlen_q, math.log2(math.e) if plan.bias else 1.0)
    launch = LaunchDescription(compiled_helper(helper), rows * heads, (), (), (part_o, statistics, out, lse, sink), numbers)
    return (part_o, statistics, plan.num_splits, rows), (launch,)
