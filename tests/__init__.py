"""The tests; a package so that they can share helpers (`tests.tiny_models`)."""
