"""The exception tree. Each branch has an exit code, so that scripts can distinguish them.

SsdError
├── UsageError        2   a flag, setting, prompt or file of the user is not usable
├── ModelError        3   a model folder is missing, broken, unsupported or does not fit its pair
├── RuntimeFailure    4   a process died, hung, or sent something invalid
│   ├── DeadlineExceeded     a wait exceeded its deadline
│   ├── ProtocolError        a message could not be decoded, or is illegal in this state
│   ├── BackendLost          the external drafting program has ended; so must this process
│   ├── StreamEnded          the program at the other end of a pipe has closed it
│   ├── ServiceLost          a required process has ended for good
│   ├── NotNumbers           a model's logits are NaN
│   ├── OutOfMemory          a request needs more memory than is left for it
│   └── Busy                 too many requests wait already
├── LosslessnessError 5   two modes disagreed although the margin was not a rounding tie
└── ParityError       6   a converted model disagrees with its source
"""


class SsdError(Exception):
    """Base of all exceptions that this project raises deliberately."""

    exit_code = 1


class UsageError(SsdError):
    """A flag, setting, prompt or file that the user provided is not usable."""

    exit_code = 2


class ModelError(SsdError):
    """A model folder is missing, broken, unsupported, or does not fit its pair."""

    exit_code = 3


class RuntimeFailure(SsdError):
    """A process died, hung, or sent something invalid."""

    exit_code = 4


class DeadlineExceeded(RuntimeFailure):
    """A wait exceeded its deadline; the message names the setting to raise."""


class ProtocolError(RuntimeFailure):
    """A message could not be decoded, or is illegal in this state."""


class BackendLost(RuntimeFailure):
    """The external program that drafts for this process has ended; the process must end too."""


class StreamEnded(RuntimeFailure):
    """The program at the other end of a pipe has closed it, its regular way to disconnect."""


class ServiceLost(RuntimeFailure):
    """A required process has ended and its restart budget is spent."""


class NotNumbers(RuntimeFailure):
    """A model's logits are NaN, so no token can be chosen from them."""


class OutOfMemory(RuntimeFailure):
    """A request needs more memory than is left for it; the other requests continue."""


class Busy(RuntimeFailure):
    """Too many requests wait already; the client may retry later."""


class LosslessnessError(SsdError):
    """Two modes disagreed although the logit margin was not a rounding tie."""

    exit_code = 5


class ParityError(SsdError):
    """A converted model disagrees with the model that it was converted from."""

    exit_code = 6


BY_EXIT_CODE: dict[int, type[SsdError]] = {
    error.exit_code: error
    for error in (UsageError, ModelError, RuntimeFailure, LosslessnessError, ParityError)
}
