"""One exception tree. Each branch owns an exit code, so a script can tell them apart.

SsdError
├── UsageError        2   a flag, setting, prompt or file the user gave is not usable
├── ModelError        3   a model folder is missing, broken, unsupported or does not fit its pair
├── RuntimeFailure    4   a process died, hung, or said something it must not
│   ├── DeadlineExceeded     a wait took longer than its deadline
│   ├── ProtocolError        a message could not be decoded, or is illegal in this state
│   ├── BackendLost          what drafts in another program is gone; this process must end
│   ├── StreamEnded          the program at the other end of a pipe has closed it
│   ├── ServiceLost          a process that was needed is gone for good
│   ├── NotNumbers           a model's logits are NaN
│   ├── OutOfMemory          a request needs more memory than there is left for it
│   └── Busy                 too many requests wait already
├── LosslessnessError 5   two modes disagreed although the margin was not a rounding tie
└── ParityError       6   a converted model does not say what its source says
"""


class SsdError(Exception):
    """Base of every error that this project raises on purpose."""

    exit_code = 1


class UsageError(SsdError):
    """A flag, setting, prompt or file the user gave is not usable."""

    exit_code = 2


class ModelError(SsdError):
    """A model folder is missing, broken, unsupported, or does not fit its pair."""

    exit_code = 3


class RuntimeFailure(SsdError):
    """A process died, hung, or said something it must not."""

    exit_code = 4


class DeadlineExceeded(RuntimeFailure):
    """A wait took longer than its deadline; the message names what to raise."""


class ProtocolError(RuntimeFailure):
    """A message could not be decoded, or is illegal in this state."""


class BackendLost(RuntimeFailure):
    """What drafts for this process in another program is gone; the process must end too."""


class StreamEnded(RuntimeFailure):
    """The program at the other end of a pipe has closed it, which is how it says goodbye."""


class ServiceLost(RuntimeFailure):
    """A process that was needed is gone and its restart budget is spent."""


class NotNumbers(RuntimeFailure):
    """A model's logits are NaN, so that nothing can be chosen from them."""


class OutOfMemory(RuntimeFailure):
    """A request needs more memory than there is left for it; the others go on."""


class Busy(RuntimeFailure):
    """Too many requests wait already; the same request may be taken later."""


class LosslessnessError(SsdError):
    """Two modes disagreed although the logit margin was not a rounding tie."""

    exit_code = 5


class ParityError(SsdError):
    """A converted model does not say what the model says that it came from."""

    exit_code = 6


BY_EXIT_CODE: dict[int, type[SsdError]] = {
    error.exit_code: error
    for error in (UsageError, ModelError, RuntimeFailure, LosslessnessError, ParityError)
}
