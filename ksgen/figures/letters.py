"""Letters as pixels for the labels of a picture, so that a PNG needs no font.

A letter is five columns of seven pixels.
"""

from typing import Any

import numpy as np

SCALE = 3  # pixels of an image for each of a letter
HEIGHT = 8 * SCALE  # pixels of a line, descenders included

_COLUMNS = (  # in hexadecimal, from left to right; the lowest bit is the top
    "0000000000 0050300000 0036360000 005b3b0000 1414141414 3e5149453e 00427f4000 4261514946 2141454b31 1814127f10 "
    "2745454539 3c4a494930 0171090503 3649494936 064949291e 7f08142241 2054545478 7f48444438 3844444420 384444487f "
    "3854545418 087e090102 0c5252523e 7f08040478 00447d4000 2040443d00 7f10284400 00417f4000 7c04180478 7c08040478 "
    "3844444438 7c14141408 081414187c 7c08040408 4854545420 043f444020 3c4040207c 1c2040201c 3c4030403c 4428102844 "
    "0c5050503c 4464544c44"
)
_LETTERS = dict(zip(" ,:;=0123456789Kabcdefghijklmnopqrstuvwxyz", _COLUMNS.split(), strict=True))


def drawn(line: str) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """A line of text; true is ink."""
    columns = np.frombuffer(bytes.fromhex("00".join(_LETTERS[letter] for letter in line)), np.uint8)
    small = np.unpackbits(columns[None], axis=0, bitorder="little").astype(bool)
    return small.repeat(SCALE, axis=0).repeat(SCALE, axis=1)
