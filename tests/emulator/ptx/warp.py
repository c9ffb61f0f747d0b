"""Exchange and agreement among the lanes of a warp: shfl, vote, match, redux, elect, activemask, and divergence around them."""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case
from tests.emulator.ptx.elementwise import elementwise

FAMILY = "warp"
ALL = "0xffffffff"

LANE = ".reg .b32 %lane, %mask;\n.reg .pred %low;\nmov.u32 %lane, %laneid;\nsetp.lt.u32 %low, %lane, 8;\n"


def one(name: str, body: str, ins: str, outs: str) -> Case:
    return elementwise(name, FAMILY, f"{name.split('.')[0]}.sync", body, ins, outs)


def split(low: str, high: str) -> str:
    """Lanes 0-7 run `low`, the others `high`."""
    return f"{LANE}@%low bra LOW;\n{high}\nbra.uni JOIN;\nLOW:\n{low}\nJOIN:"


def shuffles() -> Iterator[Case]:
    for mode in ("up", "down", "bfly", "idx"):
        clamps = ("0", "0x1800", "0x1c00") if mode == "up" else ("31", "0x181f", "0x1c1f", "0x1803")
        for clamp in clamps:
            form = f"shfl.sync.{mode}.b32"
            yield one(f"{form} clamp={clamp}", f"{form} %x|%y, %a, %b, {clamp}, {ALL};", "u32 lane", "u32 pred")
        form = f"shfl.sync.{mode}.b32"
        for distance in (1, 16, 31):
            yield one(f"{form} by {distance}", f"{form} %x, %a, {distance}, {clamps[0]}, {ALL};", "u32", "u32")
        segment = "0x1807" if mode == "down" else clamps[0]  # no lane may read one that does not take part
        body = split(f"{form} %x, %a, 1, {segment}, 0xff;", "not.b32 %x, %a;")
        yield one(f"{form} half", body, "u32", "u32")
    yield one("shfl.sync.idx.b32 register mask", f"mov.b32 %c, {ALL};\nshfl.sync.idx.b32 %x|%y, %a, %b, 31, %c;", "u32 lane u32", "u32 pred")


def votes() -> Iterator[Case]:
    uniform = "shr.u32 %b, %t, 5;\nand.b32 %b, %b, 1;\nsetp.ne.b32 %a, %b, 0;\n"  # the same in a warp: one warp in two agrees
    for mode in ("all", "any", "uni"):
        yield one(f"vote.sync.{mode}.pred", f"vote.sync.{mode}.pred %x, %a, {ALL};", "pred", "pred")
        yield one(f"vote.sync.{mode}.pred uniform", f"{uniform}vote.sync.{mode}.pred %x, %a, {ALL};", "pred u32", "pred")
        yield one(f"vote.sync.{mode}.pred negated", f"{uniform}vote.sync.{mode}.pred %x, !%a, {ALL};", "pred u32", "pred")
    yield one("vote.sync.ballot.b32", f"vote.sync.ballot.b32 %x, %a, {ALL};", "pred", "u32")
    yield one("vote.sync.ballot.b32 half", split("vote.sync.ballot.b32 %x, %a, 0xff;", "mov.b32 %x, 7;"), "pred", "u32")
    yield one("activemask.b32", split("activemask.b32 %x;", "activemask.b32 %x;"), "u32", "u32")
    yield one("elect.sync", f"elect.sync %x|%y, {ALL};", "u32", "u32 pred")
    yield one("elect.sync half", split("elect.sync %x|%y, 0xff;", "elect.sync %x|%y, 0xffffff00;"), "u32", "u32 pred")


def matches() -> Iterator[Case]:
    for width in (32, 64):
        few = f"and.b{width} %a, %a, 3;\n"
        yield one(f"match.any.sync.b{width}", f"{few}match.any.sync.b{width} %x, %a, {ALL};", f"u{width}", "u32")
        yield one(f"match.all.sync.b{width}", f"{few}match.all.sync.b{width} %x|%y, %a, {ALL};", f"u{width}", "u32 pred")
        same = f"cvt.u64.u32 %at, %cta;\ncvt.u{width}.u64 %a, %at;\n"
        yield one(f"match.all.sync.b{width} equal", f"{same}match.all.sync.b{width} %x|%y, %a, {ALL};", f"u{width}", "u32 pred")


def reductions() -> Iterator[Case]:
    for op in ("add", "min", "max"):
        for t in ("u32", "s32"):
            yield one(f"redux.sync.{op}.{t}", f"redux.sync.{op}.{t} %x, %a, {ALL};", t, t)
    for op in ("and", "or", "xor"):
        yield one(f"redux.sync.{op}.b32", f"redux.sync.{op}.b32 %x, %a, {ALL};", "u32", "u32")
    yield one("redux.sync.add.u32 half", split("redux.sync.add.u32 %x, %a, 0xff;", "redux.sync.max.u32 %x, %a, 0xffffff00;"), "u32", "u32")


def control() -> Iterator[Case]:
    """Divergent loops, indirect branches, calls, predicated returns."""
    loop = ".reg .pred %p;\nmov.b32 %x, 0;\nand.b32 %b, %a, 15;\nAGAIN:\nmad.lo.u32 %x, %x, 3, %b;\nsetp.gt.u32 %p, %b, 0;\n"
    yield one("bra.loop", f"{loop}@%p add.u32 %b, %b, -1;\n@%p bra AGAIN;", "u32 u32", "u32")
    nested = (
        ".reg .pred %p, %q;\nmov.b32 %x, 0;\nand.b32 %b, %a, 7;\nOUTER:\nand.b32 %c, %b, 3;\nINNER:\nadd.u32 %x, %x, %c;\n"
        "setp.eq.u32 %q, %x, 9;\n@%q bra OUT;\nadd.s32 %c, %c, -1;\nsetp.ge.s32 %p, %c, 0;\n@%p bra INNER;\n"
        "add.s32 %b, %b, -1;\nsetp.ge.s32 %p, %b, 0;\n@%p bra OUTER;\nOUT:\nshfl.sync.bfly.b32 %y, %x, 1, 31, 0xffffffff;"
    )
    yield one("bra.nested break", nested, "u32 u32 u32", "u32 u32")
    table = (
        "and.b32 %b, %a, 3;\nTABLE: .branchtargets A, B, C, D;\nbrx.idx %b, TABLE;\nA:\nmov.b32 %x, 10;\nbra.uni E;\n"
        "B:\nmov.b32 %x, 20;\nbra.uni E;\nC:\nmov.b32 %x, 30;\nD:\nadd.u32 %x, %a, 40;\nE:"
    )
    yield one("brx.idx", table, "u32 u32", "u32")
    scopes = "mov.b32 %x, %a;\n{\n.reg .b32 %q;\nmov.b32 %q, 5;\n{\n.reg .b32 %q;\nmov.b32 %q, 6;\nadd.u32 %x, %x, %q;\n}\nadd.u32 %x, %x, %q;\n}"
    yield one("scopes.nested", scopes, "u32", "u32")
    yield one("bar.warp", f"bar.warp.sync {ALL};\nmov.b32 %x, %a;", "u32", "u32")
    yield one("nanosleep.u32", "nanosleep.u32 20;\nmov.b32 %x, %a;", "u32", "u32")
    yield one("griddepcontrol", "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\nmov.b32 %x, %a;", "u32", "u32")


def cases() -> Iterator[Case]:
    for group in (shuffles, votes, matches, reductions, control):
        yield from group()
