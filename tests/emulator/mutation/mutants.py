"""Mutants of a kernel's PTX: every wait, fence, barrier, arrival, commit and transaction count deleted or weakened, one at a time."""

import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """`line` counts from 1; `what` says what was done to the instruction `before`."""

    line: int
    what: str
    before: str
    after: str
    ptx: str

    @property
    def name(self) -> str:
        return f"{self.line}: {self.what}"


@dataclass(frozen=True)
class Rule:
    """How instructions that match `pattern` are changed; None from `change` leaves the instruction alone."""

    what: str
    pattern: re.Pattern[str]
    change: Callable[[re.Match[str]], str | None]


def _delete(_: re.Match[str]) -> str:
    return "// deleted"


def _count(step: int) -> Callable[[re.Match[str]], str | None]:
    def change(match: re.Match[str]) -> str | None:
        count = int(match["n"]) + step
        return f"{match['head']}{count};" if count > 0 else None

    return change


def _rule(what: str, pattern: str, change: Callable[[re.Match[str]], str | None] = _delete) -> Rule:
    return Rule(what, re.compile(r"(?P<guard>@!?%?\w+\s+)?" + pattern + r"\s*$"), change)


RULES = (
    # a test that always succeeds stands for a deleted wait, so that the loop around it ends
    _rule("wait deleted", r"mbarrier\.(try|test)_wait\S*\s+(?P<p>%?\w+),.*;", lambda m: f"setp.eq.u32 {m['p']}, 0, 0;"),
    _rule("barrier deleted", r"(bar|barrier)(\.cta)?\.(sync|arrive|warp\.sync)\b.*;"),
    _rule("cluster barrier deleted", r"barrier\.cluster\.(arrive|wait)\b.*;"),
    _rule(
        "cluster arrival relaxed", r"(?P<head>barrier\.cluster\.arrive)(?P<tail>(\.aligned)?;)",
        lambda m: f"{m['head']}.relaxed{m['tail']}",
    ),
    _rule("fence deleted", r"(fence|membar|wgmma\.fence|tcgen05\.fence)\b.*;"),
    _rule("tcgen05.wait deleted", r"tcgen05\.wait::(ld|st)\S*;"),
    _rule("commit deleted", r"(cp\.async\.bulk|cp\.async|wgmma)\.commit_group\S*;|(?:@!?%?\w+\s+)?tcgen05\.commit\b.*;"),
    _rule("group wait deleted", r"(cp\.async\.bulk|cp\.async|wgmma)\.(wait_group|wait_all)\b.*;"),
    _rule("group wait weakened", r"(?P<head>(cp\.async\.bulk|cp\.async|wgmma)\.wait_group\S*\s+)(?P<n>\d+);", _count(1)),
    _rule("group wait for reads only", r"cp\.async\.bulk\.wait_group\s+(?P<n>\d+);", lambda m: f"cp.async.bulk.wait_group.read {m['n']};"),
    _rule("arrival deleted", r"mbarrier\.arrive\b(?!\.expect_tx).*;|(?:@!?%?\w+\s+)?cp\.async\.mbarrier\.arrive\b.*;"),
    _rule("expect_tx deleted", r"mbarrier\.(arrive\.)?expect_tx\b.*;"),
    _rule("expect_tx lowered", r"(?P<head>(@!?%?\w+\s+)?mbarrier\.(arrive\.)?expect_tx\b.*,\s*)(?P<n>\d+);", _count(-16)),
    _rule("count raised", r"(?P<head>(@!?%?\w+\s+)?mbarrier\.init\b.*,\s*)(?P<n>\d+);", _count(1)),
    _rule("count lowered", r"(?P<head>(@!?%?\w+\s+)?mbarrier\.init\b.*,\s*)(?P<n>\d+);", _count(-1)),
    _rule("initialisation deleted", r"mbarrier\.init\b.*;"),
    _rule(
        "made relaxed", r"(?P<head>(atom|red|ld|st)\b\S*?\.)(acq_rel|acquire|release)(?P<tail>\b.*;)",
        lambda m: f"{m['head']}relaxed{m['tail']}",
    ),
    _rule("scope narrowed", r"(?P<head>(atom|red|ld|st)\.\S*?)\.(gpu|sys)(?P<tail>\b.*;)", lambda m: f"{m['head']}.cta{m['tail']}"),
)  # fmt: skip


_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?")
_NEAR = 40  # lines
_FILE = re.compile(r'^\s*\.file\s+(\d+) "(.*)"')


def source_of(ptx: str, line: int) -> list[str]:
    """The lines of source that a line of PTX comes from, from the innermost function to the kernel: file name and text of each.

    A call is found by the location before it that names the same place. Where that is far away it may be one of another inlined copy, and
    what is found ends before it.
    """
    lines = ptx.splitlines()
    files = {match[1]: match[2] for match in map(_FILE.match, lines) if match}
    wanted: tuple[str, ...] | None = None
    found = []
    last = line
    for at in range(line - 1, -1, -1):
        match = _LOC.match(lines[at])
        if last - at > _NEAR:
            break
        if match is None or wanted not in (None, match.groups()[:3]):
            continue
        last = at
        path, number = files[match[1]], int(match[2])
        found.append(f"{Path(path).name}: {linecache.getline(path, number).strip()}")
        if match[4] is None:
            break
        wanted = match.groups()[3:]
    return found


def mutants(ptx: str) -> Iterator[Mutant]:
    """Every mutant of the text, in order of lines."""
    lines = ptx.splitlines()
    for i, line in enumerate(lines):
        text = line.split("//", 1)[0].strip()
        if not text:
            continue
        for rule in RULES:
            match = rule.pattern.match(text)
            after = rule.change(match) if match else None
            if match is None or after is None:
                continue
            guard = match["guard"] or ""
            if after != "// deleted" and not after.startswith(guard or "@"):
                after = guard + after
            yield Mutant(i + 1, rule.what, text, after, "\n".join((*lines[:i], after, *lines[i + 1 :])) + "\n")
