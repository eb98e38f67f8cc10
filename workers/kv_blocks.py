"""Where the keys and values of rows lie: blocks of rows of one capacity, none of them padded far.

A row's keys and values may stand anywhere in a buffer as long as the attention knows which columns
are its own: positions are already in the keys. So each row starts at column 0 of a slot of its own,
new rows take free slots, and a row that leaves just gives its slot back; nothing is copied then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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


@dataclass(slots=True)
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

    @classmethod
    def empty(cls, layers: Sequence[LayerShape], num_tokens: int) -> RowKV:
        """Return a row with room for so many tokens, none of it in use."""
        columns = capacity_for(num_tokens)
        return cls(
            [mx.zeros((1, s.num_heads, columns, s.key_width), s.dtype) for s in layers],
            [mx.zeros((1, s.num_heads, columns, s.value_width), s.dtype) for s in layers],
            0,
        )

    @property
    def capacity(self) -> int:
        """Columns there are."""
        return int(self.keys[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def append(self, layer: int, keys: mx.array, values: mx.array, start: int) -> None:
        """Write the columns from ``start`` on: (1, heads, tokens, width) each."""
        stop = start + keys.shape[2]
        self.keys[layer][:, :, start:stop] = keys
        self.values[layer][:, :, start:stop] = values


@dataclass(slots=True, eq=False)
class Block:
    """Slots of one capacity, in one array a layer: (slots, heads, columns, width).

    Attributes:
        owners: the row in each slot, None where it is free.
        lengths: the columns in use of each slot.
    """

    keys: list[mx.array]
    values: list[mx.array]
    owners: list[str | None]
    lengths: list[int]

    @classmethod
    def empty(cls, layers: Sequence[LayerShape], num_slots: int, capacity: int) -> Block:
        """Return a block of free slots."""
        return cls(
            [mx.zeros((num_slots, s.num_heads, capacity, s.key_width), s.dtype) for s in layers],
            [mx.zeros((num_slots, s.num_heads, capacity, s.value_width), s.dtype) for s in layers],
            [None] * num_slots,
            [0] * num_slots,
        )

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

    def put(self, slot: int, row_id: str, row: RowKV) -> None:
        """Copy a row into a free slot."""
        used = row.num_tokens
        for layer, (keys, values) in enumerate(zip(row.keys, row.values, strict=True)):
            self.keys[layer][slot : slot + 1, :, :used] = keys[:, :, :used]
            self.values[layer][slot : slot + 1, :, :used] = values[:, :, :used]
        self.owners[slot] = row_id
        self.lengths[slot] = used

    def take(self, slot: int) -> RowKV:
        """Return a copy of a row, evaluated and without padding."""
        used = self.lengths[slot]
        row = RowKV(
            [mx.contiguous(keys[slot : slot + 1, :, :used]) for keys in self.keys],
            [mx.contiguous(values[slot : slot + 1, :, :used]) for values in self.values],
            used,
        )
        # A slice that is not evaluated would keep the whole block alive.
        mx.eval(row.keys, row.values)
        return row

    def free(self, slot: int, *, wipe: bool = False) -> None:
        """Give a slot back; wipe it when NaN may be in it, which zero weights would not hide."""
        self.owners[slot] = None
        self.lengths[slot] = 0
        if wipe:
            for layer in range(len(self.keys)):
                self.keys[layer][slot] = 0
                self.values[layer][slot] = 0


@dataclass(slots=True)
class BlockStore:
    """All rows: those that are being prefilled, alone, and those in blocks.

    Args:
        layers: what each layer keeps of a token.
        budget_bytes: blocks are made smaller rather than exceed it together.
    """

    layers: Sequence[LayerShape]
    budget_bytes: int
    alone: dict[str, RowKV] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    slots: dict[str, tuple[Block, int]] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one column of one row, over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(row.nbytes for row in self.alone.values()) + sum(b.nbytes for b in self.blocks)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self.alone or row_id in self.slots

    def add(self, row_id: str, num_tokens: int) -> None:
        """Make room for a row of so many tokens, on its own."""
        if self.nbytes + capacity_for(num_tokens) * self.bytes_per_token > self.budget_bytes:
            self._shrink()
        self.alone[row_id] = RowKV.empty(self.layers, num_tokens)
        self._note_peak()

    def insert(self, row_id: str, row: RowKV, num_tokens: int) -> None:
        """Add a row that has columns already, with room for so many tokens."""
        self.add(row_id, max(num_tokens, row.num_tokens))
        made = self.alone[row_id]
        for layer, (keys, values) in enumerate(zip(row.keys, row.values, strict=True)):
            made.append(layer, keys[:, :, : row.num_tokens], values[:, :, : row.num_tokens], 0)
        made.num_tokens = row.num_tokens

    def extract(self, row_id: str) -> RowKV:
        """Return a copy of a row, evaluated and without padding."""
        if row_id in self.slots:
            block, slot = self.slots[row_id]
            return block.take(slot)
        row = self.alone[row_id]
        used = row.num_tokens
        copy = RowKV(
            [mx.contiguous(keys[:, :, :used]) for keys in row.keys],
            [mx.contiguous(values[:, :, :used]) for values in row.values],
            used,
        )
        mx.eval(copy.keys, copy.values)
        return copy

    def length(self, row_id: str) -> int:
        """Return the columns that a row has in use."""
        if row_id in self.slots:
            block, slot = self.slots[row_id]
            return block.lengths[slot]
        return self.alone[row_id].num_tokens

    def drop(self, row_id: str, *, wipe: bool = False) -> None:
        """Forget a row; unknown ids are ignored."""
        self.alone.pop(row_id, None)
        place = self.slots.pop(row_id, None)
        if place is None:
            return
        block, slot = place
        block.free(slot, wipe=wipe)
        if block.num_rows == 0:
            self.blocks.remove(block)

    def seat(self, row_ids: Iterable[str]) -> None:
        """See that rows lie in blocks, each in a slot with room for one more token."""
        moving = [row_id for row_id in row_ids if not self._has_seat(row_id)]
        capacities = Counter(capacity_for(self.length(row_id) + 1) for row_id in moving)
        for row_id in moving:
            if row_id in self.slots:
                block, slot = self.slots[row_id]
                row = block.take(slot)
                self.drop(row_id)
            else:
                row = self.alone.pop(row_id)
            capacity = capacity_for(row.num_tokens + 1)
            self._place(row_id, row, capacity, capacities[capacity])
            capacities[capacity] -= 1

    def _has_seat(self, row_id: str) -> bool:
        place = self.slots.get(row_id)
        return place is not None and place[0].lengths[place[1]] < place[0].capacity

    def clear(self) -> None:
        """Forget every row."""
        self.alone.clear()
        self.slots.clear()
        self.blocks.clear()

    def _place(self, row_id: str, row: RowKV, capacity: int, num_coming: int) -> None:
        most_slots = max(1, min(_MOST_SLOTS, _COLUMNS_PER_BLOCK // capacity))
        if most_slots == 1 and row.capacity == capacity:
            # Alone in a block: the row's own arrays become the block.
            block = Block(row.keys, row.values, [row_id], [row.num_tokens])
            self.blocks.append(block)
            self.slots[row_id] = (block, 0)
            return
        block, slot = self._free_slot(capacity, min(most_slots, max(num_coming, _FEWEST_SLOTS)))
        block.put(slot, row_id, row)
        self.slots[row_id] = (block, slot)
        self._note_peak()

    def _free_slot(self, capacity: int, num_slots: int) -> tuple[Block, int]:
        """Return a free slot, if need be in a new block of so many slots."""
        for block in self.blocks:
            if block.capacity == capacity and None in block.owners:
                return block, block.owners.index(None)
        row_bytes = capacity * self.bytes_per_token
        if self.nbytes + num_slots * row_bytes > self.budget_bytes:
            self._shrink()
            room = (self.budget_bytes - self.nbytes) // row_bytes
            num_slots = max(1, min(num_slots, room))
        block = Block.empty(self.layers, num_slots, capacity)
        self.blocks.append(block)
        return block, 0

    def _shrink(self) -> None:
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
            )
            mx.eval(smaller.keys, smaller.values)
            self.blocks[index] = smaller
            for slot, owner in enumerate(smaller.owners):
                assert owner is not None
                self.slots[owner] = (smaller, slot)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
