"""Repeated calls skip the checks only where those could not say anything else, and leave everyone who listens in the picture."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tandem_attn
from tandem_attn.api import backends, repeated
from tests.support.recorder import Recorder, qkv


def test_second_call_is_bound_and_equal(recorder: Recorder) -> None:
    for i in range(3):
        q, k, v = qkv()
        got = tandem_attn.attention(q, k, v, causal=True, return_lse=True, backend="recorder")
        want = tandem_attn.attention(q, k, v, causal=True, return_lse=True, backend="reference")
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert (recorder.binds, recorder.calls) == (1, i)


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"window": (2, 0)},
        {"mask": tandem_attn.Window(1, 1)},
        {"scale": 0.5},
        {"softcap": 3.0},
        {"return_lse": True},
        {"deterministic": True},
        {"sink": torch.zeros(4)},
        {"alibi_slopes": torch.ones(4)},
        {"bias": torch.ones(1, 1, 7, 7)},
        {"seqused_k": torch.tensor([3, 7], dtype=torch.int32)},
    ],
    ids=str,
)
def test_options_are_part_of_the_key(changes: dict[str, Any], recorder: Recorder) -> None:
    q, k, v = qkv()
    tandem_attn.attention(q, k, v, backend="recorder")
    for _ in range(2):
        got = tandem_attn.attention(q, k, v, backend="recorder", **changes)
        want = tandem_attn.attention(q, k, v, backend="reference", **changes)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert (recorder.binds, recorder.calls) == (2, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[:, :5], k, v),
        lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        lambda q, k, v: (q.double(), k.double(), v.double()),
        lambda q, k, v: (q, k[:, :, :2], v[:, :, :2]),
        lambda q, k, v: (q, k, v[..., :3]),
    ],
)
def test_properties_of_tensors_are_part_of_the_key(change: Any, recorder: Recorder) -> None:
    tandem_attn.attention(*qkv(), backend="recorder")
    others = change(*qkv())
    torch.testing.assert_close(
        tandem_attn.attention(*others, backend="recorder"), tandem_attn.attention(*others, backend="reference"), rtol=0, atol=0
    )
    assert recorder.calls == 0


@pytest.mark.parametrize(
    "good, bad",
    [
        ({"causal": True}, {"causal": 1}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 0.0}, {"softcap": False}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
    ],
    ids=str,
)
def test_equal_is_not_equally_legal(good: dict[str, Any], bad: dict[str, Any], recorder: Recorder) -> None:
    q, k, v = qkv()
    for _ in range(2):
        tandem_attn.attention(q, k, v, backend="recorder", **good)
    with pytest.raises(TypeError):
        tandem_attn.attention(q, k, v, backend="recorder", **bad)
    assert recorder.calls == 1


def test_wrong_calls_raise_every_time(recorder: Recorder) -> None:
    q, k, v = qkv()
    tandem_attn.attention(q, k, v, backend="recorder")
    for _ in range(2):
        with pytest.raises(ValueError, match="head_dim"):
            tandem_attn.attention(q, k[..., :4], v, backend="recorder")
        with pytest.raises(TypeError, match=r"k must be a torch\.Tensor"):
            tandem_attn.attention(q, None, v, backend="recorder")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="dense"):
            tandem_attn.attention(q.to_sparse(), k, v, backend="recorder")
    list_as_window = [tandem_attn.attention(q, k, v, window=[1, 0], backend="recorder") for _ in range(2)]  # type: ignore[arg-type]
    assert torch.equal(*list_as_window)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_default_device_does_not_listen(recorder: Recorder) -> None:
    q, k, v = qkv()
    want = tandem_attn.attention(q, k, v, backend="recorder")
    with torch.device("meta"):
        assert torch.equal(tandem_attn.attention(q, k, v, backend="recorder"), want)
        with torch.overrides.BaseTorchFunctionMode():
            tandem_attn.attention(q, k, v, backend="recorder")
    assert recorder.calls == 1


def test_modes_and_profilers_see_the_operator(recorder: Recorder) -> None:
    q, k, v = qkv()
    call = lambda: tandem_attn.attention(q, k, v, backend="recorder")  # noqa: E731
    call()
    with Seen() as seen:
        call()
    assert "tandem_attn.attention.default" in seen.names
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() > 0
    with torch.profiler.profile() as profile:
        call()
    assert any(event.key == "tandem_attn::attention" for event in profile.key_averages())
    assert recorder.calls == 0
    call()
    assert recorder.calls == 1


def test_traced_and_compiled_calls_take_the_operator(recorder: Recorder) -> None:
    q, k, v = qkv()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tandem_attn.attention(q, k, v, backend="recorder")

    want = call(q, k, v)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    traced = torch.fx.experimental.proxy_tensor.make_fx(call)(q, k, v)
    assert torch.equal(compiled(q, k, v), want)
    assert "tandem_attn.attention.default" in traced.code
    assert recorder.calls == 0


def test_negative_bit_is_read(recorder: Recorder) -> None:
    q, k, v = qkv()
    tandem_attn.attention(q, k, v, backend="recorder")
    negative = torch._neg_view(q)
    for _ in range(2):
        got = tandem_attn.attention(negative, k, v, backend="recorder")
        torch.testing.assert_close(got, tandem_attn.attention(-q, k, v, backend="reference"), rtol=0, atol=0)
    assert recorder.calls == 0


def test_a_call_that_its_bound_form_declines(recorder: Recorder) -> None:
    q, k, v = qkv()
    tandem_attn.attention(q, k, v, backend="recorder")
    recorder.declines = True
    got = tandem_attn.attention(q, k, v, backend="recorder")
    assert torch.equal(got, tandem_attn.attention(q, k, v, backend="reference"))
    assert (recorder.binds, recorder.calls) == (1, 0)


def test_table_is_bounded_and_keeps_nothing_alive(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "LARGEST", 3)
    for size in range(1, 8):
        x = torch.randn(1, size, 1, 8)
        tandem_attn.attention(x, x, x, backend="recorder", sink=torch.zeros(1))
    assert len(repeated._table.calls) == 3
    tensors = [*qkv(), torch.zeros(4)]
    for _ in range(2):
        tandem_attn.attention(*tensors[:3], sink=tensors[3], backend="recorder")
    alive = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.parametrize("where", ["own rows", "batch index", "pages"])
def test_cache_calls(where: str, recorder: Recorder) -> None:
    k_cache, v_cache = (torch.randn(3, 8, 2, 8) for _ in range(2))
    places = {
        "own rows": {},
        "batch index": {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)},
        "pages": {"page_table": torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)},
    }[where]
    if where == "own rows":
        k_cache, v_cache = k_cache[:2], v_cache[:2]
    for i, used in enumerate(([3, 8], [0, 5])):
        q, lengths = torch.randn(2, 1, 4, 8), torch.tensor(used, dtype=torch.int32)
        got = tandem_attn.attention_kvcache(q, k_cache, v_cache, lengths, backend="recorder", **places)
        want = tandem_attn.attention_kvcache(q, k_cache, v_cache, lengths, backend="reference", **places)
        assert torch.equal(got, want)
        assert (recorder.binds, recorder.calls) == (1, i)
    new = torch.randn(2, 1, 2, 8)
    tandem_attn.attention_kvcache(q, k_cache, v_cache, lengths, k=new, v=new, backend="recorder", **places)
    tandem_attn.attention_kvcache(q, k_cache, v_cache, 3, backend="recorder", **places)
    assert recorder.calls == 1, "calls that append, and lengths that are numbers, are checked each time"


def test_no_room_to_bind(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is there; a later call may bind."""
    q, k, v = qkv()
    real = backends.BACKENDS["recorder"]

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(backends.BACKENDS, "recorder", dataclasses.replace(real, bind=full))
    want = tandem_attn.attention(q, k, v, backend="recorder")
    monkeypatch.setitem(backends.BACKENDS, "recorder", real)
    got = [tandem_attn.attention(q, k, v, backend="recorder") for _ in range(2)]
    assert all(torch.equal(x, want) for x in got)
    assert (recorder.binds, recorder.calls) == (1, 1)


def test_masks_with_tensors_are_not_remembered(recorder: Recorder) -> None:
    q, k, v = qkv()
    for mask in (tandem_attn.Document([0] * 7), tandem_attn.Predicate(lambda b, h, i, j: j <= i), lambda b, h, i, j: j >= i):
        for _ in range(2):
            tandem_attn.attention(q, k, v, mask=mask, backend="recorder")
    assert (recorder.binds, recorder.calls) == (0, 0)


def test_each_thread_has_a_table(recorder: Recorder) -> None:
    q, k, v = qkv()
    tandem_attn.attention(q, k, v, backend="recorder")
    worker = threading.Thread(target=lambda: tandem_attn.attention(q, k, v, backend="recorder"))
    worker.start()
    worker.join()
    assert (recorder.binds, recorder.calls) == (2, 0)


def test_packed_calls(recorder: Recorder) -> None:
    q = torch.randn(9, 4, 8)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 1, 9])]
    for i, cu in enumerate(lengths):
        got = tandem_attn.attention_varlen(q, q, q, cu, cu, 8, 8, causal=True, backend="recorder")
        want = tandem_attn.attention_varlen(q, q, q, cu, cu, 8, 8, causal=True, backend="reference")
        assert torch.equal(got, want)
        assert recorder.calls == i
    tandem_attn.attention_varlen(q, q, q, cu, cu, 9, 8, causal=True, backend="recorder")
    tandem_attn.attention_varlen(q, q, q, cu, cu, torch.tensor(8), 8, causal=True, backend="recorder")
    assert recorder.calls == 1
