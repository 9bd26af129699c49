"""Steps of a preparation whose result is given."""

from typing import TypeVar

from services.runtime.preparation import Steps

T = TypeVar("T")


def at_once(result: T) -> Steps[T]:
    """Steps that end with this."""
    yield
    return result
