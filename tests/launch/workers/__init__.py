"""Tests of `launch/workers/`."""
