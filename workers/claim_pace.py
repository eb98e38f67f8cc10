"""How many jobs a worker claims ahead: as many as end in a tenth of a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_AHEAD_SECONDS = 0.1
# Rows that began together may all end in one step, which says little of the pace.
_WINDOW_SECONDS = 1.0
_MOST_AHEAD = 256
# From here on jobs end too fast to see to each by itself.
_MANY = 32


class ClaimPace:
    """Follows how quickly answers come, so that quick models never wait for jobs and slow ones
    take few from other workers.

    Args:
        usual: claimed ahead at any pace; 0 for none ever.
        clock: seconds, monotonic.
    """

    def __init__(self, usual: int, clock: Callable[[], float]) -> None:
        self._usual = usual
        self._clock = clock
        self._ended: deque[tuple[float, int]] = deque()
        self._num_ended = 0

    def note(self, num_answered: int) -> None:
        """Jobs were answered by the model; those that were refused say nothing of its pace."""
        if num_answered:
            self._ended.append((self._clock(), num_answered))
            self._num_ended += num_answered

    @property
    def ahead(self) -> int:
        """How many jobs may be claimed beyond the rows."""
        return max(self._usual, min(self._lately(), _MOST_AHEAD)) if self._usual else 0

    @property
    def at_once(self) -> int:
        """How many are worth a call of the server: many where many are claimed ahead."""
        return max(1, (self.ahead - self._usual) // 2)

    @property
    def is_fast(self) -> bool:
        """Whether jobs end so fast that it pays to gather some."""
        return self._usual > 0 and self._lately() >= _MANY

    def _lately(self) -> int:
        """Return how many jobs were answered in the time that is claimed ahead, on the average."""
        moment = self._clock() - _WINDOW_SECONDS
        while self._ended and self._ended[0][0] < moment:
            self._num_ended -= self._ended.popleft()[1]
        return round(self._num_ended * _AHEAD_SECONDS / _WINDOW_SECONDS)
