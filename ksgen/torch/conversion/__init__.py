"""Dense matrices and models as Kronecker-sparse ones: which chains, which weights, and how a model keeps and loads them."""
