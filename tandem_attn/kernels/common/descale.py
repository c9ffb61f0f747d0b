"""8-bit q, k and v stand for themselves times a number of each sequence and KV head: what that makes of scores and of O."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import packing


@gluon.jit
def scale_of_scores(plan: gl.constexpr, args, work):
    """``scale_log2`` of the tile's products of q and k."""
    if plan.descale:
        return args.scale_log2 * _number(plan, args, work, 0) * _number(plan, args, work, 1)
    else:
        return args.scale_log2


@gluon.jit
def scale_of_output(plan: gl.constexpr, args, work):
    """What O, once its row sum is 1, is to be multiplied with; weights carry 2^p_exponent."""
    if plan.descale:
        return _number(plan, args, work, 2) * 2.0**-plan.p_exponent
    else:
        return 2.0**-plan.p_exponent


@gluon.jit
def _number(plan: gl.constexpr, args, work, tensor: gl.constexpr):
    """Of q, k or v: element (sequence, KV head) of a strided float32 tensor."""
    by_batch = args.descales[3 + 2 * tensor]
    by_head = args.descales[4 + 2 * tensor]
    head = packing.head_kv(plan, args, work.head)
    return gl.load(args.descales[tensor] + work.seq.batch * by_batch + head * by_head)
