"""Twins, in plain Gluon, of what the roles do to tensor and shared memory in assembly: slower, and visible to Triton's sanitizers.

Arithmetic stays in assembly (it touches registers only), so that a twin gives the same numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.sm100 import memory
from tandem_attn.kernels.sm100.weights import weights_of


@gluon.jit
def load(tmem, layout: gl.constexpr):
    """``ptx.load_row``."""
    return gl.convert_layout(tmem.load(), layout)


@gluon.jit
def write_p(plan: gl.constexpr, s, scale, row_max, sums, p_tmem, p_ready):
    """``weights.write_p``, all parts of P at once."""
    p = weights_of(plan, s, scale, -row_max)
    p_tmem.store(gl.convert_layout(p.to(p_tmem.dtype), p_tmem.get_reg_layout()))
    for part in gl.static_range(len(plan.p_parts)):
        p_ready[part].arrive_tmem()
    return sums[0] + gl.sum(p, axis=1), sums[1]


@gluon.jit
def scale_output(plan: gl.constexpr, tmem, index: gl.constexpr, alpha, has_o):
    """``correction.scale_row``, decided by all rows of the query tile together."""
    needed = has_o
    if plan.rescale_rows:
        needed = has_o & (gl.reduce_or((alpha != 1.0).to(gl.int32), 0) != 0)
    if needed:
        for chunk in gl.static_range(len(plan.head_dim_v_chunks)):
            _scale(memory.output(plan, tmem, index, chunk), alpha)


@gluon.jit
def _scale(o, alpha):
    layout: gl.constexpr = o.get_reg_layout()
    o.store(o.load(layout) * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None])
