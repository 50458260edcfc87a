"""What families of chains share: the factors by themselves, the word that holds their tiles, and the rule about it."""

from dataclasses import dataclass, replace

from ksgen.families.chains import FactorPlace, factor_kernels, listed, places, rule_of_tiles, tiles_of
from ksgen.families.rules import Rule
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec

FIRST, SECOND, OTHER = Pattern(2, 6, 5, 1), Pattern(1, 3, 2, 6), Pattern(1, 4, 10, 1)
ALL = Epilogue(True, "gelu", True)
GROUP = KernelSpec(((FIRST, SECOND), (OTHER,)), "float16", "bsl", ALL, stride="any")


@dataclass(frozen=True)
class Own:
    size: int


@dataclass(frozen=True)
class Words:
    tiles: str

    @property
    def parsed(self) -> list[Own]:
        return [Own(int(size)) for size, _ in listed(self.tiles)]


def test_each_factor_has_its_place_and_the_last_of_a_chain_its_epilogue() -> None:
    assert places(GROUP) == (
        FactorPlace(FIRST, 0, 0, False),
        FactorPlace(SECOND, 0, 1, True),
        FactorPlace(OTHER, 1, 0, True),
    )
    assert list(factor_kernels(GROUP)) == [
        KernelSpec(pattern, "float16", "bsl", epilogue)
        for pattern, epilogue in ((FIRST, Epilogue()), (SECOND, ALL), (OTHER, ALL))
    ]


def test_the_activation_between_is_that_of_all_but_the_last() -> None:
    relu = Epilogue(activation="relu")
    assert [each.epilogue for each in factor_kernels(replace(GROUP, between="relu"))] == [relu, ALL, ALL]
    assert all(each.between == "none" for each in factor_kernels(replace(GROUP, between="relu")))


def test_tiles_are_one_word() -> None:
    tiles = tiles_of(GROUP, ["1 2", "3 4", "5 6"])
    assert tiles == "1 2, 3 4; 5 6"
    assert listed(tiles) == (("1 2", False), ("3 4", True), ("5 6", True))


def test_the_rule_of_tiles_says_whose_rule_is_broken() -> None:
    even: Rule[Own] = Rule("size is even", lambda k, c: c.size % 2 == 0)
    rule = rule_of_tiles((even,))
    assert rule.holds(GROUP, Words("2, 4; 6"))
    assert rule.comes_to
    for tiles, why in (
        ("2, 3; 6", "of factor 2, size=3 must be even; try 2 or 4"),
        ("2; 4, 6", "factors per chain are 1, 2 in tiles, and 2, 1 in the kernel"),
        ("2, 4", "factors per chain are 2 in tiles, and 2, 1 in the kernel"),
    ):
        assert not rule.holds(GROUP, Words(tiles))
        assert rule.comes_to(GROUP, Words(tiles)) == why
