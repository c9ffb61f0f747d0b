"""PTX for moving a thread's matrix fragment between global memory and registers, shared by the MMA families."""

from tests.emulator.ptx.inputs import width_of

THREADS = 128


def names(prefix: str, count: int) -> list[str]:
    return [f"%{prefix}{i}" for i in range(count)]


def braces(prefix: str, count: int) -> str:
    return "{" + ", ".join(names(prefix, count)) + "}"


def thread_index() -> str:
    """%thread: this thread's number in the grid; %at: an address to use at will."""
    return (
        ".reg .b32 %t, %cta; .reg .b64 %thread, %at; mov.u32 %t, %tid.x; mov.u32 %cta, %ctaid.x; "
        f"mad.lo.u32 %cta, %cta, {THREADS}, %t; cvt.u64.u32 %thread, %cta; "
    )


def load(prefix: str, count: int, buffer: str, bits: int = 32) -> str:
    """Registers %<prefix>0.. = the thread's `count` consecutive words of a buffer."""
    step = bits // 8
    text = f".reg .b{bits} %{prefix}<{count}>; mad.lo.u64 %at, %thread, {count * step}, %{buffer}; "
    return text + "".join(f"ld.global.b{bits} {r}, [%at+{step * i}]; " for i, r in enumerate(names(prefix, count)))


def store(prefix: str, count: int, bits: int = 32) -> str:
    step = bits // 8
    text = f"mad.lo.u64 %at, %thread, {count * step}, %out; "
    return text + "".join(f"st.global.b{bits} [%at+{step * i}], {r}; " for i, r in enumerate(names(prefix, count)))


def elements(kind: str, words: int, bits: int = 32) -> int:
    """How many elements of a kind fill so many words."""
    return words * bits // width_of(kind)
