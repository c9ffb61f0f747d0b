"""PTX pieces that the asynchronous-copy families share: shared memory in and out, an mbarrier, waiting."""

from tests.emulator.ptx.fragments import thread_index

SHARED = ".extern .shared .align 1024 .b8 smem[]; "


def start(arrivals: int = 1) -> str:
    """%t, %thread, %base (dynamic shared memory), %first (thread 0 of the CTA), %rank (in the cluster), %bar (initialised mbarrier)."""
    return (
        thread_index()
        + ".shared .align 8 .b64 bar; .reg .b32 %base, %bar, %rank; .reg .pred %first, %done; "
        + "mov.u32 %base, smem; mov.u32 %bar, bar; mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %first, %t, 0; "
        + f"@%first mbarrier.init.shared::cta.b64 [%bar], {arrivals}; @%first fence.mbarrier_init.release.cluster; "
    )


def map_address(number: int = 0) -> str:
    """%map<n>: generic address of a tensor map among the parameters."""
    return f".reg .b64 %map{number}; mov.b64 %map{number}, map{number}; cvta.param.u64 %map{number}, %map{number}; "


def fill_shared(size: int) -> str:
    """All threads write 0xA5 to shared memory, then make it visible to the async proxy."""
    return (
        f".reg .b32 %fill_at, %fill_i; .reg .pred %fill_more; shl.b32 %fill_i, %t, 2; FILL: add.u32 %fill_at, %fill_i, %base; "
        f"st.shared.b32 [%fill_at], 0xa5a5a5a5; add.u32 %fill_i, %fill_i, 512; setp.lt.u32 %fill_more, %fill_i, {size}; "
        f"@%fill_more bra FILL; fence.proxy.async.shared::cta; bar.sync 0; "
    )


def copy_out(size: int, offset: int = 0) -> str:
    """All threads copy `size` bytes of shared memory to the CTA's part of the output."""
    assert size % 4 == 0
    return (
        ".reg .b32 %out_i, %out_from, %out_v, %out_cta; .reg .b64 %out_to; .reg .pred %out_more; bar.sync 0; "
        f"mov.u32 %out_cta, %ctaid.x; shl.b32 %out_i, %t, 2; COPY_OUT: setp.lt.u32 %out_more, %out_i, {size}; "
        "@!%out_more bra COPIED_OUT; "
        f"add.u32 %out_from, %out_i, %base; ld.shared.b32 %out_v, [%out_from+{offset}]; "
        f"mad.lo.u32 %out_from, %out_cta, {size}, %out_i; cvt.u64.u32 %out_to, %out_from; add.u64 %out_to, %out_to, %out; "
        "st.global.b32 [%out_to], %out_v; add.u32 %out_i, %out_i, 512; bra.uni COPY_OUT; COPIED_OUT: "
    )


def copy_in(buffer: str, size: int) -> str:
    """All threads copy `size` bytes of a buffer (each CTA its own part) to shared memory, then make them visible to the async proxy."""
    assert size % 4 == 0
    return (
        ".reg .b32 %in_i, %in_to, %in_v, %in_cta; .reg .b64 %in_from; .reg .pred %in_more; "
        "mov.u32 %in_cta, %ctaid.x; shl.b32 %in_i, %t, 2; COPY_IN: "
        f"setp.lt.u32 %in_more, %in_i, {size}; @!%in_more bra COPIED_IN; "
        f"mad.lo.u32 %in_to, %in_cta, {size}, %in_i; cvt.u64.u32 %in_from, %in_to; add.u64 %in_from, %in_from, %{buffer}; "
        "ld.global.b32 %in_v, [%in_from]; add.u32 %in_to, %in_i, %base; st.shared.b32 [%in_to], %in_v; "
        "add.u32 %in_i, %in_i, 512; bra.uni COPY_IN; COPIED_IN: fence.proxy.async.shared::cta; bar.sync 0; "
    )


def expect(size: int) -> str:
    return f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size}; "


def wait(parity: int = 0, label: str = "WAIT", barrier: str = "%bar") -> str:
    """Spin until the phase is complete; a trap after 4096 tries, so that a wrong count is an error and not a hang."""
    return (
        f".reg .b32 %{label}_n; .reg .pred %{label}_late; mov.u32 %{label}_n, 0; {label}: "
        f"mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], {parity}; @%done bra {label}_END; "
        f"add.u32 %{label}_n, %{label}_n, 1; setp.gt.u32 %{label}_late, %{label}_n, 4096; @%{label}_late trap; "
        f"bra.uni {label}; {label}_END: "
    )


def cluster_barrier() -> str:
    return "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; "


def drain() -> str:
    """Thread 0 closes its bulk group and waits until the writes are complete."""
    return "@%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group 0; "


def coordinates(values: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"
