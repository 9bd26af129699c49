"""Wait until a stack has its speed."""

import time

from protocol.client.client import Client
from protocol.errors import DeadlineExceeded
from protocol.process.deadline import Deadline

_LONGEST_S = 600.0
_LOOK_S = 0.1


def await_prepared(client: Client) -> None:
    """Wait for the trials, timings and traces that a stack runs between requests.

    Raises:
        DeadlineExceeded: they do not end.
    """
    deadline = Deadline(_LONGEST_S)
    while not (status := client.status()).is_prepared:
        if deadline.passed:
            stages = {service.role: service.preparation.stage for service in status.services}
            raise DeadlineExceeded(f"not prepared within {_LONGEST_S:g} s: {stages}")
        time.sleep(_LOOK_S)
