"""Tests of `services/mlx/`."""
