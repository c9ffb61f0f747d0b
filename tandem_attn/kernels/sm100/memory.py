"""Tensor memory of a CTA by the names of the Plan, as the descriptors that MMA, softmax and correction use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory

from tandem_attn.kernels.common.channel import cluster_split

LANES = 128  # of one CTA


@gluon.constexpr_function
def rows(plan):
    """Of one query tile, in all CTAs that compute it together."""
    return LANES * plan.cta_group


@gluon.constexpr_function
def offset(plan, name):
    """First 32-bit column of a region."""
    return next(region.offset for region in plan.tmem if region.name == name)


@gluon.constexpr_function
def columns(plan):
    """What is allocated: a power of two from 32 on (PTX ISA, tcgen05.alloc)."""
    return max(32, 1 << (plan.tmem_columns - 1).bit_length())


@gluon.constexpr_function
def layout(plan, width):
    split = [list(basis) for basis in cluster_split(plan, 0)]
    return TensorMemoryLayout((LANES, width), col_stride=1, cga_layout=split, two_ctas=plan.cta_group == 2)


@gluon.jit
def allocate(plan: gl.constexpr):
    return allocate_tensor_memory(gl.float32, [rows(plan), columns(plan)], layout(plan, 128))


@gluon.constexpr_function
def by_turns(plan):
    """Whether both S tiles belong to one query tile, whose key blocks then go to the two softmax roles in turns."""
    return plan.q_stages == 1


@gluon.constexpr_function
def query_tile(plan, index):
    """The query tile that S tile ``index`` belongs to."""
    return 0 if by_turns(plan) else index


@gluon.jit
def scores(plan: gl.constexpr, tmem, index: gl.constexpr):
    """S tile ``index``, float32 (rows, tile_n)."""
    return _view(plan, tmem, offset(plan, _name("S", index)), plan.tile_n)


@gluon.jit
def weights(plan: gl.constexpr, tmem, index: gl.constexpr, dtype: gl.constexpr):
    """P, 16 or 8 bits an element, (rows, tile_n), over the end of its S."""
    a_column: gl.constexpr = 4 // plan.element_bytes
    wide: gl.constexpr = a_column * plan.tile_n
    first: gl.constexpr = a_column * (offset(plan, "P0") - offset(plan, "S0"))
    place = scores(plan, tmem, index)
    return place.reinterpret(dtype, [rows(plan), wide], layout(plan, wide)).slice(first, plan.tile_n)


@gluon.constexpr_function
def _name(letter, tile):
    return f"{letter}{tile}"


@gluon.jit
def output(plan: gl.constexpr, tmem, tile: gl.constexpr, chunk: gl.constexpr):
    """One chunk of the O of a query tile, float32 (rows, columns of the chunk)."""
    return _view(plan, tmem, offset(plan, _name("O", tile)) + _before(plan, chunk), plan.head_dim_v_chunks[chunk])


@gluon.constexpr_function
def _before(plan, chunk):
    return sum(plan.head_dim_v_chunks[:chunk])


@gluon.jit
def _view(plan: gl.constexpr, tmem, first: gl.constexpr, width: gl.constexpr):
    return tmem.slice(first, width).reinterpret(gl.float32, [rows(plan), width], layout(plan, width))
