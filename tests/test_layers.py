"""Imports run down the table of layers on the design page, lazy ones too."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ksgen"
ORDER = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.M)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")  # whose names are all lazy
# modules of higher layers that sources name in strings
CLIMBS = {"launch/planner.py": ["ksgen.calibration.proof"]}  # imported on request
IN_OTHER_PROCESSES = {
    "launch/behind.py": ["ksgen.calibration.trials"],
    "passport.py": ["ksgen.calibration.proof"],
    "emit/render.py": ["ksgen.launcher"],  # in emitted sources
}
CIRCLES: list[list[str]] = []  # of files, that are left: none may join them


def package_of(module: str) -> str:
    """The package of a module's dotted name."""
    return module.split(".")[1]


def imported(source: str) -> Iterator[str]:
    """Every module of ksgen that a source imports, at its top or within a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("ksgen."))
        elif isinstance(node, ast.ImportFrom) and node.module == "ksgen":
            yield from (f"ksgen.{alias.name}" for alias in node.names if alias.name in ORDER)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ksgen."):
            yield node.module or ""


def file_of(module: str) -> str:
    """The file of a dotted name, or of the module that holds it."""
    path = ROOT / module.replace(".", "/")
    found = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()]
    return str(found[0].relative_to(PACKAGE)) if found else file_of(module.rpartition(".")[0])


def files_imported(source: str) -> set[str]:
    """Every file of ksgen that a source imports, at its top or within a function, except the packages around it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names if alias.name.startswith("ksgen.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ksgen":
            found |= {file_of(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {"__init__.py"}  # whose names are all lazy


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Files that import each other, directly or through others: the least sets of them."""
    reach = {name: set(given) for name, given in imports.items()}
    for between in imports:
        for name in imports:
            if between in reach[name]:
                reach[name] |= reach[between]
    found = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in imports if name in reach[name]
    }
    return sorted(sorted(circle) for circle in found)


def test_files_import_each_other_in_no_circle() -> None:
    """Except in those that are left, which shrink."""
    imports = {str(path.relative_to(PACKAGE)): files_imported(path.read_text(encoding="utf-8")) for path in MODULES}
    assert circles(imports) == CIRCLES


def test_a_circle_through_a_lazy_import_is_found() -> None:
    lazy = files_imported("def late():\n    from ksgen.spec import kernel\n    import ksgen.errors\n")
    assert lazy == {"spec/kernel.py", "errors.py"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}}) == [["a", "b", "c"], ["e"]]


def upward(package: str, source: str) -> list[str]:
    return [module for module in imported(source) if ORDER.index(package_of(module)) > ORDER.index(package)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_down(path: Path) -> None:
    package = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert upward(package, path.read_text(encoding="utf-8")) == []


def test_a_lazy_import_upwards_is_found() -> None:
    assert upward("build", "def late():\n    from ksgen.launcher import Launcher\n") == ["ksgen.launcher"]
    assert upward("spec", "from ksgen import tuning, errors\nimport ksgen.emit.render\n") == [
        "ksgen.tuning",
        "ksgen.emit.render",
    ]


def named(source: str) -> Iterator[str]:
    """Every module of ksgen that strings of a source import: by `import_module`, or as the source of a child."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            constants = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (each for each in constants if str(each).startswith("ksgen."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"(?:^|[;\n]) *(?:from|import) (ksgen\.[\w.]+)", node.value)


def test_modules_named_in_strings_are_lower_ones_too() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        name = str(path.relative_to(PACKAGE))
        package = ORDER.index(path.relative_to(PACKAGE).with_suffix("").parts[0])
        modules = [each for each in named(path.read_text(encoding="utf-8")) if each.split(".")[1] in ORDER]
        if higher := [each for each in modules if ORDER.index(package_of(each)) > package]:
            found[name] = higher
    assert found == CLIMBS | IN_OTHER_PROCESSES


def test_a_module_named_in_a_string_is_found() -> None:
    source = 'import_module("ksgen.torch.peft")\nCHILD = "import os; from ksgen.tuning import x"\nimport_module("os")\n'
    assert list(named(source)) == ["ksgen.torch.peft", "ksgen.tuning"]


def test_no_import_is_relative() -> None:
    """They would escape the check above."""
    for path in MODULES:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level], path


def test_every_package_is_in_the_table_once() -> None:
    packages = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in MODULES}
    assert sorted(ORDER) == sorted(packages)
