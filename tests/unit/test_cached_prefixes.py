"""Cached prefixes count in the order of admission, and are looked up again before a request is admitted."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.queue import LEAST_CACHED, CachedPrefixes
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from oracles.rounds import admit, defers, open_round, propose

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, 9), st.integers(0, 2), st.integers(0, 3000), st.integers(0, 3000)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
        st.tuples(st.just("ask"), st.sets(st.integers(0, 9), max_size=6)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_the_shortest_is_that_of_a_plain_list(operations):
    one, noted, number = CachedPrefixes(), {}, 0
    for kind, *values in operations:
        if kind == "note":
            name, priority, cached, more = values
            number += 1
            noted.pop(name, None)
            if cached >= LEAST_CACHED:
                noted[name] = (priority, more, number, cached)
            one.note(name, priority, cached, cached + more)
        elif kind == "forget":
            noted.pop(values[0], None)
            one.forget(values[0])
        else:
            usable = {name: noted[name] for name in noted if name not in values[0]}
            found = one.shortest(lambda name, unusable=values[0]: name not in unusable)
            assert found == min(usable, key=usable.get, default=None)
        assert [one.tokens(name) for name in range(10)] == [noted[n][3] if n in noted else 0 for n in range(10)]


def builder():
    return Admission(ChunkedHashTree(64, seed=1), make_policy("always-add"))


def prompt(number, tokens):
    return array("q", [number] * tokens)


def test_who_has_least_to_compute_goes_first():
    b = builder()
    b.arrived("short", prompt(1, 1000))
    b.arrived("turn", prompt(2, 5000), cached_tokens=4800)
    b.arrived("other turn", prompt(3, 5000), cached_tokens=3900)
    open_round(b, 0.0, None)
    order = []
    while (name := propose(b, len(b.tree.active))) is not None:
        assert not defers(b, name, {"turn": 4800, "other turn": 3900}.get(name, 0), 1, 10**6)
        admit(b, name, 0)
        order.append(name)
    assert order == ["turn", "short", "other turn"]


def test_what_was_evicted_since_stays_out_for_a_round_and_then_counts_as_it_is():
    b = builder()
    b.arrived("short", prompt(1, 1000))
    b.arrived("turn", prompt(2, 5000), cached_tokens=4800)
    for expected in (["turn", "short"], ["turn"]):
        open_round(b, 0.0, None)
        seen = []
        while (name := propose(b, len(b.tree.active))) is not None:
            seen.append(name)
            if not defers(b, name, 0, len(prompt(1, 1000 if name == "short" else 5000)), 10**6):
                admit(b, name, 0)
            else:
                assert name == "turn" and b.round.open_proposal is None
        b.close_round()
        assert seen == expected
    assert not b.tree.waiting and not b.state.cached_prefixes.tokens("turn")


def test_a_prompt_cached_as_a_whole_is_believed():
    b = builder()
    b.arrived("again", prompt(1, 1024), cached_tokens=1024)
    open_round(b, 0.0, None)
    assert propose(b, 0) == "again" and not defers(b, "again", 1023, 1, 10**6)
