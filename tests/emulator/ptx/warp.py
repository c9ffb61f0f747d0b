"""Exchange and agreement among the lanes of a warp: shfl, vote, match, redux, elect, activemask, and divergence around them."""

from collections.abc import Iterator

from tests.emulator.ptx.case import Case
from tests.emulator.ptx.elementwise import elementwise

FAMILY = "warp"
ALL = "0xffffffff"

LANE = ".reg .b32 %lane, %mask; .reg .pred %low; mov.u32 %lane, %laneid; setp.lt.u32 %low, %lane, 8; "


def one(name: str, body: str, ins: str, outs: str) -> Case:
    return elementwise(name, FAMILY, f"{name.split('.', maxsplit=1)[0]}.sync", body, ins, outs)


def split(low: str, high: str) -> str:
    """Lanes 0-7 run `low`, the others `high`."""
    return f"{LANE}@%low bra LOW; {high} bra.uni JOIN; LOW: {low} JOIN:"


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
    yield one("shfl.sync.idx.b32 register mask", f"mov.b32 %c, {ALL}; shfl.sync.idx.b32 %x|%y, %a, %b, 31, %c;", "u32 lane u32", "u32 pred")


def votes() -> Iterator[Case]:
    uniform = "shr.u32 %b, %t, 5; and.b32 %b, %b, 1; setp.ne.b32 %a, %b, 0; "  # the same in a warp: one warp in two agrees
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
        few = f"and.b{width} %a, %a, 3; "
        yield one(f"match.any.sync.b{width}", f"{few}match.any.sync.b{width} %x, %a, {ALL};", f"u{width}", "u32")
        yield one(f"match.all.sync.b{width}", f"{few}match.all.sync.b{width} %x|%y, %a, {ALL};", f"u{width}", "u32 pred")
        same = f"cvt.u64.u32 %at, %cta; cvt.u{width}.u64 %a, %at; "
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
    loop = ".reg .pred %p; mov.b32 %x, 0; and.b32 %b, %a, 15; AGAIN: mad.lo.u32 %x, %x, 3, %b; setp.gt.u32 %p, %b, 0; "
    yield one("bra.loop", f"{loop}@%p add.u32 %b, %b, -1; @%p bra AGAIN;", "u32 u32", "u32")
    nested = (
        ".reg .pred %p, %q; mov.b32 %x, 0; and.b32 %b, %a, 7; OUTER: and.b32 %c, %b, 3; INNER: add.u32 %x, %x, %c; "
        "setp.eq.u32 %q, %x, 9; @%q bra OUT; add.s32 %c, %c, -1; setp.ge.s32 %p, %c, 0; @%p bra INNER; "
        "add.s32 %b, %b, -1; setp.ge.s32 %p, %b, 0; @%p bra OUTER; OUT: shfl.sync.bfly.b32 %y, %x, 1, 31, 0xffffffff;"
    )
    yield one("bra.nested break", nested, "u32 u32 u32", "u32 u32")
    table = (
        "and.b32 %b, %a, 3; TABLE: .branchtargets A, B, C, D; brx.idx %b, TABLE; A: mov.b32 %x, 10; bra.uni E; "
        "B: mov.b32 %x, 20; bra.uni E; C: mov.b32 %x, 30; D: add.u32 %x, %a, 40; E:"
    )
    yield one("brx.idx", table, "u32 u32", "u32")
    scopes = "mov.b32 %x, %a; { .reg .b32 %q; mov.b32 %q, 5; { .reg .b32 %q; mov.b32 %q, 6; add.u32 %x, %x, %q; } add.u32 %x, %x, %q; }"
    yield one("scopes.nested", scopes, "u32", "u32")
    yield one("bar.warp", f"bar.warp.sync {ALL}; mov.b32 %x, %a;", "u32", "u32")
    yield one("nanosleep.u32", "nanosleep.u32 20; mov.b32 %x, %a;", "u32", "u32")
    yield one("griddepcontrol", "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 %x, %a;", "u32", "u32")


def cases() -> Iterator[Case]:
    for group in (shuffles, votes, matches, reductions, control):
        yield from group()
