"""Ordinary Triton kernels (no Gluon): matmul, softmax, layer norm, histogram by atomics. They compile for any target."""

import torch
import triton
import triton.language as tl

from tests.emulator.subjects.subject import Subject, compile_kernel, random_tensor, unwritten


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """C = A B with masked edges; A (M, K), B (K, N), C (M, N) contiguous."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0)
        b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + cols, mask=cols < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * columns + cols, e / tl.sum(e, 0), mask=cols < columns)


@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / columns
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    weight = tl.load(weight_ptr + cols, mask=mask)
    bias = tl.load(bias_ptr + cols, mask=mask)
    tl.store(y_ptr + row * columns + cols, (centred * rstd * weight + bias).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    """counts[x[i]] += 1 by one relaxed atomic per element."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    value = tl.load(x_ptr + i, mask=mask, other=0)
    tl.atomic_add(counts_ptr + value, 1, mask=mask, sem="relaxed")


def matmul(M: int = 96, N: int = 80, K: int = 72, dtype: torch.dtype = torch.float16, arch: int = 90, seed: int = 0) -> Subject:
    a, b, c = random_tensor((M, K), dtype, seed), random_tensor((K, N), dtype, seed + 1), unwritten((M, N), torch.float32)
    args = (a, b, c, M, N, K)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    kernel = compile_kernel(matmul_kernel, args, blocks, arch, num_warps=4)
    expected = a.double() @ b.double()
    # An fp32 operand is rounded to tf32 (10 mantissa bits, truncated at worst) before it is multiplied.
    tolerance = float((a.double().abs() @ b.double().abs()).max()) * (2**-9 if dtype == torch.float32 else 2**-20)
    return Subject(f"matmul {dtype}", kernel, args, (triton.cdiv(M, 64), triton.cdiv(N, 64), 1), c, expected, tolerance)


def softmax(rows: int = 6, columns: int = 300, arch: int = 90, seed: int = 0) -> Subject:
    x, y = random_tensor((rows, columns), torch.float32, seed), unwritten((rows, columns), torch.float32)
    args = (x, y, columns)
    kernel = compile_kernel(softmax_kernel, args, {"BLOCK": 512}, arch, num_warps=4)
    return Subject("softmax", kernel, args, (rows, 1, 1), y, x.double().softmax(-1), 1e-6)


def layer_norm(rows: int = 6, columns: int = 300, arch: int = 90, seed: int = 0) -> Subject:
    x = random_tensor((rows, columns), torch.bfloat16, seed)
    weight, bias = (random_tensor((columns,), torch.float32, seed + i) for i in (1, 2))
    y = unwritten((rows, columns), torch.float32)
    args = (x, weight, bias, y, columns, 1e-5)
    kernel = compile_kernel(layer_norm_kernel, args, {"BLOCK": 512}, arch, num_warps=4)
    expected = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    return Subject("layer_norm", kernel, args, (rows, 1, 1), y, expected, 1e-5)


def histogram(n: int = 1000, bins: int = 17, arch: int = 90, seed: int = 0) -> Subject:
    x = torch.randint(bins, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    counts = torch.zeros(bins, dtype=torch.int32)
    args = (x, counts, n)
    kernel = compile_kernel(histogram_kernel, args, {"BLOCK": 256}, arch, num_warps=4)
    return Subject("histogram", kernel, args, (triton.cdiv(n, 256), 1, 1), counts, torch.bincount(x, minlength=bins).double(), 0.0)
