"""The race tracker forgets what nothing can conflict with any more, and still finds what comes late."""

import numpy as np

from tandem_attn.emulator.judge import pruning
from tandem_attn.emulator.judge.shadow import Sets
from tests.emulator.kernels import kinds, launch

LOOP = """
    mov.b32 %r1, smem; shl.b32 %r2, %tid, 2; add.u32 %r2, %r2, %r1; mov.b32 %r3, 0;
    L: st.shared.b32 [%r2], %r3; bar.sync 0; xor.b32 %r4, %r2, 128; ld.shared.b32 %r5, [%r4]; bar.sync 0;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 200; @%p1 bra L;
"""


def count_records(monkeypatch, body: str, limit: int):
    made = []
    monkeypatch.setattr(pruning, "LEAST", limit)
    original = pruning.Records.__init__

    def init(self):
        original(self)
        self.limit = limit
        made.append(self)

    monkeypatch.setattr(pruning.Records, "__init__", init)
    result = launch(body, threads=64, shared=512, checks="all")
    return result, made[0]


def test_records_stay_few(monkeypatch):
    """Two warps make 800 accesses; a look every 50 of them leaves no more than some 50 beyond the living ones."""
    result, records = count_records(monkeypatch, LOOP, 50)
    assert result.ok, result.reports
    assert len(records.items) < 120, len(records.items)
    _, all_of_them = count_records(monkeypatch, LOOP, 10**6)
    assert len(all_of_them.items) > 800


def test_a_late_race_is_still_found(monkeypatch):
    """One barrier is left out after 150 rounds: the pair of accesses is reported with both lines."""
    late = LOOP.replace("bar.sync 0;\n    add", "setp.eq.u32 %p2, %r3, 150; @!%p2 bar.sync 0;\n    add")
    result, _ = count_records(monkeypatch, late, 50)
    assert kinds(result) == ["race"] * len(result.reports) and result.reports, result.reports
    whole, _ = count_records(monkeypatch, late, 10**6)
    assert [str(r) for r in result.reports] == [str(r) for r in whole.reports]


def test_sets_are_numbered_anew():
    sets = Sets()
    first, second = sets.number((64, 128)), sets.number((64, 192))
    sets.keep({-second})
    third = sets.number((128, 256))
    assert third == first and sets.of(third) == (128, 256) and sets.of(second) == (64, 192)
    assert sets.number((64, 128)) not in (second, third)
    assert np.iinfo(np.int64).min < third < 0
