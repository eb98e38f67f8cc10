"""How a choice is sampled: its plan, and the random key of each token. Fixed for ever."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_MASK_64: Final = 2**64 - 1
_MASK_32: Final = 2**32 - 1
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the tokens of one choice are drawn.

    Attributes:
        temperature: 0 takes the likeliest token each time.
        top_p: keep the smallest set of likeliest tokens that holds this share of the probability,
            at least one token; 1 keeps all.
        seed: any integer; see `sampling_key`.
        top_k: keep so many of the likeliest tokens; 0 keeps all.
        min_p: keep the tokens that are at least this share as likely as the likeliest.
        xtc_probability: how often a token is drawn with the top choices excluded: all that are at
            least ``xtc_threshold`` likely but the least likely of them.
        xtc_threshold: see there.

    Raises:
        ValueError: a number is outside its range.
    """

    temperature: float
    top_p: float
    seed: int
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, not {self.top_k}")
        if not (
            0 <= self.top_p <= 1
            and 0 <= self.min_p <= 1
            and 0 <= self.xtc_probability <= 1
            and 0 <= self.xtc_threshold <= 1
        ):
            raise ValueError(
                "top_p, min_p, xtc_probability and xtc_threshold must be between 0 and 1"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the seed plays no part."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say: the model's own wishes, else these.

    Raises:
        ValueError: a number is outside its range; see `SamplingPlan`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        SamplingPlan(self.temperature, self.top_p, 0, top_k=self.top_k, min_p=self.min_p)


def default_seed(job_id: str, generation: int, choice: int) -> int:
    """Return the seed of a choice whose request names none: 63 bits.

    The first 63 bits of the 8-byte BLAKE2b digest of ``<job_id>:<generation>:<choice>``, so that
    another execution of the same generation draws the same tokens.
    """
    name = f"{job_id}:{generation}:{choice}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def sampling_key(seed: int, position: int) -> tuple[int, int]:
    """Return the key of one token's noise: the high and the low 32 bits of a 64-bit word.

    The word is ``splitmix64(splitmix64(seed) + position)``, all modulo 2**64; ``mx.random.key``
    of the word gives the same key. Source: Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", 2014, with the constants of Vigna's splitmix64.c.

    ======================= ======== ========================
    seed                    position key
    ======================= ======== ========================
    0                       0        (0xA706DD2F, 0x4D197E6F)
    0                       1        (0x2A98F501, 0xAF37E97F)
    42                      7        (0xFE2F1081, 0x89F83DF6)
    -1                      0        (0x5DC20AA7, 0xB2A27137)
    1234567890123456789     4095     (0xF503576C, 0x5D43CD0A)
    ======================= ======== ========================

    Args:
        seed: any integer, taken modulo 2**64, so -1 is 2**64 - 1.
        position: index of the completion token, from 0.
    """
    word = _splitmix64((_splitmix64(seed & _MASK_64) + position) & _MASK_64)
    return word >> 32, word & _MASK_32


def sampling_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return `sampling_key` of each pair, uint32 of shape (n, 2).

    Raises:
        ValueError: there are not as many positions as seeds.
    """
    if len(seeds) != len(positions):
        raise ValueError(f"{len(seeds)} seeds but {len(positions)} positions")
    words = _splitmix64_array(_splitmix64_array(_to_uint64(seeds)) + _to_uint64(positions))
    return np.stack([words >> np.uint64(32), words & np.uint64(_MASK_32)], axis=1).astype(np.uint32)


def _splitmix64(state: int) -> int:
    mixed = (state + _GOLDEN_GAMMA) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK_64
    return mixed ^ (mixed >> 31)


def _splitmix64_array(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = state + np.uint64(_GOLDEN_GAMMA)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    return mixed ^ (mixed >> np.uint64(31))


def _to_uint64(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array([value & _MASK_64 for value in values], dtype=np.uint64)
