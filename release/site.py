"""Adds to the site what lies outside docs/: pages, the API reference, and files that pages link to.

mkdocs calls the `on_` functions. A link out of docs/ leads to a copy of the file, or to a list of a folder's files.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from release.tutorial import tutorial_page  # noqa: E402  (mkdocs runs elsewhere)

# page -> file
OUTSIDE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
REFERENCE = {
    "ksgen": "ksgen/__init__.py",
    "ksgen.torch": "ksgen/torch/__init__.py",
    "ksgen.jax": "ksgen/jax.py",
    "ksgen.structures": "ksgen/structures.py",
    "ksgen.transforms": "ksgen/transforms/__init__.py",
}
COPIES = "repository"  # the folder of the site with copies of files
_LINK = re.compile(r"(?<=\]\()(?![a-z]+://|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, the reference, and all that pages link to."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for script in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        files.append(File.generated(config, f"tutorials/{script.stem}.md", content=tutorial_page(script)))
    files.append(File.generated(config, "reference.md", content="".join(_reference())))
    wanted = {target for file in files.documentation_pages() for target in _targets(file.src_uri, file.content_string)}
    wanted |= {inner for target in wanted if target.is_dir() for inner in target.iterdir() if inner.is_file()}
    for target in sorted(wanted):
        uri = f"{COPIES}/{target.relative_to(ROOT).as_posix()}"
        if target.is_dir():
            listed = "".join(f"- [{each.name}]({each.name})\n" for each in sorted(target.iterdir()) if each.is_file())
            files.append(
                File.generated(
                    config,
                    f"{uri}/index.md",
                    content=f"# {target.name}\n\n{listed}",
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
        else:
            files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links of a page to where the site has what they name."""
    uri = page.file.src_uri
    return markdown if uri.startswith(f"{COPIES}/") else _LINK.sub(lambda link: _moved(uri, link[1]), markdown)


def _moved(uri: str, link: str) -> str:
    target = _target(uri, link)
    pages = {(ROOT / path).resolve(): page for page, path in OUTSIDE.items()}
    if target in pages:
        place = pages[target]
    elif target.is_relative_to(ROOT / "docs"):
        place = target.relative_to(ROOT / "docs").as_posix()
    else:
        place = f"{COPIES}/{target.relative_to(ROOT).as_posix()}{'/index.md' if target.is_dir() else ''}"
    return os.path.relpath(place, PurePosixPath(uri).parent)


def _targets(uri: str, text: str) -> Iterator[Path]:
    """Files and folders of the repository that a page links to and that are no pages."""
    for link in _LINK.findall(text):
        target = _target(uri, link)
        is_page = target.is_relative_to(ROOT / "docs") or target.relative_to(ROOT).as_posix() in OUTSIDE.values()
        if target.exists() and not is_page:
            yield target


def _target(uri: str, link: str) -> Path:
    """What a link of a page names, in the repository."""
    folder = ROOT if uri in OUTSIDE else (ROOT / "docs" / uri).parent
    return (folder / link).resolve()


def _reference() -> Iterator[str]:
    """A page of directives, one per public name."""
    yield "# Reference\n"
    for module, path in REFERENCE.items():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        yield f"\n## {module}\n\n{(ast.get_docstring(tree) or '').splitlines()[0]}\n"
        yield from (f"\n::: {module}.{name}\n" for name in _public(tree) if not name.startswith("_"))


def _public(tree: ast.Module) -> list[str]:
    """The names in `__all__`, without importing the module."""
    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names: list[str] = ast.literal_eval(assigned[0].value)
    return names
