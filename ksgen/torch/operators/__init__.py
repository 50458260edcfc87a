"""Products as PyTorch operators: checks of operands, choice of the fastest backend, and caches for frozen weights."""
