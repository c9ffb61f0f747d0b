"""Every sort of race, in a minimal kernel that has it and in the repaired twin, under every schedule."""

import re

import pytest

from tandem_attn.emulator import run
from tests.emulator.mutation.race_kernels import KERNELS

SCHEDULES = [("at-issue", 0), ("latest", 0), ("random", 1), ("random", 2), ("random", 3)]
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def judged(kernel, broken, schedule, seed):
    ptx, sides = kernel.text(broken)
    result = run(
        ptx, kernel.args(), kernel.grid, block=kernel.threads, cluster=kernel.cluster, checks=kernel.checks, schedule=schedule, seed=seed,
        backend="numpy",
    )  # fmt: skip
    return result, sides


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
@pytest.mark.parametrize("name", BY_NAME)
def test_race_is_reported_with_both_lines(name, schedule, seed):
    kernel = BY_NAME[name]
    result, sides = judged(kernel, True, schedule, seed)
    found = [r for r in result.reports if r.kind in kernel.kind.split("|")]
    assert found, result.reports
    named = [r for r in found if r.kind == "deadlock" or not sides or _names(r, sides)]
    assert named, (sides, [str(r) for r in found])
    assert kernel.words in named[0].message or any(kernel.words in r.message for r in named), [r.message for r in named]
    assert all(r.cta is not None and r.warp is not None for r in named)


def _names(report, sides):
    """The report stands at one side and its message names the other."""
    if report.ptx_line not in sides:
        return False
    return all(re.search(rf"PTX line {line}\b", report.message) for line in sides if line != report.ptx_line)


@pytest.mark.parametrize("schedule, seed", SCHEDULES)
@pytest.mark.parametrize("name", BY_NAME)
def test_repaired_kernel_is_clean(name, schedule, seed):
    result, _ = judged(BY_NAME[name], False, schedule, seed)
    assert result.ok, [str(r) for r in result.reports]
