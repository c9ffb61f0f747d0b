"""What the roles of the Blackwell forward share: on-chip memory, and who tells whom what.

    load --q, kv--> mma --s_ready--> softmax t --p_ready--> mma --o_ready--> correction
    softmax t --stats--> correction --p_ready (O is rescaled)--> mma

With two query tiles (ping-pong) each has one S tile; with one, its two S tiles take turns, so that its signals are rings of two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tensor_memory_descriptor
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common.channel import WARPS, Buffers, Channel, KeyValue, channel_of, cluster_split, in_each_cta, make_buffers
from tandem_attn.kernels.common.scheduler import tile_channel_of
from tandem_attn.kernels.common.signal import Signal, make_signal
from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.handout import HandOut, make_handout


@aggregate
class Tile:
    """Signals of one query tile."""

    s_ready: Signal  # S is complete; with ping-pong also O of the block before, and its P was read
    p_ready: gl.tuple  # a part of P is written; the first also says that O is rescaled
    stats: gl.shared_memory_descriptor  # float32 (rows,): how to scale O, first block by block, then once to normalise it
    stats_ready: Signal
    stats_free: Signal
    o_ready: Signal  # O holds all blocks; without ping-pong given after every block

    @gluon.jit
    def after_scores(self):
        """For the MMA role behind the S of a block."""
        return Tile(self.s_ready.next(), self.p_ready, self.stats, self.stats_ready, self.stats_free, self.o_ready)

    @gluon.jit
    def after_values(self):
        """For the MMA role behind the O of a block."""
        return Tile(self.s_ready, next_parts(self.p_ready), self.stats, self.stats_ready, self.stats_free, self.o_ready)


@gluon.jit
def next_parts(p_ready):
    """The signals of the parts of P, one block on."""
    if len(p_ready) == 1:
        return (p_ready[0].next(),)
    elif len(p_ready) == 2:
        return (p_ready[0].next(), p_ready[1].next())
    else:
        return (p_ready[0].next(), p_ready[1].next(), p_ready[2].next())


@aggregate
class Pipeline:
    tmem: tensor_memory_descriptor
    q: Channel
    kv_out: KeyValue
    kv_in: KeyValue
    o: Buffers
    tiles: Channel  # coordinates from the load role to all others
    query_tiles: gl.tuple
    handout: HandOut


@gluon.constexpr_function
def ring(plan):
    """S tiles of one query tile."""
    return 2 // plan.q_stages


@gluon.jit
def make_pipeline(plan: gl.constexpr, dtype: gl.constexpr, out_dtype: gl.constexpr, plain: gl.constexpr):
    warps: gl.constexpr = 1 if plain else WARPS
    pair: gl.constexpr = plan.cta_group == 2
    by_rows: gl.constexpr = cluster_split(plan, 0)
    q = channel_of(make_buffers(dtype, plan.q_stages, memory.rows(plan), plan.head_dim_chunks, by_rows), plan.q_stages, 1, True, pair)
    if plan.o_over_q:
        o = q.buffers
    else:
        o = make_buffers(out_dtype, plan.q_stages, memory.rows(plan), plan.head_dim_v_chunks, by_rows)
    if plan.shared_kv_ring:
        k = channel_of(make_buffers(dtype, plan.kv_stages, plan.tile_n, plan.head_dim_chunks), plan.kv_stages, 1, True)
        v = k
    else:
        k_buffers = make_buffers(dtype, plan.k_stages, plan.tile_n, plan.head_dim_chunks, by_rows)
        v_buffers = make_buffers(dtype, plan.v_stages, plan.tile_n, plan.head_dim_v_chunks, cluster_split(plan, 1))
        k = channel_of(k_buffers, plan.k_stages, 1, True, pair)
        v = channel_of(v_buffers, plan.v_stages, 1, True, pair)
    kv_out = KeyValue(k.sender(), v.sender(), plan.shared_kv_ring)
    kv_in = KeyValue(k.receiver(), v.receiver(), plan.shared_kv_ring)
    tiles = tile_channel_of((plan.q_stages + 1) * warps + 1, plain, in_each_cta(plan))
    if plan.q_stages == 2:
        query_tiles = (_make_tile(plan, plain), _make_tile(plan, plain))
    else:
        query_tiles = (_make_tile(plan, plain),)
    return Pipeline(memory.allocate(plan), q, kv_out, kv_in, o, tiles, query_tiles, make_handout(plan))


@gluon.jit
def _make_tile(plan: gl.constexpr, plain: gl.constexpr):
    warps: gl.constexpr = 1 if plain else WARPS
    pair: gl.constexpr = plan.cta_group == 2
    by_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cluster_split(plan, 0, 1))
    stats = gl.allocate_shared_memory(gl.float32, [memory.rows(plan)], by_rows)
    first = make_signal(ring(plan), 2 * warps, plain, pair)
    if len(plan.p_parts) == 1:
        p_ready = (first,)
    elif len(plan.p_parts) == 2:
        p_ready = (first, make_signal(ring(plan), warps, plain, pair))
    else:
        p_ready = (first, make_signal(ring(plan), warps, plain, pair), make_signal(ring(plan), warps, plain, pair))
    s_ready = make_signal(ring(plan), 1, plain)
    return Tile(s_ready, p_ready, stats, make_signal(1, warps, plain), make_signal(1, warps, plain), make_signal(1, 1, plain))
