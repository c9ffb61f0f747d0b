"""What is left out of Triton's compilation changes nothing: passes that would find their work done, on every plan of the tests."""

from __future__ import annotations

import gc
import itertools
import subprocess
from collections.abc import Iterator
from typing import Any

import emulation
import float8
import forms
import pytest
from features import FEATURES, MANY_QUERIES, for_a_pair, make
from problems import PROBLEMS

from tandem_attn.kernels import backend, translate
from tandem_attn.kernels import compile as kernels
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.planner import plan as make_plan

runtime = pytest.importorskip("triton.experimental.gluon._runtime", reason="kernels are compiled by Triton: pip install tandem-attn[cuda]")
scratch = pytest.importorskip("scratch", reason="needs triton")
EVERY = 5  # of so many kernels one is tested by make test, all of them by the judge's matrix

_SHAPES = ("full", "causal", "window", "head_dim 64", "head_dim 192 and 128", "head_dim 256", "seqused, causal")
_FORMS = list(itertools.product(forms.FORMS, _SHAPES))


def _plans() -> dict[Plan, str]:
    """Every kernel of the other tests, each once, under the first of its names."""
    named: list[tuple[str, Plan]] = [(f"H200, {name}", backend.plan(p)) for name, p in PROBLEMS.items()]
    for name in (*FEATURES, *MANY_QUERIES):
        for chip in ("H200", "B200"):
            feature = make(name, "cpu")
            plan = make_plan(feature.problem, chip, direction="forward", **feature.plan).plan
            named.append((f"{chip}, {name}", plan))
            if chip == "B200":
                named.append((f"pair, {name}", for_a_pair(feature, plan)))
    named += [(f"H200, {form}, {name}", emulation.planned(forms.PROBLEMS[name], "H200", **forms.FORMS[form])) for form, name in _FORMS]
    named += [(f"B200, {name}", emulation.planned(p)) for name, p in emulation.PROBLEMS.items()]
    named += [(f"B200, 8 bits, {name}", emulation.planned(p)) for name, p in {**float8.PROBLEMS, **float8.PAIRS}.items()]
    found: dict[Plan, str] = {}
    for name, plan in named:
        found.setdefault(kernels.code_plan(plan), name)
    return found


ALL = {name: plan for plan, name in _plans().items()}
TESTED = list(ALL)[::EVERY]


class ReachedError(Exception):
    """The passes in question have run; what follows needs no time."""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A kernel's text before the passes that are left out, then behind each of them; nothing is compiled further."""
    found: list[str] = []

    def run(pipeline: translate._Pipeline, module: Any, name: str) -> None:
        names = [added for added, *_ in pipeline.added]
        first = names.index(translate.BARRIERS[0])
        pipeline._run(pipeline.added[:first], module, name)
        found.append(str(module))
        for each in pipeline.added[first:]:
            if each[0] in pipeline._needless:
                pipeline._run([each], module, name)
                found.append(str(module))
        raise ReachedError

    monkeypatch.setattr(translate._Pipeline, "run", run)
    yield found


@pytest.mark.parametrize("name", [name if name in TESTED else pytest.param(name, marks=pytest.mark.judge) for name in ALL])
def test_passes_left_out_add_nothing(name: str, texts: list[str]) -> None:
    plan = ALL[name]
    with pytest.raises(ReachedError):
        kernels.build(plan)
    assert not translate.has_scratch(texts[0])
    assert len(texts) == 1 + len(kernels.needless_passes(plan))
    assert len(set(texts)) == 1


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of passes that run between Gluon's module and LLVM."""
    found: list[str] = []
    real = translate._Pipeline._run

    def note(pipeline: translate._Pipeline, chosen: list[Any], module: Any, name: str) -> None:
        found.extend(added for added, *_ in chosen)
        real(pipeline, chosen, module, name)

    monkeypatch.setattr(translate._Pipeline, "_run", note)
    yield found


SMALL = backend.plan(PROBLEMS["head_dim 16"])


def test_other_passes_run(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Triton's in its order but those, which run where an operation has scratch memory."""
    kernels.build(SMALL)
    without = list(ran)
    ran.clear()
    monkeypatch.setattr(translate, "has_scratch", lambda _: True)
    kernels.build(SMALL)
    assert set(ran) - set(without) == set(translate.BARRIERS)
    assert [each for each in ran if each not in translate.BARRIERS] == without


def _scratch_source() -> Any:
    """A kernel in which two conversions between layouts share scratch memory."""
    return runtime.GluonASTSource(scratch.swap, {"x": "*fp32"}, {})


def test_scratch_memory_gets_its_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num_warps": 4}
    expected = translate.translated(_scratch_source(), 90, options)[0]["ptx"]
    assert translate.translated(_scratch_source(), 90, options, translate.BARRIERS)[0]["ptx"] == expected
    monkeypatch.setattr(translate, "has_scratch", lambda _: False)
    assert expected.count("bar.sync") > translate.translated(_scratch_source(), 90, options, translate.BARRIERS)[0]["ptx"].count("bar.sync")


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_pauses(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), translate.no_collection():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("chip", ["H200", "B200"])
def test_option_that_costs_spills(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton passes it always; our kernels go without."""
    commands: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    kernels.build(emulation.planned(emulation.PROBLEMS["full"], chip))
    (ptxas,) = [command for command in commands if any(each.startswith("--gpu-name") for each in command)]
    assert translate.REG_ALLOC not in ptxas
