"""The family for small batches: one factor, two factors of a layer, or several layers on one X, in one launch."""
