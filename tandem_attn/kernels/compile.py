"""From a Plan to a compiled kernel: Gluon to cubin, cached in memory and on disk.

The key is what the code depends on: the plan without what is passed at run time, the versions of Triton and of this package's sources.
Compiling needs no GPU.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.resources import WARPGROUP, warpgroup_registers

TRITON = "3.9"  # Gluon's API changes between minor releases
# By major compute capability: the module whose ``forward`` is the kernel.
ENTRIES = {9: "tandem_attn.kernels.sm90.forward", 10: "tandem_attn.kernels.sm100.forward"}
CODES = {"*": "Q", "i32": "i", "fp32": "f"}  # of ``struct``, by Triton's notation; every pointer has the first


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and what a launch must know. Its arguments are TMA descriptors, then pointers, then numbers."""

    plan: Plan
    name: str
    cubin: bytes
    ptx: str
    shared_bytes: int
    threads: int  # of a CTA
    ctas: int  # of a cluster
    descriptors: tuple[tuple[int, tuple[int, ...]], ...]  # CUtensorMapSwizzle and box of each, outermost dimension first
    codes: str  # of ``struct``, one for each pointer and number: their types
    scratch_bytes: tuple[int, int]  # global memory for each CTA: the compiler's own, and instrumentation's

    @functools.cached_property
    def has_tails(self) -> bool:
        """Whether a tensor's head_dim is cut into two chunks: the second half of the descriptors is theirs."""
        half = len(self.descriptors) // 2
        return self.descriptors[:half] != self.descriptors[half:]


@functools.lru_cache(maxsize=1024)
def compiled(plan: Plan, *, plain: bool = False, consan: bool = False) -> Kernel:
    """The kernel of a plan, from memory, from disk, or compiled now.

    Args:
        plan: a forward plan of a chip that has kernels (``ENTRIES``).
        plain: use Gluon's own synchronisation throughout (slower; Triton's sanitizers understand it).
        consan: let Triton's concurrency sanitizer instrument the code; of use for the ``plain`` form only.
    """
    return _load(code_plan(plan), plain, consan)


def code_plan(plan: Plan) -> Plan:
    """The plan without what does not change the code: plans that share a kernel become equal."""
    return replace(plan, smem=(), schedule=replace(plan.schedule, section=0), return_lse=False, deterministic=False)


@functools.lru_cache(maxsize=1024)
def _load(plan: Plan, plain: bool, consan: bool) -> Kernel:
    directory = cache_dir()
    if directory is None:
        return build(plan, plain=plain, consan=consan)
    path = directory / f"{_key(plan, plain, consan)}.json"
    kernel = _read(path, plan)
    if kernel is None:
        with _locked(path.with_suffix(".lock")):  # one process compiles, the others wait here and then find the file
            kernel = _read(path, plan) or _write(path, build(plan, plain=plain, consan=consan))
    return kernel


def cache_dir() -> Path | None:
    """Where compiled kernels are kept: ``TANDEM_CACHE_DIR``, by default ``~/.cache/tandem_attn``; None when that is set but empty."""
    setting = os.environ.get("TANDEM_CACHE_DIR")
    if setting == "":
        return None
    root = Path(setting) if setting else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem_attn"
    root.mkdir(parents=True, exist_ok=True)
    return root


def build(plan: Plan, *, plain: bool = False, consan: bool = False) -> Kernel:
    """Compiles without any cache of ours."""
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    major, minor = get_arch(plan.arch).capability or (0, 0)
    entry = importlib.import_module(ENTRIES[major]).forward
    constants = {"plan": plan, "plain": plain}
    types = {name: _type(name, plan) for name in entry.arg_names if name not in constants}
    signature = {name: types.get(name, "constexpr") for name in entry.arg_names}
    source = GluonASTSource(entry, signature, {(entry.arg_names.index(name),): value for name, value in constants.items()})
    options: dict[str, Any] = {"num_warps": WARPGROUP, "num_ctas": plan.cta_group, "maxnreg": entry_registers(plan)}
    options |= {"enable_fp_fusion": True} | ({"instrumentation_mode": "consan"} if consan else {})
    out = triton.compile(source, target=GPUTarget("cuda", major * 10 + minor, 32), options=options)
    meta = out.metadata
    return Kernel(
        plan, meta.name, out.asm["cubin"], out.asm["ptx"], meta.shared, meta.num_warps * 32, meta.num_ctas,
        descriptors=tuple((each["swizzle"], tuple(each["block_size"])) for each in meta.tensordesc_meta),
        codes="".join(CODES["*" if kind.startswith("*") else kind] for kind in types.values() if not kind.startswith("tensordesc")),
        scratch_bytes=(meta.global_scratch_size, meta.profile_scratch_size),
    )  # fmt: skip


def entry_registers(plan: Plan) -> int:
    """Registers a thread is launched with; the roles then share out the sum (PTX ISA, setmaxnreg)."""
    budgets = warpgroup_registers(plan.roles)
    return sum(budgets) // len(budgets) // 8 * 8


def _type(name: str, plan: Plan) -> str:
    """Type of a kernel argument in Triton's notation, by its name."""
    if name.endswith(("_desc", "_tail")):
        return _descriptor_type(name[0], name.endswith("_tail"), plan)
    pointers = {"lse": "*fp32", "sink": "*fp32", "slopes": "*fp32"}
    pointers |= dict.fromkeys(("counter", "cu_q", "cu_k", "used_q", "used_k", "order", "starts"), "*i32")
    return pointers.get(name) or ("fp32" if name in ("scale_log2", "softcap") else "i32")


def _descriptor_type(tensor: str, tail: bool, plan: Plan) -> str:
    from triton.experimental.gluon import language as gl

    box = box_shape(tensor, tail, plan)
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[plan.dtype]
    split = []
    if plan.cta_group == 2:  # each CTA of a pair holds half the rows of q, k and o, and half the columns of v
        split = [[int(i == len(box) - (1 if tensor == "v" else 2)) for i in range(len(box))]]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16 if dtype == "bf16" else gl.float16, cga_layout=split)
    return f"tensordesc<{dtype}{box},{layout!r}>"


def box_shape(tensor: str, tail: bool, plan: Plan) -> list[int]:
    """Shape of one TMA copy of q, k, v or o, see ``kernels.common.copies``."""
    chunks = plan.head_dim_chunks if tensor in "qk" else plan.head_dim_v_chunks
    rows = plan.tile_m * plan.cta_group if tensor in "qo" else plan.tile_n
    return [1] * leading_dims(tensor, plan) + [rows, chunks[-1] if tail else chunks[0]]


def leading_dims(tensor: str, plan: Plan) -> int:
    """Dimensions of a descriptor before rows and head_dim: (batch, heads), (end, heads) or (batch, end, heads)."""
    if plan.varlen:
        return 2
    return 3 if plan.seqused and tensor != "o" else 2


def _key(plan: Plan, plain: bool, consan: bool) -> str:
    text = repr((plan, plain, consan, _triton().__version__, _sources()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """Digest of the sources that decide the code: device code lies in folders, host code beside this file."""
    root = Path(__file__).parent
    files = [Path(__file__), *sorted(root.glob("*/*.py")), root.parent / "spec" / "exp2.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _read(path: Path, plan: Plan) -> Kernel | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    stored["descriptors"] = tuple((swizzle, tuple(box)) for swizzle, box in stored["descriptors"])
    stored["scratch_bytes"] = tuple(stored["scratch_bytes"])
    stored["cubin"] = base64.b64decode(stored["cubin"])
    return Kernel(plan, **stored)


def _write(path: Path, kernel: Kernel) -> Kernel:
    stored = {field.name: getattr(kernel, field.name) for field in fields(kernel) if field.name != "plan"}
    stored["cubin"] = base64.b64encode(kernel.cubin).decode()
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(stored))
    partial.replace(path)  # atomic: readers see all or nothing
    return kernel


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _triton() -> Any:
    """Triton, of the release that these kernels are written for.

    Raises:
        ImportError: Triton is missing or of another release; the message names both.
    """
    try:
        import triton
    except ImportError as error:
        raise ImportError(f"the GPU kernels need triton {TRITON}.*, which is not installed (pip install tandem-attn[cuda])") from error
    if not triton.__version__.startswith(TRITON + "."):
        raise ImportError(f"the GPU kernels need triton {TRITON}.*, found {triton.__version__}")
    return triton


def precompile(plans: Iterable[Plan], workers: int = 1) -> list[float]:
    """Fills the disk cache; seconds each plan took. Processes compile side by side, since Triton holds the interpreter lock."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    distinct = list(dict.fromkeys(code_plan(plan) for plan in plans))
    if workers == 1:
        return [_timed(plan) for plan in distinct]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(_timed, distinct))


def _timed(plan: Plan) -> float:
    start = time.perf_counter()
    compiled(plan)
    return time.perf_counter() - start
