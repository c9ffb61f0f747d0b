"""Find how the tensor cores add, from recorded outputs: the model and the parameters that reproduce every bit.

    python -m tools.fit_accumulation --recorded DIR

Model (cf. Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021): the products of a group of neighbouring places along K and the
running sum are exact, are aligned to the largest exponent among them, cut to `fraction` bits below it, added exactly; the sum is cut or
rounded to the accumulator's format. Groups follow one another. Each candidate is compared with every experiment of `ptx/probes.py` and
with the random mma.sync cases, whose fragments are taken apart here.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from tests.emulator.ptx import catalog, probes
from tests.emulator.ptx.case import Case
from tests.emulator.ptx.emulate import value
from tests.emulator.ptx.inputs import FLOATS, UNSIGNED
from tools.compare_outputs import load

MANTISSA = {"f32": 23, "f16": 10}
LOWEST = {"f32": -126, "f16": -14}


@dataclass(frozen=True)
class Model:
    """group: places along K added at once. fraction: bits kept below the largest exponent. cut: how a term loses its lower bits.

    final: how the sum becomes the accumulator's format. product_exponent: "sum" of the factors' exponents, or that of the "value".
    joint: C is aligned with the first group (else added to the group's own sum afterwards). mantissa: bits that the sum keeps, 0 for all
    that the accumulator's format has.
    """

    group: int
    fraction: int
    cut: str = "zero"
    final: str = "zero"
    product_exponent: str = "sum"
    joint: bool = True
    mantissa: int = 0


def exponent_of(x: np.ndarray) -> np.ndarray:
    """floor(log2 |x|), very low for zero."""
    return np.where(x == 0, -10000, np.frexp(x)[1] - 1)


def quantise(x: np.ndarray, exponent: np.ndarray, mode: str) -> np.ndarray:
    """x to a multiple of 2^exponent."""
    scaled = np.ldexp(x, -np.maximum(exponent, -1000))
    rounded = {"zero": np.trunc, "down": np.floor, "even": np.rint}[mode](scaled)
    return np.ldexp(rounded, np.maximum(exponent, -1000))


def to_format(x: np.ndarray, acc: str, mode: str, mantissa: int) -> np.ndarray:
    step = np.maximum(exponent_of(x), LOWEST[acc]) - (mantissa or MANTISSA[acc])
    return quantise(x, step, mode)


def align_and_add(terms: np.ndarray, exponents: np.ndarray, model: Model) -> np.ndarray:
    """Sum over the last axis after cutting every term at the largest exponent less `fraction`."""
    cut_at = exponents.max(-1, keepdims=True) - model.fraction
    return quantise(terms, np.broadcast_to(cut_at, terms.shape), model.cut).sum(-1)


def predict(a: np.ndarray, b: np.ndarray, c: np.ndarray, model: Model, acc: str, floor: tuple[int, int]) -> np.ndarray:
    """a, b (n, K) factors, c (n,): D. floor: exponent of the formats' smallest normal, which subnormal factors share."""
    products = a * b
    if model.product_exponent == "sum":
        exponents = np.maximum(exponent_of(a), floor[0]) + np.maximum(exponent_of(b), floor[1])
        exponents = np.where(products == 0, -10000, exponents)
    else:
        exponents = exponent_of(products)
    total = c
    for start in range(0, a.shape[1], model.group):
        part = slice(start, start + model.group)
        if model.joint:
            terms = np.concatenate([products[:, part], total[:, None]], axis=1)
            powers = np.concatenate([exponents[:, part], exponent_of(total)[:, None]], axis=1)
            total = align_and_add(terms, powers, model)
        else:
            total = total + align_and_add(products[:, part], exponents[:, part], model)
        total = to_format(total, acc, model.final, model.mantissa)
    return total


@dataclass(frozen=True)
class Experiments:
    """Rows of factors with C and the hardware's D, as fp64."""

    name: str
    fmt: tuple[str, str]
    acc: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray

    def usable(self) -> np.ndarray:
        return np.isfinite(self.d) & np.isfinite(self.a).all(1) & np.isfinite(self.b).all(1) & np.isfinite(self.c)


def lowest(fmt: str) -> int:
    return 2 - (1 << (FLOATS[probes.STORAGE.get(fmt, fmt)][0] - 1))


def from_probe(case: Case, output: np.ndarray) -> Experiments:
    """mma or wgmma probe: every column of D is the same."""
    acc, fmt = case.name.rsplit(".", 4)[-4:][:2] if "mma.sync" in case.name else case.name.rsplit(".", 3)[-3:][:2]
    a, c = probes.experiments(fmt)
    with np.errstate(over="ignore"):
        c = c.astype({"f32": np.float32, "f16": np.float16}[acc]).astype(np.float64)
    d = value(output.view(UNSIGNED[32 if acc == "f32" else 16]), acc).reshape(-1, 32, 2, 2)  # warp, lane, row half, column
    rows = d[:, ::4, :, 0].transpose(0, 2, 1).reshape(-1)
    return Experiments(case.name, (fmt, fmt), acc, a, np.ones_like(a), c, rows)


def from_mma(case: Case, output: np.ndarray) -> Experiments:
    """A random m16n8 mma.sync case: fragments back into matrices, one experiment per element of D."""
    parts = case.name.split()[0].split(".")
    k = int(parts[3].split("k")[1])
    acc, fmt_a, fmt_b = parts[6], parts[7], parts[8]
    buffers = case.make_buffers()
    rows = rows_of_a(buffers["in_a"], fmt_a, k)
    b = decode(buffers["in_b"], fmt_b).reshape(-1, 32, k * 8 // 32)
    per_word = words_per_register(fmt_b)
    lane = np.arange(32)
    columns = np.zeros((len(b), 8, k))
    for register in range(b.shape[2] // per_word):
        for e in range(per_word):
            columns[:, lane // 4, 4 * per_word * register + (lane % 4) * per_word + e] = b[:, :, register * per_word + e]
    return pair_up(case.name, (fmt_a, fmt_b), acc, rows, columns, buffers["in_c"], output)


def from_wgmma(case: Case, output: np.ndarray) -> Experiments:
    """A random wgmma case with A from registers and B K-major with the 128-byte swizzle."""
    parts = case.name.split()[0].split(".")
    n, k = (int(x) for x in parts[4].removeprefix("m64n").split("k"))
    acc, fmt_a, fmt_b = parts[5:8]
    buffers = case.make_buffers()
    rows = rows_of_a(buffers["in_a"], fmt_a, k)
    place = np.arange(n)[:, None] * 128 + np.arange(32)[None, :]  # 32 bytes of K in each 128-byte row
    place ^= (np.arange(n)[:, None] % 8) << 4
    columns = decode(buffers["in_b"][place].reshape(-1), fmt_b).reshape(1, n, k)
    return pair_up(case.name, (fmt_a, fmt_b), acc, rows, np.broadcast_to(columns, (4, n, k)), buffers["in_c"], output)


def words_per_register(fmt: str) -> int:
    return 32 // (1 + sum(FLOATS[probes.STORAGE.get(fmt, fmt)]))


def rows_of_a(data: np.ndarray, fmt: str, k: int) -> np.ndarray:
    """A fragments -> (warps, 16 rows, k)."""
    a = decode(data, fmt).reshape(-1, 32, k // 2)
    per_word = words_per_register(fmt)
    lane = np.arange(32)
    rows = np.zeros((len(a), 16, k))
    for register in range(a.shape[2] // per_word):
        for e in range(per_word):
            place = 4 * per_word * (register // 2) + (lane % 4) * per_word + e
            rows[:, lane // 4 + 8 * (register % 2), place] = a[:, :, register * per_word + e]
    return rows


def pair_up(
    name: str, fmt: tuple[str, str], acc: str, rows: np.ndarray, columns: np.ndarray, in_c: np.ndarray, output: np.ndarray
) -> Experiments:
    """rows (warps, 16, k) against columns (warps, n, k)."""
    n, k = columns.shape[1:]
    shape = (len(rows), 16, n, k)
    left = np.broadcast_to(rows[:, :, None, :], shape).reshape(-1, k)
    right = np.broadcast_to(columns[:, None, :, :], shape).reshape(-1, k)
    return Experiments(name, fmt, acc, left, right, accumulator(in_c, acc, n), accumulator(output, acc, n))


def accumulator(data: np.ndarray, acc: str, n: int) -> np.ndarray:
    """C or D fragments -> elements in row-major order of each warp's 16 x n tile."""
    values = value(data.view(UNSIGNED[32 if acc == "f32" else 16]), acc).reshape(-1, 32, n // 8, 2, 2)
    tile = np.zeros((len(values), 16, n))
    lane = np.arange(32)
    for block, half, column in product(range(n // 8), range(2), range(2)):
        tile[:, lane // 4 + 8 * half, 8 * block + 2 * (lane % 4) + column] = values[:, :, block, half, column]
    return tile.reshape(-1)


def decode(data: np.ndarray, fmt: str) -> np.ndarray:
    """Operand bits -> fp64; tf32 reads the upper 19 bits of a 32-bit word; e4m3 has no infinities."""
    storage = probes.STORAGE.get(fmt, fmt)
    bits = data.view(UNSIGNED[1 + sum(FLOATS[storage])])
    if fmt == "tf32":
        bits = bits & np.uint32(0xFFFFE000)
    if fmt == "e4m3":
        wide = bits.astype(np.uint16)  # the same value as an E5M3 float, whose top exponent is not reserved here
        field, fraction = (wide >> 3) & 15, (wide & 7).astype(np.float64) / 8
        magnitude = np.ldexp(np.where(field > 0, 1 + fraction, fraction), np.maximum(field, 1).astype(int) - 7)
        magnitude = np.where((wide & 127) == 127, np.nan, magnitude)
        return np.where(wide >> 7, -magnitude, magnitude)
    return value(bits, storage)


def candidates(k: int) -> Iterator[Model]:
    groups = sorted({g for g in (k, k // 2, k // 4, 4) if g >= 2}, reverse=True)
    for group, fraction, cut, final in product(groups, range(10, 32), ("zero", "down"), ("zero", "even")):
        for exponent, joint in product(("sum", "value"), (True, False)):
            yield Model(group, fraction, cut, final, exponent, joint)
            if k == 32:  # fp8
                yield Model(group, fraction, cut, final, exponent, joint, fraction)


def fit(sets: list[Experiments], show: int) -> None:
    scores: list[tuple[float, Model, list[float]]] = []
    for model in candidates(sets[0].a.shape[1]):
        shares = []
        for e in sets:
            use = e.usable()
            d = predict(e.a[use], e.b[use], e.c[use], model, e.acc, (lowest(e.fmt[0]), lowest(e.fmt[1])))
            shares.append(float((d == e.d[use]).mean()))
        scores.append((min(shares), model, shares))
    scores.sort(key=lambda s: -s[0])
    print("; ".join(f"{e.name} ({int(e.usable().sum())})" for e in sets))
    for _, model, shares in scores[:show]:
        print("   ", " ".join(f"{share:.5f}" for share in shares), model)


def companions(probe: Case) -> list[Case]:
    """Random cases of the probe's own form (any N), without special values, repetition or scales."""
    form = probe.name.removeprefix("probe ")
    if "mma.sync" in form:
        return [c for c in catalog.cases("matrix") if c.name.split()[0] == form and "special" not in c.name]
    tail = form.split("k", 1)[1]
    found = [c for c in catalog.cases("wgmma") if c.name.split()[0].split("k", 1)[1] == tail and "A=registers B=k128" in c.name]
    return [c for c in found if "special" not in c.name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, required=True)
    parser.add_argument("--show", type=int, default=5)
    options = parser.parse_args()
    _, outputs = load(options.recorded)
    for case in catalog.cases("probes"):
        if case.name not in outputs:
            continue
        sets = [from_probe(case, outputs[case.name])]
        for other in companions(case):
            if other.name in outputs:
                read = from_mma if other.family == "matrix" else from_wgmma
                sets.append(read(other, outputs[other.name]))
        fit(sets, options.show)


if __name__ == "__main__":
    main()
