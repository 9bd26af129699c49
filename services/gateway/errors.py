"""What goes wrong, in the error object of the API that was asked."""

import re
from typing import Any

from starlette.responses import JSONResponse

from protocol.errors import Busy, DeadlineExceeded, ServiceLost, SsdError, UsageError

ANTHROPIC_PATH = "/v1/messages"
"""Below it errors have Anthropic's shape, elsewhere OpenAI's."""


class ClientLeft(Exception):
    """The client closed its connection."""


class ApiError(Exception):
    """An answer that is an error: HTTP status, and what the error object says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int = 1,
        anthropic_message: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self._retry_after_s = retry_after_s
        """Of a refusal for now, status 429 or 503."""
        self._anthropic_message = anthropic_message or message
        """The sentence on which Anthropic's clients act, where that differs."""

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self._anthropic_message}}

    def response(self, path: str) -> JSONResponse:
        """The error object with its status, for a request of this path."""
        headers = dict(_HEADERS.get(self.status, {}))
        if self.status in (429, 503):
            headers["Retry-After"] = str(self._retry_after_s)
        body = self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()
        return JSONResponse(body, status_code=self.status, headers=headers)


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

_NAMED = ("logit_bias",)
"""Fields that the orchestrator's sentences begin with."""

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}}

_TOO_LONG = re.compile(
    r"the prompt has (?P<size>[\d,]+) (?P<unit>tokens|bytes)\D+(?P<limit>\d[\d,]*)"
    r"(?P<knob> \(\w+\))?"
)


def find_prompt_length(why: str) -> int | None:
    """The tokens of a prompt that the orchestrator refused for its length, by its sentence."""
    found = _TOO_LONG.search(why)
    return int(found["size"]) if found and found["unit"] == "tokens" else None


def refuse_value(param: str, why: str) -> ApiError:
    """A known field with a value that this server cannot honour."""
    return ApiError(400, f"{param!r}: {why}", code="unsupported_value", param=param)


def invalid(param: str, why: str) -> ApiError:
    """A field whose value makes no sense."""
    return ApiError(400, f"{param!r}: {why}", code="invalid_value", param=param)


def _refuse(why: str) -> ApiError:
    """A request that the orchestrator refused, by its sentence.

    Clients shorten a conversation by themselves ("compact") on one code and two phrases.
    """
    if found := _TOO_LONG.search(why):
        size, unit, limit, knob = found["size"], found["unit"], found["limit"], found["knob"]
        return ApiError(
            400,
            f"This model's maximum context length is {limit} {unit}, but the prompt has {size}"
            f" {unit}{knob or ''}; shorten it",
            code="context_length_exceeded",
            param="messages",
            anthropic_message=f"prompt is too long: {size} {unit} > {limit} maximum",
        )
    param = next((field for field in _NAMED if why.startswith(f"{field}:")), None)
    return ApiError(400, why, code="invalid_value", param=param)


def to_api_error(error: SsdError | ApiError) -> ApiError:
    """What a failure of the stack is over HTTP."""
    match error:
        case ApiError():
            return error
        case UsageError():
            return _refuse(str(error))
        case Busy():
            return ApiError(429, str(error), code="server_busy")
        case ServiceLost() | DeadlineExceeded():
            return ApiError(503, str(error), code="unavailable")
        case _:
            return ApiError(500, str(error), code="generation_failed")
