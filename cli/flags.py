"""What is wrong with a setting, told to somebody who gave it as an option of a command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

from queue_service.errors import QsvcError, RefusedArgument, SettingsRefused

# All others are called what the setting is.
_FLAGS: Final[Mapping[str, str]] = {"url": "--redis", "queues": "--queue", "folder": "--root"}


def told(error: QsvcError) -> str:
    """Return an error's text, with options for the names of settings that were arguments."""
    if not isinstance(error, SettingsRefused):
        return str(error)
    return "\n".join(
        _as_option(problem) if isinstance(problem, RefusedArgument) else problem
        for problem in error.problems
    )


def _as_option(refused: RefusedArgument) -> str:
    flag = _FLAGS.get(refused.field, f"--{refused.field.replace('_', '-')}")
    value = "" if refused.value is None else f" {shlex.quote(refused.value)}"
    return f"{flag}{value}: {refused.problem}"
