"""A clock that is wrong: what a worker sees on a machine whose time was never set."""

from __future__ import annotations

import datetime
import time


def set_wrong(seconds: float) -> None:
    """Move this process's clock; call it before anything else is imported.

    The monotonic clock stays right, as it does on such a machine.
    """
    real_time = time.time
    shift = datetime.timedelta(seconds=seconds)

    class WrongDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> WrongDatetime:
            return super().now(tz) + shift

    time.time = lambda: real_time() + seconds
    datetime.datetime = WrongDatetime  # type: ignore[misc]
