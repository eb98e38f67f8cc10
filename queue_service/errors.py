"""One tree of errors; the class decides what happens, never the text of a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class QsvcError(Exception):
    """Anything qsvc reports to a person. The message says what happened and what to do next."""


class ConfigurationError(QsvcError):
    """A setting, a path or an environment that cannot work; nothing was changed."""


@dataclass(frozen=True, slots=True)
class RefusedArgument:
    """A setting that was given as an argument, and whose value is not allowed.

    Attributes:
        field: the setting's name in its section.
        value: as it was given; None where it may hold a password.
        problem: what is wrong with it, or what is allowed.
    """

    field: str
    value: str | None
    problem: str

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value}"
        return f"argument {self.field}{value}: {self.problem}"


class SettingsRefused(ConfigurationError):
    """Values that are not allowed.

    Args:
        problems: what is wrong, each for a person; one that was an argument is told by whoever
            knows what its caller calls it.
    """

    def __init__(self, problems: Sequence[str | RefusedArgument]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class ServerUnavailable(QsvcError):
    """The Redis server cannot be reached or refuses us."""


class ModelUnavailable(QsvcError):
    """The model cannot be found or loaded on this machine."""


class BatchNotFound(QsvcError):
    """No batch of this id is known to the server."""


class JobNotFound(QsvcError):
    """No job of this id is known to the server."""


class JobFailed(QsvcError):
    """A job whose text was read ended without an answer."""


class TextReplaced(QsvcError):
    """Text that was handed on is not the answer's: another worker gives another answer."""


class BatchConflict(QsvcError):
    """The same key was used before for a file with other content."""


class BatchFileError(QsvcError):
    """The file as a whole is refused (strict mode, empty, unreadable); nothing was queued.

    Args:
        message: what is wrong, for a person; names the file.
        code: a stable word such as ``empty_file``.
    """

    def __init__(self, message: str, *, code: str = "invalid_file") -> None:
        super().__init__(message)
        self.code = code


class RequestError(QsvcError):
    """One request is refused: it would fail the same way every time, so it is not retried.

    Carries the body of an OpenAI error object.

    Args:
        message: what is wrong, for a person; names the field.
        code: a stable word such as ``invalid_request`` or ``context_length_exceeded``.
        param: the field, as a path like ``messages.0.content``; None when it is the whole request.
        status_code: what an HTTP API would answer, 400-599.
        type: the error family, ``invalid_request_error`` unless said otherwise.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status_code: int = 400,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status_code = status_code
        self.type = type

    def to_error(self) -> dict[str, Any]:
        """Return the OpenAI error object: ``{"message", "type", "param", "code"}``."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }


class LineError(RequestError):
    """One line of a batch file is refused before anything is queued for it.

    Args:
        line: the line's number in the file, counted from 1, blank lines included.
        custom_id: the line's own id when it could be read.
    """

    def __init__(self, message: str, *, line: int, custom_id: str | None, **error: Any) -> None:
        super().__init__(message, **error)
        self.line = line
        self.custom_id = custom_id
