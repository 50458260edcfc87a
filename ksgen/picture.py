"""Pictures of a pattern's support: characters for a terminal, a PNG for a page. Draws shares, so nothing small is lost.

A cell of a picture stands for many entries of K once K is larger than the picture: it is as dark as its share of them is free.
"""

import struct
import zlib
from typing import Any

import numpy as np

from ksgen.pattern import Pattern

Array = np.ndarray[Any, Any]

SHADES = " ░▒▓█"
MOST_POSITIONS = 2**15  # that are looked at along a side; beyond, a picture is a sample
COLUMNS, LINES = 72, 32  # of characters, at most
PIXELS = 1024  # of the longer side, at most
PALETTE = [(31, 119, 180), (214, 96, 39), (44, 140, 80), (190, 60, 90), (120, 90, 180), (140, 110, 40), (30, 150, 160), (200, 80, 160)]
PAPER, RULE = (255, 255, 255), (232, 232, 236)


def text(pattern: Pattern) -> str:
    """The support in characters, rows of K downwards; a character is two cells high."""
    rows, columns = pattern.out_features, pattern.in_features
    scale = max(columns / COLUMNS, rows / (2 * LINES), 1.0)
    height, width = max(1, round(rows / scale)), max(1, round(columns / scale))
    share = np.zeros((height + height % 2, width))
    share[:height] = _cells(pattern, height, width)[0]
    pairs = zip(share[::2], share[1::2], strict=True)
    return "\n".join("".join(map(_character, top, bottom)).rstrip() for top, bottom in pairs)


def _character(top: float, bottom: float) -> str:
    if {top, bottom} <= {0.0, 1.0}:
        return " ▄▀█"[int(2 * top + bottom)]
    return SHADES[int(np.ceil((top + bottom) * 2 - 1e-9))]


def png(pattern: Pattern) -> bytes:
    """The support as a PNG: one colour for each of the a*d blocks, thin rules between entries where they are large enough."""
    rows, columns = pattern.out_features, pattern.in_features
    longer = max(rows, columns)
    height, width = (rows, columns) if longer <= PIXELS else (max(1, rows * PIXELS // longer), max(1, columns * PIXELS // longer))
    share, block = _cells(pattern, height, width)
    colours = np.array(PALETTE, np.float64)[block % len(PALETTE)]
    image = share[..., None] * colours + (1 - share[..., None]) * np.array(PAPER)
    zoom = max(1, PIXELS // longer)
    image = np.repeat(np.repeat(image, zoom, axis=0), zoom, axis=1)
    if zoom >= 6:
        image[::zoom] = image[:, ::zoom] = RULE
        image[-1] = image[:, -1] = RULE
    return _encode(image.round().astype(np.uint8))


def _cells(pattern: Pattern, height: int, width: int) -> tuple[Array, Array]:
    """For each cell, the share of its entries that is free, and the block (i, j) that has most of it."""
    random = np.random.default_rng(0)
    rows, row_cells = _positions(pattern.out_features, height, random)
    columns, column_cells = _positions(pattern.in_features, width, random)
    row_blocks = rows // (pattern.b * pattern.d) * pattern.d + rows % pattern.d
    column_blocks = columns // (pattern.c * pattern.d) * pattern.d + columns % pattern.d
    share, most, block = np.zeros((height, width)), np.zeros((height, width)), np.zeros((height, width), np.int64)
    for one in np.intersect1d(row_blocks, column_blocks):
        high = np.bincount(row_cells[row_blocks == one], minlength=height) / np.bincount(row_cells, minlength=height)
        wide = np.bincount(column_cells[column_blocks == one], minlength=width) / np.bincount(column_cells, minlength=width)
        lines, places = np.flatnonzero(high), np.flatnonzero(wide)
        where = np.ix_(lines, places)
        part = np.outer(high[lines], wide[places])
        share[where] += part
        block[where] = np.where(part > most[where], one, block[where])
        most[where] = np.maximum(part, most[where])
    return share.round(9), block


def _positions(size: int, cells: int, random: np.random.Generator) -> tuple[Array, Array]:
    """All positions along a side, or some at random where they are too many, and the cell of each."""
    if size <= MOST_POSITIONS:
        positions = np.arange(size)
        return positions, positions * cells // size
    of_cell = np.repeat(np.arange(cells), MOST_POSITIONS // cells)
    return ((of_cell + random.random(of_cell.size)) * (size / cells)).astype(np.int64), of_cell


def _encode(image: Array) -> bytes:
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
