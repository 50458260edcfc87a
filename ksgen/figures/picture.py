"""Pictures of a pattern's support: characters for a terminal, a PNG for a page.

Both show every entry of K if there is room. Otherwise they show the first few blocks, tiles and entries, dots, and the
last ones.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ksgen.pattern import Pattern

Array = np.ndarray[Any, Any]
Place = tuple[int | None, int | None, int | None]  # i, k (or l), j of a row or column; None for omitted ones

FREE, ZERO, OUTSIDE, ACROSS, DOWN, DIAGONAL = "█· ⋯⋮⋱"
PLAIN = str.maketrans("█·⋯⋮⋱├┤─┬│┴×", "#.-:\\||-+|+x")  # for a terminal without these characters
MOST_SHOWN = 6  # blocks, tiles or entries shown along a side if some are omitted: the first ones, dots, and the last
LINES, CELLS = 40, 64  # the most lines of a picture for a terminal; the most cells along a side of a PNG
PIXELS = 960  # the most pixels of a PNG's cells along the longer side
LARGEST, MARGIN, STROKE = 40, 24, 2  # pixels: side of the largest cell, margin of the picture, width of a line
PALETTE = [
    (31, 119, 180), (214, 96, 39), (44, 140, 80), (190, 60, 90), (120, 90, 180), (140, 110, 40), (30, 150, 160),
    (200, 80, 160),
]  # fmt: skip
PAPER, BLOCK, RULE, TILE, INK = (255, 255, 255), (246, 246, 248), (228, 228, 232), (160, 160, 168), (60, 60, 66)
SCALE = 3  # pixels of an image per pixel of a letter
HEIGHT = 8 * SCALE  # pixels of a line, descenders included

_COLUMNS = (  # in hexadecimal, from left to right; the lowest bit is the top
    "0000000000 0050300000 0060600000 0036360000 005b3b0000 1414141414 3e5149453e 00427f4000 4261514946 2141454b31 "
    "1814127f10 2745454539 3c4a494930 0171090503 3649494936 064949291e 7f08142241 2054545478 7f48444438 3844444420 "
    "384444487f 3854545418 087e090102 0c5252523e 7f08040478 00447d4000 2040443d00 7f10284400 00417f4000 7c04180478 "
    "7c08040478 3844444438 7c14141408 081414187c 7c08040408 4854545420 043f444020 3c4040207c 1c2040201c 3c4030403c "
    "4428102844 0c5050503c 4464544c44"
)
_LETTERS = dict(zip(" ,.:;=0123456789Kabcdefghijklmnopqrstuvwxyz", _COLUMNS.split(), strict=True))


def can_show(encoding: str) -> bool:
    """Whether a terminal's encoding has the characters of a picture."""
    try:
        f"{FREE}{ZERO}{ACROSS}{DOWN}{DIAGONAL}├─┤┬│┴".encode(encoding)
    except (LookupError, UnicodeError):
        return False
    return True


def legend(pattern: Pattern) -> list[str]:
    """The picture's legend, in words."""
    a, b, c, d = pattern.shape
    return [
        f"K is {pattern.out_features} x {pattern.in_features}; coloured: its free entries",
        f"a = {a}: blocks on the diagonal of K",
        f"b x c = {b} x {c}: tiles in a block, b down, c across",
        f"d = {d}: free entries of a tile, on its diagonal",
        *(
            f"{sides} are shown in the order {order.natural}; they are stored in the order {order.text}"
            for sides, order in (("rows", pattern.outputs), ("columns", pattern.inputs))
            if order.is_exchanged
        ),
    ]


def text(pattern: Pattern, width: int, plain: bool = False) -> str:
    """The support in characters, at most `width` wide, and the legend."""
    b_label, c_label = f"b = {pattern.b} ", f" c = {pattern.c} "
    margin = len(b_label) + 2
    room = max(width - margin, 0)
    rows, columns = sketch(pattern, LINES, max(room // 2, 1))
    each = 2 if 2 * len(columns) <= room else 1
    wide, high = each * _first_block(columns), _first_block(rows)
    over = f"├{c_label.center(wide - 2, '─')}┤" if wide >= len(c_label) + 2 else c_label.strip()
    marks = "┬" + "│" * (high - 2) + "┴" if high > 1 else " "
    lines = [" " * margin + over]
    for number, row in enumerate(rows):
        label = b_label if number == (high - 1) // 2 else ""
        mark = marks[number] if number < high else ""
        cells = "".join(
            character * each if character == FREE else character.ljust(each) for character in _cells(row, columns)
        )
        lines.append(f"{label:<{margin - 2}}{mark:<2}{cells}".rstrip())
    whole = "\n".join([*lines, "", *legend(pattern)])
    return whole.translate(PLAIN) if plain else whole


def png(pattern: Pattern) -> bytes:
    """The support and the legend as a PNG, with a colour per block of the permuted K."""
    rows, columns = sketch(pattern, CELLS, CELLS)
    size = min(LARGEST, PIXELS // max(len(rows), len(columns)))
    b_label, c_label = drawn(f"b = {pattern.b}"), drawn(f"c = {pattern.c}")
    words = [drawn(line) for line in legend(pattern)]
    left, top = MARGIN + b_label.shape[1] + 2 * MARGIN, MARGIN + HEIGHT + 2 * MARGIN
    bottom, right = top + size * len(rows), left + size * len(columns)
    width = max(right, MARGIN + max(word.shape[1] for word in words), left + c_label.shape[1]) + MARGIN
    image = np.full((bottom + 2 * MARGIN + 2 * HEIGHT * len(words), width, 3), PAPER, np.uint8)
    for y, row in enumerate(rows):
        for x, (column, cell) in enumerate(zip(columns, _cells(row, columns), strict=True)):
            square = image[top + y * size : top + (y + 1) * size, left + x * size : left + (x + 1) * size]
            _draw_cell(square, cell, ((row[0] or 0) * pattern.d + (row[2] or 0)) % len(PALETTE))
            if cell != OUTSIDE and row[0] is not None:
                square[0], square[:, 0] = _line_before(row), _line_before(column)
    for i in {row[0] for row in rows} - {None}:
        down, across = ([at for at, place in enumerate(side) if place[0] == i] for side in (rows, columns))
        rows_of_block = slice(top + size * down[0], top + size * (down[-1] + 1) + STROKE)
        columns_of_block = slice(left + size * across[0], left + size * (across[-1] + 1) + STROKE)
        _frame(image[rows_of_block, columns_of_block], INK)
    _frame(image[top - STROKE : bottom + 2 * STROKE, left - STROKE : right + 2 * STROKE], TILE)
    _measure(image[top - MARGIN : top - MARGIN // 2, left : left + size * _first_block(columns)])
    _measure(image[top : top + size * _first_block(rows), left - MARGIN : left - MARGIN // 2].transpose(1, 0, 2))
    _write(image, c_label, MARGIN, left)
    _write(image, b_label, top + (size * _first_block(rows) - HEIGHT) // 2, MARGIN)
    for number, word in enumerate(words):
        _write(image, word, bottom + 2 * MARGIN + 2 * HEIGHT * number, MARGIN)
    return _encode(image)


def sketch(pattern: Pattern, height: int, width: int) -> tuple[list[Place], list[Place]]:
    """Rows and columns of a picture with at most `height` rows and `width` columns.

    They are all of K's, or as many of each kind as fit, but at least the first, dots and the last.
    """
    a, b, c, d = pattern.shape
    if pattern.out_features <= height and pattern.in_features <= width:
        return _side((a, b, d), (a, b, d)), _side((a, c, d), (a, c, d))
    for most in range(MOST_SHOWN, 1, -1):  # the smaller of b and c is shown in proportion
        down, across = (max(2, round(most * min(1, one / other))) for one, other in ((b, c), (c, b)))
        rows, columns = _side((a, b, d), (most, down, most)), _side((a, c, d), (most, across, most))
        if len(rows) <= height and len(columns) <= width:
            break
    return rows, columns


def _side(counts: tuple[int, int, int], shown: tuple[int, int, int]) -> list[Place]:
    outer, middle, inner = (
        list(range(count) if count <= most + 1 else (*range(most - 1), None, count - 1))
        for count, most in zip(counts, shown, strict=True)
    )
    return [
        (i, k, j)
        for i in outer
        for k in (middle if i is not None else [None])
        for j in (inner if k is not None else [None])
    ]  # fmt: skip


def _cells(row: Place, columns: Sequence[Place]) -> Iterator[str]:
    """Cells of a row of the picture."""
    i, k, j = row
    for its_i, its_l, its_j in columns:
        if i != its_i:
            yield OUTSIDE
        elif i is None or (k is None and its_l is None):
            yield DIAGONAL
        elif k is None or its_l is None:
            yield DOWN if k is None else ACROSS
        elif j != its_j:
            yield ZERO
        else:
            yield DIAGONAL if j is None else FREE


def _first_block(side: Sequence[Place]) -> int:
    return sum(place[0] == 0 for place in side)


def _line_before(place: Place) -> tuple[int, int, int]:
    """The colour of the line between a row or column and the one before it."""
    return TILE if place[2] == 0 or place[1] is None else RULE


def _draw_cell(square: Array, cell: str, colour: int) -> None:
    if cell == OUTSIDE:
        return
    square[:] = PALETTE[colour] if cell == FREE else BLOCK
    if cell in (ACROSS, DOWN, DIAGONAL):
        size = len(square)
        dot = max(2, size // 8)
        for at in (size // 4, size // 2, 3 * size // 4):
            y, x = (at if cell != ACROSS else size // 2), (at if cell != DOWN else size // 2)
            square[y - dot // 2 :, x - dot // 2 :][:dot, :dot] = INK


def _frame(image: Array, colour: tuple[int, int, int]) -> None:
    image[:STROKE] = image[-STROKE:] = image[:, :STROKE] = image[:, -STROKE:] = colour


def _measure(strip: Array) -> None:
    """A line along a strip, with its two ends marked."""
    middle = len(strip) // 2
    strip[middle : middle + STROKE] = strip[:, :STROKE] = strip[:, -STROKE:] = INK


def _write(image: Array, word: Array, y: int, x: int) -> None:
    image[y : y + word.shape[0], x : x + word.shape[1]][word] = INK


def drawn(line: str) -> Array:
    """A line of text as pixels, so that a PNG needs no font; true is ink. A letter is five columns of seven pixels."""
    columns = np.frombuffer(bytes.fromhex("00".join(_LETTERS[letter] for letter in line)), np.uint8)
    small = np.unpackbits(columns[None], axis=0, bitorder="little").astype(bool)
    return small.repeat(SCALE, axis=0).repeat(SCALE, axis=1)


def _encode(image: Array) -> bytes:
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + chunk(b"IEND", b"")
    )
