"""Decides, step by step, which sequences have room in KV memory, and who prefills and decodes.

It knows lengths and bytes, never tokens or arrays, and what it decides depends on the order of
the calls alone. The engine carries out each plan whole and says what became of the sequences.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from operator import attrgetter
from typing import Final

# Waiting sequences without room that a plan passes by before it stops looking for one that fits,
# so that its cost does not grow with the queue.
_MAX_PASSED_BY: Final = 32
# The weight of the newest completion length: the estimate follows about the last 32 of them.
_NEWEST_WEIGHT: Final = 1 / 32


class State(StrEnum):
    """Where a sequence is; the last two are rows."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


class SchedulerCorrupt(AssertionError):
    """The scheduler contradicts itself, which is a fault of its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the scheduler may use, and how it shares it.

    Raises:
        ValueError: a number is out of its range.
    """

    # Padded KV bytes of all rows stay within it.
    kv_budget_bytes: int
    # Rows in the batch.
    max_rows: int = 32
    # Completion length assumed at first when the limit is unset or larger.
    expected_tokens: int = 256
    # What is kept free for a row that outlived the guess or was pre-empted, so that it can stay.
    headroom_tokens: int = 64
    # Admissions past a waiting head that does not fit, before everyone waits for it.
    max_overtakes: int = 8
    # Part of a step's prefill budget that the oldest prefilling row gets at least, if it needs it.
    oldest_share: float = 0.5
    # While others decode, an admission waits up to so many steps for more to be prefilled with it.
    join_wait_steps: int = 0
    # ... unless that many can be admitted now.
    min_joins: int = 4
    # A sequence that waits takes the place of rows whose priority is lower by so much.
    yield_gap: int = 1 << 32
    # So often at most a row makes room for others.
    max_yields: int = 2

    def __post_init__(self) -> None:
        for name in ("kv_budget_bytes", "max_rows", "expected_tokens", "headroom_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_overtakes", "join_wait_steps", "min_joins", "max_yields"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.oldest_share <= 1:
            raise ValueError(f"oldest_share must be between 0 and 1, not {self.oldest_share}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of a row to prefill: positions ``start`` up to, not including, ``stop``.

    Attributes:
        is_last: prefill is complete after it; the row decodes from the next plan on.
    """

    sequence_id: str
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. The engine carries it out in the order of the fields.

    Attributes:
        overflowed: sequences whose next token does not fit the budget even alone. The scheduler
            has forgotten them; the engine ends them with an error.
        preempted: rows that give their KV back; they wait again. Never with admissions.
        admitted: rows that take room in this step, with their cached tokens.
        chunks: prefill work; at most one chunk a row.
        decoding: rows that decode a token, in the order in which they joined; all of them were
            decoding before this plan.
    """

    overflowed: tuple[str, ...]
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    decoding: tuple[str, ...]


NOTHING = Plan((), (), (), (), ())


class Scheduler:
    """Plans the steps of one batch of rows.

    A sequence waits, is admitted when there is room for the length it is expected to reach,
    prefills all its tokens but the last, and decodes: the first decode step feeds the last prompt
    token. Order is by priority, then pre-empted ones, then first come, first served.

    The padded bytes of all rows, at the length they have after a plan, stay within the budget.
    When the guesses were too short for that, rows are pre-empted: lowest priority first, then the
    most recently admitted. So they are when a sequence of a far higher priority has no room.

    Args:
        policy: the budget and the knobs.
        kv_bytes: padded bytes of a row that holds so many tokens; never falls, 0 for 0.
    """

    def __init__(self, policy: Policy, kv_bytes: Callable[[int], int]) -> None:
        self._policy = policy
        self._kv_bytes = kv_bytes
        self._sequences: dict[str, _Sequence] = {}
        # Each sequence is in one of these four. The list is sorted; the dicts keep the order in
        # which their rows came in.
        self._eligible: list[_Sequence] = []
        self._held: dict[str, _Sequence] = {}
        self._prefilling: dict[str, _Sequence] = {}
        self._decoding: dict[str, _Sequence] = {}
        self._num_added = 0
        self._num_admissions = 0
        self._waited_steps = 0
        self._is_paused = False
        self._length = _LengthEstimate(policy.expected_tokens)

    def add(
        self,
        sequence_id: str,
        *,
        num_tokens: int,
        token_limit: int,
        cached_tokens: int = 0,
        priority: int = 0,
    ) -> None:
        """Put a sequence into the queue.

        Args:
            sequence_id: any name that is not in use.
            num_tokens: the tokens to feed before the first new one can be sampled, at least 1.
            token_limit: new tokens after which it gets no more decode steps, at least 1.
            cached_tokens: how many of its first tokens need no prefill, fewer than ``num_tokens``.
            priority: higher ones come first.

        Raises:
            ValueError: the id is known, or a number is out of its range.
        """
        if sequence_id in self._sequences:
            raise ValueError(f"{sequence_id} is scheduled already")
        if num_tokens < 1 or token_limit < 1:
            raise ValueError(f"{sequence_id} needs a token to feed and a token to generate")
        sequence = _Sequence(sequence_id, priority, self._num_added, num_tokens, token_limit)
        sequence.cache(cached_tokens)
        self._num_added += 1
        self._sequences[sequence_id] = sequence
        insort(self._eligible, sequence, key=_ORDER)

    def remove(self, sequence_id: str) -> None:
        """Forget a sequence, finished or cancelled; an unknown id is ignored."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._take_out(sequence)

    def hold(self, sequence_id: str) -> None:
        """Do not admit a waiting sequence for now; it keeps its place and blocks nobody.

        Raises:
            KeyError: the id is unknown.
            ValueError: the sequence does not wait.
        """
        sequence = self._waiting(sequence_id)
        self._take_out(sequence)
        self._held[sequence_id] = sequence

    def release(self, sequence_id: str) -> None:
        """End a hold; ignored when there is none."""
        sequence = self._held.pop(sequence_id, None)
        if sequence is not None:
            insort(self._eligible, sequence, key=_ORDER)

    def set_cached(self, sequence_id: str, cached_tokens: int, *, shared_tokens: int = 0) -> None:
        """Say how many of a waiting sequence's first tokens need no prefill.

        Args:
            shared_tokens: so many of them lie outside the budget, where other rows use them too.

        Raises:
            KeyError: the id is unknown.
            ValueError: the sequence does not wait, or a number is out of its range.
        """
        self._waiting(sequence_id).cache(cached_tokens, shared_tokens)

    def cut(self, sequence_id: str, num_tokens: int) -> None:
        """Let a chunk of a sequence's prefill end after so many tokens, where one would go on.

        Raises:
            KeyError: the id is unknown.
        """
        self._sequences[sequence_id].cut(num_tokens)

    def preempt(self, sequence_id: str) -> None:
        """Make a row wait again, in front of its priority; ignored when the sequence waits.

        The tokens that it generated become tokens to feed, and nothing counts as cached.

        Raises:
            KeyError: the id is unknown.
            ValueError: its last token is generated, so there is nothing to come back for.
        """
        sequence = self._sequences[sequence_id]
        if sequence.is_exhausted:
            raise ValueError(f"{sequence_id} has generated all its tokens; remove it instead")
        if sequence.state is not State.WAITING:
            self._take_out(sequence)
            sequence.start_over()
            insort(self._eligible, sequence, key=_ORDER)

    def pause_admission(self, paused: bool) -> None:
        """Admit nobody until it is unpaused; rows go on."""
        self._is_paused = paused

    def finished_with(self, completion_tokens: int) -> None:
        """Learn from the length of a completion how long others will be.

        Raises:
            ValueError: the number is negative.
        """
        if completion_tokens < 0:
            raise ValueError(f"completion_tokens must be 0 or more, not {completion_tokens}")
        self._length.observe(completion_tokens)

    def plan(self, prefill_tokens: int, *, decode: bool = True) -> Plan:
        """Decide the next step, and take it as done.

        It may be empty: when every sequence is held, admission is paused, or the only rows are
        those that wait for their last token to be read and removed.

        Args:
            prefill_tokens: prompt tokens that the step may prefill, at least 1.
            decode: whether rows that are ready decode; else they wait for a later step.

        Raises:
            ValueError: the budget is below 1.
        """
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, not {prefill_tokens}")
        overflowed = [row for row in self._rows() if self._overflows(row)]
        self._forget(overflowed)
        preempted = self._make_room() or self._yield_to_urgent()
        ready = [row for row in self._decoding.values() if not row.is_exhausted]
        decoding = ready if decode else []
        admitted: list[_Sequence] = []
        if not preempted and not self._is_paused:
            admitted, too_long = self._admit(others_decode=bool(ready))
            overflowed += too_long
        chunks = self._share_prefill(prefill_tokens)
        for row in decoding:
            row.kv_tokens += 1
        for chunk in chunks:
            self._prefilling[chunk.sequence_id].kv_tokens = chunk.stop
            if chunk.is_last:
                self._start_decoding(self._prefilling.pop(chunk.sequence_id))
        return Plan(
            overflowed=_ids(overflowed),
            preempted=_ids(preempted),
            admitted=_ids(admitted),
            chunks=tuple(chunks),
            decoding=_ids(decoding),
        )

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens and one more fit the budget of an empty batch."""
        return self._kv_bytes(num_tokens + 1) <= self._policy.kv_budget_bytes

    def state_of(self, sequence_id: str) -> State | None:
        """Return where a sequence is, None when it is unknown."""
        sequence = self._sequences.get(sequence_id)
        return sequence.state if sequence else None

    def tokens_of(self, sequence_id: str) -> int:
        """Return how many tokens a row holds in KV memory, 0 while it waits.

        Raises:
            KeyError: the id is unknown.
        """
        return self._sequences[sequence_id].kv_tokens

    def first_to_go(self) -> str | None:
        """Return the row to pre-empt first: of the lowest priority the one admitted last.

        None when no row has tokens left to generate.
        """
        return next((row.id for row in self._order_of_leaving()), None)

    @property
    def decoding(self) -> tuple[str, ...]:
        """The rows past their prefill, in the order in which they joined."""
        return tuple(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences without room, held ones too."""
        return len(self._eligible) + len(self._held)

    @property
    def num_prefilling(self) -> int:
        """Rows that have prompt tokens left to prefill."""
        return len(self._prefilling)

    @property
    def num_decoding(self) -> int:
        """Rows past their prefill."""
        return len(self._decoding)

    @property
    def num_rows(self) -> int:
        """Rows that have room in KV memory."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def kv_bytes_used(self) -> int:
        """Padded bytes of the rows at their present length."""
        return sum(self._bytes_of(row, row.kv_tokens) for row in self._rows())

    @property
    def kv_bytes_reserved(self) -> int:
        """Padded bytes kept for the rows; beyond the budget when a guess was too short."""
        return sum(self._reservation(row) for row in self._rows())

    @property
    def expected_tokens(self) -> int:
        """Completion length assumed now, from the lengths observed."""
        return self._length.expected

    @property
    def has_work(self) -> bool:
        """Whether there are rows, or sequences that may become rows."""
        return self.num_rows > 0 or (bool(self._eligible) and not self._is_paused)

    def check_integrity(self) -> None:
        """Compare what the scheduler holds with what it promises.

        Raises:
            SchedulerCorrupt: they differ; the message says where.
        """
        policy = self._policy
        if self.num_waiting + self.num_rows != len(self._sequences):
            raise SchedulerCorrupt(f"{len(self._sequences)} sequences, not all in one place")
        if self.num_rows > policy.max_rows:
            raise SchedulerCorrupt(f"{self.num_rows} rows of {policy.max_rows}")
        if self.kv_bytes_used > policy.kv_budget_bytes:
            raise SchedulerCorrupt(f"{self.kv_bytes_used} bytes of {policy.kv_budget_bytes}")
        heads = self._eligible[: _MAX_PASSED_BY + 1]
        for before, after in pairwise(heads):
            if before.order >= after.order:
                raise SchedulerCorrupt(f"{after.id} waits behind {before.id}")
        waiting = chain(heads, self._held.values())
        for places, state in (
            (waiting, State.WAITING),
            (self._prefilling.values(), State.PREFILLING),
            (self._decoding.values(), State.DECODING),
        ):
            for sequence in places:
                if self._sequences.get(sequence.id) is not sequence:
                    raise SchedulerCorrupt(f"{sequence.id} is {state} and not known")
                if sequence.state is not state or not sequence.has_right_length:
                    raise SchedulerCorrupt(f"{sequence} is in the place of those {state}")

    def _rows(self) -> Iterable[_Sequence]:
        return chain(self._prefilling.values(), self._decoding.values())

    def _waiting(self, sequence_id: str) -> _Sequence:
        sequence = self._sequences[sequence_id]
        if sequence.state is not State.WAITING:
            raise ValueError(f"{sequence_id} is {sequence.state}, not waiting")
        return sequence

    def _take_out(self, sequence: _Sequence) -> None:
        if sequence.state is State.PREFILLING:
            del self._prefilling[sequence.id]
        elif sequence.state is State.DECODING:
            del self._decoding[sequence.id]
        elif self._held.pop(sequence.id, None) is None:
            del self._eligible[bisect_left(self._eligible, sequence.order, key=_ORDER)]

    def _forget(self, sequences: Iterable[_Sequence]) -> None:
        for sequence in sequences:
            self.remove(sequence.id)

    def _overflows(self, sequence: _Sequence) -> bool:
        return self._bytes_of(sequence, sequence.needed_tokens) > self._policy.kv_budget_bytes

    def _bytes_of(self, sequence: _Sequence, num_tokens: int) -> int:
        """Return what a sequence of so many tokens takes of the budget."""
        return self._kv_bytes(max(num_tokens - sequence.shared_tokens, 0))

    def _make_room(self) -> list[_Sequence]:
        """Pre-empt rows until all that stay can grow. A row alone can: it does not overflow."""
        needed = sum(self._bytes_of(row, row.needed_tokens) for row in self._rows())
        if needed <= self._policy.kv_budget_bytes:
            return []
        preempted = []
        for row in self._order_of_leaving():
            if needed <= self._policy.kv_budget_bytes:
                break
            needed -= self._bytes_of(row, row.needed_tokens)
            self.preempt(row.id)
            preempted.append(row)
        return preempted

    def _order_of_leaving(self) -> list[_Sequence]:
        """Return the rows that may be pre-empted: of the lowest priority the last one first."""
        rows = [row for row in self._rows() if not row.is_exhausted]
        return sorted(rows, key=lambda row: (row.priority, -row.admission))

    def _yield_to_urgent(self) -> list[_Sequence]:
        """Pre-empt rows for the first that waits, if it is far above them and has no room."""
        if not self._eligible or self._is_paused:
            return []
        head = self._eligible[0]
        most = head.priority - self._policy.yield_gap
        rows = [
            row
            for row in self._order_of_leaving()
            if row.priority <= most and row.yields < self._policy.max_yields
        ]
        if not rows or self._overflows(head):
            return []
        wanted = self._bytes_of(head, head.num_tokens + self._guess(head))
        free_bytes = self._policy.kv_budget_bytes - self.kv_bytes_reserved
        free_rows = self._policy.max_rows - self.num_rows
        leaving: list[_Sequence] = []
        for row in rows:
            if free_rows > 0 and wanted <= free_bytes:
                break
            free_rows += 1
            free_bytes += self._reservation(row)
            leaving.append(row)
        if free_rows <= 0 or wanted > free_bytes:
            return []  # it would not help
        for row in leaving:
            row.yields += 1
            self.preempt(row.id)
        return leaving

    def _guess(self, sequence: _Sequence) -> int:
        """Return how many tokens a sequence is expected to generate."""
        headroom = self._policy.headroom_tokens if sequence.was_preempted else 0
        return min(sequence.token_limit, max(self._length.expected, headroom))

    def _reservation(self, row: _Sequence) -> int:
        tokens = row.reserved_tokens
        if row.kv_tokens >= tokens:
            tokens = min(row.kv_tokens + self._policy.headroom_tokens, row.max_kv_tokens)
        return self._bytes_of(row, tokens)

    def _admit(self, *, others_decode: bool) -> tuple[list[_Sequence], list[_Sequence]]:
        """Admit who fits; return them, and those that never will and are forgotten."""
        joining, too_long = self._choose()
        self._forget(too_long)
        if self._waits_for_more(len(joining), others_decode=others_decode):
            return [], too_long
        for sequence in joining:
            self._take_out(sequence)
            sequence.admission = self._num_admissions
            self._num_admissions += 1
            sequence.reserved_tokens = sequence.num_tokens + self._guess(sequence)
            sequence.kv_tokens = sequence.cached_tokens
            if sequence.tokens_to_prefill:
                sequence.state = State.PREFILLING
                self._prefilling[sequence.id] = sequence
            else:
                self._start_decoding(sequence)
        if self._eligible:
            head = self._eligible[0]
            head.overtakes += sum(sequence.order > head.order for sequence in joining)
        return joining, too_long

    def _choose(self) -> tuple[list[_Sequence], list[_Sequence]]:
        """Return who fits, in order, and who on the way there does not fit even alone."""
        joining: list[_Sequence] = []
        too_long: list[_Sequence] = []
        num_passed_by = 0
        may_pass = math.inf
        free_bytes = self._policy.kv_budget_bytes - self.kv_bytes_reserved
        free_rows = self._policy.max_rows - self.num_rows
        for sequence in self._eligible:
            if len(joining) >= free_rows or num_passed_by > _MAX_PASSED_BY or may_pass <= 0:
                break
            if self._overflows(sequence):
                too_long.append(sequence)
                continue
            wanted = self._bytes_of(sequence, sequence.num_tokens + self._guess(sequence))
            is_alone = not joining and self.num_rows == 0
            if wanted <= free_bytes or is_alone:
                joining.append(sequence)
                free_bytes -= wanted
                may_pass -= 1
                continue
            if num_passed_by == 0:
                may_pass = self._policy.max_overtakes - sequence.overtakes
            num_passed_by += 1
        return joining, too_long

    def _waits_for_more(self, num_joining: int, *, others_decode: bool) -> bool:
        """Whether an admission waits, so that more rows share its prefill; counts the steps."""
        is_worth_it = (
            0 < num_joining < self._policy.min_joins and others_decode and not self._prefilling
        )
        if is_worth_it and self._waited_steps < self._policy.join_wait_steps:
            self._waited_steps += 1
            return True
        self._waited_steps = 0
        return False

    def _share_prefill(self, budget: int) -> list[Chunk]:
        """Give the oldest row its share, the others the rest, shortest first, and it what is left.

        So short prompts start soon beside a long one, and no stream of them stops it.
        """
        rows = list(self._prefilling.values())
        if not rows:
            return []
        oldest, *others = rows
        share = min(oldest.tokens_to_prefill, math.ceil(budget * self._policy.oldest_share))
        left = budget - share
        grants = []
        for row in sorted(others, key=attrgetter("tokens_to_prefill")):
            grant = min(row.tokens_to_prefill, left)
            left -= grant
            grants.append((row, grant))
        share = min(oldest.tokens_to_prefill, share + left)
        return [row.next_chunk(grant) for row, grant in [(oldest, share), *grants] if grant]

    def _start_decoding(self, row: _Sequence) -> None:
        row.state = State.DECODING
        self._decoding[row.id] = row


@dataclass(slots=True, eq=False)
class _Sequence:
    """What is known of a sequence.

    Attributes:
        arrival: how many were added before it.
        cached_tokens: what its row begins with.
        shared_tokens: of them, those that lie outside the budget.
        kv_tokens: what its row holds; 0 while it waits.
        overtakes: admissions past it while it was the first to wait.
        admission: how many admissions were before its last one.
        reserved_tokens: the length that room was kept for at its admission.
        cuts: lengths at which a chunk ends, in order.
        yields: how often it made room for others.
    """

    id: str
    priority: int
    arrival: int
    num_tokens: int
    token_limit: int
    cached_tokens: int = 0
    shared_tokens: int = 0
    state: State = State.WAITING
    was_preempted: bool = False
    kv_tokens: int = 0
    overtakes: int = 0
    admission: int = -1
    reserved_tokens: int = 0
    cuts: tuple[int, ...] = ()
    yields: int = 0

    @property
    def order(self) -> tuple[int, bool, int]:
        """Its place among those that wait."""
        return -self.priority, not self.was_preempted, self.arrival

    @property
    def tokens_to_prefill(self) -> int:
        """Prompt tokens that its row lacks; the last one is fed by the first decode step."""
        return max(self.num_tokens - 1 - self.kv_tokens, 0)

    @property
    def max_kv_tokens(self) -> int:
        """The length of its row when its last token is generated; that one is never fed."""
        return self.num_tokens - 1 + self.token_limit

    @property
    def needed_tokens(self) -> int:
        """The length that its row must be able to have for the next token."""
        if self.state is State.DECODING:
            return min(self.kv_tokens + 1, self.max_kv_tokens)
        return self.num_tokens

    @property
    def is_exhausted(self) -> bool:
        """Whether it has generated its last token and only waits for its removal."""
        return self.kv_tokens >= self.max_kv_tokens

    @property
    def has_right_length(self) -> bool:
        """Whether its length is one that its state allows."""
        if self.state is State.WAITING:
            return self.kv_tokens == 0
        if self.state is State.PREFILLING:
            return self.cached_tokens <= self.kv_tokens < self.num_tokens - 1
        return self.num_tokens - 1 <= self.kv_tokens <= self.max_kv_tokens

    def cache(self, cached_tokens: int, shared_tokens: int = 0) -> None:
        """Set what its row begins with."""
        if not 0 <= shared_tokens <= cached_tokens:
            raise ValueError(f"{self.id} cannot share {shared_tokens} of {cached_tokens} tokens")
        if not 0 <= cached_tokens < self.num_tokens:
            raise ValueError(f"{self.id} cannot have {cached_tokens} of {self.num_tokens} cached")
        self.cached_tokens = cached_tokens
        self.shared_tokens = shared_tokens

    def cut(self, num_tokens: int) -> None:
        """Let a chunk end after so many tokens."""
        self.cuts = tuple(sorted({*self.cuts, num_tokens}))

    def next_chunk(self, num_tokens: int) -> Chunk:
        """Return its next tokens to prefill, at most so many."""
        stop = self.kv_tokens + num_tokens
        stop = next((cut for cut in self.cuts if self.kv_tokens < cut < stop), stop)
        return Chunk(self.id, self.kv_tokens, stop, stop == self.num_tokens - 1)

    def start_over(self) -> None:
        """Wait again, with the tokens generated so far to feed."""
        num_generated = max(self.kv_tokens - (self.num_tokens - 1), 0)
        self.num_tokens += num_generated
        self.token_limit -= num_generated
        self.state = State.WAITING
        self.was_preempted = True
        self.cached_tokens = self.shared_tokens = self.kv_tokens = self.overtakes = 0


_ORDER: Final = attrgetter("order")


class _LengthEstimate:
    """A completion length that most stay below: a running mean and the usual distance from it."""

    def __init__(self, tokens: int) -> None:
        self._mean = float(tokens)
        self._distance = 0.0

    def observe(self, tokens: int) -> None:
        self._distance += _NEWEST_WEIGHT * (abs(tokens - self._mean) - self._distance)
        self._mean += _NEWEST_WEIGHT * (tokens - self._mean)

    @property
    def expected(self) -> int:
        return max(math.ceil(self._mean + self._distance), 1)


def _ids(sequences: Iterable[_Sequence]) -> tuple[str, ...]:
    return tuple(sequence.id for sequence in sequences)
