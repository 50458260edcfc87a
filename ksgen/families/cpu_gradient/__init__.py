"""The gradient family for processors: by vectors, or by matrix tiles."""
