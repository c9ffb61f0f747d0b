"""The micro kernels are well formed: ptxas takes each for sm_90a, names are unique, inputs are the same everywhere."""

import hashlib
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.emulator.ptx import catalog, inputs, probes
from tests.emulator.ptx.case import HEADER

triton = pytest.importorskip("triton", reason="ptxas comes in Triton's wheel: pip install tandem-attn[cuda]")
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


@pytest.mark.parametrize("family", [*catalog.FAMILIES, *catalog.EXTRA])
def test_ptxas_assembles(family, tmp_path):
    """The whole family as one module, the entries renamed apart."""
    text = HEADER
    for number, case in enumerate(catalog.cases(family)):
        body = case.ptx.removeprefix(HEADER)
        declared = re.findall(r"\.func \([^)]*\) (\w+)|\.(?:const|global) \.align \d+ \.\w+ (\w+)\[", body)
        for name in ["kernel", *("".join(pair) for pair in declared)]:
            body = re.sub(rf"(?<![%.\w]){name}\b", f"{name}_{number}", body)
        text += body.replace(
            ".extern .shared .align 1024 .b8 smem[];\n", "" if "smem[]" in text else ".extern .shared .align 1024 .b8 smem[];\n"
        )
    source = tmp_path / "family.ptx"
    source.write_text(text)
    result = subprocess.run([PTXAS, "-arch=sm_90a", "-O0", source, "-o", tmp_path / "out"], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:2000]


def test_names_are_unique():
    names = Counter(case.name for case in catalog.all_cases())
    assert len(names) > 1500
    assert max(names.values()) == 1, names.most_common(3)


def test_every_case_launches_within_limits():
    for case in catalog.all_cases():
        assert case.shared <= 232_448 and case.threads <= 1024 and case.grid % case.cluster == 0, case.name
        parameters = 8 * (1 + len(case.inputs)) + 128 * len(case.maps)
        assert case.ptx.count(".param .u64 p_") == 1 + len(case.inputs) and parameters <= 4096, case.name
        for tensor_map in case.maps:
            assert tensor_map.buffer in ("out", *case.inputs), case.name


def test_inputs_are_the_same_on_every_machine():
    """The digest of one input of every kind: the recorded GPU results are worthless when it changes."""
    kinds = ["s8", "u16", "s32", "u64", "f64", "f32", "f16", "bf16", "e4m3", "e5m2", "f16n", "bf16n", "f32n", "e4m3n", "f16x2", "s16x2"]
    kinds += ["divisor.s32", "divisor.u64", "lane", "pred", "b1"]
    digest = hashlib.sha256()
    for kind in kinds:
        digest.update(inputs.Input(kind, 64).make(f"check/{kind}").tobytes())
    assert digest.hexdigest()[:16] == "b3f1cdb7595d0019"


def test_divisors_are_safe():
    values = inputs.Input("divisor.s32", 4096).make("divisors").view(np.int32)
    assert not np.isin(values, [0, -1]).any()


@pytest.mark.parametrize("fmt", probes.K)
def test_probe_fragments_hold_the_rows(fmt):
    """Decoding the fragments as the manual's figures place them gives the experiments back."""
    a, _ = probes.experiments(fmt)
    words = probes.fragments_of_a(fmt, a).reshape(-1, 32, 4)
    bits = probes.encode(fmt, a)
    per_word = 4 // bits.dtype.itemsize
    elements = words.view(bits.dtype).reshape(-1, 32, 4, per_word)
    # PTX ISA, "Matrix Fragments for mma.m16n8k16" and its siblings: row = lane / 4 (+ 8 for odd registers)
    row, column = 5, probes.K[fmt] - 1
    lane, register = row * 4 + 3, 2
    assert elements[0, lane, register, per_word - 1] == bits[row, column]
    assert elements[1, lane, register + 1, per_word - 1] == bits[16 + row + 8, column]
