"""Expressions of mask predicates on the device, see ``spec.predicates`` and ``spec.mask_tree``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Site:
    """Where a block of scores lies, for predicates, and what they read."""

    batch: gl.tensor
    head: gl.tensor  # query head: one, or (M, 1)
    data: gl.tuple  # arguments, see spec.mask_tree


@gluon.jit
def evaluate(e: gl.constexpr, site, i, j):
    """The value of an expression for queries ``i`` (M, 1) and keys ``j`` (1, N); as small as its operands allow."""
    if e.kind == "b":
        return site.batch
    elif e.kind == "h":
        return site.head
    elif e.kind == "i":
        return i
    elif e.kind == "j":
        return j
    elif e.kind == "constant":
        return _constant(e.number)
    elif e.kind == "table":
        return _element(e, site, i, j)
    elif e.kind == "where":
        return gl.where(evaluate(e.args[0], site, i, j), evaluate(e.args[1], site, i, j), evaluate(e.args[2], site, i, j))
    elif len(e.args) == 1:
        return _unary(e.kind, _widened(evaluate(e.args[0], site, i, j), e.wide))
    else:
        a = _widened(evaluate(e.args[0], site, i, j), e.wide)
        b = _widened(evaluate(e.args[1], site, i, j), e.wide)
        return _binary(e.kind, a, b)


@gluon.jit
def _constant(value: gl.constexpr):
    if _is_bool(value):
        return gl.to_tensor(_as_int(value)) != 0
    else:
        return gl.to_tensor(value)


@gluon.constexpr_function
def _is_bool(value):
    return isinstance(value, bool)


@gluon.constexpr_function
def _as_int(value):
    return int(value)


@gluon.jit
def _widened(x, wide: gl.constexpr):
    if wide:
        return x.to(gl.int64)
    else:
        return x


@gluon.jit
def _element(e: gl.constexpr, site, i, j):
    """A table's element. Negative indices count from the end; what lies outside is read as 0, and no key in use needs it."""
    dims: gl.constexpr = len(e.args)
    place = gl.to_tensor(0).to(gl.int64)
    inside = gl.to_tensor(1) != 0
    for d in gl.static_range(dims):
        index = evaluate(e.args[d], site, i, j)
        size = site.data[e.at + 1 + d]
        index = gl.where(index < 0, index + size, index)
        inside = inside & (index >= 0) & (index < size)
        place = place + index.to(gl.int64) * site.data[e.at + 1 + dims + d]
    if dims == 0:
        value = gl.load(site.data[e.at])
    else:
        value = gl.load(site.data[e.at] + place, mask=inside, other=0)
    if e.element == "i1" or e.element == "u8":
        value = value.to(gl.int32) & 255  # PyTorch's booleans and unsigned bytes, loaded as signed ones
    if e.element == "i1":
        return value != 0
    elif e.element == "i8" or e.element == "i16":
        return value.to(gl.int32)
    else:
        return value


@gluon.jit
def _unary(kind: gl.constexpr, x):
    if kind == "neg":
        return -x
    elif kind == "abs":
        return gl.abs(x)
    elif x.dtype == gl.int1:
        return x == 0
    else:
        return ~x


@gluon.jit
def _binary(kind: gl.constexpr, a, b):
    if kind == "lt":
        return a < b
    elif kind == "le":
        return a <= b
    elif kind == "gt":
        return a > b
    elif kind == "ge":
        return a >= b
    elif kind == "eq":
        return a == b
    elif kind == "ne":
        return a != b
    elif kind == "and":
        return a & b
    elif kind == "or":
        return a | b
    elif kind == "xor":
        return a ^ b
    elif kind == "min":
        return gl.where((a < b) | (a != a), a, b)  # a NaN wins, as in PyTorch
    elif kind == "max":
        return gl.where((a > b) | (a != a), a, b)
    elif kind == "shl":
        return a << b
    elif kind == "shr":
        return a >> b
    elif kind == "mod":
        rest = a % b
        return rest + gl.where((rest != 0) & ((rest ^ b) < 0), b, 0)  # the hardware's has the dividend's sign
    elif kind == "floordiv":
        rest = a % b
        return a // b - ((rest != 0) & ((rest ^ b) < 0)).to(gl.int32)
    elif kind == "div" or a.dtype == gl.float32 or b.dtype == gl.float32:
        return _rounded(kind, a.to(gl.float32), b.to(gl.float32))
    elif kind == "add":
        return a + b
    elif kind == "sub":
        return a - b
    else:
        return a * b


@gluon.jit
def _rounded(kind: gl.constexpr, a, b):
    """One float32 operation, rounded by itself as PyTorch's: the compiler would fuse products and sums, and approximate quotients."""
    return gl.inline_asm_elementwise(_rounded_asm(kind), "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _rounded_asm(kind):
    return f"{kind}.rn.f32 $0, $1, $2;"
