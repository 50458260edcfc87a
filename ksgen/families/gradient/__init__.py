"""The family of the weights' gradient on GPUs: by plain multiply-adds, or on tensor cores."""
