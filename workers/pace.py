"""How many prompt tokens a step may take in, so that running rows never wait long for a token."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.3  # of the newest observation
_LEAST_TOKENS = 32
_GRANULE = 32


@dataclass(slots=True)
class PrefillPace:
    """Learns what a step costs and gives each the prompt tokens that fit.

    Attributes:
        pause_seconds: how long a step may take while rows are decoding.
        most_tokens: the most in one step, also when nobody waits for a token.
        first_guess: tokens beside decoding rows until something was measured.
    """

    pause_seconds: float = 0.6
    most_tokens: int = 1024
    first_guess: int = 128
    _decode_seconds: float | None = None
    _token_seconds: float | None = None

    def tokens(self, *, beside_decoding: bool) -> int:
        """Return the prompt tokens for the next step, at least 1."""
        if not beside_decoding:
            return self.most_tokens
        if self._token_seconds is None:
            return min(self.first_guess, self.most_tokens)
        room = self.pause_seconds - (self._decode_seconds or 0)
        tokens = int(room / self._token_seconds) // _GRANULE * _GRANULE
        return min(max(tokens, _LEAST_TOKENS), self.most_tokens)

    def observe(self, seconds: float, *, prompt_tokens: int, decoded: bool) -> None:
        """Note what a step took that fed so many prompt tokens, and perhaps decoded."""
        if prompt_tokens == 0:
            if decoded:
                self._decode_seconds = _mixed(self._decode_seconds, seconds)
            return
        if decoded:
            seconds = max(seconds - (self._decode_seconds or 0), seconds / 4)
        self._token_seconds = _mixed(self._token_seconds, seconds / prompt_tokens)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
