"""Settings that all tests share."""

from hypothesis import settings

# The same examples in every run: a failure is a fact about the code, not about the day.
settings.register_profile(
    "repeatable", derandomize=True, max_examples=60, deadline=None, database=None
)
settings.load_profile("repeatable")
