"""Finds templates, adds the snippets that a source uses, and reports a template that cannot be rendered.

Snippet libraries (`templates/include/words/`) hold a block for each word that a template may use: a function, a type, a
macro. A source gets the snippets that it uses, directly or through others, and only the constants that it uses. So
nothing in it is unused. Never chooses constants.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2

from ksgen.emit.compiled import CompiledTemplates
from ksgen.errors import RenderError
from ksgen.families import Family, family_named
from ksgen.paths import resource

DIALECTS = {"cuda": ".cu", "opencl": ".cl"}
WORDS = {  # the dictionaries of a dialect, in the order in which they use each other
    "cuda": ("cuda", "ptx", "numbers", "epilogue", "tile", "parts", "chunks", "operands", "warpgroups"),
    "opencl": ("opencl", "numbers", "epilogue", "tile", "parts"),
}
VECTOR_WORDS = ("opencl", "vector", "epilogue", "vector_outputs")  # snippets of sources for processors
PART_WORDS = ("tile", "chunks", "operands")  # snippets of a part of a source with its own constants
TILE_WORDS = (*VECTOR_WORDS, "amx")  # snippets of sources for processors' matrix tiles
TILE_PART_WORDS = TILE_WORDS[2:]  # the same of a part of theirs
VARIANT = "__"  # separates a snippet's name and its variant: `widen__float16` serves sources with the variant `float16`

_LATE = "\0"  # stands in a first rendering where later words will
_NOT_CODE = re.compile(r'//[^\n]*|(?<!_Pragma\()"(?:[^"\\\n]|\\.)*"')  # a name in a pragma is a use
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def fill(
    template: str | jinja2.Template,
    words: Mapping[str, Any],
    dictionaries: Iterable[str] = (),
    variants: Iterable[str] = (),
) -> str:
    """Fill in the template with the snippets that it uses.

    Snippets that `late_word_lines` needs first go to `word_lines`, the rest to `late_word_lines`. `constant_lines`
    defines the `constexprs` that the source uses.
    """
    found = environment().get_template(template)
    words = {**words, "every_variant": tuple(variants)}
    try:
        front, _, rest = found.render(
            {**words, "word_lines": "", "constant_lines": "", "late_word_lines": _LATE}
        ).partition(_LATE)
        names, variants = list(dictionaries), tuple(variants)
        needed = identifiers(front)
        entries, used = _linked(needed | identifiers(rest), names, variants, words)
        early = _linked(needed, names, variants, words)[0] if rest else entries
        late = [entry for entry in entries if entry not in early]
        constants = constant_lines(names[0], words["constexprs"], used) if "constexprs" in words else ""
        return found.render(
            {**words, "word_lines": _lines(early), "constant_lines": constants, "late_word_lines": _lines(late)}
        )
    except jinja2.TemplateError as error:
        raise RenderError(_report(found.name or "a text", words, error)) from error


def identifiers(text: str) -> set[str]:
    """Identifiers in a source's code, without its comments and strings."""
    return set(_IDENTIFIER.findall(_NOT_CODE.sub(" ", text)))


@lru_cache(maxsize=4096)
def _identifiers_of(text: str) -> frozenset[str]:
    """Identifiers of one block, cached because many sources share it."""
    return frozenset(identifiers(text))


def constant_lines(dictionary: str, constexprs: Iterable[Any], used: set[str], block: str = "_constants") -> str:
    """Definitions of the constants that a source uses, in its dialect; or, with another block, their ends."""
    found = _dictionary(dictionary)
    return _spelled(found, block, found.new_context({"constexprs": [each for each in constexprs if each.name in used]}))


def _dictionary(name: str) -> jinja2.Template:
    return environment().get_template(f"include/words/{name}.j2")


def _linked(
    used: set[str], dictionaries: list[str], variants: tuple[str, ...], words: Mapping[str, Any]
) -> tuple[list[tuple[str, str]], set[str]]:
    """Snippets for a source that uses these words, by library, and all words used then, in order."""
    found: list[tuple[str, str]] = []
    for name in reversed(dictionaries):
        dictionary = _dictionary(name)
        context = dictionary.new_context(dict(words))
        for word, block in _chosen(dictionary, variants):
            if word in used:
                text = _spelled(dictionary, block, context)
                found.insert(0, (name, text))
                used |= _identifiers_of(text)
    return found, used


def _lines(entries: list[tuple[str, str]]) -> str:
    """The sources of all entries, with an empty line between two dictionaries."""
    return "\n".join("".join(text for _, text in group) for _, group in groupby(entries, key=lambda entry: entry[0]))


@lru_cache(maxsize=1024)
def _chosen(dictionary: jinja2.Template, variants: tuple[str, ...]) -> list[tuple[str, str]]:
    """Snippets with their blocks, last first: the block for a variant of the source, where there is one."""
    words = dict.fromkeys(block.partition(VARIANT)[0] for block in dictionary.blocks)
    best = {
        word: next((name for each in variants if (name := f"{word}{VARIANT}{each}") in dictionary.blocks), word)
        for word in words
    }
    return [
        (word, block) for block in reversed(dictionary.blocks) if best[word := block.partition(VARIANT)[0]] == block
    ]


def _spelled(dictionary: jinja2.Template, block: str, context: Any) -> str:
    """Text of a block; empty if there is no such block."""
    try:
        return "".join(dictionary.blocks[block](context)) if block in dictionary.blocks else ""
    except jinja2.TemplateError:
        return environment().handle_exception()  # raises again, with the template's lines in place of Jinja's


def _report(template: str, words: Mapping[str, Any], error: jinja2.TemplateError) -> str:
    """The kernel, the chain of includes down to where it failed, what failed, and the words that were there."""
    kernel = words.get("kernel")
    family, name = template.partition(".")[0], getattr(kernel, "name", words.get("entry", "a text"))
    chain = list(dict.fromkeys(_frames(error.__traceback__))) or [template]
    if isinstance(error, jinja2.TemplateSyntaxError):
        chain.append(f"{error.name}:{error.lineno}")
    return f"{family}, {name}: {' > '.join(chain)}: {error.message}; the words there are {', '.join(sorted(words))}"


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
def _with_words(context: jinja2.runtime.Context, text: str, part: Mapping[str, Any]) -> str:
    """A part of a source in a namespace of its own, such as one factor of a chain.

    It follows the definitions of its `constexprs` and of the snippets that depend on them. OpenCL's constants end with
    it.
    """
    words = {**context.get_all(), **part}
    dialect = words["dialect"]
    variants = (*part["variants"], *words["every_variant"])
    entries, used = _linked(identifiers(text), list(words["part_words"]), variants, words)
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
    made.filters["with_words"] = _with_words
    return made


def template_of(family: Family[Any], kind: type[Any]) -> str:
    """Template of the sources of a family with such constants: for both dialects, or for OpenCL alone."""
    stem = kind.template or family.name
    return next(name for name in (f"{stem}.cu.j2", f"{stem}.cl.j2") if (resource("templates") / name).is_file())


def part_words(family: Family[Any], kind: type[Any]) -> tuple[str, ...]:
    """Snippet libraries of each part of a source, for sources of the family with such constants that have parts."""
    if template_of(family, kind).endswith(".cl.j2"):
        return TILE_PART_WORDS
    return tuple(each for each in PART_WORDS if each != "operands" or kind.on_tensor_cores)


def dialects_of(family: Family[Any], kind: type[Any]) -> tuple[str, ...]:
    """Dialects in which the family's template for such constants can be rendered."""
    if (template := template_of(family, kind)).endswith(".cl.j2"):
        return ("opencl",)
    # OpenCL lacks instructions of tensor cores, and the wide loads of small-batch kernels
    return ("cuda",) if has_parts(template) or kind.on_tensor_cores or family.for_small_batches else tuple(DIALECTS)


def has_parts(template: str) -> bool:
    """Whether the template's sources of chains have parts with snippets of their own."""
    return "with_words" in (resource("templates") / template).read_text(encoding="utf-8")


def dictionaries(family: Family[Any], kind: type[Any], dialect: str, in_parts: bool = False) -> tuple[str, ...]:
    """Snippet libraries that the family's sources with such constants may use in a dialect, in order. `in_parts`:
    outside of the parts of a source that has parts with snippets of their own."""
    if template_of(family, kind).endswith(".cl.j2"):
        own = VECTOR_WORDS if family.name == "vector" else TILE_WORDS
        return tuple(each for each in own if not in_parts or each not in part_words(family, kind))
    if in_parts:
        return tuple(each for each in WORDS[dialect] if each not in (*PART_WORDS, "parts", "warpgroups"))
    others = {"tile" if family.name.startswith("gradient") else "parts"} | (
        set() if family.by_warpgroups else {"warpgroups"}
    )
    if not kind.on_tensor_cores:
        others.add("operands")
    return tuple(each for each in WORDS[dialect] if each not in others)


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
    named = {
        name for kind in own.kinds for dialect in dialects_of(own, kind) for name in dictionaries(own, kind, dialect)
    }
    found.update(root / "include" / "words" / f"{name}.j2" for name in named)
    read: set[Path] = set()
    while new := found - read:
        read |= new
        found.update(path for name in _named(new) for path in (root / "include").glob(name))
        # begun with
        found.update(
            root / name for path in new for name in re.findall(r'"(\w+\.cu\.j2)"', path.read_text(encoding="utf-8"))
        )
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def _named(paths: Iterable[Path]) -> set[str]:
    """Includes that templates name: a snippet library, or a file with its folder if the name has a variable."""
    names = {name for path in paths for name in re.findall(r'"include/([\w/.]+)', path.read_text(encoding="utf-8"))}
    return {name if name.startswith("words/") else f"{name.partition('/')[0]}/*.j2" for name in names}
