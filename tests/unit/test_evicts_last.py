"""Requests that would evict others go last, and requests that would not fit beside growing ones stay out."""

from array import array
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.deferrals import LEAST_TOKENS, PrefixBatching
from feather_sglang.scheduling.admission.forecast import KVForecast, Outlook
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.admission.overtaking import Overtaking
from oracles.rounds import admit, builder, defers, fits, judged_round, open_round, propose, skip

PREFIX, PROMPT = 768, 772


def prompt_of(name):
    """All of group "a" begin with the same PREFIX tokens."""
    return array("q", [ord(name[0])] * PREFIX + [1000 + int(name[1:])] * (PROMPT - PREFIX))


def short_of_memory(pool=100, **options):
    """A builder whose gathering knows no prefill time, so that no prefix waits for more of its requests."""
    gathering = PrefixBatching(pool)
    gathering.share_rate = 1.0
    return builder(prefix_batching=gathering, **options)


def arrive_all(b, *names):
    for name in names:
        b.arrived(name, prompt_of(name), most_tokens=8)
    if b.state.deferrals.prefix_batching is not None:
        b.state.deferrals.prefix_batching.share_rate = 1.0


def round_of(b, cached="", free=0, now=0.0, asked=None, slots=100):
    """A round; `cached`: groups whose prefix SGLang still has."""

    def found(r):
        if asked is not None:
            asked.append(r)
        return PREFIX if r[0] in cached or any(other[0] == r[0] for other in b.tree.active) else 0

    admitted = judged_round(b, found, PROMPT, free, now, slots)
    assert not b.state.deferrals.batching
    return admitted


# Last ------------------------------------------------------------------------------------------------------------


def test_those_whose_prefix_is_cached_come_before_one_that_would_have_it_evicted():
    b = short_of_memory()
    arrive_all(b, "a0", "a1", "b0", "b1", "c0")
    assert round_of(b, cached="b") == ["b0", "b1", "a0", "c0"]  # of "a" the first computes for the second
    assert b.stats()["deferrals"]["evicts"] == b.stats()["put_last"] == 2
    assert round_of(b) == ["a1"] and b.stats()["deferrals"]["evicts"] == 2


@pytest.mark.parametrize("free", [PROMPT, 10**6])
def test_where_nothing_must_be_evicted_nobody_goes_last(free):
    b = short_of_memory()
    arrive_all(b, "a0", "b0")
    assert round_of(b, cached="b", free=free) == ["a0", "b0"] and b.stats()["deferrals"]["evicts"] == 0
    arrive_all(b, "c0", "d0")
    assert round_of(b, cached="d", free=PROMPT - 1) == ["d0", "c0"] and b.stats()["deferrals"]["evicts"] == 1


def test_nor_where_memory_is_not_short_or_nothing_gathers():
    ample, alone = short_of_memory(pool=10**6), short_of_memory()
    for b in (ample, alone, builder()):
        arrive_all(b, "a0", "b0")
        alone.state.deferrals.prefix_batching.share_rate = 0.0
        assert round_of(b, cached="b") == ["a0", "b0"] and b.stats()["deferrals"]["evicts"] == 0


def test_nor_for_a_prefix_that_is_short_or_that_another_computes():
    b = short_of_memory()
    arrive_all(b, "a0", "a1")
    open_round(b, 0.0, None)
    assert not defers(b, "a0", PROMPT - LEAST_TOKENS + 1, LEAST_TOKENS - 1, 0)
    assert propose(b, 0) == "a0"
    admit(b, "a0", 0)
    assert not defers(b, "a1", 0, PROMPT, 0)
    b.close_round()


def test_one_that_is_late_does_not_go_last():
    b = short_of_memory(max_wait=5.0)
    arrive_all(b, "a0", "b0")
    assert round_of(b, now=0.0, slots=0) == []
    assert round_of(b, cached="b", now=5.0) == ["a0", "b0"] and b.stats()["deferrals"]["evicts"] == 0


def test_where_all_go_last_they_come_in_their_order():
    b = short_of_memory()
    arrive_all(b, "a0", "b0", "b1", "c0")
    assert round_of(b) == ["a0", "b0", "c0"]
    assert round_of(b) == ["b1"]


def test_in_later_rounds_they_go_last_without_being_looked_up_first():
    """SGLang looks a proposed request up in its cache; it does so again only when nobody else is proposed."""
    b = short_of_memory()
    arrive_all(b, "a0", "a1", "c0")
    asked = []
    assert round_of(b, cached="b", asked=asked, slots=0) == [] and asked == []
    open_round(b, 0.0, None)
    assert propose(b, 0) == "a0" and defers(b, "a0", 0, PROMPT, 0) and set(b.state.deferrals.last) == {"a0"}
    b.close_round()
    arrive_all(b, "b0")
    assert round_of(b, cached="bc", asked=asked) == ["c0", "b0", "a0"] and asked == ["c0", "b0", "a0"]


def test_they_are_no_longer_last_once_another_computes_theirs_or_they_leave():
    b = short_of_memory()
    arrive_all(b, "a0", "a1", "b0")
    open_round(b, 0.0, None)
    for r in ("a0", "b0"):
        assert propose(b, 0) == r and defers(b, r, 0, PROMPT, 0)
    b.close_round()
    b.aborted("b0")
    assert set(b.state.deferrals.last) == {"a0"}
    open_round(b, 0.0, None)
    admit(b, "a1", 0)
    b.close_round()
    open_round(b, 0.0, None)
    assert not b.state.deferrals.last
    b.close_round()


def test_in_the_last_call_nobody_is_last_so_who_is_passed_over_by_sglang_is_skipped():
    b = short_of_memory()
    arrive_all(b, "a0", "b0")
    open_round(b, 0.0, None)
    for r in ("a0", "b0"):
        assert propose(b, 0) == r and defers(b, r, 0, PROMPT, 0)
    assert propose(b, 0) == "a0" and not b.state.deferrals.last and not defers(b, "a0", 0, PROMPT, 0)
    skip(b, "a0")
    assert propose(b, 0) == "b0"
    skip(b, "b0")
    assert propose(b, 0) is None
    b.close_round()
    assert set(b.tree.waiting) == {"a0", "b0"}


def test_a_round_that_is_held_calls_nobody():
    b = short_of_memory(prefill_delay=PrefillDelay(1.0))
    arrive_all(b, "x0")
    assert round_of(b, now=0.0) == ["x0"]
    arrive_all(b, "a0")
    open_round(b, 0.001, None, None, 10.0)
    assert b.round.delayed and propose(b, 1) is None
    b.close_round()


groups = st.lists(st.sampled_from("abcdef"), max_size=12)


@given(st.lists(st.tuples(groups, st.sets(st.sampled_from("abcdef")), st.booleans()), min_size=1, max_size=8))
def test_in_every_round_all_are_proposed_and_those_who_evict_behind_the_others(rounds):
    # Without the bound: with it, who may pass nobody any more waits while the oldest awaits its prefix.
    b, count = short_of_memory(overtaking=Overtaking(inf)), 0
    for arrivals, cached, leave in rounds:
        for group in arrivals:
            arrive_all(b, f"{group}{count}")
            count += 1
        present = cached | {r[0] for r in b.tree.active}
        waiting = set(b.tree.waiting)
        admitted = round_of(b, cached=cached)
        costly = [r[0] not in present for r in admitted]
        assert costly == sorted(costly) and set(admitted) | set(b.tree.waiting) == waiting
        assert {r for r in waiting if r[0] in present} <= set(admitted)
        assert {r[0] for r in b.tree.waiting} <= {r[0] for r, late in zip(admitted, costly, strict=True) if late}
        for r in sorted(b.tree.active) if leave else ():
            b.finished(r, 8)


# Memory ahead ----------------------------------------------------------------------------------------------------


def looking_ahead(pool=100, generated=None, fixed=True, **options):
    generated = {} if generated is None else generated

    def outlook(name):
        return Outlook(PROMPT + generated.get(name, 0), generated.get(name, 0), 100, fixed)

    return short_of_memory(pool, forecast=KVForecast(), outlook_of=outlook, **options)


def run_one(b, name="a0", now=0.0):
    arrive_all(b, name)
    open_round(b, now, None)
    assert fits(b, name, 0)  # beside nobody: SGLang decides
    admit(b, name, 0)
    b.close_round()
    for r in list(b.state.deferrals.in_flight):
        b.computed(r)


def needs_exactly(b, name, tokens):
    return fits(b, name, tokens) and not fits(b, name, tokens - 1)


def beside_one(pending_tokens=0, **options):
    """A round is open for a1 and b0, while a0 runs."""
    b = looking_ahead(**options)
    run_one(b)
    arrive_all(b, "a1", "b0")
    open_round(b, 0.0, None, pending_tokens=pending_tokens)
    return b


def test_whoever_joins_fits_only_if_all_do_to_their_ends():
    b = beside_one(generated={"a0": 40})
    tail = PROMPT - PREFIX
    # Both take 60 tokens more; then a0 is gone with what it holds alone, far more than a1 still takes.
    assert needs_exactly(b, "a1", tail + 120) and b.stats()["deferrals"]["kv_budget"] == 1
    assert needs_exactly(b, "b0", PROMPT + 120)
    b.close_round()


def test_who_has_been_admitted_in_the_round_counts_with_its_prompt():
    b = beside_one(pending_tokens=7)
    assert fits(b, "b0", 7 + PROMPT + 200)
    admit(b, "b0", 0)
    assert needs_exactly(b, "a1", 7 + PROMPT + (PROMPT - PREFIX) + 300)
    b.close_round()
    open_round(b, 0.0, None)
    assert needs_exactly(b, "a1", (PROMPT - PREFIX) + 300)  # b0's is in its place
    b.close_round()


def test_a_prefix_is_given_back_when_the_last_that_has_it_ends():
    b = beside_one(generated={"a0": 90})
    tail = PROMPT - PREFIX
    # Both take 10 tokens more; then a0 gives back its prompt.
    assert needs_exactly(b, "b0", PROMPT + 20)
    admit(b, "a1", PREFIX)
    # Now it gives back its tail and its output but for the last token, and the others have 90 to go.
    most = 2 * 100 - (tail + 89)
    assert needs_exactly(b, "b0", tail + PROMPT + most)
    b.close_round()
    open_round(b, 0.0, None)
    assert needs_exactly(b, "b0", PROMPT + most)
    b.close_round()


def test_where_sharing_ends_inside_a_chunk_is_known_from_what_was_cached():
    b = looking_ahead(generated={"a0": 90})
    shared = PREFIX + 1  # of a prompt; chunks have two tokens
    for number, name in enumerate(("a0", "a1")):
        b.arrived(name, array("q", [ord("a")] * shared + [1000 + number] * (PROMPT - shared)))
    open_round(b, 0.0, None)
    admit(b, "a0", 0)
    b.computed("a0")
    b.close_round()
    open_round(b, 0.0, None)
    admit(b, "a1", shared)
    b.close_round()
    arrive_all(b, "b0")
    open_round(b, 0.0, None)
    most = 2 * 100 - (PROMPT - shared + 89)
    assert needs_exactly(b, "b0", PROMPT + most)
    b.close_round()


def test_all_fit_where_the_pool_suffices_and_before_lengths_are_known():
    for b in (looking_ahead(pool=10**6), looking_ahead(fixed=False)):
        run_one(b)
        arrive_all(b, "b0")
        open_round(b, 0.0, None)
        assert fits(b, "b0", PROMPT)
        b.close_round()
    b.finished("a0", 50)  # now they are known
    arrive_all(b, "c0", "d0")
    open_round(b, 0.0, None)
    admit(b, "c0", 0)
    assert needs_exactly(b, "d0", 2 * PROMPT + 100)
    b.close_round()


def test_it_does_not_matter_whether_prefixes_gather():
    b = looking_ahead()
    run_one(b)
    arrive_all(b, "b0")
    b.state.deferrals.prefix_batching.share_rate = 0.0
    open_round(b, 0.0, None)
    assert not fits(b, "b0", PROMPT)
    b.close_round()


def test_sglang_decides_about_one_that_is_overdue():
    b = looking_ahead(max_wait=5.0)
    run_one(b)
    arrive_all(b, "b0")
    open_round(b, 0.0, None)
    b.close_round()
    open_round(b, 5.0, None)
    assert propose(b, 1) == "b0" and fits(b, "b0", 0) and b.stats()["deferrals"]["kv_budget"] == 0
    b.close_round()
