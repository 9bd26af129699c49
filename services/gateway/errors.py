"""What goes wrong, as OpenAI's error object, whose shape every client library knows."""

from typing import Any

from starlette.responses import JSONResponse

from protocol.errors import Busy, DeadlineExceeded, ServiceLost, SsdError, UsageError


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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self._retry_after_s = retry_after_s
        """Of a refusal for now, status 429."""

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The error object with its status."""
        headers = dict(_HEADERS.get(self.status, {}))
        if self.status == 429:
            headers["Retry-After"] = str(self._retry_after_s)
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}

_NAMED = ("logit_bias",)
"""Fields that the orchestrator's sentences begin with."""

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}}


def unsupported(param: str, why: str) -> ApiError:
    """A known field with a value that this server cannot honour."""
    return ApiError(400, f"{param!r}: {why}", code="unsupported_value", param=param)


def _refused(why: str) -> ApiError:
    """A request that the orchestrator would not have, by its sentence."""
    too_long = "context holds" in why or "max_prompt_tokens" in why
    code = "context_length_exceeded" if too_long else "invalid_value"
    param = next((field for field in _NAMED if why.startswith(f"{field}:")), None)
    return ApiError(400, why, code=code, param=param)


def to_api_error(error: SsdError) -> ApiError:
    """What a failure of the stack is over HTTP."""
    match error:
        case UsageError():
            return _refused(str(error))
        case Busy():
            return ApiError(429, str(error), code="server_busy")
        case ServiceLost() | DeadlineExceeded():
            return ApiError(503, str(error), code="unavailable")
        case _:
            return ApiError(500, str(error), code="generation_failed")
