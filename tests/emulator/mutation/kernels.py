"""The kernels that are mutated, at sizes that visit every role, stage and phase."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tandem_attn.emulator.judge.checks import CHECKS
from tests.emulator.subjects import nvcc, plain_triton
from tests.emulator.subjects.forward_sm100 import forward_sm100
from tests.emulator.subjects.gemm_sm90 import gemm_sm90
from tests.emulator.subjects.gemm_sm100 import CLUSTERS, gemm_sm100
from tests.emulator.subjects.subject import Subject


@dataclass(frozen=True)
class Argued:
    """An argument by hand that mutants are equivalent: those of this kind whose source (``mutants.source_of``) has these texts."""

    what: str
    texts: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Kernel:
    """`make` gives a compiled kernel with fresh tensors, `others` the same one for other launches; slow ones run when named.

    `checks` is passed to `tandem_attn.emulator.run`. A mutant must show in one of the launches, or be equivalent in all of them.
    """

    name: str
    make: Callable[[], Subject]
    checks: str | Iterable[str] = "all"
    slow: bool = False
    others: tuple[Callable[[], Subject], ...] = ()
    argued: tuple[Argued, ...] = ()

    @property
    def launches(self) -> tuple[Callable[[], Subject], ...]:
        return (self.make, *self.others)


_STRICT = CHECKS - {"uninitialised-register", "register-pressure"}  # with those that Triton's own kernels do not pass
_SIZES = {"one": (256, 256, 256), "pair": (512, 256, 256), "multicast": (512, 256, 256), "quad": (512, 512, 256)}


# Both hold for every problem, by how the roles follow each other.
_FORWARD_ARGUED = (
    Argued(
        "wait deleted",
        ("acquire(", "load.py: q_out = packing.load_queries(plan, args, seq, work.head, work.row + memory.rows(plan), q_out)"),
        "both slots of Q are freed by commits that mma issues one after the other, behind its last product with either, and load has "
        "waited for the first slot before it comes to the second",
    ),
    Argued(
        "barrier deleted",
        ("scheduler.py: tiles_in.release()", "mma.py: at, tiles_in = receive_tile("),
        "a message's slot is written again when load has loaded the Q of the tile behind, for which it waits for commits of mma's that "
        "follow mma's reading of the message, and a barrier of its warp at the wait for Q",
    ),
)


def _forward(name: str, ctas: int) -> Kernel:
    """Also with maxima that grow, so that O is rescaled, and more tiles than the tile channel has slots; and with one block a tile, so
    that no wait within a tile orders two tiles."""
    make = partial(forward_sm100, cta_group=ctas)
    others = (partial(make, seqlen_q=200 * ctas, heads=3, spread=6.0), partial(make, seqlen_k=100, heads=4))
    return Kernel(name, make, _STRICT, slow=True, others=others, argued=_FORWARD_ARGUED)


_TURNS_ARGUED = (
    Argued(
        "barrier deleted",
        ("stats_free.arrive()", "correction.py: b, _ = b.receive("),
        "softmax 1 writes there again behind the first maxima of the next tile, which softmax 0 sends when correction has released the "
        "factor, with a barrier of its warp",
    ),
    Argued(
        "barrier deleted",
        ("stats_free.arrive()", "softmax.py: other, theirs = other.receive("),
        "the sums that softmax 0 receives: softmax 1 writes there again behind the first maxima of the next tile, which softmax 0 sends, "
        "with a barrier of its warp",
    ),
    Argued(
        "barrier deleted",
        ("stats_free.arrive()", "softmax.py: state, other = _received_max("),
        "the maxima that softmax 1 receives: softmax 0 writes there again when it has received what softmax 1 sends next, maxima or sums, "
        "with a barrier of its warp (softmax 0's own receptions have no such successor, and each of those mutants shows)",
    ),
)


def _turns() -> Kernel:
    """One query tile, its key blocks in turns: an even number; even and odd ones with maxima that grow; one, so that a role has none."""
    make = partial(forward_sm100, cta_group=1, q_stages=1, seqlen_q=100, seqlen_k=400)
    others = (partial(make, seqlen_q=200, seqlen_k=300, heads=3, spread=6.0), partial(make, seqlen_k=100, heads=4))
    return Kernel("forward_sm100 turns", make, _STRICT, slow=True, others=others, argued=_FORWARD_ARGUED + _TURNS_ARGUED)


_ALL = (
    Kernel("gemm_sm90", partial(gemm_sm90, 256, 256, 256, ctas=1)),
    *(Kernel(f"gemm_sm100 {name}", partial(gemm_sm100, *_SIZES[name], name, programs=1)) for name in CLUSTERS),
    _forward("forward_sm100", 1),
    _forward("forward_sm100 pair", 2),
    _turns(),
    Kernel("matmul", partial(plain_triton.matmul, 64, 64, 72)),
    Kernel("softmax", plain_triton.softmax),
    Kernel("layer_norm", plain_triton.layer_norm),
    Kernel("block_sum", partial(nvcc.block_sum, use_nvcc=False)),
)
KERNELS = {kernel.name: kernel for kernel in _ALL}
