"""The vector family, for processors: one factor, or all factors of a layer."""
