"""What the roles of the Blackwell forward share: on-chip memory, and who tells whom what.

    load --q, kv--> mma --s_ready--> softmax t --p_ready--> mma --o_ready--> correction
    softmax t --stats--> correction --p_ready (O is rescaled)--> mma

There are two S tiles, each with a softmax role of its own. With two query tiles (ping-pong) each has one; with one, its key blocks go to
both in turns, and each softmax role sends its statistics to the other too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tensor_memory_descriptor
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import ptx
from tandem_attn.kernels.common.channel import WARPS, Buffers, Channel, KeyValue, channel_of, cluster_split, in_each_cta, make_buffers
from tandem_attn.kernels.common.scheduler import tile_channel_of
from tandem_attn.kernels.common.signal import Signal, make_signal
from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.handout import HandOut, make_handout


@aggregate
class Tile:
    """Signals of one S tile."""

    s_ready: Signal  # S is complete, and so is O with the block that was in this S tile before, whose P was read
    p_ready: gl.tuple  # a part of P is written; the first also says that O is rescaled
    stats: gl.shared_memory_descriptor  # float32 (rows,): how to scale O, block by block, then a number behind the last block
    stats_ready: Signal
    stats_free: Signal

    @gluon.jit
    def after_scores(self):
        """Behind the S of a block."""
        return Tile(self.s_ready.next(), self.p_ready, self.stats, self.stats_ready, self.stats_free)

    @gluon.jit
    def after_values(self):
        """Behind the P of a block."""
        return Tile(self.s_ready, _next_parts(self.p_ready), self.stats, self.stats_ready, self.stats_free)

    @gluon.jit
    def for_softmax(self):
        """The tile as its softmax role sees it, whose first message finds ``stats`` free."""
        return Tile(self.s_ready, self.p_ready, self.stats, self.stats_ready, self.stats_free.given())

    @gluon.jit
    def send(self, x, lane_row):
        """Passes a number a row to all that receive this tile's statistics."""
        self.stats_free.wait()
        if self.s_ready.plain:
            self.stats.store(x)
        else:
            ptx.put_row(self.stats, x, lane_row)
        self.stats_ready.arrive()
        return Tile(self.s_ready, self.p_ready, self.stats, self.stats_ready.next(), self.stats_free.next())

    @gluon.jit
    def receive(self, lane_row):
        """The next number a row from softmax."""
        self.stats_ready.wait()
        if self.s_ready.plain:
            x = self.stats.load(lane_row.type.layout)
        else:
            x = ptx.get_row(self.stats, lane_row)
        self.stats_free.arrive()
        return Tile(self.s_ready, self.p_ready, self.stats, self.stats_ready.next(), self.stats_free.next()), x


@gluon.jit
def _next_parts(p_ready):
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
    s_tiles: gl.tuple  # two
    o_ready: gl.tuple  # of each query tile: O holds all blocks; by turns given after every block
    handout: HandOut


@gluon.jit
def make_pipeline(plan: gl.constexpr, dtype: gl.constexpr, out_dtype: gl.constexpr, plain: gl.constexpr):
    warps: gl.constexpr = 1 if plain else WARPS
    lean: gl.constexpr = not plain
    pair: gl.constexpr = plan.cta_group == 2
    by_rows: gl.constexpr = cluster_split(plan, 0)
    q = channel_of(make_buffers(dtype, plan.q_stages, memory.rows(plan), plan.head_dim_chunks, by_rows), plan.q_stages, 1, True, pair, lean)
    if plan.o_over_q:
        o = q.buffers
    else:
        o = make_buffers(out_dtype, plan.q_stages, memory.rows(plan), plan.head_dim_v_chunks, by_rows)
    if plan.shared_kv_ring:
        k = channel_of(make_buffers(dtype, plan.kv_stages, plan.tile_n, plan.head_dim_chunks), plan.kv_stages, 1, True, False, lean)
        v = k
    else:
        k_buffers = make_buffers(dtype, plan.k_stages, plan.tile_n, plan.head_dim_chunks, by_rows)
        v_buffers = make_buffers(dtype, plan.v_stages, plan.tile_n, plan.head_dim_v_chunks, cluster_split(plan, 1))
        k = channel_of(k_buffers, plan.k_stages, 1, True, pair, lean)
        v = channel_of(v_buffers, plan.v_stages, 1, True, pair, lean)
    kv_out = KeyValue(k.sender(), v.sender(), plan.shared_kv_ring)
    kv_in = KeyValue(k.receiver(), v.receiver(), plan.shared_kv_ring)
    tiles = tile_channel_of(3 * warps + 1, plain, in_each_cta(plan), lean)
    a = _make_tile(plan, plain)
    o_a = make_signal(1, 1, plain)
    b = _make_tile(plan, plain)
    if memory.by_turns(plan):
        o_ready = (o_a,)
    else:
        o_ready = (o_a, make_signal(1, 1, plain))
    return Pipeline(memory.allocate(plan), q, kv_out, kv_in, o, tiles, (a, b), o_ready, make_handout(plan, plain))


@gluon.jit
def _make_tile(plan: gl.constexpr, plain: gl.constexpr):
    warps: gl.constexpr = 1 if plain else WARPS
    pair: gl.constexpr = plan.cta_group == 2
    by_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cluster_split(plan, 0, 1))
    stats = gl.allocate_shared_memory(gl.float32, [memory.rows(plan)], by_rows)
    first = make_signal(1, 2 * warps, plain, pair)
    if len(plan.p_parts) == 1:
        p_ready = (first,)
    elif len(plan.p_parts) == 2:
        p_ready = (first, make_signal(1, warps, plain, pair))
    else:
        p_ready = (first, make_signal(1, warps, plain, pair), make_signal(1, warps, plain, pair))
    s_ready = make_signal(1, 1, plain)
    receivers: gl.constexpr = 2 if memory.by_turns(plan) else 1
    return Tile(s_ready, p_ready, stats, make_signal(1, warps, plain), make_signal(1, receivers * warps, plain))
