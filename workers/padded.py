"""Runs a model on mlx-lm's own batch caches, for the families that cannot run packed.

Rows are prefilled one at a time, which every family does right, and then decoded in groups of
about the same length, since a batch cache pads all of its rows to the longest. A model whose
caches cannot be merged decodes each row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from workers.checkpoints.identity import CacheFacts
from workers.checkpoints.records import Layer
from workers.kv_blocks import capacity_for
from workers.kv_records import columns_layer, state_layer, to_array, to_state
from workers.runner import NotExtractable, PromptChunk

# Recurrent caches grow a graph that nothing else evaluates: mlx-lm's advance() is lazy.
_STEPS_BETWEEN_EVALUATIONS = 64

_Caches = list[Any]  # one of mlx-lm's caches a layer


@dataclass(slots=True, eq=False)
class _Group:
    """Rows that are decoded in one forward pass."""

    capacity: int
    row_ids: list[str]
    caches: _Caches


@dataclass(slots=True)
class _Row:
    length: int
    caches: _Caches | None  # until it joins a group
    group: _Group | None = None


@dataclass(frozen=True, slots=True)
class PaddedState:
    """What a row holds: mlx-lm's single-row caches, evaluated."""

    caches: _Caches
    num_tokens: int


@dataclass(slots=True)
class PaddedRunner:
    """Runs rows of any model that mlx-lm can run. See `workers.runner.Runner`.

    Args:
        model: evaluated weights; used on the calling thread.
        batched: whether rows may be decoded together.
    """

    model: Any
    batched: bool = True
    peak_bytes: int = 0
    _rows: dict[str, _Row] = field(default_factory=dict)
    _groups: list[_Group] = field(default_factory=list)
    _num_steps: int = 0
    _fixed_bytes: int = 0
    _bytes_per_token: int = 0
    _has_columns_only: bool = False

    def __post_init__(self) -> None:
        self._fixed_bytes, self._bytes_per_token = _measure(self.model)
        self._has_columns_only = all(_is_plain(cache) for cache in make_prompt_cache(self.model))

    def row_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a row of so many tokens takes, padding included."""
        if num_tokens <= 0:
            return 0
        return self._fixed_bytes + capacity_for(num_tokens) * self._bytes_per_token

    def add(self, rows: Mapping[str, int]) -> None:
        """Make room for rows; mlx-lm's caches grow by themselves."""
        for row_id in rows:
            self._rows[row_id] = _Row(0, make_prompt_cache(self.model))

    def shared_tokens(self, length: int) -> int:
        """Return 0: mlx-lm's caches hold all of a row."""
        return 0

    def add_with(
        self, rows: Mapping[str, int], state: PaddedState, length: int, shared: int
    ) -> None:
        """Make room for rows that begin with ``length`` tokens of a state, copied for each."""
        for row_id in rows:
            self._rows[row_id] = _Row(length, _copied(self._head(state, length).caches))

    @property
    def is_sliceable(self) -> bool:
        """Whether what a row holds of its first tokens can be had alone: not of every cache."""
        return self._has_columns_only

    def describe_layers(self) -> list[CacheFacts]:
        """Return what each layer keeps of a row: the same where states fit each other."""
        caches = make_prompt_cache(self.model)
        self.model(mx.array([[0]]), cache=caches)
        return [_facts(cache) for cache in caches]

    def to_layers(self, state: PaddedState, start: int, stop: int) -> tuple[Layer, ...]:
        """Return a state as plain arrays: of the tokens from start to stop, where each has its own.

        Raises:
            NotExtractable: a layer keeps what cannot be stored.
        """
        try:
            return tuple(
                columns_layer(_name(cache), _evaluated(_columns(cache)), start, stop)
                if _is_plain(cache)
                else state_layer(_name(cache), cache.state)
                for cache in state.caches
            )
        except TypeError as error:
            raise NotExtractable(str(error)) from error

    def from_layers(self, layers: Sequence[Layer], length: int) -> PaddedState:
        """Return the state after ``length`` tokens that plain arrays hold.

        Raises:
            ValueError: they are of another model or length.
        """
        caches = []
        for empty, layer in zip(make_prompt_cache(self.model), layers, strict=True):
            if layer.cls != _name(empty):
                raise ValueError(f"a {_name(empty)} cannot be made of a {layer.cls}")
            if _is_plain(empty):
                columns = [to_array(tensor) for tensor in layer.tensors]
                if any(array.shape[2] != length for array in columns):
                    raise ValueError(f"{length} tokens are wanted of {columns[0].shape}")
                caches.append(_from_columns(empty, columns, length))
            else:
                caches.append(type(empty).from_state(to_state(layer)))
        return PaddedState(caches, length)

    def extract(self, row_id: str, length: int | None = None) -> PaddedState:
        """Return a copy of what a row holds, evaluated.

        Raises:
            NotExtractable: a cache of this model cannot be made from its state.
        """
        row = self._rows[row_id]
        if row.group is not None and self.batched:
            index = row.group.row_ids.index(row_id)
            caches = [cache.extract(index) for cache in row.group.caches]
        else:
            own = row.caches if row.group is None else row.group.caches
            assert own is not None
            caches = _copied(own)
        mx.eval([cache.state for cache in caches])
        state = PaddedState(caches, row.length)
        return state if length is None else self._head(state, length)

    def is_finite(self, state: PaddedState) -> bool:
        """Return whether every number of a state is one; others would spread."""
        numbers = [a for a in _arrays(state.caches) if mx.issubdtype(a.dtype, mx.floating)]
        return all(bool(mx.isfinite(array).all().item()) for array in numbers)

    def shrink(self) -> None:
        """Give back what no row uses: nothing, since a batch cache holds its rows only."""

    def drop(self, row_id: str) -> None:
        """Forget a row, if it is known; nothing of it stays in a batch."""
        row = self._rows.pop(row_id, None)
        if row is None or row.group is None:
            return
        group = row.group
        kept = [index for index, other in enumerate(group.row_ids) if other != row_id]
        group.row_ids.remove(row_id)
        if not kept:
            self._groups.remove(group)
            return
        for cache in group.caches:
            cache.filter(mx.array(kept))

    def clear(self) -> None:
        """Forget every row."""
        self._rows.clear()
        self._groups.clear()

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[mx.array]:
        """Take chunks of prompts in; return what must be evaluated for it to have happened."""
        made: list[mx.array] = []
        for chunk in chunks:
            row = self._rows[chunk.row_id]
            assert row.caches is not None
            self.model(mx.array([list(chunk.tokens)]), cache=row.caches)
            row.length += len(chunk.tokens)
            made.extend(_arrays(row.caches))
        self._note_peak()
        return made

    def arrange(self, row_ids: Sequence[str]) -> list[str]:
        """Seat rows for the next `decode`; return them in the order that its tokens must have."""
        wanted = set(row_ids)
        for group in list(self._groups):
            if not wanted.issuperset(group.row_ids):
                self._unseat([row_id for row_id in group.row_ids if row_id not in wanted])
        joining: dict[int, list[str]] = {}
        for row_id in row_ids:
            row = self._rows[row_id]
            capacity = capacity_for(row.length + 1)
            if row.group is not None and row.group.capacity < capacity:
                self._unseat([row_id])
            if row.group is None:
                joining.setdefault(capacity, []).append(row_id)
        for capacity, joiners in joining.items():
            self._join(capacity, joiners)
        self._note_peak()
        return [row_id for group in self._groups for row_id in group.row_ids]

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        """Feed one token to each row, (rows,) in the order of `arrange`; return their logits.

        Returns:
            (rows, vocabulary), not evaluated.
        """
        outputs, start = [], 0
        for group in self._groups:
            stop = start + len(group.row_ids)
            outputs.append(self.model(tokens[start:stop, None], cache=group.caches)[:, -1])
            start = stop
        for row_id in order:
            self._rows[row_id].length += 1
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_EVALUATIONS == 0:
            states = [array for group in self._groups for array in _arrays(group.caches)]
            mx.async_eval(states)  # type: ignore[no-untyped-call]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    @property
    def nbytes(self) -> int:
        """Bytes that rows take, padding included."""
        alone = [row.caches for row in self._rows.values() if row.caches is not None]
        shared = [group.caches for group in self._groups]
        return sum(array.nbytes for caches in (*alone, *shared) for array in _arrays(caches))

    def _head(self, state: PaddedState, length: int) -> PaddedState:
        """Return the first tokens of a state, not copied."""
        if length == state.num_tokens:
            return state
        if not self._has_columns_only:
            raise ValueError(f"a state of {state.num_tokens} tokens cannot be cut to {length}")
        caches = [_from_columns(cache, _columns(cache), length) for cache in state.caches]
        return PaddedState(caches, length)

    def _join(self, capacity: int, row_ids: Sequence[str]) -> None:
        own: list[_Caches] = []
        for row_id in row_ids:
            caches = self._rows[row_id].caches
            assert caches is not None
            own.append(caches)
        if not self.batched:
            for row_id, caches in zip(row_ids, own, strict=True):
                group = _Group(capacity, [], caches)
                self._groups.append(group)
                self._seat(group, [row_id])
            return
        merged = [layer[0].merge(list(layer)) for layer in zip(*own, strict=True)]
        shared = next((g for g in self._groups if g.capacity == capacity), None)
        if shared is None:
            shared = _Group(capacity, [], merged)
            self._groups.append(shared)
        else:
            for cache, other in zip(shared.caches, merged, strict=True):
                cache.extend(other)
        self._seat(shared, row_ids)

    def _seat(self, group: _Group, row_ids: Sequence[str]) -> None:
        group.row_ids.extend(row_ids)
        for row_id in row_ids:
            self._rows[row_id].group = group
            self._rows[row_id].caches = None

    def _unseat(self, row_ids: Sequence[str]) -> None:
        """Take rows out of their groups, to stand alone."""
        for row_id in row_ids:
            row = self._rows[row_id]
            assert row.group is not None
            caches = self.extract(row_id).caches if self.batched else row.group.caches
            self.drop(row_id)
            self._rows[row_id] = _Row(row.length, caches)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.nbytes)


def _arrays(caches: _Caches) -> list[mx.array]:
    leaves: Any = tree_flatten([cache.state for cache in caches])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def _name(cache: Any) -> str:
    """Return what a checkpoint calls a cache: its class, and those inside."""
    inner = ", ".join(_name(one) for one in getattr(cache, "caches", ()))
    return f"{type(cache).__name__}({inner})" if inner else type(cache).__name__


def _facts(cache: Any) -> CacheFacts:
    arrays = _columns(cache) if _is_plain(cache) else _arrays([cache])
    shapes = [tuple(array.shape[1:]) for array in arrays]
    if _is_plain(cache):
        shapes = [(heads, width) for heads, _, width in shapes]
    return CacheFacts(_name(cache), tuple(str(a.dtype) for a in arrays), tuple(shapes))


def _is_plain(cache: Any) -> bool:
    """Return whether a cache keeps a key and a value for each token, and nothing else."""
    if type(cache) is CacheList:
        return all(_is_plain(one) for one in cache.caches)
    return type(cache) is KVCache


def _columns(cache: Any) -> list[mx.array]:
    """Return keys and values of a plain cache, without the columns that it has in reserve."""
    if type(cache) is CacheList:
        return [array for one in cache.caches for array in _columns(one)]
    return [] if cache.keys is None else list(cache.keys_and_values())


def _from_columns(like: Any, columns: Sequence[mx.array], length: int) -> Any:
    """Return a plain cache of the first columns of some keys and values."""
    if type(like) is CacheList:
        parts = iter(columns)
        return CacheList(  # type: ignore[no-untyped-call]
            *(_from_columns(one, [next(parts), next(parts)], length) for one in like.caches)
        )
    keys, values = (array[:, :, :length] for array in columns)
    return KVCache.from_state((keys, values, length))  # type: ignore[no-untyped-call]


def _evaluated(arrays: list[mx.array]) -> list[mx.array]:
    arrays = [mx.contiguous(array) for array in arrays]
    mx.eval(arrays)
    return arrays


def _copied(caches: _Caches) -> _Caches:
    return [_copy(cache) for cache in caches]


def _copy(cache: Any) -> Any:
    state = tree_map(
        lambda leaf: mx.array(leaf) if isinstance(leaf, mx.array) else leaf, cache.state
    )
    try:
        return type(cache).from_state(state)
    except AttributeError as error:  # not one of mlx-lm's own classes: a model's
        raise NotExtractable(
            f"mlx-lm cannot make a {type(cache).__name__} from its state, so the rows of this "
            "model cannot be saved"
        ) from error


def _measure(model: Module) -> tuple[int, int]:
    """Return the bytes that a row takes whatever its length, and those of each token."""
    sizes = []
    for num_tokens in (1, 2):
        caches = make_prompt_cache(model)
        runnable: Any = model
        runnable(mx.array([[0] * num_tokens]), cache=caches)
        sizes.append(sum(_logical_bytes(cache) for cache in caches))
    per_token = max(0, sizes[1] - sizes[0])
    return max(0, sizes[0] - per_token), per_token


def _logical_bytes(cache: Any) -> int:
    """Return the bytes of what a cache holds, without the columns that it has in reserve."""
    inner = getattr(cache, "caches", None)
    if inner is not None:
        return sum(_logical_bytes(one) for one in inner)
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        return sum(a.nbytes // a.shape[2] for a in (keys, values)) * int(cache.offset)
    return sum(array.nbytes for array in _arrays([cache]))
