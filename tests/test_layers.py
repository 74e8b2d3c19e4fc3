"""Dependencies point down only, and importing does nothing."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

from hvdcompress import methods

PACKAGE = ROOT / "hvdcompress"
# Each layer may import itself and the layers before it.
LAYERS = [
    ("errors", "settings", "spec", "options"),
    ("core",),
    ("kernels", "frame"),
    ("codecs", "sketch"),
    ("reducers",),
    ("traffic", "memory"),
    ("session",),
    ("watch",),
    ("drivers",),
    ("adapter", "compression", "schedule", "checkpoint"),
    ("torch", "tensorflow", "testing"),
    ("keras",),
    ("command",),
]
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "mpi4py"}


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imported(path: Path) -> tuple[set[str], set[str]]:
    """Names of the package's own parts and of other packages that a module imports."""
    inside, outside, depth = set(), set(), len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.relative_to(PACKAGE).parts[: depth - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            inside |= {".".join((*base, name)).split(".")[0] for name in names}
        elif isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            outside.add(node.module.split(".")[0])
    return inside - {"__version__"}, outside


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_its_own_layer_and_those_below(path: Path) -> None:
    own = layer_of(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    inside, outside = imported(path)
    for name in inside:
        assert layer_of(name) <= own, f"{path.name} imports {name}, which is above it"
    if own < layer_of("drivers"):
        assert not outside & FRAMEWORKS, f"{path.name} imports {outside & FRAMEWORKS}"


def test_importing_the_package_imports_no_framework_and_changes_nothing() -> None:
    program = f"""
import os, random, sys, threading, warnings
import numpy as np
before = dict(os.environ), list(warnings.filters), random.getstate(), np.random.get_state()[1].tolist(), threading.active_count()
import hvdcompress, hvdcompress.drivers.simulate
assert not {FRAMEWORKS!r} & set(sys.modules), sorted({FRAMEWORKS!r} & set(sys.modules))
after = dict(os.environ), list(warnings.filters), random.getstate(), np.random.get_state()[1].tolist(), threading.active_count()
assert before == after
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_table_of_methods_is_that_of_the_registry() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "methods_table.py"))["page"](page) == page, "run python docs/methods_table.py"
    for name in methods:
        assert f"| `{name}` |" in page
