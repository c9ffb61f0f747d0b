"""Imports point one way, and ``import tandem_attn`` loads nothing a CPU user does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tandem_attn"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

# What each part may import of ours, itself besides.
ALLOWED = {
    "spec": set(),
    "reference": {"spec"},
    "kernels": {"spec", "emulator"},  # kernels.emulated hands launches to it
    "perfmodel": {"spec"},
    "emulator": set(),
    "api": {"spec", "reference", "kernels", "perfmodel"},
    "compat": {"spec", "reference", "api"},
    "bench": {"spec", "reference", "kernels", "api"},
    "cli": {"spec", "reference", "kernels", "perfmodel", "api", "compat", "bench", "emulator"},
}
TOP = {"__init__", "__main__", "_version"}
FOREIGN_AT_IMPORT = {"spec": set(), "emulator": {"numpy"}}  # others: whatever their part of pyproject.toml installs
LAZY = ("triton", "numba", "llvmlite", "transformers", "gguf", "accelerate", "sentencepiece", "click", "rich", "scipy", "networkx")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path, nested: bool) -> set[str]:
    """Dotted names a file imports; ``nested``: also inside functions. Imports for type checkers alone do not count."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if nested else at_import(tree)
    hidden = {id(child) for node in ast.walk(tree) if is_type_checking(node) for child in ast.walk(node)}
    names: set[str] = set()
    for node in nodes:
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def at_import(tree: ast.AST) -> list[ast.AST]:
    """Nodes that run when the module is imported."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found += [child, *at_import(child)]
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def ours(names: set[str]) -> set[str]:
    """Parts of the package among the names; "" is the package itself."""
    parts = {name.split(".")[1] for name in names if name.startswith("tandem_attn.")}
    return parts if "tandem_attn" not in names else parts | {""}


def foreign(names: set[str]) -> set[str]:
    roots = {name.split(".")[0] for name in names}
    return roots - set(sys.stdlib_module_names) - {"tandem_attn", "__future__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part in TOP:
        assert ours(imports(path, nested=True)) <= {*ALLOWED, "_version"} - {"emulator"}
        return
    public = {"Causal", "Document", "Full", "Mask", "Predicate", "Problem", "Support", "UnsupportedError", "Window", "attention",
              "attention_kvcache", "attention_varlen", "backends", "supports", "__version__"}  # fmt: skip
    used = ours(imports(path, nested=True))
    if part in ("compat", "cli"):
        used -= public | {""}
    assert used - {part, "_version"} <= ALLOWED[part], f"{part} imports {sorted(used - {part} - ALLOWED[part])}"


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(p) in FOREIGN_AT_IMPORT], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_spec_and_emulator_need_little(path: Path) -> None:
    """spec is the standard library alone; the emulator reaches neither torch nor triton when it is imported."""
    part = part_of(path)
    assert foreign(imports(path, nested=part == "spec")) <= FOREIGN_AT_IMPORT[part] | (
        {"numba", "llvmlite"} if part == "emulator" else set()
    )


def fresh(code: str) -> str:
    """Output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_optional() -> None:
    loaded = fresh(
        f"import sys, torch; before = set(sys.modules); import tandem_attn; print(*[m for m in {LAZY} if m in set(sys.modules) - before])"
    )
    assert loaded == "", f"import tandem_attn loads {loaded}"


def test_import_works_without_optional_packages() -> None:
    """Also when they are not installed at all: a call runs on the CPU."""
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {LAZY}:
            raise ImportError('absent: ' + name)
sys.meta_path.insert(0, Absent())
import torch, tandem_attn
x = torch.ones(1, 3, 2, 4)
print(tandem_attn.attention(x, x, x, causal=True, softcap=1.0).sum().item())
"""
    assert float(fresh(code)) == pytest.approx(24.0)


def test_spec_loads_without_torch() -> None:
    """A planner or a schedule is of use where torch is not installed; only the package's own ``__init__`` asks for it."""
    code = f"""
import sys, types
package = types.ModuleType('tandem_attn')
package.__path__ = [{str(PACKAGE)!r}]
sys.modules['tandem_attn'] = package
import importlib, pathlib
for path in pathlib.Path({str(PACKAGE / "spec")!r}).glob('*.py'):
    importlib.import_module('tandem_attn.spec.' + path.stem if path.stem != '__init__' else 'tandem_attn.spec')
print([m for m in ('torch', 'numpy', 'triton') if m in sys.modules])
"""
    assert fresh(code) == "[]"


def test_public_names() -> None:
    import tandem_attn  # noqa: PLC0415  (the names of the package itself are the subject)

    assert all(hasattr(tandem_attn, name) for name in tandem_attn.__all__)
    assert len(set(tandem_attn.__all__)) == len(tandem_attn.__all__)
