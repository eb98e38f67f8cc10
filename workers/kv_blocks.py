"""Where the keys and values of rows lie: blocks of rows of one capacity, none of them padded far.

A row's keys and values may stand anywhere in a buffer as long as the attention knows which columns
are its own: positions are already in the keys. So each row starts at column 0 of a slot of its own,
new rows take free slots, and a row that leaves just gives its slot back; nothing is copied then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

# Columns of the smallest slot. Each class has twice the last one's, up to _LARGEST_DOUBLED.
_SMALLEST_CAPACITY = 128
_LARGEST_DOUBLED = 4096
_STEP_BEYOND = 2048
# Rows share a block while it holds about so many columns: more rows a block make fewer calls a
# layer, fewer make less memory wait for rows.
_COLUMNS_PER_BLOCK = 4096
_MOST_SLOTS = 16
_FEWEST_SLOTS = 4


def capacity_for(num_tokens: int) -> int:
    """Return the columns of the smallest slot that holds so many tokens; 0 for none."""
    if num_tokens <= 0:
        return 0
    capacity = _SMALLEST_CAPACITY
    while capacity < num_tokens and capacity < _LARGEST_DOUBLED:
        capacity *= 2
    if capacity >= num_tokens:
        return capacity
    return -(-num_tokens // _STEP_BEYOND) * _STEP_BEYOND


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token: heads, widths of key and value, and their type."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        return self.num_heads * (self.key_width + self.value_width) * self.dtype.size


@dataclass(slots=True, eq=False)
class RowKV:
    """The keys and values of one row, on their own.

    Attributes:
        keys: one array a layer, (1, heads, columns, width).
        values: likewise.
        num_tokens: columns in use, from the first.
    """

    keys: list[mx.array]
    values: list[mx.array]
    num_tokens: int
    _heads: dict[int, RowKV] = field(default_factory=dict)

    def head(self, num_tokens: int) -> RowKV:
        """Return the first columns, not copied: one object for each number of them."""
        if num_tokens == self.num_tokens:
            return self
        if num_tokens not in self._heads:
            self._heads[num_tokens] = RowKV(
                [keys[:, :, :num_tokens] for keys in self.keys],
                [values[:, :, :num_tokens] for values in self.values],
                num_tokens,
            )
        return self._heads[num_tokens]

    def columns(self, start: int, stop: int) -> RowKV:
        """Return some columns, not copied."""
        return RowKV(
            [keys[:, :, start:stop] for keys in self.keys],
            [values[:, :, start:stop] for values in self.values],
            stop - start,
        )


@dataclass(slots=True, eq=False)
class Block:
    """Slots of one capacity, in one array a layer: (slots, heads, columns, width).

    Attributes:
        owners: the row in each slot, None where it is free.
        lengths: the columns in use of each slot.
        is_used: whether a slot had an owner before.
        base: what all rows of the block begin with, before their columns; it lies elsewhere, once.
    """

    keys: list[mx.array]
    values: list[mx.array]
    owners: list[str | None]
    lengths: list[int]
    is_used: list[bool]
    base: RowKV | None = None

    @classmethod
    def empty(
        cls,
        layers: Sequence[LayerShape],
        num_slots: int,
        capacity: int,
        base: RowKV | None = None,
    ) -> Block:
        """Return a block of free slots."""
        return cls(
            [mx.zeros((num_slots, s.num_heads, capacity, s.key_width), s.dtype) for s in layers],
            [mx.zeros((num_slots, s.num_heads, capacity, s.value_width), s.dtype) for s in layers],
            [None] * num_slots,
            [0] * num_slots,
            [False] * num_slots,
            base,
        )

    @property
    def base_tokens(self) -> int:
        """Tokens that every row has before its columns."""
        return self.base.num_tokens if self.base is not None else 0

    @property
    def capacity(self) -> int:
        """Columns of each slot."""
        return int(self.keys[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    @property
    def num_rows(self) -> int:
        """Slots in use."""
        return sum(owner is not None for owner in self.owners)

    def give(self, slot: int, row_id: str) -> None:
        """Make a free slot a row's own, empty."""
        self.owners[slot] = row_id
        self.lengths[slot] = 0
        if self.is_used[slot]:
            # NaN of the last owner would get through a mask: nothing times it is NaN again.
            for layer in range(len(self.values)):
                self.values[layer][slot] = 0
        self.is_used[slot] = True

    def write(self, layer: int, slot: int, start: int, keys: mx.array, values: mx.array) -> None:
        """Write the columns of a row from ``start`` on: (1, heads, tokens, width) each."""
        stop = start + keys.shape[2]
        self.keys[layer][slot : slot + 1, :, start:stop] = keys
        self.values[layer][slot : slot + 1, :, start:stop] = values

    def put(self, slot: int, row: RowKV) -> None:
        """Copy into a row's slot what it holds."""
        for layer, (keys, values) in enumerate(zip(row.keys, row.values, strict=True)):
            self.write(layer, slot, 0, keys, values)
        self.lengths[slot] = row.num_tokens

    def take(self, slot: int, length: int | None = None) -> RowKV:
        """Return a copy of a row's own first columns, evaluated and without padding."""
        used = self.lengths[slot] if length is None else length
        row = RowKV(
            [mx.contiguous(keys[slot : slot + 1, :, :used]) for keys in self.keys],
            [mx.contiguous(values[slot : slot + 1, :, :used]) for values in self.values],
            used,
        )
        # A slice that is not evaluated would keep the whole block alive.
        mx.eval(row.keys, row.values)
        return row

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.owners[slot] = None
        self.lengths[slot] = 0


@dataclass(slots=True)
class BlockStore:
    """All rows, each in a slot of a block.

    Args:
        layers: what each layer keeps of a token.
        budget_bytes: blocks are made smaller rather than exceed it together.
    """

    layers: Sequence[LayerShape]
    budget_bytes: int
    blocks: list[Block] = field(default_factory=list)
    slots: dict[str, tuple[Block, int]] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one column of one row, over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes held, without what rows share: that is counted where it is kept."""
        return sum(block.nbytes for block in self.blocks)

    def add(self, rows: Mapping[str, int], base: RowKV | None = None) -> None:
        """Give each row a slot for so many tokens, those of its base not counted.

        Args:
            base: what all of them begin with: the same object for rows that share it.
        """
        capacities = {
            row_id: capacity_for(max(num_tokens, 1)) for row_id, num_tokens in rows.items()
        }
        num_coming = Counter(capacities.values())
        for row_id, capacity in capacities.items():
            self._place(row_id, capacity, num_coming[capacity], base)
            num_coming[capacity] -= 1

    def load(self, row_id: str, row: RowKV) -> None:
        """Write columns into the slot of a row that was just added."""
        block, slot = self.slots[row_id]
        block.put(slot, row)

    def extract(self, row_id: str, length: int | None = None) -> RowKV:
        """Return what a row holds of its first tokens, evaluated and without padding."""
        block, slot = self.slots[row_id]
        if length is None:
            length = block.base_tokens + block.lengths[slot]
        if block.base is None:
            return block.take(slot, length)
        if length <= block.base_tokens:
            return block.base.head(length)
        return _joined(block.base, block.take(slot, length - block.base_tokens))

    def length(self, row_id: str) -> int:
        """Return the tokens that a row holds; 0 for an unknown id."""
        block, slot = self.slots.get(row_id, (None, 0))
        return 0 if block is None else block.base_tokens + block.lengths[slot]

    def drop(self, row_id: str) -> None:
        """Forget a row; unknown ids are ignored."""
        place = self.slots.pop(row_id, None)
        if place is None:
            return
        block, slot = place
        block.free(slot)
        if block.num_rows == 0:
            self.blocks.remove(block)

    def grow(self, row_ids: Iterable[str]) -> None:
        """See that each row's slot has room for one more token."""
        for row_id in row_ids:
            block, slot = self.slots[row_id]
            if block.lengths[slot] < block.capacity:
                continue
            row = block.take(slot)
            self.drop(row_id)
            self.add({row_id: row.num_tokens + 1}, block.base)
            self.load(row_id, row)

    def shrink(self) -> None:
        """Give free slots back, at the price of a copy of each block that has some."""
        for index, block in enumerate(self.blocks):
            kept = [slot for slot, owner in enumerate(block.owners) if owner is not None]
            if len(kept) == len(block.owners):
                continue
            chosen = mx.array(kept)
            smaller = Block(
                [keys[chosen] for keys in block.keys],
                [values[chosen] for values in block.values],
                [block.owners[slot] for slot in kept],
                [block.lengths[slot] for slot in kept],
                [True] * len(kept),
                block.base,
            )
            mx.eval(smaller.keys, smaller.values)
            self.blocks[index] = smaller
            for slot, owner in enumerate(smaller.owners):
                assert owner is not None
                self.slots[owner] = (smaller, slot)

    def clear(self) -> None:
        """Forget every row."""
        self.slots.clear()
        self.blocks.clear()

    def _place(self, row_id: str, capacity: int, num_coming: int, base: RowKV | None) -> None:
        block = self._block_with_room(capacity, num_coming, base)
        slot = block.owners.index(None)
        block.give(slot, row_id)
        self.slots[row_id] = (block, slot)

    def _block_with_room(self, capacity: int, num_coming: int, base: RowKV | None) -> Block:
        for block in self.blocks:
            if block.capacity == capacity and block.base is base and None in block.owners:
                return block
        most_slots = max(1, min(_MOST_SLOTS, _COLUMNS_PER_BLOCK // capacity))
        num_slots = min(most_slots, max(num_coming, _FEWEST_SLOTS))
        row_bytes = capacity * self.bytes_per_token
        if self.nbytes + num_slots * row_bytes > self.budget_bytes:
            self.shrink()
            room = (self.budget_bytes - self.nbytes) // row_bytes
            num_slots = max(1, min(num_slots, room))
        block = Block.empty(self.layers, num_slots, capacity, base)
        self.blocks.append(block)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return block


def _joined(base: RowKV, own: RowKV) -> RowKV:
    """Return two runs of columns as one, evaluated."""
    row = RowKV(
        [mx.concatenate(list(pair), axis=2) for pair in zip(base.keys, own.keys, strict=True)],
        [mx.concatenate(list(pair), axis=2) for pair in zip(base.values, own.values, strict=True)],
        base.num_tokens + own.num_tokens,
    )
    mx.eval(row.keys, row.values)
    return row
