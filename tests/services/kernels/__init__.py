"""Tests of services/kernels."""
