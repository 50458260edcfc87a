"""Docstrings of public names teach: parameters and errors are described, and an example prints what it shows."""

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from ksgen.errors import KsgenError
from ksgen.launch.planner import PLANNER
from tests.support.hasty import compiles_hastily
from tests.support.libraries import library
from tests.support.native import chosen_native

__all__ = ["compiles_hastily"]  # which pytest finds by its name

MODULES = [
    "ksgen",
    "ksgen.structures",
    "ksgen.transforms",
    "ksgen.reference",
    "ksgen.order",
    pytest.param("ksgen.torch", marks=pytest.mark.libraries),
    pytest.param("ksgen.torch.peft", marks=pytest.mark.libraries),
    pytest.param("ksgen.jax", marks=pytest.mark.libraries),
]
NEEDED = {"ksgen.torch": "torch", "ksgen.torch.peft": "peft", "ksgen.jax": "jax"}
OF_TORCH = ("reset_parameters", "extra_repr", "register_parameter", "train")  # methods of PyTorch with another body
METHODS = (FunctionType, classmethod, staticmethod, property)


def public_names(module: str) -> list[str]:
    """Names that a module offers and that hold a class or a function."""
    found = import_module(module)
    names = getattr(
        found, "__all__", [name for name, each in vars(found).items() if getattr(each, "__module__", "") == module]
    )
    return sorted(name for name in names if not name.startswith("_") and callable(getattr(found, name)))


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield name and function or property of each public member that ksgen defines for a class."""
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        each = vars(owner)[name]
        is_ours = owner.__module__.startswith("ksgen.") and not (cls.__name__ == "KSLinear" and name in OF_TORCH)
        if is_ours and (not name.startswith("_") or name == "__call__") and isinstance(each, METHODS):
            yield name, each


def things(module: str) -> Iterator[tuple[str, Any]]:
    """Yield full name and object of each public name, and of each public member of a class."""
    if module in NEEDED:
        library(NEEDED[module])
    for name in public_names(module):
        whole = getattr(import_module(module), name)
        yield f"{module}.{name}", whole
        if inspect.isclass(whole):
            yield from ((f"{module}.{name}.{member}", each) for member, each in members(whole))


def raises(function: Any) -> bool:
    """Whether the body of a function has a statement that raises an error; nested functions do not count."""
    left: list[ast.AST] = list(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body)  # type: ignore[attr-defined]
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise) and node.exc:
            return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)
    return False


def bodies(thing: Any) -> list[Any]:
    """Functions that run when a class is called, a property is read, or a function is called."""
    if inspect.isclass(thing):
        written = (vars(thing).get(name) for name in ("__init__", "__post_init__"))
        return [each for each in written if each and Path(each.__code__.co_filename).is_file()]
    return [thing.fget if isinstance(thing, property) else inspect.unwrap(getattr(thing, "__func__", thing))]


def complaints(name: str, thing: Any) -> Iterator[str]:
    """Yield what the docstring of a class, a function, a method or a property lacks."""
    text = inspect.cleandoc(thing.__doc__ or "")
    if not text:
        yield f"{name}: no docstring"
    if any(map(raises, bodies(thing))) and not re.search(r"^Raises:$", text, re.MULTILINE):
        yield f"{name}: it raises errors, and has no Raises"
    if isinstance(thing, property) or thing is KsgenError:
        return
    if ">>> " not in text:
        yield f"{name}: no example"
    function = getattr(thing, "__func__", thing)
    parameters = [
        each.name for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")
    ]
    listed = "".join(re.findall(r"^(?:Args|Advanced|Attributes):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL))
    for parameter in parameters:
        if not parameter.startswith("_") and not re.search(rf"^    \*{{0,2}}{parameter}: ", listed, re.MULTILINE):
            yield f"{name}: parameter {parameter} is not listed under Args"
    is_void = inspect.isclass(thing) or inspect.signature(function).return_annotation in (None, "None")
    if not is_void and not re.search(r"^Returns:$", text, re.MULTILINE):
        yield f"{name}: no Returns"


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_describe_every_parameter_and_show_an_example(module: str) -> None:
    found = [complaint for name, thing in things(module) for complaint in complaints(name, thing)]
    assert not found, "\n".join(found)


def test_an_error_without_documentation_is_found() -> None:
    def silent(x: int) -> None:
        """Check x.

        Args:
            x: Number.

        Examples:
            >>> 1
            1
        """
        for _ in range(x):
            if x < 0:
                raise ValueError(x)

    def outer() -> Any:
        def inner() -> None:
            raise ValueError

        return inner

    assert list(complaints("silent", silent)) == ["silent: it raises errors, and has no Raises"]
    assert not raises(outer)


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_show(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(things(module))
    chosen_native(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))  # which a search of an example writes
    if module == "ksgen.torch.peft":  # an example replaces what BOFT builds blocks with
        boft = import_module("peft.tuners.boft.layer")
        monkeypatch.setattr(boft, "_FBD_CUDA", boft._FBD_CUDA)
    runner, shown = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS), list[str]()
    for name, thing in found.items():
        test = doctest.DocTestParser().get_doctest(inspect.cleandoc(thing.__doc__ or ""), {}, name, None, 0)
        runner.run(test, out=shown.append)
    PLANNER.forget()
    assert not runner.failures, "".join(shown)
