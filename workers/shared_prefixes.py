"""Sees that what several prompts begin with is computed once: by one row, for all that need it.

A row that comes looks in three places for the beginning of its prompt: in memory, in a row that
has it or is about to, and among the checkpoints on disk. What it finds it takes over at its
admission; what is not ready yet it waits for.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from queue_service.beginnings import common_length
from workers.checkpoint_tier import CheckpointTier, Restore
from workers.checkpoints.announcements import Announcement
from workers.prefixes import Prefix, PrefixStore, SeenPrompts
from workers.runner import NotExtractable, Runner
from workers.scheduler import Chunk, Scheduler

# Tokens that prompts must begin with alike for one of them to use what the other has.
_LEAST_SHARED: Final = 16
# So many more are computed again rather than waited for.
_NOT_WORTH_WAITING: Final = 32
# A row that others follow stops at most so often to hand a state on.
_MOST_CUTS: Final = 16
# Prompts that are known before they come.
_MOST_EXPECTED: Final = 64
# How often rows look whether other workers have stored what they wait for.
_LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Start:
    """What a row begins with: so many tokens of a prefix.

    Attributes:
        shared: of them stay with the prefix, which is kept as long as the row is there.
    """

    prefix: Prefix
    length: int
    shared: int


@dataclass(slots=True, eq=False)
class _Row:
    """What is known of one row.

    Attributes:
        number: counts rows in the order in which they came.
        is_sibling: the prompt is another choice's of the same request.
        keep: after so many tokens its keys and values are worth keeping.
        start: what others have computed of it.
        waits_for: the row that is computing a prefix for this one.
        restore: what is being read from disk for it.
        announced: what other workers were told that this row computes.
        check: what was read of it, to be compared after so many tokens.
        is_gone: the runner holds it no more.
    """

    row_id: str
    tokens: Sequence[int]
    number: int
    is_sibling: bool
    keep: set[int] = field(default_factory=set)
    start: Start | None = None
    waits_for: str | None = None
    restore: Restore | None = None
    announced: tuple[int, Announcement] | None = None
    check: tuple[int, Prefix] | None = None
    is_gone: bool = False


@dataclass(slots=True)
class PrefixFigures:
    """What sharing did since the start, in tokens of prompts.

    Attributes:
        hits: rows that began with what others had computed.
        misses: rows that did not.
        tokens_saved: tokens that those did not compute.
    """

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0


@dataclass(slots=True)
class SharedPrefixes:
    """The prefixes of an engine's rows. Used on its thread.

    Args:
        runner: what holds the rows.
        scheduler: what admits them; `restart` brings another.
        budget_bytes: what prefixes may take in memory, beside the rows.
        tier: checkpoints on disk; None keeps everything in memory.
        seconds_per_token: what a token of a prompt takes to compute.
    """

    runner: Runner
    scheduler: Scheduler
    budget_bytes: int
    tier: CheckpointTier | None = None
    seconds_per_token: Callable[[], float] = lambda: 0.0
    figures: PrefixFigures = field(default_factory=PrefixFigures)
    in_memory: PrefixStore = field(init=False)
    _rows: dict[str, _Row] = field(default_factory=dict)
    # Rows that wait for a prefix, by the row that computes it, and the length of each.
    _followers: dict[str, dict[str, int]] = field(default_factory=dict)
    _restoring: list[_Row] = field(default_factory=list)
    # Rows that wait for other workers, and the length that these announced.
    _awaiting: dict[str, int] = field(default_factory=dict)
    _looked_at: float = 0.0
    _seen: SeenPrompts = field(default_factory=SeenPrompts)
    _expected: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=_MOST_EXPECTED))
    _num_rows_ever: int = 0

    def __post_init__(self) -> None:
        self.in_memory = PrefixStore(self.budget_bytes, is_sliceable=self.runner.is_sliceable)

    def add(
        self,
        row_id: str,
        tokens: Sequence[int],
        *,
        keep: Iterable[int] = (),
        is_sibling: bool = False,
    ) -> None:
        """Let a row that waits use what is known of its prompt, or wait for what will be.

        Args:
            keep: after so many tokens its keys and values are kept for later prompts.
            is_sibling: a row of the same request has the same prompt, so that no other prompt is
                expected to begin with all of it.
        """
        row = self._enter(row_id, tokens, is_sibling=is_sibling)
        for length in keep:
            self._keep(row, min(length, len(tokens) - 1))
        if not is_sibling and self.tier is not None:
            # A beginning that comes for the second time will come again.
            repeated = max(self._seen.note(tokens), self._expected_of(tokens))
            self._keep(row, min(repeated, len(tokens) - 1))
        self._seek(row)

    def expect(self, tokens: Sequence[int]) -> None:
        """Note a prompt that is about to come: what rows have in common with it is worth keeping.

        Also of rows that are here already, as far as it can still be had.
        """
        if self.tier is None or any(row.tokens == tokens for row in self._rows.values()):
            return  # it has come
        self._expected.append(tokens)
        for row in self._rows.values():
            length = min(common_length(row.tokens, tokens), len(row.tokens) - 1)
            if row.is_gone or length < self.tier.least_tokens:
                continue
            if self.scheduler.tokens_of(row.row_id) < length:
                self._keep(row, length)
            elif self.runner.is_sliceable:
                self._share(row, {}, {length})

    def save(self, row_id: str, tokens: Sequence[int]) -> None:
        """Keep in memory, if there is room, what a row holds that is about to lose its place."""
        if self.runner.is_sliceable and not self._rows[row_id].is_gone:
            self._capture(self._rows[row_id], tokens, 0)

    def add_again(self, row_id: str, tokens: Sequence[int]) -> None:
        """Let a row that lost its place look again for what is known of its tokens."""
        old = self._rows[row_id]
        self.remove(row_id)
        row = self._enter(row_id, tokens, is_sibling=True)
        row.keep = old.keep
        self._seek(row)

    def take(self, row_id: str) -> Start | None:
        """Return what an admitted row begins with; it is held on to as far as it is shared."""
        row = self._rows[row_id]
        start = row.start
        if start is None:
            self.figures.misses += 1
            return None
        self.in_memory.touch(start.prefix)
        if not start.shared:
            self._let_go(row)
        self.figures.hits += 1
        self.figures.tokens_saved += start.length
        row.keep = {kept for kept in row.keep if kept > start.length}
        return start

    def computed(self, chunk: Chunk) -> None:
        """Hand on what a row holds after a chunk of its prompt, to those that wait for it."""
        row = self._rows[chunk.sequence_id]
        waiting = self._followers.get(row.row_id, {})
        is_ready: Callable[[int], bool] = (
            chunk.stop.__ge__ if self.runner.is_sliceable else chunk.stop.__eq__
        )
        ready = {follower: length for follower, length in waiting.items() if is_ready(length)}
        kept = {length for length in row.keep if is_ready(length)}
        row.keep -= kept
        if row.check is not None and is_ready(row.check[0]):
            self._check(row, *row.check)
        for follower in ready:
            del waiting[follower]
        if not waiting:
            self._followers.pop(row.row_id, None)
        if ready or kept:
            self._share(row, ready, kept)

    def finish(self, row_id: str, tokens: Sequence[int]) -> bool:
        """Keep all that a row holds, after its last token but one; tell whether that was possible.

        Args:
            tokens: prompt and answer, as far as the row was fed.
        """
        row = self._rows[row_id]
        # What cannot be cut is ahead by the token that was fed before the end was seen.
        if not self.runner.is_sliceable or row.is_gone:
            return False
        if self.scheduler.tokens_of(row_id) < len(tokens):
            return False  # it waits for a place
        return self._capture(row, tokens, len(tokens)) is not None

    def lose(self, row_id: str) -> None:
        """Note that the runner will hold a row no more, though it is not at its end."""
        row = self._rows[row_id]
        row.is_gone = True
        self._let_go(row)

    def remove(self, row_id: str) -> None:
        """See that nobody waits for, or as, a row that leaves."""
        row = self._rows.pop(row_id)
        self._let_go(row)
        if row.restore is not None:
            self._restoring.remove(row)
        self._awaiting.pop(row_id, None)
        self._end_announcement(row)
        if row.waits_for is not None:
            followers = self._followers[row.waits_for]
            del followers[row_id]
            if not followers:
                del self._followers[row.waits_for]
        for follower_id in self._followers.pop(row_id, {}):
            follower = self._rows[follower_id]
            follower.waits_for = None
            self.scheduler.release(follower_id)
            self._seek(follower)

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Let rows go on whose prefix was read from disk, or could not be, or is there now.

        Args:
            timeout_seconds: how long to wait for the first of them, if there are any.
        """
        if timeout_seconds and self.tier is not None and (self._restoring or self._awaiting):
            if self._restoring:
                self.tier.wait(timeout_seconds)
            else:
                time.sleep(timeout_seconds)
        self._look_at_others()
        for row in [row for row in self._restoring if row.restore and row.restore.is_done]:
            assert row.restore is not None
            self._restoring.remove(row)
            restore, row.restore = row.restore, None
            self._use_restored(row, restore)

    def restart(self, scheduler: Scheduler) -> None:
        """Begin again with no row and nothing in memory; what is on disk stays."""
        self.scheduler = scheduler
        for row in self._rows.values():
            self._end_announcement(row)
        self._rows.clear()
        self._followers.clear()
        self._restoring.clear()
        self._awaiting.clear()
        self.in_memory.clear()

    def _enter(self, row_id: str, tokens: Sequence[int], *, is_sibling: bool) -> _Row:
        self._num_rows_ever += 1
        row = self._rows[row_id] = _Row(row_id, tokens, self._num_rows_ever, is_sibling)
        return row

    # Where a prefix comes from --------------------------------------------------------------

    def _seek(self, row: _Row) -> None:
        prefix, num_known = self.in_memory.best(row.tokens)
        leader, num_shared = self._best_leader(row)
        match = self.tier.match(row.tokens) if self.tier is not None else None
        num_stored = match.length if match is not None else 0
        best = max(num_shared, num_stored)
        if (
            prefix is not None
            and num_known >= _LEAST_SHARED
            and num_known + _NOT_WORTH_WAITING >= best
        ):
            self._use(row, prefix, num_known)
        elif match is not None and num_stored + _NOT_WORTH_WAITING >= num_shared:
            assert self.tier is not None
            row.restore = self.tier.restore(match, row.tokens)
            self.scheduler.hold(row.row_id)
            self._restoring.append(row)
        elif leader is not None and num_shared >= _LEAST_SHARED:
            self._follow(row, leader, num_shared)
        elif self.tier is not None and (announced := self.tier.others_compute(row.tokens)):
            self.scheduler.hold(row.row_id)
            self._awaiting[row.row_id] = announced
        else:
            self._announce(row, max(row.keep, default=0))

    def _expected_of(self, tokens: Sequence[int]) -> int:
        """Return with how many tokens of a prompt that has come an expected one begins."""
        if tokens in self._expected:
            self._expected.remove(tokens)
        return max((common_length(one, tokens) for one in self._expected), default=0)

    def _look_at_others(self) -> None:
        """Let rows go on that wait for other workers, once these have stored it or never will."""
        if not self._awaiting or time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        assert self.tier is not None
        self._looked_at = time.monotonic()
        for row_id, length in list(self._awaiting.items()):
            row = self._rows[row_id]
            match = self.tier.match(row.tokens)
            is_there = match is not None and match.length >= min(length, len(row.tokens) - 1)
            if is_there or self.tier.others_compute(row.tokens) < length:
                del self._awaiting[row_id]
                self.scheduler.release(row_id)
                self._seek(row)

    def _announce(self, row: _Row, length: int) -> None:
        """Tell other workers what a row computes and will store, if they were not told as much."""
        if self.tier is None or length < self.tier.least_tokens:
            return
        if row.announced is not None:
            if row.announced[0] >= length:
                return
            self._end_announcement(row)
        announcement = self.tier.announce(row.tokens[:length])
        if announcement is not None:
            row.announced = (length, announcement)

    def _end_announcement(self, row: _Row) -> None:
        if row.announced is not None:
            row.announced[1].done()
            row.announced = None

    def _follow(self, row: _Row, leader: _Row, length: int) -> None:
        """Let a row have what another computes or has computed."""
        num_there = self.scheduler.tokens_of(leader.row_id)
        if num_there == length or (num_there > length and self.runner.is_sliceable):
            self._share(leader, {row.row_id: length}, set())
            return
        if not self.runner.is_sliceable:
            self.scheduler.cut(leader.row_id, length)
        self.scheduler.hold(row.row_id)
        row.waits_for = leader.row_id
        if not row.is_sibling and leader.row_id not in self._awaiting:
            self._announce(leader, length)
        self._followers.setdefault(leader.row_id, {})[row.row_id] = length

    def _best_leader(self, row: _Row) -> tuple[_Row | None, int]:
        """Return the earlier row with which a prompt has most in common, and how many tokens."""
        best, length = None, 0
        for other in self._rows.values():
            if other.number >= row.number or other.is_gone:
                continue
            shared = min(
                common_length(other.tokens, row.tokens),
                len(other.tokens) - 1,
                len(row.tokens) - 1,
            )
            if shared > length and (self.runner.is_sliceable or self._can_stop(other, shared)):
                best, length = other, shared
        return best, length

    def _can_stop(self, row: _Row, length: int) -> bool:
        """Whether the state of a row after so many tokens can still be had."""
        waiting = set(self._followers.get(row.row_id, {}).values())
        if len(waiting) >= _MOST_CUTS and length not in waiting:
            return False
        return self.scheduler.tokens_of(row.row_id) <= length

    def _use_restored(self, row: _Row, restore: Restore) -> None:
        """Let a row begin with what was read for it, or look again for the rest."""
        self.scheduler.release(row.row_id)
        prefix = restore.prefix(self.in_memory)
        length = 0
        if prefix is not None:
            length = min(common_length(prefix.tokens, row.tokens), len(row.tokens) - 1)
        if prefix is None or length < _LEAST_SHARED:
            self._seek(row)
            return
        assert self.tier is not None
        if length == len(prefix.tokens) and self.tier.is_due_for_check():
            # Computed as if it were not there, and compared when that is done.
            row.check = (length, prefix)
            if not self.runner.is_sliceable:
                self.scheduler.cut(row.row_id, length)
            return
        self._use(row, prefix, length)

    def _use(self, row: _Row, prefix: Prefix, length: int) -> None:
        # What is not in the store is there for the row alone, and soon for nobody.
        shared = self.runner.shared_tokens(length) if prefix in self.in_memory else 0
        prefix.num_users += 1
        row.start = Start(prefix, length, shared)
        self.scheduler.set_cached(row.row_id, length, shared_tokens=shared)

    def _let_go(self, row: _Row) -> None:
        if row.start is not None:
            row.start.prefix.num_users -= 1
            row.start = None

    # What rows leave behind -----------------------------------------------------------------

    def _keep(self, row: _Row, length: int) -> None:
        """Note that a row's state after so many tokens is worth keeping."""
        if self.tier is None or length < self.tier.least_tokens:
            return
        row.keep.add(length)
        if not self.runner.is_sliceable:
            self.scheduler.cut(row.row_id, length)

    def _share(self, leader: _Row, lengths: Mapping[str, int], kept: set[int]) -> None:
        """Keep a prefix of what a row holds and let others use so much of it each."""
        for_others = {n for follower, n in lengths.items() if not self._rows[follower].is_sibling}
        on_disk = max(for_others | kept, default=0)
        length = max(on_disk, *lengths.values()) if lengths else on_disk
        prefix = self._capture(leader, leader.tokens[:length], on_disk)
        for row_id, shared in lengths.items():
            row = self._rows[row_id]
            row.waits_for = None
            if prefix is not None:  # else each computes it for itself
                self._use(row, prefix, shared)
            self.scheduler.release(row_id)

    def _check(self, row: _Row, length: int, prefix: Prefix) -> None:
        row.check = None
        assert self.tier is not None
        with contextlib.suppress(NotExtractable):
            self.tier.check(prefix.state, self.runner.extract(row.row_id, length), length)

    def _capture(self, row: _Row, tokens: Sequence[int], num_on_disk: int) -> Prefix | None:
        """Copy what a row holds of its first tokens; None where there is no room, or no copy.

        Args:
            num_on_disk: so many of the tokens are worth a checkpoint.
        """
        num_bytes = self.runner.row_bytes(len(tokens))
        tier = self.tier
        if tier is None or tier.has(tokens[:num_on_disk]):
            num_on_disk = 0
        fits = self.in_memory.make_room(num_bytes)
        if not fits and not num_on_disk:
            return None
        try:
            state = self.runner.extract(row.row_id, len(tokens))
        except NotExtractable:
            return None
        if not self.runner.is_finite(state):
            return None
        prefix = Prefix(tuple(tokens), state, num_bytes)
        if tier is not None and num_on_disk:
            tier.save(prefix, num_on_disk, self.seconds_per_token())
        if not fits:
            return None
        self.in_memory.add(prefix)
        return prefix
