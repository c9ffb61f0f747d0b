"""Arch records: every number has a source, and the numbers agree with each other and with the paper's peak."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tandem_attn.spec.arch import ARCHS, B100, B200, B300, CPU, H100, H200, Arch, get_arch


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
def test_every_number_has_a_source(arch: Arch) -> None:
    known = {f.name for f in fields(arch) if f.name not in ("name", "sources") and getattr(arch, f.name) not in (None, ())}
    assert known == {fact for fact, _ in arch.sources}
    assert all(len(source) > 8 for _, source in arch.sources)


def test_peaks_match_the_data_sheets() -> None:
    peaks = {H100: 989.4e12, H200: 989.4e12, B100: 1.75e15, B200: 2.24e15}
    for arch, peak in peaks.items():
        assert arch.peak_flops == pytest.approx(peak, rel=2e-3), arch.name
    assert B300.peak_flops is None


def test_capacities_are_consistent() -> None:
    for arch in ARCHS.values():
        if arch is CPU:
            assert not arch.sources
            continue
        assert arch.smem_bytes_cta == 232_448 and arch.smem_bytes_sm == 232_448 + 1024
        assert arch.registers == 64 * 1024 and arch.max_warps_sm == 64
        assert arch.tmem_bytes == (256 * 1024 if arch.capability and arch.capability[0] == 10 else None)
    assert (B300.mufu, B200.mufu, H200.mufu) == (32, 16, 16)
    assert B200.mma_rate("bfloat16") == 2 * (H200.mma_rate("bfloat16") or 0) == 8192 and CPU.mma_rate("bfloat16") is None


def test_lookup_ignores_case_and_names_the_choices() -> None:
    assert get_arch("b200") is B200 and get_arch("cpu") is CPU
    with pytest.raises(ValueError, match="arch must be one of H100, H200, B100, B200, B300, CPU, got 'A100'"):
        get_arch("A100")
    with pytest.raises(KeyError):
        B300.source("sms")
    assert "2603.05451" in B200.source("clock_mhz")
