"""Registers and stack read from a cubin are those that NVIDIA's own tool prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from problems import PROBLEMS

from tandem_attn.kernels import backend
from tandem_attn.kernels.compile import compiled
from tandem_attn.kernels.cubin import usage

triton = pytest.importorskip("triton", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")


@pytest.mark.parametrize("name", ["causal", "head_dim 16"])
def test_as_cuobjdump_prints(name: str, tmp_path: Path) -> None:
    cubin = compiled(backend.plan(PROBLEMS[name])).cubin
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = usage(cubin)
    assert re.findall(r"REG:(\d+) STACK:(\d+)", printed) == [(str(found.registers), str(found.stack_bytes))]


@pytest.mark.parametrize("content, words", [(b"", "64-bit ELF"), (b"\x7fELF\x01" + bytes(100), "64-bit ELF")])
def test_other_files(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        usage(content)
