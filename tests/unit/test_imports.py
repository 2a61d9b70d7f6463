"""The tree of folders is the architecture: no circle, and no package imports what its docstring does not allow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"feather_sglang": ROOT / "feather_sglang", "feather_kernels": ROOT / "kernels" / "feather_kernels"}
HEAVY = {"sglang", "torch"}
MAY = "May import: "


def name_of(file: Path, package: str) -> str:
    parts = file.relative_to(OURS[package]).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


MODULES = {name_of(file, package): file for package, folder in OURS.items() for file in sorted(folder.rglob("*.py"))}


def imports(node: ast.AST, types: bool = False) -> Iterator[str]:
    """Dotted names that a piece of code imports when it runs, and those that only type checkers read if asked for."""
    if not types and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        modules = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in MODULES else node.module for name in modules)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, types)


GRAPH = {module: set(imports(ast.parse(file.read_text()))) for module, file in MODULES.items()}
WITH_TYPES = {module: set(imports(ast.parse(file.read_text()), types=True)) for module, file in MODULES.items()}


def package_of(module: str) -> str:
    """The package whose docstring says what a module may import."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def test_no_module_imports_itself_in_a_circle() -> None:
    TopologicalSorter({m: {o for o in others if o in MODULES} - {m} for m, others in GRAPH.items()}).prepare()


def test_nothing_needs_the_tuning_command() -> None:
    tune = "feather_kernels.tune"
    assert not [m for m, others in GRAPH.items() if not m.startswith(tune) and any(o.startswith(tune) for o in others)]


def short(module: str) -> str:
    """As a docstring names it: within feather_sglang without that, of other packages their first name."""
    top, _, rest = module.partition(".")
    return rest or top if top == "feather_sglang" else top


@pytest.mark.parametrize(
    "package", sorted({package_of(m) for m in MODULES if m.startswith("feather_sglang.")} - {"feather_sglang"})
)
def test_a_package_imports_what_its_docstring_allows(package: str) -> None:
    said = ast.get_docstring(ast.parse(MODULES[package].read_text())) or ""
    (line,) = [line for line in said.splitlines() if line.startswith(MAY)]
    allowed = [name.strip() for name in line.removeprefix(MAY).rstrip(".").split(",")]
    found = {
        short(other)
        for module, others in WITH_TYPES.items()
        if package_of(module) == package
        for other in others
        if other.partition(".")[0] in (*OURS, *HEAVY) and not f"{other}.".startswith(f"{package}.")
    }
    known = ["__version__", "feather_sglang", short(package), *allowed]
    extra = {name for name in found if not any(f"{name}.".startswith(f"{one}.") for one in known)}
    assert not extra, f"{package} imports {sorted(extra)}; its docstring allows {allowed}"


def test_data_flows_one_way() -> None:
    """Between the packages of the top level, whichever modules they are in; no type points back either."""
    tops = {}
    for module, others in WITH_TYPES.items():
        if module.startswith("feather_sglang."):
            own = module.split(".")[1]
            tops.setdefault(own, set()).update(
                other.split(".")[1] for other in others if other.startswith("feather_sglang.") and other in MODULES
            )
    TopologicalSorter({top: others - {top} for top, others in tops.items()}).prepare()
