"""What a device or a host pool of the simulated fleet holds: never more than fits, and what is pinned stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvpeer.sim.fleet.cache import PrefixCache

CAPACITY = 100
PREFIXES = st.sampled_from("abcde")


class Cache(RuleBasedStateMachine):
    """Random use beside a model of what is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(CAPACITY)
        self.pins: list[tuple[str, int]] = []  # (prefix, tokens that were there when it was pinned or filled)

    @rule(prefix=PREFIXES, n_tokens=st.integers(0, 130))
    def put(self, prefix, n_tokens):
        self.cache.put(prefix, n_tokens)

    @rule(prefix=PREFIXES, n_tokens=st.integers(1, 60), n_filled=st.integers(0, 60))
    def reserve(self, prefix, n_tokens, n_filled):
        if self.cache.reserve(prefix, n_tokens):
            self.cache.fill(prefix, min(n_filled, n_tokens))
            self.pins.append((prefix, self.cache.tokens(prefix)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data):
        prefix, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.cache.release(prefix)

    @invariant()
    def it_holds_what_fits_and_what_is_pinned(self):
        assert 0 <= self.cache.pinned_tokens <= self.cache.used_tokens <= CAPACITY
        assert sum(self.cache.tokens(prefix) for prefix in "abcde") <= self.cache.used_tokens
        for prefix, n_tokens in self.pins:
            assert self.cache.tokens(prefix) >= n_tokens
        if not self.pins:
            assert self.cache.pinned_tokens == 0
            assert sum(self.cache.tokens(prefix) for prefix in "abcde") == self.cache.used_tokens


TestCache = Cache.TestCase


def test_the_least_recently_used_prefix_loses_its_end_first():
    cache = PrefixCache(CAPACITY)
    cache.put("old", 50)
    cache.put("new", 50)
    cache.touch("old")
    cache.put("newest", 20)
    assert [cache.tokens(prefix) for prefix in ("old", "new", "newest")] == [50, 30, 20]


@given(st.integers(0, CAPACITY))
def test_what_is_pinned_leaves_room_for_the_rest_alone(n_pinned):
    cache = PrefixCache(CAPACITY)
    assert cache.reserve("pinned", n_pinned)
    assert not cache.reserve("more", CAPACITY - n_pinned + 1)
    assert cache.reserve("rest", CAPACITY - n_pinned)
