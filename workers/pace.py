"""How many prompt tokens a step may take in, so that running rows never wait long for a token."""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.3  # of the newest observation
_LEAST_TOKENS = 32
_GRANULE = 32
# A chunk of fewer tokens costs mostly what any pass does; it says little about more.
_LEAST_OBSERVED = 64
# Decode steps of about as many rows cost about the same.
_ROWS_ALIKE = 8


@dataclass(slots=True)
class PrefillPace:
    """Learns what a step costs and gives each the prompt tokens that fit.

    Attributes:
        pause_seconds: how long a step may take while rows are decoding.
        most_tokens: the most in one step, also when nobody waits for a token.
        first_guess: tokens beside decoding rows until something was measured.
    """

    pause_seconds: float = 0.7
    most_tokens: int = 1024
    first_guess: int = 128
    _decode_seconds: dict[int, float] = field(default_factory=dict)
    _token_seconds: float | None = None

    @property
    def seconds_per_token(self) -> float:
        """What a prompt token takes, 0 until it was measured."""
        return self._token_seconds or 0.0

    def tokens(self, *, num_decoding: int) -> int:
        """Return the prompt tokens for a step in which so many rows decode, at least 1."""
        if not num_decoding:
            return self.most_tokens
        if self._token_seconds is None:
            return min(self.first_guess, self.most_tokens)
        room = self.pause_seconds - self._decode_cost(num_decoding)
        tokens = int(room / self._token_seconds) // _GRANULE * _GRANULE
        return min(max(tokens, _LEAST_TOKENS), self.most_tokens)

    def observe(self, seconds: float, *, prompt_tokens: int, num_decoded: int) -> None:
        """Note what a step took that fed so many prompt tokens and decoded so many rows."""
        if prompt_tokens == 0:
            if num_decoded:
                kind = num_decoded // _ROWS_ALIKE
                self._decode_seconds[kind] = _mixed(self._decode_seconds.get(kind), seconds)
            return
        if prompt_tokens < _LEAST_OBSERVED:
            return
        prefill = max(seconds - self._decode_cost(num_decoded), seconds / 4)
        self._token_seconds = _mixed(self._token_seconds, prefill / prompt_tokens)

    def _decode_cost(self, num_rows: int) -> float:
        """Return the seconds of a decode step: of as many rows, else of the nearest number."""
        if not num_rows or not self._decode_seconds:
            return 0.0
        kind = num_rows // _ROWS_ALIKE
        nearest = min(self._decode_seconds, key=lambda known: abs(known - kind))
        return self._decode_seconds[nearest]


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
