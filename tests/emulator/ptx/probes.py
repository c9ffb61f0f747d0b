"""How the tensor cores add: crafted rows of A against a B of ones, for mma.sync and wgmma of every floating type.

Each row of A with its element of C is one experiment; D = sum of the row + C shows which bits survive. Experiments (all values powers of
two, so that the exact sum is known):
    shift       one product 2^-s beside a C of 1, and beside a product of 1: where alignment to the largest exponent cuts
    cancel      1 - 1 + 2^-s with the terms in different places: bits kept before the cancellation, and which terms are summed together
    round       C = 1 plus products that leave 1/4, 1/2, 3/4 of an ulp, of either sign: truncation or rounding, and of which kind
    many        C = 1 plus one small product in every place: whether they add up before they are cut
    random      exponents spread wide, random mantissas, every place used
"""

from collections.abc import Iterator

import numpy as np

from tests.emulator.ptx.case import Case, module
from tests.emulator.ptx.fragments import THREADS, braces, load, store, thread_index
from tests.emulator.ptx.inputs import FLOATS, Input, random_bits
from tests.emulator.ptx.wgmma import A_BYTES, Operand, copy_in, descriptor

FAMILY = "probes"
K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
STORAGE = {"tf32": "f32"}
ROWS = 64
Experiment = tuple[dict[int, float], float]  # value by place along K, and C


def smallest(fmt: str) -> int:
    """Exponent of the smallest power of two the format holds."""
    exponent, mantissa = FLOATS[STORAGE.get(fmt, fmt)]
    return max(2 - (1 << (exponent - 1)) - mantissa, -60)


def largest(fmt: str) -> int:
    return {"e4m3": 8, "e5m2": 15, "f16": 15}.get(fmt, 40)


def shift(fmt: str) -> Iterator[Experiment]:
    low = smallest(fmt)
    for s in range(min(-low, 40) + 1):
        yield {0: 2.0**-s}, 1.0
        yield {0: 2.0**-s}, -1.0
        yield {0: 1.0, 1: 2.0**-s}, 0.0
        yield {0: 1.0}, 2.0**-s
        yield {0: -1.0}, 2.0**-s
        yield {0: 1.5 * 2.0 ** (3 - s) if 3 - s > low else 2.0**low}, 2.0**3


def cancel(fmt: str) -> Iterator[Experiment]:
    k, top = K[fmt], largest(fmt)
    low = smallest(fmt)
    for s in range(min(top - low, 40) + 1):
        small = 2.0 ** (top - s)
        yield {0: 2.0**top, 1: -(2.0**top), 2: small}, 0.0
        yield {0: 2.0**top, k - 1: small}, -(2.0**top)
        yield {0: small, k - 1: -(2.0**top)}, 2.0**top
        yield {0: 2.0**top, k - 1: -(2.0**top)}, small
    for i in range(k):  # which places are aligned with which: a big pair at (i, j), a small one at every other place in turn
        for j in (i ^ 1, i ^ (k // 4), i ^ (k // 2)):
            for place in (0, k // 4, k // 2, k - 1):
                if place not in (i, j):
                    yield {i: 2.0**top, j: -(2.0**top), place: 2.0 ** (top - min(30, top - low))}, 0.0


def rounding(fmt: str) -> Iterator[Experiment]:
    low = smallest(fmt)
    for s in range(18, 30):
        for part in (1.0, 0.5, 0.75, 0.25, 1.25, 1.5):
            for sign in (1.0, -1.0):
                scale = 2.0**-s * sign
                base = 1.0
                if -s - 2 < low:  # raise everything so that the small product is representable
                    base = 2.0 ** min(low + s + 2, 100)
                    scale *= base
                yield {0: part * scale} if part != 1.25 else {0: scale, 1: 0.25 * scale}, base
                yield {0: part * scale} if part != 1.25 else {0: scale, 1: 0.25 * scale}, base * (1 + 2.0**-23)


def many(fmt: str) -> Iterator[Experiment]:
    k, low = K[fmt], smallest(fmt)
    for s in range(20, 32):
        base = 2.0 ** max(0, low + s)
        for count in (2, 4, k // 2, k):
            yield dict.fromkeys(range(count), 2.0**-s * base), base
            yield dict.fromkeys(range(k - count, k), 2.0**-s * base), base
            yield dict.fromkeys(range(0, k, k // count), -(2.0**-s) * base), base


def random(fmt: str) -> Iterator[Experiment]:
    k = K[fmt]
    exponent, mantissa = FLOATS[STORAGE.get(fmt, fmt)]
    mantissa = 10 if fmt == "tf32" else mantissa
    spread = min((1 << exponent) - 3 - mantissa, 40)
    bits = random_bits(f"probe/{fmt}", 64, 512 * (k + 1)).astype(object).reshape(512, k + 1)
    for row in bits:
        values = []
        for word in row:
            power = (word >> 40) % spread - spread // 2 + (2 if fmt == "e4m3" else 0)
            values.append((-1.0) ** (word & 1) * (1 + ((word >> 1) % (1 << mantissa)) / (1 << mantissa)) * 2.0**power)
        yield dict(enumerate(values[:k])), values[k]


def encode(fmt: str, values: np.ndarray) -> np.ndarray:
    """Exactly representable float64 values -> the format's bits."""
    exponent, mantissa = FLOATS[STORAGE.get(fmt, fmt)]
    bias = (1 << (exponent - 1)) - 1
    fraction, power = np.frexp(np.abs(values))
    power = np.maximum(power - 1, 1 - bias)  # subnormals keep the smallest exponent
    significand = np.ldexp(np.abs(values), mantissa - power)
    whole = significand.astype(np.int64)
    if not np.array_equal(whole, significand):
        worst = values[whole != significand][0]
        raise ValueError(f"{worst!r} is no {fmt} value")
    normal = whole >= 1 << mantissa
    bits = np.where(normal, ((power + bias) << mantissa) + whole - (1 << mantissa), whole)
    if (bits >> mantissa).max() >= (1 << exponent) - (fmt != "e4m3"):
        raise ValueError(f"a value is too large for {fmt}")
    bits = np.where(fraction == 0, 0, bits) | np.where(np.signbit(values), 1 << (exponent + mantissa), 0)
    return bits.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[1 + exponent + mantissa])


def experiments(fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows of A (n, K) and elements of C (n,) in fp64; n is a multiple of 64."""
    rows = [e for group in (shift, cancel, rounding, many, random) for e in group(fmt)]
    rows = [e for e in rows if all(abs(v) <= 2.0 ** largest(fmt) * 1.75 for v in e[0].values())]
    n = -(-len(rows) // ROWS) * ROWS
    a, c = np.zeros((n, K[fmt])), np.zeros(n)
    low = smallest(fmt)
    for i, (places, addend) in enumerate(rows):
        for place, value in places.items():
            a[i, place] = value
        c[i] = addend
    mantissa = 10 if fmt == "tf32" else FLOATS[fmt][1]
    # What the format cannot hold is cut to it here: an experiment then simply asks a coarser question.
    quantum = np.exp2(np.maximum(np.floor(np.log2(np.abs(a), where=a != 0, out=np.zeros_like(a))) - mantissa, low))
    return np.trunc(a / quantum) * quantum, c


def fragments_of_a(fmt: str, a: np.ndarray) -> np.ndarray:
    """(n, K) -> words (n / 16 warps, 32 lanes, 4 registers), the A fragment of m16n8 shapes and of each warp of an m64 wgmma."""
    bits = encode(fmt, a)
    per_word = 4 // bits.dtype.itemsize
    lane = np.arange(32)
    group, member = lane // 4, lane % 4
    warps = bits.reshape(-1, 16, K[fmt])
    out = np.empty((len(warps), 32, 4, per_word), bits.dtype)
    for register in range(4):
        row = group + 8 * (register % 2)
        for e in range(per_word):
            out[:, :, register, e] = warps[:, row, 4 * per_word * (register // 2) + member * per_word + e]
    return out.reshape(-1).view(np.uint32)


def fragments_of_c(acc: str, c: np.ndarray) -> np.ndarray:
    """(n,) -> the C fragment of N = 8 with the same value in a whole row."""
    group = np.arange(32) // 4
    warps = c.reshape(-1, 16)
    low, high = warps[:, group], warps[:, group + 8]
    pairs = np.stack([low, low, high, high], axis=-1)
    with np.errstate(over="ignore"):  # beyond f16 the addend is infinity, which is a question too
        return pairs.astype(np.float32 if acc == "f32" else np.float16).reshape(-1)


def ones(fmt: str, count: int) -> bytes:
    return np.full(count, encode(fmt, np.ones(1))[0]).tobytes()


def build(fmt: str, acc: str, unit: str) -> Case:
    a, c = experiments(fmt)
    words = 4 if acc == "f32" else 2
    ctas = len(a) // ROWS
    shape = f"n8k{K[fmt]}"
    body = thread_index() + load("a", 4, "in_a") + load("c", words, "in_c")
    raw_a, raw_c = fragments_of_a(fmt, a).tobytes(), fragments_of_c(acc, c).tobytes()
    element = np.dtype(encode(fmt, np.ones(1)).dtype).itemsize
    if unit == "mma.sync":
        form = f"mma.sync.aligned.m16{shape}.row.col.{acc}.{fmt}.{fmt}.{acc}"
        body += load("b", 2, "in_b") + f".reg .b32 %d<{words}>; "
        body += f"{form} {braces('d', words)}, {braces('a', 4)}, {braces('b', 2)}, {braces('c', words)}; " + store("d", words)
        raw_b, shared, prologue = ones(fmt, ctas * THREADS * 8 // element), 0, ""
    else:
        form = f"wgmma.mma_async.sync.aligned.m64{shape}.{acc}.{fmt}.{fmt}"
        body += ".reg .b32 %base; mov.u32 %base, smem; " + copy_in("in_b", A_BYTES, 2048, "COPY_B")
        body += descriptor("desc_b", A_BYTES, Operand(128)) + ".reg .pred %use; setp.eq.s32 %use, 0, 0; "
        body += "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned; "
        transpose = ", 0" if fmt in ("f16", "bf16") else ""
        body += f"{form} {braces('c', words)}, {braces('a', 4)}, %desc_b, %use, 1, 1{transpose}; "
        body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; " + store("c", words)
        raw_b, shared, prologue = ones(fmt, 2048 // element), A_BYTES + 2048, ".extern .shared .align 1024 .b8 smem[]; "
    return Case(
        name=f"probe {form}",
        family=FAMILY,
        ptx=module(body, ["out", "in_a", "in_b", "in_c"], prologue=prologue),
        inputs={"in_a": Input("raw", len(raw_a), raw_a), "in_b": Input("raw", len(raw_b), raw_b), "in_c": Input("raw", len(raw_c), raw_c)},
        out=Input("fill", len(raw_c)),
        section="accumulation order and precision are left open by the manual",
        grid=ctas,
        threads=THREADS,
        shared=shared,
    )


def cases() -> Iterator[Case]:
    for unit in ("mma.sync", "wgmma"):
        for fmt in K:
            yield build(fmt, "f32", unit)
            if fmt not in ("bf16", "tf32"):
                yield build(fmt, "f16", unit)
