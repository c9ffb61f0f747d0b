"""The MMA role: one warp issues all products, in an order that keeps the tensor cores busy while the softmax roles work.

Products of one thread run in the order of their issue (PTX ISA, pipelined tcgen05 instructions), so S may be issued into the place of P
behind the product that reads it, and a commit says of all products before it that they are complete.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_commit, tcgen05_mma

from tandem_attn.kernels.common import ptx
from tandem_attn.kernels.common.arguments import work_at
from tandem_attn.kernels.common.scheduler import receive_tile
from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.visits import apart, visit_of, visit_of_all
from tandem_attn.kernels.sm100.weights import pieces

WIDEST = gl.constexpr(128)  # keys of one call


@gluon.jit
def mma(plan: gl.constexpr, args, pipe):
    """With two query tiles: S0 S1, then per block O0 S0 O1 S1, at last O0 O1. With one, whose blocks go to S0 and S1 in turns: S0, then per
    pair of blocks S1 O S0 O, at last O, of an even number of blocks S1 O O.
    """
    kv = pipe.kv_in
    a = pipe.s_tiles[0]
    b = pipe.s_tiles[1]
    o_a = pipe.o_ready[0].barrier()
    o_b = pipe.o_ready[plan.q_stages - 1].barrier()
    q_a = pipe.q.lane(0).receiver()
    q_b = pipe.q.lane(plan.q_stages - 1).receiver()
    at, tiles_in = receive_tile(pipe.tiles.receiver())
    while ptx.uniform(at.valid) != 0:
        work = work_at(plan, args, at)
        every = visit_of_all(work)
        blocks = every.stop - every.start
        if apart(plan):
            visit_a = visit_of(plan, args, work, 0)
            visit_b = visit_of(plan, args, work, 1)
            a, b, kv = _apart(plan, args, pipe.tmem, a, b, o_a, o_b, q_a, q_b, kv, every, visit_a, visit_b)
        elif memory.by_turns(plan):
            a, b, kv = _turns(plan, args, pipe.tmem, a, b, o_a, q_a, kv, blocks)
        else:
            a, b, kv = _ping_pong(plan, args, pipe.tmem, a, b, o_a, o_b, q_a, q_b, kv, blocks)
        q_a = q_a.next()
        q_b = q_b.next()
        at, tiles_in = receive_tile(tiles_in)


@gluon.jit
def _ping_pong(plan: gl.constexpr, args, tmem, a, b, o_a, o_b, q_a, q_b, kv, blocks):
    """All blocks of two query tiles: while one's softmax works, the other's products run."""
    k = kv.k
    q_a.wait()
    k.wait()
    a = _scores(plan, tmem, 0, a, q_a, k, (a.s_ready.barrier(),))
    q_b.wait()
    b = _scores(plan, tmem, 1, b, q_b, k, (b.s_ready.barrier(), k.empty()))
    kv = kv.after_k(k.next())
    use_acc = False
    for _ in range(blocks - 1):
        v = kv.v
        kv = kv.after_v(v.next())
        k = kv.k
        kv = kv.after_k(k.next())
        v.wait()
        a = _values(plan, args, tmem, 0, a, v, use_acc, ())
        _between_waits(plan)
        k.wait()
        a = _scores(plan, tmem, 0, a, q_a, k, (a.s_ready.barrier(),))
        b = _values(plan, args, tmem, 1, b, v, use_acc, (v.empty(),))
        b = _scores(plan, tmem, 1, b, q_b, k, (b.s_ready.barrier(), k.empty()))
        use_acc = True
    if not plan.o_over_q:
        tcgen05_commit(q_a.empty(), descs=_in_pair(plan, q_a))
        tcgen05_commit(q_b.empty(), descs=_in_pair(plan, q_b))
    v = kv.v
    v.wait()
    a = _values(plan, args, tmem, 0, a, v, use_acc, (o_a,))
    b = _values(plan, args, tmem, 1, b, v, use_acc, (o_b, v.empty()))
    return a, b, kv.after_v(v.next())


@gluon.jit
def _apart(plan: gl.constexpr, args, tmem, a, b, o_a, o_b, q_a, q_b, kv, every, visit_a, visit_b):
    """``_ping_pong`` where a query tile leaves out blocks that only the other visits."""
    n_block = every.stop - 1
    k = kv.k
    q_a.wait()
    k.wait()
    a = _scores_visited(plan, tmem, 0, a, visit_a, n_block, q_a, k)
    q_b.wait()
    b = _scores_visited(plan, tmem, 1, b, visit_b, n_block, q_b, k)
    tcgen05_commit(k.empty(), descs=_in_pair(plan, q_a))
    kv = kv.after_k(k.next())
    for _ in range(every.start, every.stop - 1):
        v = kv.v
        kv = kv.after_v(v.next())
        k = kv.k
        kv = kv.after_k(k.next())
        v.wait()
        a = _values_visited(plan, args, tmem, 0, a, o_a, visit_a, n_block, q_a, v)
        _between_waits(plan)
        k.wait()
        a = _scores_visited(plan, tmem, 0, a, visit_a, n_block - 1, q_a, k)
        b = _values_visited(plan, args, tmem, 1, b, o_b, visit_b, n_block, q_b, v)
        tcgen05_commit(v.empty(), descs=_in_pair(plan, q_a))
        b = _scores_visited(plan, tmem, 1, b, visit_b, n_block - 1, q_b, k)
        tcgen05_commit(k.empty(), descs=_in_pair(plan, q_a))
        n_block -= 1
    if not plan.o_over_q:
        tcgen05_commit(q_a.empty(), descs=_in_pair(plan, q_a))
        tcgen05_commit(q_b.empty(), descs=_in_pair(plan, q_b))
    v = kv.v
    v.wait()
    a = _values_visited(plan, args, tmem, 0, a, o_a, visit_a, n_block, q_a, v)
    b = _values_visited(plan, args, tmem, 1, b, o_b, visit_b, n_block, q_b, v)
    tcgen05_commit(v.empty(), descs=_in_pair(plan, q_a))
    return a, b, kv.after_v(v.next())


@gluon.jit
def _between_waits(plan: gl.constexpr):
    """Of the role's threads for two slots of one ring: they enter the second together."""
    if plan.shared_kv_ring:
        gl.barrier()


@gluon.jit
def _scores_visited(plan: gl.constexpr, tmem, index: gl.constexpr, tile, visit, n_block, q, k):
    if visit.holds(n_block):
        tile = _scores(plan, tmem, index, tile, q, k, (tile.s_ready.barrier(),))
    return tile


@gluon.jit
def _values_visited(plan: gl.constexpr, args, tmem, index: gl.constexpr, tile, o_ready, visit, n_block, q, v):
    if visit.holds(n_block):
        tile = _values(plan, args, tmem, index, tile, v, n_block != visit.stop - 1, ())
        tcgen05_commit(o_ready, pred=n_block == visit.start, descs=_in_pair(plan, q))
    return tile


@gluon.jit
def _turns(plan: gl.constexpr, args, tmem, a, b, o_ready, q, kv, blocks):
    """All blocks of one query tile, two at a time: the softmax of one block works while S of the next is computed."""
    q.wait()
    a, kv = _next_scores(plan, tmem, 0, a, q, kv)
    use_acc = False
    for _ in range((blocks - 1) // 2):
        v, kv = _next_v(kv)
        b, kv = _next_scores(plan, tmem, 1, b, q, kv)
        a = _values_of(plan, args, tmem, 0, a, o_ready, v, use_acc)
        v, kv = _next_v(kv)
        a, kv = _next_scores(plan, tmem, 0, a, q, kv)
        b = _values_of(plan, args, tmem, 1, b, o_ready, v, True)
        use_acc = True
    even = blocks % 2 == 0
    v, kv = _next_v(kv)
    if even:
        b, kv = _next_scores(plan, tmem, 1, b, q, kv)
    if not plan.o_over_q:
        tcgen05_commit(q.empty(), descs=_in_pair(plan, q))
    a = _values_of(plan, args, tmem, 0, a, o_ready, v, use_acc)
    if even:
        v, kv = _next_v(kv)
        b = _values_of(plan, args, tmem, 1, b, o_ready, v, True)
    return a, b, kv


@gluon.jit
def _next_scores(plan: gl.constexpr, tmem, index: gl.constexpr, tile, q, kv):
    """S of the next keys, which are free behind it."""
    k = kv.k
    k.wait()
    tile = _scores(plan, tmem, index, tile, q, k, (tile.s_ready.barrier(), k.empty()))
    return tile, kv.after_k(k.next())


@gluon.jit
def _next_v(kv):
    """The next values, which are loaded before the keys of the block behind them and used after those."""
    return kv.v, kv.after_v(kv.v.next())


@gluon.jit
def _values_of(plan: gl.constexpr, args, tmem, index: gl.constexpr, tile, o_ready, v, use_acc):
    """O += P V of a block whose values are free behind it, and whose end correction waits for."""
    v.wait()
    return _values(plan, args, tmem, index, tile, v, use_acc, (o_ready, v.empty()))


@gluon.jit
def _in_pair(plan: gl.constexpr, q):
    """What a commit needs in order to arrive in both CTAs of a pair."""
    if plan.cta_group == 2:
        return (q.slot(),)
    else:
        return ()


@gluon.jit
def _scores(plan: gl.constexpr, tmem, index: gl.constexpr, tile, q, k, done):
    """S = Q K^T of one block; ``done`` are barriers to arrive at when it is complete."""
    s = memory.scores(plan, tmem, index)
    if len(plan.head_dim_chunks) == 1:
        tcgen05_mma(q.slot(), k.slot().permute((1, 0)), s, use_acc=False, multicast=plan.cta_group == 2, mbarriers=done)
    else:
        tcgen05_mma(q.slot(), k.slot().permute((1, 0)), s, use_acc=False, mbarriers=())
        if _too_many_operands(plan):
            q = q.anew()
        tcgen05_mma(q.tail(), k.tail().permute((1, 0)), s, multicast=plan.cta_group == 2, mbarriers=done)
    return tile.after_scores()


@gluon.constexpr_function
def _too_many_operands(plan):
    """Whether the addresses of all operands, which ptxas computes before the block loop, are more than the uniform registers. It then
    finds other ways for the whole kernel, with spills in every role. The last chunk's are cheap to compute anew.
    """
    return len(plan.head_dim_chunks) == 2 and plan.tile_n == 128 and (plan.num_splits > 1 or sum(plan.head_dim_chunks) > 128)


@gluon.jit
def _values(plan: gl.constexpr, args, tmem, index: gl.constexpr, tile, v, use_acc, done):
    """O += P V of one block, each part of P as soon as it is written."""
    p = memory.weights(plan, tmem, index, args.v.dtype)
    for part in gl.static_range(len(plan.p_parts)):
        tile.p_ready[part].alone().wait()
        ptx.tmem_after()
        for i in gl.static_range(len(pieces(plan, part, WIDEST))):
            if _is_last(plan, part, i):
                _keys(plan, tmem, index, p, v, pieces(plan, part, WIDEST)[i], use_acc, done)
            else:
                _keys(plan, tmem, index, p, v, pieces(plan, part, WIDEST)[i], use_acc, ())
            use_acc = True
    return tile.after_values()


@gluon.constexpr_function
def _is_last(plan, part, i):
    return part == len(plan.p_parts) - 1 and i == len(pieces(plan, part, WIDEST.value)) - 1


@gluon.jit
def _keys(plan: gl.constexpr, tmem, index: gl.constexpr, p, v, keys: gl.constexpr, use_acc, done):
    """O += P V of ``keys``, a first key and a number of keys."""
    p = p.slice(keys[0], keys[1])
    o = memory.output(plan, tmem, memory.query_tile(plan, index), 0)
    v_keys = v.slot().slice(keys[0], keys[1])
    if len(plan.head_dim_v_chunks) == 1:
        tcgen05_mma(p, v_keys, o, use_acc=use_acc, multicast=plan.cta_group == 2, mbarriers=done)
    else:
        tcgen05_mma(p, v_keys, o, use_acc=use_acc, mbarriers=())
        o = memory.output(plan, tmem, memory.query_tile(plan, index), 1)
        v_keys = v.tail().slice(keys[0], keys[1])
        tcgen05_mma(p, v_keys, o, use_acc=use_acc, multicast=plan.cta_group == 2, mbarriers=done)
