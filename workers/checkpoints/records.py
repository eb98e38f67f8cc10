"""What a checkpoint consists of, as plain arrays: no MLX here, and no files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Part of every namespace: other formats are other caches.
FORMAT_VERSION: Final = 1
# A segment that begins within another begins at a multiple of it.
BLOCK_TOKENS: Final = 256
_DIGEST_BYTES: Final = 16
_DOMAIN: Final = b"qkv1"


class Kind(StrEnum):
    """What a layer's arrays hold.

    DELTA: of the segment's tokens only, on the axis before the last: any part of it can be used.
    STATE: all that the layer keeps after the segment's last token, of use there only.
    """

    DELTA = "delta"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Numbers, bit for bit.

    Attributes:
        dtype: MLX's name of the type, such as ``bfloat16``.
        data: contiguous; unsigned integers of the same size where numpy lacks the type.
    """

    dtype: str
    data: NDArray[Any]

    def as_float32(self) -> NDArray[np.float32]:
        """Return the numbers as numpy can reckon with them."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of a segment.

    Attributes:
        cls: the name of the cache's class, as MLX-LM or the runner has it.
        tensors: keys, values and what else it keeps; of a DELTA each is (1, heads, tokens, width).
        meta: what is no array, as JSON holds it.
    """

    cls: str
    kind: Kind
    tensors: tuple[Tensor, ...]
    meta: Any = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys and values of consecutive tokens that stand after certain others.

    Attributes:
        start: how many tokens stand before it.
        tokens: those of the segment.
        parent: the digest of the tokens before it.
        digest: the digest of all tokens up to its end.
        layers: one a layer of the model; all segments of a namespace have the same kinds.
        cost_seconds: what it took to compute.
    """

    start: int
    tokens: tuple[int, ...]
    parent: bytes
    digest: bytes
    layers: tuple[Layer, ...]
    cost_seconds: float = 0.0

    @property
    def end(self) -> int:
        """How many tokens a prompt has up to its end."""
        return self.start + len(self.tokens)

    @property
    def is_sliceable(self) -> bool:
        """Whether a part of it, from its first token on, can be used."""
        return all(layer.kind is Kind.DELTA for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(int(t.data.nbytes) for layer in self.layers for t in layer.tensors)


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be alike for keys and values to be of use again, and a name for it.

    Attributes:
        facts: weights, adapter, configuration, caches, types, versions, device: values of JSON.
    """

    facts: Mapping[str, Any]

    @property
    def namespace(self) -> str:
        """32 hex digits."""
        return blake2b(self.canonical().encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def canonical(self) -> str:
        """Return the facts as JSON that is the same for the same facts."""
        return canonical_json({"qsvc_kv_format": FORMAT_VERSION, **self.facts})


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def prefix_digests(namespace: str, tokens: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Return the digest of the first tokens up to each of some ends, which must not fall."""
    data = np.asarray(tokens, dtype="<u4").tobytes()
    digest = blake2b(_DOMAIN + bytes.fromhex(namespace), digest_size=_DIGEST_BYTES)
    done, digests = 0, []
    for end in ends:
        digest.update(data[4 * done : 4 * end])
        done = end
        digests.append(digest.copy().digest())
    return digests


assert sys.byteorder == "little", "checkpoints are written in the byte order of the processor"
