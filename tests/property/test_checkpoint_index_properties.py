"""The radix tree of segments against a list that is searched in full."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.checkpoints import IDENTITY
from tests.unit.test_checkpoint_index import entry
from workers.checkpoints.index import Entry, RadixIndex
from workers.checkpoints.records import BLOCK_TOKENS

# Prompts are made of a few pieces, so that many of them begin alike and part inside blocks.
PIECES = [[piece] * length for piece in range(2) for length in (1, 100, BLOCK_TOKENS, 300)]
PROMPTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(
    lambda pieces: [token for piece in pieces for token in piece]
)


class Model:
    """All prompts' entries in a list: (their whole prompt, the entry)."""

    def __init__(self) -> None:
        self.held: list[tuple[list[int], Entry]] = []

    def reachable_ends(self, tokens: list[int], limit: int) -> set[int]:
        """Every place of a prompt where another entry may begin, with all before it kept."""
        found = {0}
        while True:
            more = {
                place
                for prompt, one in self.held
                if one.start in found
                for place in [*range(BLOCK_TOKENS, one.end, BLOCK_TOKENS), one.end]
                if one.start < place <= limit and prompt[:place] == tokens[:place]
            }
            if more <= found:
                return found
            found |= more

    def length(self, tokens: list[int], limit: int) -> int:
        """The most tokens of a prompt that can be restored."""
        places = self.reachable_ends(tokens, limit)
        best = 0
        for prompt, one in self.held:
            if one.start not in places or prompt[: one.start] != tokens[: one.start]:
                continue
            shared = common(prompt, tokens[:limit])
            if one.is_sliceable and shared > one.start:
                best = max(best, shared)
            elif shared == one.end:
                best = max(best, one.end)
        return best


def common(one: list[int], other: list[int]) -> int:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared


class IndexMachine(RuleBasedStateMachine):
    """Adds and removes entries, and asks for prompts."""

    is_sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(IDENTITY.namespace)
        self.model = Model()

    @rule(prompt=PROMPTS)
    def add(self, prompt: list[int]) -> None:
        start = self.index.covers(prompt)
        if start < len(prompt):
            self._add(prompt, start)

    @rule(prompt=PROMPTS)
    def add_all_of_it(self, prompt: list[int]) -> None:
        self._add(prompt, 0)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.model.held))
        assert self.index.remove(held[1].digest) is held[1]
        self.model.held.remove(held)

    @rule(prompt=PROMPTS)
    def match(self, prompt: list[int]) -> None:
        found = self.index.match(prompt)
        assert found.length == self.model.length(prompt, len(prompt) - 1)
        place = 0
        for part in found.parts:
            assert part.entry.start == place
            assert 0 < part.num_tokens <= part.entry.num_tokens
            place += part.num_tokens
            is_last = part is found.parts[-1]
            if is_last and not part.entry.is_sliceable:
                assert place == part.entry.end
            assert is_last or place == part.entry.end or place % BLOCK_TOKENS == 0

    @rule(prompt=PROMPTS)
    def covers(self, prompt: list[int]) -> None:
        covered = self.index.covers(prompt)
        if self.model.length(prompt, len(prompt)) == len(prompt):
            assert covered == len(prompt)
        else:
            places = self.model.reachable_ends(prompt, len(prompt)) - {len(prompt)}
            assert covered == max(places)

    @rule(prompt=PROMPTS)
    def tokens_to(self, prompt: list[int]) -> None:
        point = entry(prompt).digest
        is_there = len(prompt) in self.model.reachable_ends(prompt, len(prompt))
        assert (self.index.tokens_to(point) is not None) == is_there

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.index) == len(self.model.held)
        assert self.index.num_bytes == sum(one.num_bytes for _, one in self.model.held)

    @invariant()
    def leaves_are_what_nothing_follows(self) -> None:
        parents = {one.parent for _, one in self.model.held}
        expected = {one.digest for _, one in self.model.held if parents.isdisjoint(one.points)}
        assert {one.digest for one in self.index.leaves()} == expected

    def _add(self, prompt: list[int], start: int) -> None:
        one = entry(prompt, start, is_sliceable=self.is_sliceable)
        self.model.held = [held for held in self.model.held if held[1].digest != one.digest]
        self.model.held.append((prompt, one))
        self.index.add(one)


class StateIndexMachine(IndexMachine):
    """The same where each entry ends with a state."""

    is_sliceable = False


_LIMITS = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestSliceable = IndexMachine.TestCase
TestSliceable.settings = _LIMITS
TestWithStates = StateIndexMachine.TestCase
TestWithStates.settings = _LIMITS


@given(prompts=st.lists(PROMPTS, max_size=6), prompt=PROMPTS)
@settings(max_examples=60, deadline=None)
def test_a_prompt_matches_what_it_has_most_in_common_with(
    prompts: list[list[int]], prompt: list[int]
) -> None:
    index = RadixIndex(IDENTITY.namespace)
    for one in prompts:
        start = index.covers(one)
        if start < len(one):
            index.add(entry(one, start))
    expected = max((common(one, prompt[:-1]) for one in prompts), default=0)
    assert index.match(prompt).length == expected
