"""Tests of services/kernels/cpu."""
