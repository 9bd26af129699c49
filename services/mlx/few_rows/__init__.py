"""Passes over few rows on a CPU, by our own kernels (`services/mlx/cpu`)."""
