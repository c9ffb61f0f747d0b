"""The correction role: one warpgroup that rescales O off the softmax's path, normalises it at the end and stores it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.core import _aggregate as aggregate

from tandem_attn.kernels.common import masks, packing, ptx, splits
from tandem_attn.kernels.common.arguments import exp2_of, is_natural, work_at
from tandem_attn.kernels.common.scheduler import receive_tile
from tandem_attn.kernels.common.signal import Signal
from tandem_attn.kernels.common.softmax import finite_or_zero
from tandem_attn.kernels.sm100 import memory, twins
from tandem_attn.kernels.sm100.memory import by_turns
from tandem_attn.kernels.sm100.softmax import part_rows, place_of, row_layout, tile_type
from tandem_attn.kernels.sm100.visits import apart, stride, turn, visit_of, visit_of_all

STORE_COLUMNS = gl.constexpr(16)


@gluon.constexpr_function
def rescale_columns(plan):
    """Columns of O held in registers at a time: fewer where the role has 88 registers and bounds of blocks that come from memory."""
    return 16 if by_turns(plan) and masks.reads_data(masks.parse(plan.mask)) else 32


@aggregate
class Output:
    """What correction keeps of one O tile."""

    ready: Signal
    row_max: gl.tensor  # by turns: of the blocks so far, as softmax then sends maxima and not alpha


@gluon.jit
def correction(plan: gl.constexpr, args, pipe):
    """Rescales and stores the O of all query tiles."""
    two: gl.constexpr = not by_turns(plan)
    lane_row = ptx.pinned(gl.arange(0, memory.rows(plan), gl.SliceLayout(1, row_layout(plan, STORE_COLUMNS))))
    unknown = (lane_row * 0).to(gl.float32)  # row maxima that the first block replaces without using them
    a = pipe.s_tiles[0]
    a_output = Output(pipe.o_ready[0], unknown)
    b = pipe.s_tiles[1]
    b_output = Output(pipe.o_ready[plan.q_stages - 1], unknown)
    at, tiles_in = receive_tile(pipe.tiles.receiver())
    while ptx.uniform(at.valid) != 0:
        work = work_at(plan, args, at)
        every = visit_of_all(work)
        visit_a = visit_of(plan, args, work, 0)
        visit_b = visit_of(plan, args, work, plan.q_stages - 1)
        n_block = every.stop + (stride(plan) - 1)
        for _ in range(every.start, every.stop, stride(plan)):
            n_block -= stride(plan)
            a, a_output = _rescale_visited(plan, pipe.tmem, 0, a, a_output, lane_row, visit_a, n_block)
            if two:
                b, b_output = _rescale_visited(plan, pipe.tmem, 1, b, b_output, lane_row, visit_b, n_block)
            else:
                b, a_output = _rescale_visited(plan, pipe.tmem, 1, b, a_output, lane_row, visit_a, n_block - 1)
        if two:
            a, a_output = _finish(plan, args, pipe, 0, a, a_output, work, lane_row)
            b, b_output = _finish(plan, args, pipe, 1, b, b_output, work, lane_row)
        else:
            b, _ = b.receive(lane_row)  # its sums, which are for the other softmax role
            a, a_output = _finish(plan, args, pipe, 0, a, a_output, work, lane_row)
        at, tiles_in = receive_tile(tiles_in)
    tma.store_wait(0)


@gluon.jit
def _rescale_visited(plan: gl.constexpr, tmem, index: gl.constexpr, tile, output, lane_row, visit, n_block):
    """``_rescale`` in the blocks that the query tile visits; in the first there is no O yet."""
    if apart(plan) or turn(plan, index) == 1:
        if visit.holds(n_block):
            tile, output = _rescale(plan, tmem, index, tile, output, lane_row, n_block != visit.stop - 1)
        return tile, output
    else:
        return _rescale(plan, tmem, index, tile, output, lane_row, n_block != visit.stop - 1)


@gluon.jit
def _rescale(plan: gl.constexpr, tmem, index: gl.constexpr, tile, output, lane_row, has_o):
    """Scales O of the blocks before by alpha, where there are any, and lets the product of the block in S tile ``index`` begin."""
    tile, alpha = tile.receive(lane_row)
    if by_turns(plan):
        row_max = alpha
        alpha = exp2_of(is_natural(plan), output.row_max - finite_or_zero(row_max))
        if has_o:
            output.ready.wait()
        output = Output(output.ready.next_if(has_o), row_max)
    o = ptx.tmem_lanes(memory.output(plan, tmem, memory.query_tile(plan, index), 0), lane_row)
    ptx.tmem_after()
    if tile.s_ready.plain:
        twins.scale_output(plan, tmem, memory.query_tile(plan, index), alpha, has_o)
    else:
        gl.inline_asm(_scale_row(plan), "r,f,r,~{memory}", [o, alpha, has_o.to(gl.int32)])
    tile.p_ready[0].arrive_tmem()
    return tile.after_values(), output


@gluon.constexpr_function
def _scale_row(plan):
    """O of one row a thread times alpha; skipped without O, and, if the plan allows, by a warp whose rows all have alpha = 1."""
    o, alpha, has_o = "$0", "$1", "$2"
    width = rescale_columns(plan)
    lines = [f"{{ .reg .pred skip, same; .reg .b64 factor, x; .reg .b32 r<{width}>;", f"setp.eq.s32 skip, {has_o}, 0;"]
    if plan.rescale_rows:
        lines += [f"setp.eq.f32 same, {alpha}, 0f3F800000;", "vote.sync.all.pred same, same, 0xffffffff;", "or.pred skip, skip, same;"]
    lines += ["@skip bra.uni scaled${:uid};", f"mov.b64 factor, {{{alpha}, {alpha}}};"]
    for first in range(0, sum(plan.head_dim_v_chunks), width):
        count = min(width, sum(plan.head_dim_v_chunks) - first)
        registers = ", ".join(f"r{i}" for i in range(count))
        lines += [f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [{o} + {first}];", "tcgen05.wait::ld.sync.aligned;"]
        for i in range(0, count, 2):
            lines += [f"mov.b64 x, {{r{i}, r{i + 1}}};", "mul.rn.ftz.f32x2 x, x, factor;", f"mov.b64 {{r{i}, r{i + 1}}}, x;"]
        lines += [f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{o} + {first}], {{{registers}}};"]
    return "\n".join([*lines, "scaled${:uid}:", "}"])


@gluon.jit
def _finish(plan: gl.constexpr, args, pipe, index: gl.constexpr, tile, output, work, lane_row):
    if plan.num_splits > 1:
        return _store_part(plan, args, pipe, index, tile, output, work, lane_row)
    else:
        return _store(plan, args, pipe, index, tile, output, work, lane_row)


@gluon.jit
def _store_part(plan: gl.constexpr, args, pipe, index: gl.constexpr, tile, output, work, lane_row):
    """Normalises O of a part of the keys and writes it in float32, see ``splits``."""
    tile, factor = tile.receive(lane_row)
    at, exists = part_rows(plan, args, work, place_of(plan, args, work, work.row + index * memory.rows(plan) + lane_row))
    output.ready.wait()
    ptx.tmem_after()
    _write_part(plan, args, memory.output(plan, pipe.tmem, index, 0), 0, factor, at, exists, lane_row, tile.s_ready.plain)
    if len(plan.head_dim_v_chunks) == 2:
        o = memory.output(plan, pipe.tmem, index, 1)
        _write_part(plan, args, o, plan.head_dim_v_chunks[0], factor, at, exists, lane_row, tile.s_ready.plain)
    if plan.o_over_q:
        pipe.q.lane(index).receiver().release()
    return tile, Output(output.ready.next(), output.row_max)


@gluon.jit
def _store(plan: gl.constexpr, args, pipe, index: gl.constexpr, tile, output, work, lane_row):
    """Normalises O once, exactly, and stores it."""
    tile, factor = tile.receive(lane_row)
    slot = pipe.o.slots.index(index)
    tail = pipe.o.tails.index(index)
    tma.store_wait(_stores_since(plan))  # what this tile's buffers held is stored
    gl.barrier()
    output.ready.wait()
    ptx.tmem_after()
    _stage(plan, memory.output(plan, pipe.tmem, index, 0), slot, factor, lane_row, tile.s_ready.plain)
    if len(plan.head_dim_v_chunks) == 2:
        _stage(plan, memory.output(plan, pipe.tmem, index, 1), tail, factor, lane_row, tile.s_ready.plain)
    fence_async_shared()
    gl.barrier()
    packing.store_outputs(plan, args, work.seq, work.head, work.row + index * memory.rows(plan), slot, tail)
    if plan.o_over_q:
        tma.store_wait(0)
        gl.barrier()
        pipe.q.lane(index).receiver().release()
    return tile, Output(output.ready.next(), output.row_max)


@gluon.constexpr_function
def _stores_since(plan):
    """Stores issued since this tile's last: those of the other query tile. Of packed heads in packed sequences they may be left out."""
    return 0 if plan.varlen and plan.pack_gqa > 1 else (plan.q_stages - 1) * len(plan.head_dim_v_chunks)


@gluon.jit
def _write_part(plan: gl.constexpr, args, o, first: gl.constexpr, factor, at, exists, lane_row, plain: gl.constexpr):
    """One chunk of O times ``factor`` (rows,) from tensor memory to the parts; its columns count from ``first`` on."""
    for i in gl.static_range(o.shape[1] // STORE_COLUMNS):
        part = _columns(plan, o, i * STORE_COLUMNS, lane_row, plain)
        splits.store_columns(args.parts, at, part, factor, first + i * STORE_COLUMNS, plan.head_dim_v, exists)


@gluon.jit
def _stage(plan: gl.constexpr, o, slot, factor, lane_row, plain: gl.constexpr):
    """One chunk of O times ``factor`` (rows,) from tensor to shared memory."""
    for i in gl.static_range(o.shape[1] // STORE_COLUMNS):
        scaled = _columns(plan, o, i * STORE_COLUMNS, lane_row, plain) * factor[:, None]
        if plan.seqused and plan.pack_gqa > 1:  # rows that are not in use may be NaN, see packing
            scaled = gl.where(factor[:, None] == 0.0, 0.0, scaled)
        slot.slice(i * STORE_COLUMNS, STORE_COLUMNS, dim=1).store(scaled.to(slot.dtype))


@gluon.jit
def _columns(plan: gl.constexpr, o, first: gl.constexpr, lane_row, plain: gl.constexpr):
    """STORE_COLUMNS columns of O, complete."""
    if plain:
        return twins.load(o.slice(first, STORE_COLUMNS), row_layout(plan, STORE_COLUMNS))
    else:
        return ptx.load_row(ptx.tmem_lanes(o, lane_row) + first, tile_type(plan, STORE_COLUMNS))
