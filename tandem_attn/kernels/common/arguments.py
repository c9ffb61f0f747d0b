"""What the roles of a forward kernel are given: its arguments, a tile with its sequence and key blocks, and the units of logits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import documents, masks, packing, softmax, splits
from tandem_attn.kernels.common.copies import sequence


@aggregate
class Args:
    """Arguments of the kernel that the roles read."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    o: tma.tensor_descriptor
    q_tail: tma.tensor_descriptor  # second chunk of head_dim, where there is one
    k_tail: tma.tensor_descriptor
    v_tail: tma.tensor_descriptor
    o_tail: tma.tensor_descriptor
    lse: gl.tensor  # pointer, float32 (batch, heads, seqlen_q) or (heads, total_q)
    counter: gl.tensor  # pointer, int32: tiles handed out
    cu_q: gl.tensor  # pointers, int32
    cu_k: gl.tensor
    used_q: gl.tensor
    used_k: gl.tensor
    sink: gl.tensor  # pointer, float32 (heads,)
    slopes: gl.tensor  # pointer, float32 (batch, heads)
    order: gl.tensor  # pointers, int32: packed sequences in the order they are worked on, and the number of tiles before each
    starts: gl.tensor
    scalars: gl.tuple  # window bounds, see spec.plan.mask_scalars
    scale_log2: gl.tensor  # scale * log2 e
    softcap: gl.tensor
    seqlen_q: gl.tensor  # of padded tensors
    seqlen_k: gl.tensor
    pitch_q: gl.tensor  # see copies
    pitch_k: gl.tensor
    pitch_v: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    heads_per_kv: gl.tensor
    blocks: gl.tensor  # query tiles of a sequence
    section: gl.tensor  # heads of a section, see spec.schedule
    num_tiles: gl.tensor
    lse_stride: gl.tensor  # rows of one head in lse
    mask_data: gl.tuple  # see kernels.extras: this and what follows is empty where the plan needs none
    bias_data: gl.tuple
    pages: gl.tuple
    parts: gl.tuple
    descales: gl.tuple  # see descale


@aggregate
class Work:
    """One tile: its place, its sequence and the key blocks it visits."""

    head: gl.tensor  # or group of packed heads
    row: gl.tensor  # first row of the CTA's tile, see packing
    seq: gl.base_value
    visit: gl.base_value
    split: gl.tensor


@gluon.constexpr_function
def worker_registers(plan):
    """Register budgets of all roles but the first, which gets what they leave."""
    return [role.registers for role in plan.roles[1:]]


@gluon.jit
def work_at(plan: gl.constexpr, args, at):
    """Sequence, rows and key blocks of a tile."""
    tree: gl.constexpr = masks.parse(plan.mask)
    seq = sequence(plan, args, at.batch)
    row = at.m_block * (plan.rows_per_cta * plan.ctas)
    query = packing.queries(plan, row)
    ranges = documents.range_pointers(plan, tree, args, seq, at.m_block)
    visit = masks.visit(tree, args.scalars, seq, query, plan.queries_per_tile, plan.tile_n, ranges)
    if plan.num_splits > 1:
        visit = splits.part(visit, at.valid - 1, args.parts[2], plan.tile_n, seq.k.used)
    return Work(at.head, row, seq, visit, at.valid - 1)


@gluon.jit
def lse_offset(plan: gl.constexpr, args, batch, heads):
    """How far from the LSE's start the rows of a head lie, or of each row's head; those of a packed batch begin with the first sequence.

    Both factors are unsigned: a sign would be an operand of its own, which LLVM takes from before the dispatch of roles."""
    if not plan.varlen:
        heads = batch * args.heads + heads
    return heads.to(gl.uint32).to(gl.int64) * args.lse_stride.to(gl.uint32).to(gl.int64)


@gluon.constexpr_function
def has_bias(plan):
    """Whether logits are complete before the maxima, and not scaled within the exponent."""
    return plan.softcap or plan.alibi or is_natural(plan) or plan.scaled_first


@gluon.constexpr_function
def is_natural(plan):
    """Whether maxima are in natural units instead of log2 units: with a bias, see Plan."""
    return plan.bias != ""


@gluon.constexpr_function
def unit(plan):
    """A natural logit in the units of maxima."""
    return 1.0 if is_natural(plan) else softmax.LOG2_E.value


@gluon.jit
def exp2_of(natural: gl.constexpr, x):
    """2^x, or e^x of natural units."""
    return gl.exp2(x * softmax.LOG2_E) if natural else gl.exp2(x)


@gluon.jit
def natural_lse(plan: gl.constexpr, row_max, row_sum):
    """LSE of rows in natural units."""
    if is_natural(plan):
        return row_max + gl.log2(row_sum) * softmax.LN_2
    else:
        return (row_max + gl.log2(row_sum)) * softmax.LN_2


@gluon.jit
def with_sink(sink, row_max, row_sum, natural: gl.constexpr = False):
    """The sink joins the denominator. Returns the new maximum and sum, and the factor of what was weighted by the old maximum."""
    top = gl.maximum(row_max, sink)
    safe = softmax.finite_or_zero(top)
    share = exp2_of(natural, row_max - safe)
    return top, row_sum * share + exp2_of(natural, sink - safe), share
