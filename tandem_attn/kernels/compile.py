"""From a Plan to a compiled kernel: Gluon to cubin, cached in memory and on disk.

The key is what the code depends on: the plan without what is passed at run time, the versions of Triton and of this package's sources.
Compiling needs no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tandem_attn.kernels import cache, extras
from tandem_attn.kernels.translate import BARRIERS, BINARY, FENCES, no_collection, translated
from tandem_attn.spec.arch import get_arch
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.resources import WARPGROUP, warpgroup_registers

TRITON = "3.9"  # Gluon's API changes between minor releases
# By major compute capability: the module whose ``forward`` is the kernel.
ENTRIES = {9: "tandem_attn.kernels.sm90.forward", 10: "tandem_attn.kernels.sm100.forward"}
_LEAST_SWIZZLE = 32  # bytes a row; narrower tiles are not swizzled (PTX ISA, tensor swizzling modes)
_ELEMENTS = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "float16": "fp16", "bfloat16": "bf16"}  # in Triton's notation
CODES = {"*": "Q", "i32": "i", "i64": "q", "fp32": "f"}  # of ``struct``, by Triton's notation; every pointer has the first


@dataclass(frozen=True)
class Helper:
    """A small kernel in plain Triton, launched before or after a forward. Arguments are pointers, then numbers."""

    arch: str
    module: str
    entry: str
    types: tuple[tuple[str, str], ...]  # name and type, in Triton's notation, of each argument
    constants: tuple[tuple[str, int], ...]  # behind them
    warps: int = 4


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and what a launch must know. Its arguments are TMA descriptors, then pointers, numbers, and ``extras``."""

    plan: Plan | Helper
    name: str
    cubin: bytes
    ptx: str
    shared_bytes: int
    threads: int  # of a CTA
    ctas: int  # of a cluster
    descriptors: tuple[tuple[int, tuple[int, ...]], ...]  # CUtensorMapSwizzle and box of each, outermost dimension first
    codes: str  # of ``struct``, one for each pointer, number and extra: their types
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


def is_cached(plan: Plan) -> bool:
    """Whether the plan's kernel is on disk."""
    return cache.contains(_key(code_plan(plan), False, False))


def code_plan(plan: Plan) -> Plan:
    """The plan without what does not change the code: plans that share a kernel become equal."""
    return replace(
        plan, smem=(), schedule=replace(plan.schedule, section=0), return_lse=False, deterministic=False,
        num_splits=min(plan.num_splits, 2), page_size=min(plan.page_size, 1),
    )  # fmt: skip


def through_disk(plan: Plan) -> Kernel:
    """``compiled``, but for kernels that are in memory only: this one is on disk afterwards."""
    return _load.__wrapped__(code_plan(plan), False, False)


@functools.lru_cache(maxsize=1024)
def _load(plan: Plan, plain: bool, consan: bool) -> Kernel:
    return _cached((plan, plain, consan), plan, lambda: build(plan, plain=plain, consan=consan))


@functools.lru_cache(maxsize=256)
def compiled_helper(helper: Helper) -> Kernel:
    """A helper's kernel, from memory, from disk, or compiled now."""
    return _cached((helper,), helper, lambda: _build_helper(helper))


def _cached(key: tuple[Any, ...], source: Plan | Helper, make: Callable[[], Kernel]) -> Kernel:
    return _decode(cache.fetch(_key(*key), lambda: _encode(make())), source)


@no_collection()
def build(plan: Plan, *, plain: bool = False, consan: bool = False) -> Kernel:
    """Compiles without any cache of ours."""
    _triton()
    from triton.experimental.gluon._runtime import GluonASTSource

    entry = importlib.import_module(ENTRIES[(get_arch(plan.arch).capability or (0, 0))[0]]).forward
    constants = {"plan": plan, "plain": plain}
    types = {name: _type(name, plan) for name in entry.arg_names if name not in constants}
    signature = {name: types.get(name, "constexpr") for name in entry.arg_names}
    source = GluonASTSource(entry, signature, {(entry.arg_names.index(name),): value for name, value in constants.items()})
    options: dict[str, Any] = {"num_warps": WARPGROUP, "num_ctas": plan.cta_group, "maxnreg": entry_registers(plan)}
    options |= {"enable_fp_fusion": True} | ({"instrumentation_mode": "consan"} if consan else {})
    needless = () if plain or consan else needless_passes(plan)
    return _kernel(plan, *translated(source, _capability(plan.arch), options, needless, reg_alloc=consan), types.values())


def needless_passes(plan: Plan) -> tuple[str, ...]:
    """Passes of Triton's that find all their work done in a kernel's sources, where nothing needs scratch memory."""
    return BARRIERS if plan.cta_group == 1 else FENCES


@no_collection()
def _build_helper(helper: Helper) -> Kernel:
    _triton()
    from triton.compiler import ASTSource

    entry = getattr(importlib.import_module(helper.module), helper.entry)
    types, constants = dict(helper.types), dict(helper.constants)
    source = ASTSource(entry, types | dict.fromkeys(constants, "constexpr"), dict(constants))
    options = {"num_warps": helper.warps, "enable_fp_fusion": True}
    return _kernel(helper, *translated(source, _capability(helper.arch), options), types.values())


def _kernel(source: Plan | Helper, made: dict[str, Any], meta: dict[str, Any], types: Iterable[str | tuple[str, ...]]) -> Kernel:
    flat = [kind for each in types for kind in ((each,) if isinstance(each, str) else each) if not kind.startswith("tensordesc")]
    return Kernel(
        source, meta["name"], made["cubin"], made["ptx"], meta["shared"], meta["num_warps"] * 32,
        ctas=source.ctas if isinstance(source, Plan) else meta["num_ctas"],
        descriptors=tuple((each["swizzle"], tuple(each["block_size"])) for each in meta.get("tensordesc_meta") or ()),
        codes="".join(CODES["*" if kind.startswith("*") else kind] for kind in flat),
        scratch_bytes=(meta["global_scratch_size"], meta["profile_scratch_size"]),
    )  # fmt: skip


def _capability(arch: str) -> int:
    major, minor = get_arch(arch).capability or (0, 0)
    return major * 10 + minor


def entry_registers(plan: Plan) -> int:
    """Registers a thread is launched with; the roles then share out the sum (PTX ISA, setmaxnreg)."""
    budgets = warpgroup_registers(plan.roles)
    return sum(budgets) // len(budgets) // 8 * 8


def _type(name: str, plan: Plan) -> str | tuple[str, ...]:
    """Type of a kernel argument in Triton's notation, by its name."""
    if name in extras.NAMES:
        return extras.types(name, plan)
    if name.endswith(("_desc", "_tail")):
        return _descriptor_type(name[0], name.endswith("_tail"), plan)
    pointers = {"lse": "*fp32", "sink": "*fp32", "slopes": "*fp32"}
    pointers |= dict.fromkeys(("counter", "cu_q", "cu_k", "used_q", "used_k", "order", "starts"), "*i32")
    return pointers.get(name) or ("fp32" if name in ("scale_log2", "softcap") else "i32")


def _descriptor_type(tensor: str, tail: bool, plan: Plan) -> str:
    from triton.experimental.gluon import language as gl

    box = box_shape(tensor, tail, plan)
    name = plan.out_dtype if tensor == "o" else plan.dtype
    dtype, element = _ELEMENTS[name], gl.dtype(_ELEMENTS[name])
    split, columns = [], box[-1]
    if plan.cta_group == 2:  # each CTA of a pair holds half the rows (or packed queries) of q, k and o, and half the columns of v
        dim = len(box) - (1 if tensor == "v" else 2 if tensor == "k" or plan.pack_gqa == 1 else 3)
        split = [[int(i == dim) for i in range(len(box))]]
        columns = columns // 2 if tensor == "v" else columns
    if plan.pack_gqa > 1 or plan.page_rows:  # swizzled as the whole tile, of which the box's last two dimensions are a part
        row_bytes = columns * element.primitive_bitwidth // 8
        swizzle = min(row_bytes, 128) if row_bytes >= _LEAST_SWIZZLE else 0
        layout = gl.NVMMASharedLayout(swizzle, element.primitive_bitwidth, len(box), cga_layout=split)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(box, element, cga_layout=split)
    return f"tensordesc<{dtype}{box},{layout!r}>"


def box_shape(tensor: str, tail: bool, plan: Plan) -> list[int]:
    """Shape of one TMA copy of q, k, v or o, see ``kernels.common.copies``."""
    chunks = plan.head_dim_chunks if tensor in "qk" else plan.head_dim_v_chunks
    if tensor in "kv":
        rows = [plan.page_rows or plan.tile_n]
    else:
        rows = [plan.tile_m * plan.cta_group]
        if plan.pack_gqa > 1:
            rows = [rows[0] // plan.pack_rows, plan.pack_rows]
    columns = chunks[-1] if tail else chunks[0]
    if tensor in "kv" and 0 < plan.page_rows < plan.tile_n:  # see kernels.common.paging
        columns = min(columns, 128 // plan.element_bytes)
    return [1] * leading_dims(tensor, plan) + [*rows, columns]


def leading_dims(tensor: str, plan: Plan) -> int:
    """Dimensions of a descriptor before rows and head_dim: (batch, heads); (END, start, heads), see ``kernels.common.copies``; of packed
    heads (batch, groups) or of packed sequences too (groups,) of q and (start, groups) of o, see ``kernels.common.packing``."""
    if tensor in "kv" and plan.page_size:
        return 3
    if plan.varlen and plan.pack_gqa > 1 and tensor in "qo":
        return 1 if tensor == "q" else 2
    if plan.varlen:
        return 3
    return 3 if plan.seqused and tensor != "o" and (tensor != "q" or plan.pack_gqa == 1) else 2


def _key(*parts: Any) -> str:
    text = repr((*parts, triton_version(), _sources()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """Digest of the sources that decide the code: device code lies in folders, host code beside this file."""
    root = Path(__file__).parent
    spec = (root.parent / "spec" / f"{name}.py" for name in ("exp2", "mask_tree", "plan"))
    files = [Path(__file__), root / "translate.py", root / "extras.py", *sorted(root.glob("*/*.py")), *spec]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _encode(kernel: Kernel) -> bytes:
    """A line of JSON with everything short and the sizes of what follows, then cubin and PTX."""
    ptx = kernel.ptx.encode()
    short = {field.name: getattr(kernel, field.name) for field in fields(kernel) if field.name not in ("plan", *BINARY)}
    return json.dumps({**short, "cubin": len(kernel.cubin), "ptx": len(ptx)}).encode() + b"\n" + kernel.cubin + ptx


def _decode(stored: bytes, source: Plan | Helper) -> Kernel:
    line = stored.index(b"\n")
    short: dict[str, Any] = json.loads(stored[:line])
    cubin = stored[line + 1 : line + 1 + short["cubin"]]
    descriptors = tuple((swizzle, tuple(box)) for swizzle, box in short["descriptors"])
    others = {"ptx": stored[line + 1 + len(cubin) :].decode(), "descriptors": descriptors, "scratch_bytes": tuple(short["scratch_bytes"])}
    return Kernel(source, **{**short, "cubin": cubin, **others})


def triton_version() -> str:
    """Of the Triton that would compile; found without importing it, which takes longer than to load a kernel.

    Raises:
        ImportError: see ``_triton``.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("triton")
        if version.startswith(TRITON + "."):
            return version
    return str(_triton().__version__)


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
