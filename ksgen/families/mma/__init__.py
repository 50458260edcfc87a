"""The tensor-core family: products of one factor, or of all factors of a layer."""
