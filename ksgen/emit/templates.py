"""Finds templates, adds the snippets that a source uses, and reports a template that cannot be rendered.

Snippet libraries (`templates/include/snippets/`) hold a block per name that a template may use: a function, a type, a
macro. A source gets the snippets that it uses, directly or through others, and only the constants that it uses. So
nothing in it is unused. Never chooses constants.

Compiled templates are kept in the user's cache, because compiling them takes longer than rendering a kernel. There is
one file per template and version of Python. A file that is damaged, or that another user can have written, is never
loaded: its template is compiled again.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jinja2
from jinja2.bccache import Bucket

from ksgen.errors import KsgenError, RenderError
from ksgen.families import Family, family_named
from ksgen.files import read, replaced
from ksgen.locks import yield_to_calls
from ksgen.ownership import check_folder, keep_from_others, make_folder
from ksgen.paths import cache_dir, resource

FOLDER = "templates"  # in the cache
MOST_BYTES = 2**24  # of the largest compiled template that is read; usual ones have kilobytes
_SEAL_BYTES = hashlib.sha256().digest_size


class CompiledTemplates(jinja2.BytecodeCache):
    """Compiled templates of environments with these settings, one of which is the folder of the templates."""

    def __init__(self, *settings: object) -> None:
        self._made_with = "\0".join(map(str, (sys.version, jinja2.__version__, *settings)))

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return f"{name.replace('/', '.')}.{sys.implementation.cache_tag}"

    def get_source_checksum(self, source: str) -> str:
        return hashlib.sha256(f"{self._made_with}\0{source}".encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        yield_to_calls()  # if there is none, the template is compiled, which takes 20 ms
        folder = cache_dir() / FOLDER
        with suppress(OSError):
            for each in (folder.parent, folder):
                check_folder(each)
            content = read(folder / bucket.key, MOST_BYTES, is_own=True)
            if _seal(content[_SEAL_BYTES:]) == content[:_SEAL_BYTES]:
                bucket.bytecode_from_string(content[_SEAL_BYTES:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        compiled, folder = bucket.bytecode_to_string(), cache_dir() / FOLDER
        with suppress(OSError, KsgenError):  # the cache cannot be written to, which a build warns of
            make_folder(folder)
            with replaced(folder / bucket.key) as aside:
                aside.write_bytes(_seal(compiled) + compiled)
                keep_from_others(aside)


def _seal(compiled: bytes) -> bytes:
    """Digest that a file begins with. It proves that the rest is whole, before any of it is loaded."""
    return hashlib.sha256(compiled).digest()


Dialect = Literal["cuda", "opencl"]
DIALECTS: dict[Dialect, str] = {"cuda": ".cu", "opencl": ".cl"}
LIBRARIES = {  # snippet libraries of a dialect; each may use those before it
    "cuda": ("cuda", "ptx", "numbers", "epilogue", "tile", "parts", "chunks", "operands", "warpgroups"),
    "opencl": ("opencl", "numbers", "epilogue", "tile", "parts"),
}
VECTOR_LIBRARIES = ("opencl", "vector", "epilogue", "vector_outputs")  # snippets of sources for processors
PART_LIBRARIES = ("tile", "chunks", "operands")  # snippets of a part of a source with its own constants
TILE_LIBRARIES = (*VECTOR_LIBRARIES, "amx")  # snippets of sources for processors' matrix tiles
TILE_PART_LIBRARIES = TILE_LIBRARIES[2:]  # snippets of a part of such a source
VARIANT = "__"  # separates a snippet's name and its variant: `widen__float16` is for sources with the variant `float16`

_LATE = "\0"  # placeholder for later snippets in a first rendering
_NOT_CODE = re.compile(r'//[^\n]*|(?<!_Pragma\()"(?:[^"\\\n]|\\.)*"')  # a name in a pragma is a use
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def fill(
    template: str | jinja2.Template,
    variables: Mapping[str, Any],
    libraries: Iterable[str] = (),
    variants: Iterable[str] = (),
) -> str:
    """Fill in the template with the snippets that it uses.

    Snippets that the text before `late_snippet_lines` uses go to `snippet_lines`, the others to `late_snippet_lines`.
    `constant_lines` defines the `constexprs` that the source uses.
    """
    found = environment().get_template(template)
    variables = {**variables, "every_variant": tuple(variants)}
    try:
        front, _, rest = found.render(
            {**variables, "snippet_lines": "", "constant_lines": "", "late_snippet_lines": _LATE}
        ).partition(_LATE)
        names, variants = list(libraries), tuple(variants)
        needed = identifiers(front)
        entries, used = _linked(needed | identifiers(rest), names, variants, variables)
        early = _linked(needed, names, variants, variables)[0] if rest else entries
        late = [entry for entry in entries if entry not in early]
        constants = constant_lines(names[0], variables["constexprs"], used) if "constexprs" in variables else ""
        lines = {"snippet_lines": _lines(early), "constant_lines": constants, "late_snippet_lines": _lines(late)}
        return found.render({**variables, **lines})
    except jinja2.TemplateError as error:
        raise RenderError(_report(found.name or "a text", variables, error)) from error


def identifiers(text: str) -> set[str]:
    """Identifiers in a source's code, without its comments and strings."""
    return set().union(*map(_identifiers_of_line, text.splitlines()))


@lru_cache(maxsize=1 << 14)
def _identifiers_of_line(line: str) -> frozenset[str]:
    """Identifiers of one line, cached because sources share most of their lines."""
    return frozenset(_IDENTIFIER.findall(_NOT_CODE.sub(" ", line)))


def constant_lines(library: str, constexprs: Iterable[Any], used: set[str], block: str = "_constants") -> str:
    """Definitions of the constants that a source uses, in its dialect; or, with another block, their ends."""
    found = _library(library)
    return _spelled(found, block, found.new_context({"constexprs": [each for each in constexprs if each.name in used]}))


def _library(name: str) -> jinja2.Template:
    return environment().get_template(f"include/snippets/{name}.j2")


def _linked(
    used: set[str], libraries: list[str], variants: tuple[str, ...], variables: Mapping[str, Any]
) -> tuple[list[tuple[str, str]], set[str]]:
    """Snippets for a source that uses these names, in order, each with its library; and all names then used."""
    found: list[tuple[str, str]] = []
    for name in reversed(libraries):
        library = _library(name)
        context = library.new_context(dict(variables))
        for word, block in _chosen(library, variants):
            if word in used:
                text = _spelled(library, block, context)
                found.insert(0, (name, text))
                used |= identifiers(text)
    return found, used


def _lines(entries: list[tuple[str, str]]) -> str:
    """The sources of all entries, with an empty line between two libraries."""
    return "\n".join("".join(text for _, text in group) for _, group in groupby(entries, key=lambda entry: entry[0]))


@lru_cache(maxsize=1024)
def _chosen(library: jinja2.Template, variants: tuple[str, ...]) -> list[tuple[str, str]]:
    """Snippets with their blocks, last first: the block for a variant of the source, where there is one."""
    names = dict.fromkeys(block.partition(VARIANT)[0] for block in library.blocks)
    best = {
        word: next((name for each in variants if (name := f"{word}{VARIANT}{each}") in library.blocks), word)
        for word in names
    }
    return [(word, block) for block in reversed(library.blocks) if best[word := block.partition(VARIANT)[0]] == block]


def _spelled(library: jinja2.Template, block: str, context: Any) -> str:
    """Text of a block; empty if there is no such block."""
    try:
        return "".join(library.blocks[block](context)) if block in library.blocks else ""
    except jinja2.TemplateError:
        return environment().handle_exception()  # raises again, with the template's lines in place of Jinja's


def _report(template: str, variables: Mapping[str, Any], error: jinja2.TemplateError) -> str:
    """Message with the kernel, the chain of includes, the failure, and the variables that were defined."""
    kernel = variables.get("kernel")
    family, name = template.partition(".")[0], getattr(kernel, "name", variables.get("entry", "a text"))
    chain = list(dict.fromkeys(_frames(error.__traceback__))) or [template]
    if isinstance(error, jinja2.TemplateSyntaxError):
        chain.append(f"{error.name}:{error.lineno}")
    known = ", ".join(sorted(variables))
    return f"{family}, {name}: {' > '.join(chain)}: {error.message}; the variables there are {known}"


def _frames(trace: TracebackType | None) -> Iterator[str]:
    """Templates and their lines, as Jinja writes them into its traces."""
    root = str(resource("templates"))
    while trace is not None:
        if (path := trace.tb_frame.f_code.co_filename).startswith(root):
            yield f"{Path(path).relative_to(root).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next


def _with_constants(text: str, constexprs: list[Any]) -> str:
    """A part of a source, such as one factor of a chain, between the definitions and ends of its constants."""
    used = identifiers(text)
    return (
        constant_lines("opencl", constexprs, used) + text + constant_lines("opencl", constexprs, used, "_no_constants")
    )


@jinja2.pass_context
def _with_snippets(context: jinja2.runtime.Context, text: str, part: Mapping[str, Any]) -> str:
    """A part of a source in a namespace of its own, such as one factor of a chain.

    It follows the definitions of its `constexprs` and of the snippets that depend on them. OpenCL's constants end with
    it.
    """
    variables = {**context.get_all(), **part}
    dialect = variables["dialect"]
    variants = (*part["variants"], *variables["every_variant"])
    entries, used = _linked(identifiers(text), list(variables["part_libraries"]), variants, variables)
    constants, ends = (
        constant_lines(dialect, part["constexprs"], used, block) for block in ("_constants", "_no_constants")
    )
    return f"{constants}\n{_lines(entries)}\n{text}{ends}"


@cache
def environment() -> jinja2.Environment:
    root = str(resource("templates"))
    settings: dict[str, Any] = {
        "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True
    }  # fmt: skip
    compiled = CompiledTemplates(root, settings)
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root), bytecode_cache=compiled, auto_reload=False, **settings
    )
    made.filters["with_constants"] = _with_constants
    made.filters["with_snippets"] = _with_snippets
    return made


def template_of(family: Family[Any], kind: type[Any]) -> str:
    """Template of the sources of a family with such constants. One named `.cl.j2` is for OpenCL alone."""
    stem = kind.template or family.name
    return next(name for name in (f"{stem}.cu.j2", f"{stem}.cl.j2") if (resource("templates") / name).is_file())


def part_libraries(family: Family[Any], kind: type[Any]) -> tuple[str, ...]:
    """Snippet libraries for each part of a chain's source with constants of type `kind`; none if it has no parts."""
    if template_of(family, kind).endswith(".cl.j2"):
        return () if family.name == "vector" else TILE_PART_LIBRARIES
    return tuple(each for each in PART_LIBRARIES if each != "operands" or kind.on_tensor_cores)


def dialects_of(family: Family[Any], kind: type[Any]) -> tuple[Dialect, ...]:
    """Dialects in which the family's template for such constants can be rendered."""
    if template_of(family, kind).endswith(".cl.j2"):
        return ("opencl",)
    # OpenCL lacks namespaces for a chain's factors, instructions of tensor cores, and the wide loads of small-batch
    # kernels
    is_cuda = bool(kind.template) or kind.on_tensor_cores or family.for_small_batches
    return ("cuda",) if is_cuda else tuple(DIALECTS)


def libraries(family: Family[Any], kind: type[Any], dialect: Dialect, is_chain: bool = False) -> tuple[str, ...]:
    """Snippet libraries that the family's sources with such constants may use in a dialect, in order.

    A chain's parts have snippets of their own, which are left out.
    """
    own: tuple[str, ...] = LIBRARIES[dialect]
    others = set(part_libraries(family, kind)) if is_chain else set[str]()
    if template_of(family, kind).endswith(".cl.j2"):
        own = VECTOR_LIBRARIES if family.name == "vector" else TILE_LIBRARIES
    else:
        others.add("tile" if family.name.startswith("gradient") else "parts")
        if not family.by_warpgroups:
            others.add("warpgroups")
        if not kind.on_tensor_cores:
            others.add("operands")
    return tuple(each for each in own if each not in others)


@cache
def digest_of_all() -> str:
    """Sixteen hex digits over all templates, in a tenth of the time of the digests of all families."""
    return _digest_of(resource("templates").rglob("*.j2"))[:16]


@cache
def template_digest(family: str) -> str:
    """Eight hex digits over everything that can be part of the family's sources.

    That is its templates, the snippet libraries that they use, and all includes in the folders that they name,
    recursively.
    """
    root, own = resource("templates"), family_named(family)
    templates = {template_of(own, kind) for kind in own.kinds}
    found = {
        path for each in templates for path in (root / each, *(root / "include" / each.partition(".")[0]).glob("*.j2"))
    }
    found.update((root / "include").glob("*.j2"))
    named = {name for kind in own.kinds for dialect in dialects_of(own, kind) for name in libraries(own, kind, dialect)}
    found.update(root / "include" / "snippets" / f"{name}.j2" for name in named)
    read: set[Path] = set()
    while new := found - read:
        read |= new
        found.update(path for name in _named(new) for path in (root / "include").glob(name))
        # templates that they extend
        found.update(
            root / name for path in new for name in re.findall(r'"(\w+\.cu\.j2)"', path.read_text(encoding="utf-8"))
        )
    return _digest_of(found)[:8]


def _digest_of(templates: Iterable[Path]) -> str:
    """Hex digits over names and texts of templates."""
    root, digest = resource("templates"), hashlib.sha256()
    for path in sorted(templates):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _named(paths: Iterable[Path]) -> set[str]:
    """Includes that templates name: a snippet library, or a file with its folder if the name has a variable."""
    names = {name for path in paths for name in re.findall(r'"include/([\w/.]+)', path.read_text(encoding="utf-8"))}
    return {name if name.startswith("snippets/") else f"{name.partition('/')[0]}/*.j2" for name in names}
