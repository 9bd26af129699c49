"""Tests of `services/kernels/metal/`, whose kernels run as C++ here."""
