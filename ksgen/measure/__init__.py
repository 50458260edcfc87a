"""Whether a kernel is right and how long it takes: the check against float64, the floor, and whether to trust a time."""
