"""The tests; a package so that they can share helpers (`tests.support.tiny_models`)."""
