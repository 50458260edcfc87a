"""Drawings of tiles: every part that is drawn once, the middle of many left out, all of it comments."""

from ksgen.families.drawing import MOST_COLUMNS, MOST_ROWS, DrawnSide, draw


def test_a_small_tile_is_drawn_whole() -> None:
    assert draw(
        "Tile", DrawnSide(8, "rows", 2), DrawnSide(4, "columns", 2), lambda row, column: f"w{row}{column}", "below"
    ).splitlines() == [
        "// Tile",
        "//",
        "//         4 columns",
        "//         +-----+-----+",
        "// 8 rows  | w00 | w01 |",
        "//         +-----+-----+",
        "//         | w10 | w11 |",
        "//         +-----+-----+",
        "//",
        "// below",
    ]


def test_of_many_parts_the_first_ones_and_the_last_are_drawn() -> None:
    text = draw("Tile", DrawnSide(64, "rows", 20), DrawnSide(64, "columns", 30), lambda row, column: f"{row}.{column}")
    lines = [line.removeprefix("//").split("|")[1:-1] for line in text.splitlines() if "|" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["0.0", "0.1", "0.2", "0.3", "...", "0.29"],
        ["1.0", "1.1", "1.2", "1.3", "...", "1.29"],
        ["..."] * MOST_COLUMNS,
        ["19.0", "19.1", "19.2", "19.3", "...", "19.29"],
    ]
    assert len(lines) == MOST_ROWS
    assert all(line.startswith("//") and line == line.rstrip() for line in text.splitlines())
