"""The whole suite: skipped CUDA tests say why, and the report counts the semantic suite's cells that a backend does not support."""

from __future__ import annotations

import argparse
import collections
import zlib
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("tandem", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("tandem")

UNSUPPORTED = pytest.StashKey[dict[str, int]]()  # "backend: reason" -> cells


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", type=_share, default="1", help="of each slow emulated test, run one case in so many: 6, the first of 6 parts, or 2/6"
    )


def _share(text: str) -> tuple[int, int]:
    part, slash, parts = text.rpartition("/")
    number, of = int(part) if slash else 1, int(parts)
    if not 1 <= number <= of:
        raise argparse.ArgumentTypeError(f"--share must be N, or K/N with 1 <= K <= N, got {text}")
    return number, of


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNSUPPORTED] = collections.Counter()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests are small: threads cost more than they bring, and several processes may share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _needs_cuda(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("cuda")
    wanted = marker.kwargs.get("devices", 1) if marker else 0
    if wanted > torch.cuda.device_count():
        pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}, this machine has {torch.cuda.device_count()}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the cells that ``supports`` refuses, and keeps count of them and of the reasons."""
    refused = []
    for item in items:
        cell = getattr(item, "callspec", None)
        reason = cell.params["cell"].refused() if cell and "cell" in cell.params else ""
        if reason:
            refused.append(item)
            config.stash[UNSUPPORTED][f"{cell.params['cell'].backend.name}: {reason}"] += 1  # type: ignore[union-attr]
    left_out = set(refused) | _beyond_share([item for item in items if item not in set(refused)], config.getoption("--share"))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _beyond_share(items: list[pytest.Item], share: tuple[int, int]) -> set[pytest.Item]:
    """Cases of emulated kernels that ``--share`` leaves out: the same ones each time; in the first part of every test function some stay.

    Kernels of our own take seconds each to compile and to execute; all of them take hours. Of a test with ``judge(each="a parameter")`` the
    first part has one case for each value of that parameter.
    """
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("judge") and not item.nodeid.startswith("tests/emulator"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for cases in functions.values():
        ranked = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left_out |= set(ranked) - set(_part(ranked, *share))
    return left_out


def _part(ranked: list[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """The part with this number, from 1 on, of one test function's cases."""
    marker = ranked[0].get_closest_marker("judge")
    each = marker.kwargs.get("each") if marker else None
    if parts > 1 and each:
        firsts = {str(item.callspec.params[each]): item for item in reversed(ranked)}.values()  # type: ignore[attr-defined]
        rest = [item for item in ranked if item not in firsts]
        return list(firsts) if number == 1 else rest[number - 2 :: parts - 1]
    size = -(-len(ranked) // parts)
    return ranked[(number - 1) * size : number * size]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["unsupported"] = dict(session.config.stash[UNSUPPORTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of pytest-xdist collects the whole suite, so one worker's counts are the suite's."""
    node.config.stash[UNSUPPORTED] = collections.Counter(getattr(node, "workeroutput", {}).get("unsupported", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash[UNSUPPORTED]
    if not counts:
        return
    terminalreporter.section("semantic cells not supported by a backend (tandem_attn.supports), not run")
    for reason, cells in sorted(counts.items(), key=lambda entry: (entry[0].split(":")[0], -entry[1])):
        terminalreporter.line(f"{cells:5d}  {reason}")
