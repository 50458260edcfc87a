"""Checks a kernel against float64, times it, computes its floor, and decides whether to trust a time."""
