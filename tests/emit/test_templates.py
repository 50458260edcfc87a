"""What a template asks for and is not there is named with the family, the kernel and the chain of includes; texts
are linked.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest

from ksgen.emit import templates
from ksgen.emit.render import render
from ksgen.emit.templates import Dialect, template_of
from ksgen.errors import RenderError
from ksgen.families import FAMILIES, Limits, cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec

ROOT = Path(__file__).parents[2]
KERNEL = KernelSpec(Pattern(2, 64, 48, 4))
ON_PROCESSORS = {name for name in FAMILIES if name.startswith(("vector", "amx", "cpu"))}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Templates of this test's own, that it may break."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    monkeypatch.setattr(templates, "resource", lambda name: tmp_path / name)
    clear_caches()
    yield tmp_path / "templates"
    clear_caches()


def clear_caches() -> None:
    """Forget all that was read of templates."""
    for each in vars(templates).values():
        if hasattr(each, "cache_clear") and each.__module__ == templates.__name__:
            each.cache_clear()


def append(path: Path, more: str) -> int:
    """The line where it stands then."""
    text = path.read_text() + more
    path.write_text(text)
    return text.count("\n")


def test_an_unknown_word_is_named_with_where_it_stands_and_what_is_there(copied: Path) -> None:
    line = append(copied / "include/simt/layout_bsf.j2", "{{ nonsense }}\n")
    with pytest.raises(RenderError) as caught:
        render(KERNEL)
    said = str(caught.value)
    assert said.startswith("simt, ks_2x64x48x4_float32_bsf: simt.cu.j2:")
    assert f" > include/simt/layout_bsf.j2:{line}: 'nonsense' is undefined; the variables there are " in said
    assert ", constexprs, " in said


def test_so_is_one_of_a_dictionary(copied: Path) -> None:
    words = copied / "include/snippets/numbers.j2"
    words.write_text(words.read_text().replace("typedef float real;", "typedef {{ nonsense }} real;"))
    with pytest.raises(
        RenderError,
        match=r"^simt, ks_\S+: include/snippets/numbers\.j2:\d+: 'nonsense' is undefined; the variables there are ",
    ):
        render(KERNEL)


def test_and_an_include_that_is_not_there(copied: Path) -> None:
    (copied / "include/simt/layout_bsf.j2").unlink()
    with pytest.raises(
        RenderError, match=r"^simt, ks_\S+: simt\.cu\.j2:\d+.*: 'include/simt/layout_bsf\.j2' not found in search path"
    ):
        render(KERNEL)


def test_and_one_that_cannot_be_read(copied: Path) -> None:
    line = append(copied / "include/simt/layout_bsf.j2", "{% for %}\n")
    with pytest.raises(RenderError, match=rf"^simt, ks_\S+: .*include/simt/layout_bsf\.j2:{line}: "):
        render(KERNEL)


def test_a_text_takes_a_word_and_what_that_one_uses_and_no_more(copied: Path) -> None:
    (copied / "include/snippets/small.j2").write_text(
        "{% block first %}\nint first;\n{% endblock %}\n{% block spare %}\nint spare;\n{% endblock %}\n"
        "{% block second %}\nint second = first;\n{% endblock %}\n{% block second__long %}\nlong second;\n{% endblock "
        "%}\n"
    )
    (copied / "small.j2").write_text('{{ snippet_lines }}// spare\nf("spare", second);\n')
    assert (
        templates.fill("small.j2", {}, ["small"]) == 'int first;\nint second = first;\n// spare\nf("spare", second);\n'
    )
    assert templates.fill("small.j2", {}, ["small"], ["long"]) == 'long second;\n// spare\nf("spare", second);\n'


def test_templates_do_no_arithmetic_and_set_nothing() -> None:
    for path in (ROOT / "templates").rglob("*.j2"):
        text = path.read_text()
        assert "{% set" not in text, path
        tags = re.findall(r"{%-? *((?:if|elif|endif)\b[^%]*?) *-?%}", text)
        assert all(re.fullmatch(r"if (not )?(\w+\.)?\w+|endif", tag) for tag in tags), (path, tags)  # one named boolean
        assert [tag.partition(" ")[0] for tag in tags] == ["if", "endif"] * (len(tags) // 2), path  # never nested


def test_templates_extend_at_most_two_others() -> None:
    root = ROOT / "templates"
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.j2")}
    extended = {name: re.findall(r'{% extends "([^"]+)" %}', text) for name, text in texts.items()}
    for name in texts:
        levels = [name]
        while above := extended[levels[-1]]:
            levels += above
        assert len(levels) <= 3, levels


def names_in(variables: Any) -> Iterator[str]:
    """Names of template variables, and of those of parts."""
    if isinstance(variables, dict):
        yield from variables
        variables = variables.values()
    elif not isinstance(variables, list):
        return
    for each in variables:
        yield from names_in(each)


def variables_of(name: str) -> set[str]:
    """Names of a family's template variables for every job and layout."""
    family, found = FAMILIES[name], set[str]()
    for kernel, limits in supported(name):
        found.update(names_in(family.variables(kernel, family.default(kernel, limits))))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_variable_of_a_family_is_used_by_a_template(name: str) -> None:
    every = [path.read_text() for path in (ROOT / "templates").rglob("*.j2")]
    spelled = " ".join(each for text in every for each in re.findall(r"{[{%].*?[%}]}", text, re.DOTALL))
    python_reads = {"variants", "constexprs"}  # and no template
    assert variables_of(name) - set(re.findall(r"\w+", spelled)) - python_reads == set()


def test_each_family_has_its_template() -> None:
    for family in FAMILIES.values():
        for kind in family.kinds:
            assert (ROOT / "templates" / template_of(family, kind)).is_file()


# ---- the digest


@pytest.mark.parametrize(
    ("file", "families"),
    [
        ("simt_chain.cu.j2", {"simt"}),
        ("include/wgmma/permute.j2", {"wgmma"}),
        ("gemv.cu.j2", {"gemv"}),
        ("gemv_group.cu.j2", {"gemv"}),
        ("include/gemv/place_bsf.j2", {"gemv"}),
        ("include/text.j2", set(FAMILIES)),
        ("include/gradient/common.j2", {"gradient"}),
        ("include/gradient_mma/load_registers.j2", {"gradient"}),
        ("include/vector/tile.j2", {"vector", "cpu_gradient"}),
        ("include/exchange/input_at.j2", ON_PROCESSORS),
        ("include/snippets/cuda.j2", set(FAMILIES) - ON_PROCESSORS),
        ("include/snippets/opencl.j2", ON_PROCESSORS | {"simt", "gradient"}),
        ("include/snippets/vector.j2", ON_PROCESSORS),
        ("include/snippets/amx.j2", {"amx", "cpu_gradient"}),
        ("include/amx/repair_none.j2", {"amx", "cpu_gradient"}),
        ("include/cpu_gradient/tiles_repair_none.j2", {"cpu_gradient"}),
        ("include/snippets/operands.j2", {"mma", "gradient", "wgmma"}),
        ("include/snippets/warpgroups.j2", {"wgmma"}),
        ("probe.cu.j2", set()),
    ],
)
def test_a_template_changes_the_digests_of_the_families_that_use_it_and_no_others(
    file: str, families: set[str], copied: Path
) -> None:
    before = {name: templates.template_digest.__wrapped__(name) for name in FAMILIES}
    of_all = templates.digest_of_all.__wrapped__()
    append(copied / file, "// more\n")
    assert templates.digest_of_all.__wrapped__() != of_all
    assert {name for name in FAMILIES if templates.template_digest.__wrapped__(name) != before[name]} == families


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The templates that are read from now on."""
    found: set[str] = set()
    read = jinja2.FileSystemLoader.get_source

    def noted(self: jinja2.FileSystemLoader, environment: jinja2.Environment, template: str) -> Any:
        found.add(template)
        return read(self, environment, template)

    monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", noted)
    return found


def supported(family: str) -> Iterator[tuple[KernelSpec, Limits]]:
    """Kernels of a family for every job and layout, with all that may follow the product, and the device's limits."""
    limits = [cuda_limits("sm_90a"), replace(cuda_limits("sm_70"), is_cpu=True, tiles=("bf16", "f16"))]
    kernels = [
        KernelSpec(Pattern(2, 64, 64, d), precision, layout, Epilogue(bias=True, activation="gelu", residual=True))
        for d in (1, 16) for precision in ("float32", "tf32x3", "float16") for layout in LAYOUTS
    ]  # fmt: skip
    gradients = [replace(each, job="gradient", epilogue=Epilogue()) for each in kernels]
    chains = [replace(each, chains=(Pattern(2, 64, 64, 1), each.pattern)) for each in kernels if each.pattern.d == 1]
    groups = [
        replace(each, chains=(*each.chains, (Pattern(1, 32, 128, 1),)))
        for each in chains
        if each.precision == "float16"
    ]
    kernels += [*gradients, *(each for each in chains if each.precision != "tf32x3"), *groups]
    for kernel, limit in product(kernels, limits):
        if FAMILIES[family].supports(kernel, limit):
            yield kernel, limit


def rendered(family: str) -> Iterator[str]:
    """Texts of a family for its kernels, in every dialect."""
    for kernel, limits in supported(family):
        dialect: Dialect = "opencl" if limits.is_cpu else "cuda"
        yield render(kernel, FAMILIES[family].default(kernel, limits), family=family, dialect=dialect).text


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_a_digest_covers_every_file_that_a_text_reads(family: str, copied: Path, opened: set[str]) -> None:
    assert list(rendered(family))
    before = templates.template_digest.__wrapped__(family)
    for template in sorted(opened):
        path = copied / template
        whole = path.read_bytes()
        path.write_bytes(whole + b"// more\n")
        assert templates.template_digest.__wrapped__(family) != before, template
        path.write_bytes(whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_of_a_source_opens_few_files(
    family: str, copied: Path, opened: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = templates._lines
    used: set[str] = set()

    def noted(entries: list[tuple[str, str]]) -> str:
        used.update(f"include/snippets/{name}.j2" for name, _ in entries)
        return lines(entries)

    monkeypatch.setattr(templates, "_lines", noted)
    for _ in rendered(family):
        files = {each for each in opened if not each.startswith("include/snippets/")} | used
        assert len(files) <= 13, sorted(files)
        opened.clear()
        used.clear()
        templates.environment.cache_clear()
