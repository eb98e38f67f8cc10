"""Cuts what was computed of a prompt into segments of a size that is good to store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from workers.checkpoints.records import (
    BLOCK_TOKENS,
    Kind,
    Layer,
    Segment,
    prefix_digests,
)

SEGMENT_BYTES = 32 << 20


def segments_of(
    namespace: str,
    tokens: Sequence[int],
    start: int,
    layers: Sequence[Layer],
    cost_seconds: float = 0.0,
    max_bytes: int = SEGMENT_BYTES,
) -> list[Segment]:
    """Return the segments of a prompt's tokens from a place on; none when there are no tokens.

    They are cut at multiples of ``BLOCK_TOKENS``, so that others can begin there, and hold at
    least one such block; the last ends where the tokens end. A layer of a STATE is worth something
    at the end of the tokens only, so with one there is no cut at all.

    Args:
        tokens: all of the prompt up to the end of the last segment.
        start: how many of them are stored already.
        layers: those of the tokens from the start on.
        cost_seconds: what these took to compute; shared out by tokens.
        max_bytes: the most that a segment's arrays may take, if a block takes less.

    Raises:
        ValueError: a DELTA does not have the tokens on the axis before its last.
    """
    count = len(tokens) - start
    if count <= 0:
        return []
    for layer in layers:
        if layer.kind is Kind.DELTA and any(t.data.shape[-2] != count for t in layer.tensors):
            raise ValueError(f"a layer of {layer.cls} is not one of {count} tokens")
    cuts = _cuts(start, len(tokens), layers, max_bytes)
    digests = prefix_digests(namespace, tokens, cuts)
    return [
        Segment(
            start=begin,
            tokens=tuple(tokens[begin:end]),
            parent=parent,
            digest=digest,
            layers=tuple(_part(layer, begin - start, end - start) for layer in layers),
            cost_seconds=cost_seconds * (end - begin) / count,
        )
        for (begin, end), (parent, digest) in zip(pairwise(cuts), pairwise(digests), strict=True)
    ]


def first_tokens(segment: Segment, num_tokens: int, digest: bytes) -> Segment:
    """Return a segment without its last tokens, and without states: they are worth nothing there.

    Args:
        digest: of all tokens up to the new end.
    """
    if num_tokens == len(segment.tokens):
        return segment
    layers = (
        _part(layer, 0, num_tokens) if layer.kind is Kind.DELTA else replace(layer, tensors=())
        for layer in segment.layers
    )
    return replace(segment, tokens=segment.tokens[:num_tokens], digest=digest, layers=tuple(layers))


def _cuts(start: int, end: int, layers: Sequence[Layer], max_bytes: int) -> list[int]:
    if any(layer.kind is Kind.STATE for layer in layers):
        return [start, end]
    num_bytes = sum(tensor.data.nbytes for layer in layers for tensor in layer.tensors)
    block_bytes = max(1, num_bytes * BLOCK_TOKENS // (end - start))
    length = max(1, max_bytes // block_bytes) * BLOCK_TOKENS
    first = start - start % BLOCK_TOKENS + length
    return [start, *range(first, end, length), end]


def _part(layer: Layer, begin: int, end: int) -> Layer:
    if layer.kind is Kind.STATE:
        return layer
    tensors = (
        replace(tensor, data=np.ascontiguousarray(tensor.data[..., begin:end, :]))
        for tensor in layer.tensors
    )
    return replace(layer, tensors=tuple(tensors))
