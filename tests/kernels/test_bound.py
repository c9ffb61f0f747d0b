"""A bound forward launches what the whole way launches: same kernel, grid, numbers, and descriptors and pointers of its own tensors."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from features import make
from problems import K_LENGTHS, PROBLEMS, Q_LENGTHS

from tandem_attn.kernels import backend, bound
from tandem_attn.kernels.prepare import POINTERS
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.problem import Problem
from tests.support.fake_cuda import Device, Launched, fake_cuda

pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")

NAMES = ("full", "causal", "sink", "alibi", "seqused", "varlen, causal", "varlen, sink, seqused", "head_dim 192 and 128")
FEATURE_NAMES = ("bias", "heads packed, seqused", "splits, packed lengths", "pages of 64, splits")


@pytest.fixture
def device() -> Iterator[Device]:
    with fake_cuda() as found:
        yield found


def inputs(p: Problem, offset: int = 0) -> Inputs:
    """Tensors of a problem, ``offset`` elements into their memory."""
    dtype = getattr(torch, p.dtype)
    rows_q, rows_k = ((p.total_q,), (p.total_k,)) if p.varlen else ((p.batch, p.seqlen_q), (p.batch, p.seqlen_k))

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(torch.Size(shape).numel() + offset).to(dtype)[offset:].view(shape)

    extra = {}
    if p.varlen:
        extra = {
            f"cu_seqlens_{side}": torch.tensor([0, *lengths]).cumsum(0).int() for side, lengths in (("q", Q_LENGTHS), ("k", K_LENGTHS))
        }
    if p.seqused:
        extra["seqused_k"] = torch.ones(p.batch, dtype=torch.int32)
    if p.sink:
        extra["sink"] = torch.randn(p.heads)
    if p.alibi:
        extra["alibi_slopes"] = torch.rand(p.batch, p.heads)
    return Inputs(
        q=make(*rows_q, p.heads, p.head_dim), k=make(*rows_k, p.heads_kv, p.head_dim), v=make(*rows_k, p.heads_kv, p.head_dim_v), **extra
    )


def in_order(x: Inputs) -> tuple[torch.Tensor | None, ...]:
    return tuple(getattr(x, field.name) for field in dataclasses.fields(x))


def relative(launched: list[Launched], x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> list[tuple[Any, ...]]:
    """The launches of one call without what lies where: addresses as names of the tensors they belong to, or as numbers of scratch."""
    names: dict[int, object] = {
        tensor.data_ptr(): name for name, tensor in {**vars(x), "out": out, "lse": lse}.items() if tensor is not None
    }
    found: list[tuple[Any, ...]] = []
    for each in launched:
        tensors = [tensor for tensor in (x.q, x.k, x.v, out) for _ in range(len(each.descriptors) // 4)]
        maps = [(at - tensor.data_ptr(), rest) for (at, rest), tensor in zip(each.descriptors, tensors, strict=True)]
        values = [
            names.setdefault(int(value), len(names)) if code == "Q" and value else value
            for code, value in zip(each.kernel.codes, each.values, strict=True)
        ]
        found.append((each.kernel.name, each.grid, each.stream, maps, values))
    return found


@pytest.mark.parametrize("name", [*NAMES, *FEATURE_NAMES])
def test_launches_what_the_whole_way_does(name: str, device: Device) -> None:
    if name in FEATURE_NAMES:
        p, plan, first = (feature := make(name, "cpu")).problem, backend.plan(feature.problem).with_(**feature.plan), feature.inputs
    else:
        p, plan, first = PROBLEMS[name], backend.plan(PROBLEMS[name]), inputs(PROBLEMS[name])
    given = [first, Inputs(**{field: None if x is None else x.clone() for field, x in vars(first).items()})]
    bound_call = backend.bind(p, plan, first)
    assert isinstance(bound_call, bound.Bound)
    wanted = [launches_of(device, lambda x: backend.forward(p, plan, x), x) for x in given]
    assert wanted[0] == wanted[1]
    assert [launched[0] for launched in wanted[0]] == kernels_of(plan)
    assert [launches_of(device, lambda x: bound_call(in_order(x)), x) for x in (*given, first)] == [wanted[0]] * 3


def test_descales_are_read_where_they_lie(device: Device) -> None:
    """8-bit inputs on a Blackwell chip: one descale strided, one expanded, none for v."""
    p = dataclasses.replace(PROBLEMS["gqa 4"], dtype="float8_e4m3fn", descale=True)
    plan = backend.plan(p, FORWARD, "B200")
    numbers = torch.rand(2, p.heads_kv, p.batch)
    first = dataclasses.replace(inputs(p), q_descale=numbers[0].T, k_descale=numbers[1, :1].T.expand(p.batch, p.heads_kv))
    other = dataclasses.replace(inputs(p), q_descale=numbers[1].T, k_descale=numbers[0, :1].T.expand(p.batch, p.heads_kv))
    bound_call = backend.bind(p, plan, first)
    assert isinstance(bound_call, bound.Bound)
    wanted = [launches_of(device, lambda x: backend.forward(p, plan, x), x) for x in (first, other)]
    assert wanted[0] == wanted[1]
    assert [launches_of(device, lambda x: bound_call(in_order(x)), x) for x in (other, first)] == wanted
    ((*_, values),) = wanted[0]
    assert values[-9:-7] == ["q_descale", "k_descale"] and values[-6:] == [1, p.batch, 1, 0, 0, 0]


def kernels_of(plan: Plan) -> list[str]:
    """Names, in the order in which they are launched."""
    return ["packed_tiles"] * plan.varlen + ["forward"] + ["combine"] * (plan.num_splits > 1)


def launches_of(device: Device, call: Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]], x: Inputs) -> list[tuple[Any, ...]]:
    """The launches of a call."""
    device.launches.clear()
    out, lse = call(x)
    assert (out.is_contiguous(), lse.is_contiguous(), lse.dtype) == (True, True, torch.float32)
    return relative(device.launches, x, out, lse)


def test_descriptors_are_encoded_once_an_address(device: Device) -> None:
    p = PROBLEMS["causal"]
    x = inputs(p)
    call = backend.bind(p, backend.plan(p), x)
    call(in_order(x))
    before, kept = device.encoded, [call(in_order(x)) for _ in range(3)]
    assert device.encoded - before <= len(kept)  # q, k and v lie where they lay; each O is new
    maps = call._steps[0]._maps[0]
    maps.update({64 * i: b"" for i in range(bound._MAPS_KEPT)})
    call(in_order(inputs(p)))
    assert len(maps) <= bound._MAPS_KEPT


@pytest.mark.parametrize("offset, takes", [(0, True), (8, True), (1, False), (4, False)])
def test_misplaced_tensors_go_the_whole_way(offset: int, takes: bool, device: Device) -> None:
    """In units of two bytes; TMA reads from multiples of 16."""
    p = PROBLEMS["causal"]
    call = backend.bind(p, backend.plan(p), inputs(p))
    assert (call(in_order(inputs(p, offset))) is not None) == takes


def test_what_is_no_address_is_not_bound(device: Device) -> None:
    p = PROBLEMS["sink"]
    given = inputs(p)
    assert backend.bind(p, backend.plan(p), dataclasses.replace(given, sink=given.sink.double())) is None
    strided = dataclasses.replace(given, q=torch.zeros(p.batch, p.seqlen_q, p.heads, p.head_dim + 3, dtype=torch.bfloat16)[..., :-3])
    assert backend.bind(p, backend.plan(p), strided) is None


@pytest.mark.parametrize(
    "more",
    [
        lambda launch: launch.pointers[0].sum(),
        lambda launch: launch.pointers[0].copy_(torch.ones_like(launch.pointers[0])),
    ],
)
def test_what_is_not_repeated_is_not_bound(more: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's own work beside launches: allocations and fills are repeated, and nothing else."""
    p, real = PROBLEMS["causal"], bound.prepare

    def with_more(*args: Any, **options: Any) -> Any:
        launch = real(*args, **options)
        more(launch)
        return launch

    monkeypatch.setattr(bound, "prepare", with_more)
    assert backend.bind(p, backend.plan(p), inputs(p)) is None


def test_fills_and_scratch_are_repeated(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    p, real = PROBLEMS["causal"], bound.prepare

    def with_scratch(*args: Any, **options: Any) -> Any:
        launch = real(*args, **options)
        launch.pointers[0].fill_(3.0)
        scratch = torch.empty(5, dtype=torch.int32).zero_()
        constant = torch.full((2,), 7)
        place = POINTERS.index("order")
        return launch._replace(pointers=(*launch.pointers[:place], scratch, constant))

    monkeypatch.setattr(bound, "prepare", with_scratch)
    x = inputs(p)
    call = backend.bind(p, backend.plan(p), x)
    kept = [call(in_order(x)) for _ in range(2)]
    assert all((lse == 3.0).all() for _, lse in kept)
    first, second = device.launches
    assert first.pointer("starts") == second.pointer("starts") == call._constants[0].data_ptr()
    assert first.pointer("order") and second.pointer("order")


def spaces() -> list[tuple[int, int]]:
    """Address and size of this thread's spaces."""
    kept = (space.memory for space in bound._spaces._known.values())
    return [(memory.data_ptr(), memory.numel()) for memory in kept if memory is not None]


def test_an_lse_that_nobody_gets_lies_in_the_space(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "_spaces", bound._Spaces())
    small = dataclasses.replace(PROBLEMS["causal"], return_lse=False)
    large = dataclasses.replace(small, seqlen_q=5000, seqlen_k=5000, total_q=0, total_k=0)
    given = {p: inputs(p) for p in (small, large)}
    calls = {p: backend.bind(p, backend.plan(p), x) for p, x in given.items()}
    for p in (small, large, small):
        out, _ = calls[p](in_order(given[p]))
        ((start, size),) = spaces()
        launched = device.launches[-1]
        assert start <= launched.pointer("lse") and launched.pointer("lse") + 4 * p.batch * p.heads * p.seqlen_q <= start + size
        assert launched.descriptors[-1][0] == out.data_ptr()


def test_an_lse_that_backward_reads_is_its_own(device: Device) -> None:
    p = dataclasses.replace(PROBLEMS["causal"], return_lse=False, backward=True)
    x = inputs(p)
    call = backend.bind(p, backend.plan(p), x)
    kept = [call(in_order(x)) for _ in range(2)]
    assert [lse.shape for _, lse in kept] == [(p.batch, p.heads, p.seqlen_q)] * 2
    assert [launched.pointer("lse") for launched in device.launches] == [lse.data_ptr() for _, lse in kept]
    assert kept[0][1].data_ptr() != kept[1][1].data_ptr()


def test_scratch_of_a_call_does_not_overlap(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "_spaces", bound._Spaces())
    p = dataclasses.replace(PROBLEMS["varlen, causal"], return_lse=False)
    x = inputs(p)
    backend.bind(p, backend.plan(p), x)(in_order(x))
    ((start, size),) = spaces()
    sizes = {"lse": 4 * p.heads * p.total_q, "order": 4 * p.batch, "starts": 4 * (p.batch + 1)}
    ends = sorted((device.launches[-1].pointer(name), device.launches[-1].pointer(name) + each) for name, each in sizes.items())
    assert start <= ends[0][0] and ends[-1][1] <= start + size
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


def test_streams_and_threads_have_spaces_of_their_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "_spaces", bound._Spaces())
    p = dataclasses.replace(PROBLEMS["causal"], return_lse=False)
    x = inputs(p)

    def run() -> None:
        backend.bind(p, backend.plan(p), x)(in_order(x))

    run()
    device.stream = 77
    run()
    kept = dict(bound._spaces._known)
    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    assert len(kept) == 2 and len({launched.pointer("lse") for launched in device.launches}) == 3


def test_one_tensor_twice(device: Device) -> None:
    """A call whose optional inputs are one tensor binds a form for calls where they are two."""
    p = dataclasses.replace(PROBLEMS["seqused"])
    x = inputs(p)
    both = dataclasses.replace(x, seqused_q=x.seqused_k)
    call = backend.bind(p, backend.plan(p), both)
    other = dataclasses.replace(x, seqused_q=x.seqused_k.clone())
    call(in_order(other))
    used = [device.launches[-1].pointer(name) for name in ("used_q", "used_k")]
    assert used == [other.seqused_q.data_ptr(), other.seqused_k.data_ptr()]


def test_graph_capture_goes_the_whole_way(device: Device) -> None:
    p = PROBLEMS["causal"]
    x = inputs(p)
    call = backend.bind(p, backend.plan(p), x)
    device.capturing = True
    assert call(in_order(x)) is None


def test_stream_and_device_of_each_call(device: Device) -> None:
    p = PROBLEMS["causal"]
    x = inputs(p)
    call = backend.bind(p, backend.plan(p), x)
    call(in_order(x))
    device.stream = 77
    call(in_order(x))
    device.index = 1  # another device is current: the call runs on its tensors'
    call(in_order(x))
    streams = [launched.stream for launched in device.launches]
    counters = [launched.pointer("counter") for launched in device.launches]
    assert streams[1:] == [77, 77] and streams[0] != 77
    assert counters[0] == device.counters[streams[0]].data_ptr() != counters[1] == counters[2]
    assert device.index == 1


def test_keeps_no_tensor_alive(device: Device) -> None:
    p = PROBLEMS["alibi, causal, softcap, sink"]
    x = inputs(p)
    call = backend.bind(p, backend.plan(p), x)
    results = call(in_order(x))
    alive = [weakref.ref(tensor) for tensor in (*in_order(x), *results) if tensor is not None]
    del x, results
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
