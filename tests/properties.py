"""How many examples a property is tried with: few by `make test`, many by `make test-all`."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

FEW, MANY = 15, 40
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "many"


def load_profile() -> None:
    """Make all properties repeatable: a failure is a fact about the code, not about the day."""
    settings.register_profile(
        "tests",
        derandomize=True,
        max_examples=MANY if IS_THOROUGH else FEW,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
    )
    settings.load_profile("tests")


def examples(count: int, **more: Any) -> settings:
    """Settings of a property that deserves `count` examples; `make test` tries few of them."""
    return settings(max_examples=count if IS_THOROUGH else min(count, FEW), **more)
