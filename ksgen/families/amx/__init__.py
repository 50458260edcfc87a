"""The amx family, for processors with matrix tiles: one factor, or all factors of a layer."""
