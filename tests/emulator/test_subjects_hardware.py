"""The emulator gives, bit for bit, what an H200 gave for the same PTX and inputs.

tests/emulator/ptx/recorded holds a run of tools/compare_h200.py as tools/compare_outputs.py --keep reduced it.
"""

from pathlib import Path

import pytest

from tests.emulator.ptx import catalog
from tools.compare_outputs import judge, load

RECORDED = Path(__file__).parent / "ptx/recorded"


@pytest.fixture(scope="module")
def recording():
    if not (RECORDED / "h200.json").exists():
        pytest.skip("no GPU run is recorded in tests/emulator/ptx/recorded: run tools/compare_h200.py on a Hopper GPU")
    return load(RECORDED)


@pytest.mark.parametrize("family", catalog.FAMILIES)
def test_emulator_equals_hardware(family, recording):
    record, outputs = recording
    failed = []
    for case in catalog.cases(family):
        verdict, detail = judge(case, record["cases"].get(case.name, {}), outputs.get(case.name))
        if verdict not in ("equal", "tolerance", "fault", "new"):
            failed.append(f"{case.name}: {verdict}: {detail}")
    assert not failed, f"{len(failed)} cases:\n" + "\n".join(failed[:40])
