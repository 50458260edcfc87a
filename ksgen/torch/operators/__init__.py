"""Products as PyTorch operators: what they take, which way is the fastest, and what is kept of frozen weights."""
