"""Tests of `services/mlx/few_rows/`."""
