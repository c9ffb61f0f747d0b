"""Key blocks: S of one, O += P V of the block before, and the softmax of S.

P is an operand of the next block's product, so the first block has no product to overlap with and the last one's comes behind the loop."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import bias, masks, packing, predicates, ptx, softmax
from tandem_attn.kernels.common.arguments import exp2_of, has_bias, is_natural, unit
from tandem_attn.kernels.sm90 import turns


@aggregate
class State:
    """What a consumer keeps between key blocks."""

    acc: gl.tensor
    acc_tail: gl.tensor  # 0 where head_dim_v is one chunk
    row_max: gl.tensor  # log2 units
    row_sum: gl.tensor
    p: gl.tensor  # of the last block, an operand of the next product


@gluon.constexpr_function
def s_layout(plan):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.tile_n, 16])


@gluon.constexpr_function
def o_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def p_layout(plan):
    return gl.DotOperandLayout(0, o_layout(plan.head_dim_v_chunks[0]), 2)


@gluon.jit
def rows_from(plan: gl.constexpr, row):
    """The rows of a consumer whose first one is ``row``, two a thread. Made anew where they are asked for: what LLVM computes of a thread's
    number before the dispatch of roles lives through all of them, on the stack."""
    return row + ptx.pinned(gl.arange(0, plan.tile_m, layout=gl.SliceLayout(1, s_layout(plan))))


@gluon.jit
def first_block(plan: gl.constexpr, args, work, rows, q_a, q_b, kv_in, n_block, index: gl.constexpr):
    """The last key block: there is no P V to overlap with yet."""
    k = kv_in.k
    k.wait()
    turns.take(plan, index)
    s_mma = _scores_mma(plan, q_a, q_b, k)
    turns.pass_on(plan, index)
    s = warpgroup_mma_wait(0, deps=(s_mma,))
    k.release()
    s = _logits(plan, args, work, s, rows, n_block, True)
    row_max = _tile_max(plan, args, s)
    p = _weights(plan, args, s, softmax.finite_or_zero(row_max))
    acc = gl.full([plan.tile_m, plan.head_dim_v_chunks[0]], 0.0, gl.float32, o_layout(plan.head_dim_v_chunks[0]))
    acc_tail = gl.to_tensor(0)
    if len(plan.head_dim_v_chunks) > 1:
        acc_tail = gl.full([plan.tile_m, plan.head_dim_v_chunks[1]], 0.0, gl.float32, o_layout(plan.head_dim_v_chunks[1]))
    return State(acc, acc_tail, row_max, softmax.partial_sum(p), _operand(plan, args, p)), kv_in.after_k(k.next())


@gluon.jit
def block(plan: gl.constexpr, args, work, rows, q_a, q_b, kv_in, state, n_block, masked: gl.constexpr, index: gl.constexpr):
    """S of one key block, O += P V of the block before it, and the softmax of S under both."""
    k = kv_in.k
    kv_in = kv_in.after_k(k.next())
    v = kv_in.v
    kv_in = kv_in.after_v(v.next())
    k.wait()
    turns.take(plan, index)
    s_mma = _scores_mma(plan, q_a, q_b, k)
    if plan.early_turn:
        turns.pass_on(plan, index)
    v.wait()
    o_mma, tail_mma = values_mma(plan, state, v)
    if not plan.early_turn:
        turns.pass_on(plan, index)
    s = warpgroup_mma_wait(len(plan.head_dim_v_chunks), deps=(s_mma,))
    if plan.fixed_max and not masked:
        return _fixed_block(plan, args, state, s, o_mma, tail_mma, k, v), kv_in
    s = _logits(plan, args, work, s, rows, n_block, masked)
    row_max = gl.maximum(state.row_max, _tile_max(plan, args, s))
    if plan.rescale_rows:
        row_max = softmax.grown_max(state.row_max, row_max, plan.rescale_threshold * unit(plan) / softmax.LOG2_E)
    safe_max = row_max
    if masked or is_natural(plan):  # a bias may hold -inf
        safe_max = softmax.finite_or_zero(row_max)
    alpha = exp2_of(is_natural(plan), state.row_max - safe_max)
    p = _weights(plan, args, s, safe_max)
    row_sum = state.row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout))[:, None] + softmax.partial_sum(p)
    if plan.intra_overlap:
        k.release_after(row_sum)
    else:
        k.release()
    acc, acc_tail = values_wait(plan, o_mma, tail_mma)
    v.release()
    if plan.intra_overlap and plan.q_registers:
        operand = softmax.rounded_over(state.p, p, acc)
    else:
        operand = _operand(plan, args, p)
    acc, acc_tail = _rescale(plan, acc, acc_tail, alpha)
    return State(acc, acc_tail, row_max, row_sum, operand), kv_in


@gluon.jit
def _fixed_block(plan: gl.constexpr, args, state, s, o_mma, tail_mma, k, v):
    """``block`` behind S with the maxima that rows have: no maximum, no correction."""
    k.release()
    acc, acc_tail = values_wait(plan, o_mma, tail_mma)
    v.release()
    row_max = state.row_max
    if plan.q_registers:
        row_max = softmax.behind(row_max, acc)
    p = _weights(plan, args, s, row_max)
    row_sum = state.row_sum + softmax.partial_sum(p)
    return State(acc, acc_tail, row_max, row_sum, _operand(plan, args, p))


@gluon.jit
def _scores_mma(plan: gl.constexpr, q_a, q_b, k):
    zero = gl.full([plan.tile_m, plan.tile_n], 0.0, gl.float32, s_layout(plan))
    s = warpgroup_mma(q_a, k.slot().permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(plan.head_dim_chunks) > 1:
        s = warpgroup_mma(q_b, k.tail().permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def values_mma(plan: gl.constexpr, state, v):
    acc = warpgroup_mma(state.p, v.slot(), state.acc, is_async=True)
    if len(plan.head_dim_v_chunks) > 1:
        return acc, warpgroup_mma(state.p, v.tail(), state.acc_tail, is_async=True)
    else:
        return acc, state.acc_tail


@gluon.jit
def values_wait(plan: gl.constexpr, acc, acc_tail):
    if len(plan.head_dim_v_chunks) > 1:
        return warpgroup_mma_wait(0, deps=(acc, acc_tail))
    else:
        return warpgroup_mma_wait(0, deps=(acc,)), acc_tail


@gluon.jit
def _logits(plan: gl.constexpr, args, work, s, rows, n_block, masked: gl.constexpr):
    """Masked scores; with soft cap or ALiBi in log2 units, else still to be multiplied by scale_log2."""
    queries = packing.queries(plan, rows)
    heads = packing.heads(plan, work.head, rows)
    if plan.softcap:
        s = softmax.tanh(s * (args.scale_log2 * softmax.LN_2 / args.softcap)) * (args.softcap * unit(plan))
    elif has_bias(plan):
        s = s * (args.scale_log2 * softmax.LN_2 if is_natural(plan) else args.scale_log2)
    if is_natural(plan):
        s = bias.add(s, args.bias_data, plan.bias, work.seq.batch, heads, queries, n_block * plan.tile_n)
    if plan.alibi:
        slope = gl.load(args.slopes + work.seq.batch * args.heads + heads) * unit(plan)
        distance = queries + (work.seq.k.used - work.seq.q.used) - n_block * plan.tile_n
        s = masks.add_alibi(s, slope, distance.to(gl.float32))
    if masked:
        site = predicates.Site(work.seq.batch, packing.as_column(plan, heads), args.mask_data)
        s = masks.hide(s, masks.parse(plan.mask), args.scalars, work.seq, queries, n_block * plan.tile_n, site)
    return s


@gluon.jit
def _tile_max(plan: gl.constexpr, args, s):
    """Row maxima of one block."""
    row_max = gl.max(s, axis=1)
    return row_max if has_bias(plan) else row_max * args.scale_log2


@gluon.jit
def _weights(plan: gl.constexpr, args, s, row_max):
    if is_natural(plan):
        x = (s - row_max[:, None]) * softmax.LOG2_E
    elif has_bias(plan):
        x = s - row_max[:, None]
    else:
        x = s * args.scale_log2 - row_max[:, None]
    return softmax.exp2(x, plan.exp2)


@gluon.jit
def _operand(plan: gl.constexpr, args, p):
    return gl.convert_layout(p.to(args.v.dtype), p_layout(plan))


@gluon.jit
def _rescale(plan: gl.constexpr, acc, acc_tail, alpha):
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    if plan.rescale_rows:
        acc = softmax.scaled_rows(acc, alpha)
    else:
        acc = acc * alpha[:, None]
    if len(plan.head_dim_v_chunks) > 1:
        acc_tail = acc_tail * gl.convert_layout(alpha, gl.SliceLayout(1, acc_tail.type.layout))[:, None]
    return acc, acc_tail
