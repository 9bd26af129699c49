"""Tests of `launch/bench/`."""
