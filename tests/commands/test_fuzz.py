"""YAML specs at random: each is a spec, or one line that names the file, in bounded time and memory."""

import string
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ksgen.errors import SpecError
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS, Spec, load, parse
from tests.support.damage import damaged, fuzzing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NO_HANG = timedelta(seconds=10)  # a hundred times what an example takes: busy machines are no reason to fail


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# --- specs: near the grammar, then anything

numbers = st.sampled_from(["1", "2", "3", "4", "5", "6", "7", "48", "64", "1000"])
right_pattern = st.tuples(*[numbers] * 4).map(lambda shape: f"[{','.join(shape)}]")
odd_numbers = [
    "",
    "0",
    "-1",
    "9" * 19,
    "9" * 5000,
    "2147483647",
    "1e400",
    "0x10",
    "٣",
    ".inf",
    ".nan",
    "1:2:3",
    "2024-01-01",
]
odd_words = [
    "~",
    "null",
    "yes",
    "&a 1",
    "*a",
    "<<",
    "!!python/object:os.system x",
    "!!binary aaaa",
    "!<",
    "@",
    "`",
    "#",
    "💥",
]
odd_texts = [
    '"\\U00110000"',
    '"\\ud800"',
    '"\\0"',
    "'",
    '"',
    "|",
    ">-",
    "? a",
    "%YAML 9.9",
    "---",
    "...",
    "]",
    "}",
    "[" * 30,
    "{a: " * 30,
]
odd_characters = ["\t", "\0", "\ufeff", "\x85", "\u2028"]
odd = st.sampled_from([*odd_numbers, *odd_words, *odd_texts, *odd_characters]) | st.text(max_size=8)
any_value = st.recursive(
    odd
    | numbers
    | st.sampled_from(["6,64,64,1", "any", "true", "paper", "monarch", *PRECISIONS, *LAYOUTS, *ACTIVATIONS]),
    lambda inner: (
        st.lists(inner, max_size=5).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(odd | st.sampled_from(["pattern", "chain", "family"]), inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=8,
)


def mostly(right: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 49).flatmap(lambda roll: right if roll else any_value)


def one_or_more(words: list[str]) -> st.SearchStrategy[str]:
    word = st.sampled_from(words)
    return mostly(word | st.lists(word, min_size=1, max_size=3, unique=True).map(lambda some: f"[{', '.join(some)}]"))


options = st.fixed_dictionaries(
    {},
    optional={
        "precision": one_or_more([*PRECISIONS]),
        "layout": one_or_more([*LAYOUTS]),
        "batch": one_or_more(["any", "1", "25088"]),
        "bias": one_or_more(["true", "false"]),
        "activation": one_or_more([*ACTIVATIONS]),
        "residual": one_or_more(["true", "false"]),
    },
).map(lambda chosen: [f"{key}: {value}" for key, value in chosen.items()])
kernels = st.lists(
    mostly(right_pattern)
    | options.flatmap(lambda given: mostly(right_pattern).map(lambda one: in_braces(f"pattern: {one}", *given)))
)
chains = st.sampled_from(
    [
        "[[2,3,4,1], [1,5,6,1]]",
        "{family: monarch, in_features: 6, out_features: 20, split_in: 3, split_out: 4}",
        "{family: deformable_butterfly, in_features: 12, blocks: [[2,3],[2,2]]}",
        "{family: square_dyadic, features: 1073741824}",
        "{family: kaleidoscope, features: 16}",
    ]
)
layers = st.dictionaries(
    st.text(string.ascii_letters, min_size=1, max_size=4) | odd,
    mostly(chains) | options.flatmap(lambda given: mostly(chains).map(lambda one: in_braces(f"chain: {one}", *given))),
    max_size=4,
)
sections = st.one_of(
    options.map(lambda given: f"defaults: {in_braces(*given)}"),
    kernels.map(lambda entries: "kernels:\n" + "".join(f"- {entry}\n" for entry in entries)),
    layers.map(lambda named: "layers:\n" + "".join(f"  {name}: {chain}\n" for name, chain in named.items())),
    mostly(st.just("paper")).map(lambda name: f"patterns: {name}"),
    mostly(st.just("# nothing")),
    st.tuples(odd, any_value).map(": ".join),
)


def in_braces(*parts: str) -> str:
    return "{" + ", ".join(parts) + "}"


def check_spec(path: Path, data: bytes) -> Spec | None:
    """A spec that reads again as it was, or one line that names the file."""
    path.write_bytes(data)
    try:
        spec = load(path)
    except SpecError as error:
        message = str(error)
        assert message.startswith(str(path))
        assert len(message.splitlines()) == 1
        assert len(message) < 1000
        return None
    assert load(path) == spec
    some = spec.kernels[:100]
    assert parse(as_yaml(Spec(spec.name, some, {}))).kernels == some
    assert {name: chain.factors for name, chain in parse(as_yaml(spec)).layers.items()} == {
        n: c.factors for n, c in spec.layers.items()
    }
    return spec


def as_yaml(spec: Spec) -> str:
    lines = ["kernels:"]
    for kernel in spec.kernels[:100]:
        given = {
            "pattern": [*kernel.pattern.shape],
            "precision": kernel.precision,
            "layout": kernel.layout,
            "batch": kernel.batch or "any",
        }
        flags = {
            "bias": kernel.epilogue.bias,
            "activation": kernel.epilogue.activation,
            "residual": kernel.epilogue.residual,
        }
        lines.append("- " + in_braces(*(f"{key}: {str(value).lower()}" for key, value in (given | flags).items())))
    lines += ["layers:"] if spec.layers else []
    lines += [f"  {name}: {[[*pattern.shape] for pattern in chain]}" for name, chain in spec.layers.items()]
    return "\n".join(lines)


@settings(fuzzing(150), deadline=NO_HANG)
@given(
    st.lists(sections, min_size=1, max_size=4, unique_by=lambda text: text[:4]).map("\n".join),
    st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16"]),
)
def test_a_spec_near_the_grammar_is_read_or_refused_in_one_line(folder: Path, text: str, encoding: str) -> None:
    check_spec(folder / "near.yaml", text.encode(encoding, "surrogatepass"))


SHIPPED = sorted((ROOT / "specs").glob("*.yaml"))


@settings(fuzzing(100), deadline=NO_HANG)
@given(st.sampled_from([path.read_bytes() for path in SHIPPED]).flatmap(damaged))
@example(b"")
@example(b"\xef\xbb\xbf")
def test_a_damaged_spec_is_read_or_refused_in_one_line(folder: Path, data: bytes) -> None:
    check_spec(folder / "damaged.yaml", data)


@pytest.mark.parametrize("name", ["a\nb.yaml", "\udcff.yaml", "x" * 300, "no/such.yaml", "\0", "."])
def test_a_spec_of_any_name_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1
    str(caught.value).encode()


BOMBS = {
    "a long number": "a: " + "9" * 10**6,
    "a long pattern": "kernels: ['" + "9" * 10**6 + ",1,1,1']",
    "a billion laughs": "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 10}]\n" for n in range(1, 12)),
    "anchors": "a: " + "&a " * 3 * 10**5,
    "deep lists": "a: " + "[" * 10**6,
    "deep maps": "a: " + "{a: " * 2 * 10**5,
    "deep blocks": "".join(f"{' ' * n}a:\n" for n in range(1400)),
    "deep dashes": "- " * 5 * 10**5,
    "question marks": "? " * 5 * 10**5,
    "a giant sweep": "defaults: {batch: ["
    + ",".join(map(str, range(1, 2 * 10**4)))
    + "], precision: [float32, float16]}\nkernels: [[1,1,1,1]]",
    "a giant factor": "layers: {a: {chain: {family: deformable_butterfly, in_features: 1, blocks: ["
    + "[1,1]," * 10**4
    + "]}}}",
    "a giant chain": "layers: {a: [" + "[1,1,1,1]," * 10**4 + "]}",
    "a long key": "a" * 10**6 + ": 1",
    "a long text": "a: '" + "x" * 10**6 + "'",
    "empty lines": "\n" * 10**6,
    "a comment": "#" * 10**6,
    "many keys": "".join(f"a{n}: 1\n" for n in range(10**4)),
    "a directive": "%YAML " + "9" * 10**6 + ".1\n--- a",
    "tags": "!" * 10**6,
    "an escape": 'a: "' + "\\U0010FFFF" * 10**5 + '"',
    "a layer name": "layers: {" + "a" * 10**6 + ": [[1,1,1,1]]}",
}


@pytest.mark.slow
def test_no_bomb_takes_long_or_much_memory(folder: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from ksgen.errors import SpecError; from ksgen.spec import "
        "load\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (100, 100))\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    print(path.stem, flush=True)\n"
        "    try: load(path)\n"
        "    except SpecError as error: assert len(str(error)) < 1000 and len(str(error).splitlines()) == 1, path\n"
    )
    paths = [folder / f"{name}.yaml" for name in BOMBS]
    for path, text in zip(paths, BOMBS.values(), strict=True):
        path.write_text(text)
    done = subprocess.run([sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.splitlines() == [*BOMBS]
