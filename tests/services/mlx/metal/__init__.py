"""Tests of `services/mlx/metal/`, whose kernels run as C++ here."""
