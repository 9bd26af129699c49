"""Errors in the error format of the requested API."""

import re
from typing import Any

from starlette.responses import JSONResponse

from protocol.errors import Busy, DeadlineExceeded, ServiceLost, SsdError, UsageError

ANTHROPIC_PATH = "/v1/messages"
"""Errors below this path have Anthropic's shape, all others OpenAI's."""


class ClientLeft(Exception):
    """The client closed its connection."""


class ApiError(Exception):
    """An error response: HTTP status and error object."""

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
        """For a temporary refusal, status 429 or 503."""
        self._anthropic_message = anthropic_message or message
        """The sentence that Anthropic's clients act on, where it differs."""

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        """Return Anthropic's error object."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self._anthropic_message}}

    def response(self, path: str) -> JSONResponse:
        """Return the error response for a request of this path."""
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
"""Fields that the orchestrator's messages begin with."""

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}}

_TOO_LONG = re.compile(
    r"the prompt has (?P<size>[\d,]+) (?P<unit>tokens|bytes)\D+(?P<limit>\d[\d,]*)"
    r"(?P<knob> \(\w+\))?"
)


def find_prompt_length(why: str) -> int | None:
    """Return the token count in the orchestrator's message about a prompt that is too long."""
    found = _TOO_LONG.search(why)
    return int(found["size"]) if found and found["unit"] == "tokens" else None


def refuse_value(param: str, why: str) -> ApiError:
    """Refuse a valid field whose value this server cannot honour."""
    return ApiError(400, f"{param!r}: {why}", code="unsupported_value", param=param)


def invalid(param: str, why: str) -> ApiError:
    """Refuse a field with an invalid value."""
    return ApiError(400, f"{param!r}: {why}", code="invalid_value", param=param)


def _refuse(why: str) -> ApiError:
    """Convert the orchestrator's refusal of a request.

    Clients shorten a conversation automatically ("compact") on one code and two phrases.
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
    """Convert a failure of the stack to an HTTP error."""
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
