"""Letters of pictures."""

from ksgen.figures import picture
from ksgen.pattern import Pattern


def test_every_letter_of_a_legend_can_be_drawn() -> None:
    line = picture.drawn("0123456789")
    assert line.shape == (picture.HEIGHT, 59 * picture.SCALE)
    columns = line[:: picture.SCALE, :: picture.SCALE]
    assert len({columns[:, 6 * at : 6 * at + 5].tobytes() for at in range(10)}) == 10
    assert ["".join(".#"[int(ink)] for ink in row) for row in columns[:7, 24:29]] == [
        "...#.", "..##.", ".#.#.", "#..#.", "#####", "...#.", "...#.",
    ]  # fmt: skip
    for line_of_words in picture.legend(Pattern(1, 2, 3, 4)):
        assert picture.drawn(line_of_words).any()
