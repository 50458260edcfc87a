"""Tiles are used where the processor has them, the compiler makes their instructions and the system permits them:
all three.
"""

import platform
from collections.abc import Callable

import pytest

from ksgen.build import processors
from ksgen.build.host import HostCompiler
from ksgen.build.processors import tiles_are_permitted
from ksgen.devices import native
from ksgen.devices.native import pair_products, usable_tiles

MACROS = frozenset({"__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__"})
FEATURES = frozenset({"avx512f", "amx_tile", "amx_bf16", "amx_int8"})


class Compiler:
    """One that says what it defines, and how often it was asked."""

    def __init__(self, macros: frozenset[str]) -> None:
        self._macros, self.asked = macros, 0

    def macros(self, target: str) -> frozenset[str]:
        self.asked += 1
        return self._macros


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    def tiles(
        features: frozenset[str] = FEATURES, macros: frozenset[str] = MACROS, permits: bool = True
    ) -> tuple[str, ...]:
        monkeypatch.setattr(native, "processor_features", lambda: features)
        monkeypatch.setattr(native, "tiles_are_permitted", lambda: permits)
        return usable_tiles(Compiler(macros))  # type: ignore[arg-type]

    return tiles


def test_all_three_are_needed(found: Callable[..., tuple[str, ...]]) -> None:
    assert found() == ("bf16",)
    assert found(features=FEATURES - {"amx_tile"}) == found(features=FEATURES - {"amx_bf16"}) == ()
    assert found(macros=MACROS - {"__AMX_TILE__"}) == found(macros=MACROS - {"__AMX_BF16__"}) == ()
    assert found(permits=False) == ()


def test_without_a_compiler_the_processor_is_asked(
    found: Callable[..., tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs was built by another, as a rule one that knows these products."""
    found(features=FEATURES | {"amx_fp16", "avx512_bf16"})
    assert (usable_tiles(None), pair_products(None)) == (("bf16", "f16"), ("bf16",))


def test_each_operand_is_by_itself(found: Callable[..., tuple[str, ...]]) -> None:
    newer = FEATURES | {"amx_fp16"}
    assert found(features=newer) == ("bf16",)  # the compiler is older than these products
    assert found(features=newer, macros=MACROS | {"__AMX_FP16__"}) == ("bf16", "f16")


def test_pairs_are_multiplied_where_the_processor_and_the_compiler_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, macros, wanted in (
        ({"avx512f", "avx512_bf16"}, {"__AVX512BF16__"}, ("bf16",)),
        ({"avx512f", "avx512_bf16"}, {"__AVX512F__"}, ()),  # a compiler of before
        ({"avx512f"}, {"__AVX512BF16__"}, ()),
    ):
        monkeypatch.setattr(native, "processor_features", lambda features=features: features)
        assert pair_products(Compiler(frozenset(macros))) == wanted  # type: ignore[arg-type]


def test_without_tiles_the_system_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_features", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(native, "tiles_are_permitted", lambda: pytest.fail("asked"))
    compiler = Compiler(MACROS)
    assert usable_tiles(compiler) == ()  # type: ignore[arg-type]
    assert compiler.asked == 0


def test_the_system_is_asked_by_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer decides, even on a processor that has tiles."""
    assert isinstance(tiles_are_permitted(), bool)
    asked = []

    class Library:
        def syscall(self, *given: int) -> int:
            asked.append(given)
            return -1

    monkeypatch.setattr(processors.ctypes, "CDLL", lambda *given, **named: Library())
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    tiles_are_permitted.cache_clear()
    assert not tiles_are_permitted()
    assert asked == [(158, 0x1023, 18)]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")  # whose call of that number is another
    tiles_are_permitted.cache_clear()
    assert not tiles_are_permitted()
    assert len(asked) == 1
    tiles_are_permitted.cache_clear()


def test_a_compiler_says_what_it_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    from ksgen.build.host import find_host_compiler, host_target
    from ksgen.errors import ToolchainError

    try:
        compiler: HostCompiler = find_host_compiler()
    except ToolchainError as absent:
        pytest.skip(str(absent))
    assert {"__cplusplus", "__GNUC__"} <= compiler.macros(host_target())
