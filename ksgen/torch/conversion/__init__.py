"""Conversion of dense matrices and models to Kronecker-sparse ones: choice of chains, weights, saving and loading."""
