"""Tests of `services/mlx/tracing/`."""
