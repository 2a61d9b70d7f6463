"""Batch formation: FINDBEST, ADD or STOP, the fairness bound, row order."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.batch_builder import BatchBuilder
from feather_sglang.cht import ChunkedHashTree
from feather_sglang.policies import Action, make_policy


class Scripted:
    """A policy that answers from a list and notes what it is told."""

    name = "scripted"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.states, self.rewards, self.cancelled = [], [], 0

    def decide(self, state):
        self.states.append(state)
        return self.answers.pop(0) if self.answers else Action.ADD

    def observe(self, reward):
        self.rewards.append(reward)

    def cancel(self):
        self.cancelled += 1


def builder(policy=None, **bounds):
    return BatchBuilder(ChunkedHashTree(chunk_size=2, seed=1), policy or make_policy("always-add"), **bounds)


def strict():
    """A policy that never gives up shared prefix."""
    return make_policy("heuristic", small_batch=1, small_batch_loss=0, max_loss=0, many_peers_loss=0)


def tokens(*chunks):
    """Two equal tokens per named chunk."""
    return array("q", [ord(c) for name in chunks for c in name * 2])


def run_round(b, batch_size=0, now=0.0, slots=100, skip=(), reward=None):
    b.begin_round(now, reward)
    admitted = []
    while (r := b.propose(batch_size + len(admitted), 1.0, has_room=len(admitted) < slots)) is not None:
        if len(admitted) >= slots:
            break
        if r in skip:
            b.skipped(r)
            continue
        b.admitted(r)
        admitted.append(r)
    b.end_round()
    return admitted


def test_the_best_candidate_is_found_again_after_each_add():
    b = builder()
    for name, prompt in (("a1", "AB"), ("c1", "CD"), ("a2", "AB"), ("c2", "CD"), ("a3", "AE")):
        b.arrive(name, tokens(*prompt))
    assert run_round(b) == ["a1", "a2", "a3", "c1", "c2"]


def test_stop_ends_the_round_and_leaves_the_rest_waiting():
    policy = Scripted(Action.ADD, Action.STOP)
    b = builder(policy)
    for name in ("a1", "a2", "b1"):
        b.arrive(name, tokens(name[0].upper()))
    assert run_round(b) == ["a1", "a2"]  # the first into an empty batch is not asked about
    assert set(b.cht.waiting) == {"b1"} and b.stops == 1
    assert [s.batch_size for s in policy.states] == [1, 2]
    assert [s.tip_loss for s in policy.states] == [0, 1]


def test_an_empty_batch_is_never_stopped():
    b = builder(Scripted(*[Action.STOP] * 10))
    b.arrive("a", tokens("A"))
    assert run_round(b) == ["a"]


def test_the_policy_is_not_asked_when_no_slot_is_free():
    policy = Scripted()
    b = builder(policy)
    for i in range(3):
        b.arrive(i, tokens("A"))
    assert run_round(b, batch_size=5, slots=1) == [0]
    assert len(policy.states) == 1


def test_an_add_that_was_not_carried_out_is_cancelled():
    policy = Scripted()
    b = builder(policy)
    b.arrive("a", tokens("A"))
    b.begin_round(0.0, None)
    assert b.propose(3, 1.0) == "a"  # the scheduler then runs out of tokens
    b.end_round()
    assert policy.cancelled == 1 and set(b.cht.waiting) == {"a"}


def long_prompt(*groups, tail):
    """256 tokens per group, then four of one's own."""
    return array("q", [token for group in groups for token in [group] * 256] + [1000 + tail] * 4)


def propose_all(b, cached, batch_size=0):
    """One open round: everything proposed is admitted, with so many tokens in the cache."""
    b.begin_round(0.0, None)
    admitted = []
    while (r := b.propose(batch_size + len(admitted), 1.0)) is not None:
        b.admitted(r, cached)
        admitted.append(r)
    b.end_round()
    return admitted


def test_who_shares_a_prefix_that_is_being_computed_comes_after_it():
    b = builder()
    for i in range(3):
        b.arrive(f"a{i}", long_prompt(1, tail=i))
        b.arrive(f"b{i}", long_prompt(2, tail=i))
    assert propose_all(b, cached=0) == ["a0", "b0"]
    assert set(b.computing) == {"a0", "b0"} and b.cht.find_best().request_id == "a1"
    assert propose_all(b, cached=256, batch_size=2) == []  # both are still at it
    b.computed("a0")
    assert propose_all(b, cached=256, batch_size=2) == ["a1", "a2"]
    assert set(b.computing) == {"b0"}  # the rest of theirs is not worth a wait
    b.leave_batch("b0")  # aborted: the next one computes it
    assert propose_all(b, cached=0, batch_size=3) == ["b1"]


def test_who_shares_only_what_is_cached_already_is_not_deferred():
    b = builder()
    for name, groups in (("a0", (1, 2)), ("a1", (1, 2)), ("c0", (1, 3)), ("c1", (1, 3))):
        b.arrive(name, long_prompt(*groups, tail=int(name[1])))
    assert propose_all(b, cached=256) == ["a0", "c0"]  # both levels of 1, the second of 2 and 3


def test_requests_deferred_still_count_as_peers_and_can_be_overdue():
    policy = Scripted()
    b = builder(policy, max_wait=5.0)
    for name, group in (("a0", 1), ("a1", 1), ("a2", 1), ("b0", 2)):
        b.arrive(name, long_prompt(group, tail=int(name[1])))
    assert propose_all(b, cached=0) == ["a0", "b0"]
    first = policy.states[0]  # b0's: a1 and a2 still wait, and will be in the batch before long
    assert (first.batch_size, first.tip_loss, first.peers) == (3, 128, 2)
    b.begin_round(5.0, None)
    assert b.propose(2, 1.0) == "a1"
    b.end_round()


def test_a_skipped_request_waits_for_the_next_round_at_its_age():
    b = builder()
    b.arrive("old", tokens("A"))
    b.arrive("new", tokens("A"))
    assert run_round(b, skip={"old"}) == ["new"]
    assert run_round(b) == ["old"]


def test_the_reward_reaches_the_policy_once():
    policy = Scripted()
    b = builder(policy)
    b.begin_round(0.0, None)
    b.begin_round(1.0, 42.0)
    assert policy.rewards == [42.0]


@pytest.mark.parametrize("bounds", [{"max_wait": 5.0}, {"max_wait_rounds": 5}])
def test_nobody_starves_behind_a_favoured_group(bounds):
    """Group A arrives for ever and STOP keeps B out; the bound, counted from the first round, admits B next."""
    b = builder(strict(), **{"max_wait": 1e9, "max_wait_rounds": 10**9, **bounds})
    b.arrive("a0", tokens("A"))
    run_round(b, now=0.0)
    b.arrive("b", tokens("B"))
    waited = 0
    for step in range(1, 50):
        b.arrive(f"a{step}", tokens("A"))
        admitted = run_round(b, batch_size=step, now=float(step))
        assert f"a{step}" in admitted
        if "b" in admitted:
            waited = step
            break
    assert waited == 6
    assert b.overdue_admissions == 1 and b.longest_wait == 5.0


def test_without_the_bound_it_would_starve():
    b = builder(strict(), max_wait=1e9, max_wait_rounds=10**9)
    b.arrive("a0", tokens("A"))
    b.arrive("a1", tokens("A"))
    run_round(b)
    b.arrive("b", tokens("B"))
    assert all(run_round(b, batch_size=2, now=float(step)) == [] for step in range(1, 50))


def test_an_overdue_request_yields_to_a_more_urgent_class_only():
    b = builder(Scripted(), max_wait=1.0)
    b.arrive("late", tokens("A"), priority=5)
    run_round(b, batch_size=1, now=8.0, slots=0)
    b.arrive("urgent", tokens("B"), priority=0)
    b.arrive("same", tokens("C"), priority=5)
    assert run_round(b, now=10.0) == ["urgent", "late", "same"]


def test_requeued_requests_keep_their_age_and_forget_nothing():
    b = builder(max_wait=3.0)
    b.arrive("a", tokens("A"))
    run_round(b)
    b.requeue("a", tokens("A", "X"))
    b.arrive("z", tokens("Z"))
    assert b.cht.missing_count("a") == 2
    assert run_round(b, batch_size=1, now=4.0) == ["a", "z"]
    b.leave_batch("a")
    b.leave_batch("z")
    assert len(b.cht) == 0 and not b._arrivals


def test_the_oracle_stops_at_the_group_border():
    b = builder(make_policy("oracle"))
    b.group_of = lambda r: r[0]
    for name in ("a1", "b1", "a2", "b2"):
        b.arrive(name, tokens(name[0].upper()))
    assert run_round(b) == ["a1", "a2"]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12), st.randoms())
def test_rows_of_one_prefix_are_neighbours_at_every_level(prompts, random):
    b = builder()
    for i, prompt in enumerate(prompts):
        b.arrive(i, array("q", [token for t in prompt for token in (t, t)]))
    rows = list(range(len(prompts)))
    random.shuffle(rows)
    order = b.row_order(rows)
    ordered = rows if order is None else [rows[i] for i in order]
    assert sorted(ordered) == sorted(rows)
    assert b.row_order(ordered) is None  # in order: nothing to permute
    for level in range(1, 7):
        seen, last = set(), None
        for prefix in (tuple(prompts[r][:level]) if len(prompts[r]) >= level else None for r in ordered):
            assert prefix is None or prefix == last or prefix not in seen
            seen.add(prefix)
            last = prefix


def test_a_mixed_batch_finds_back_to_one_prefix():
    """Six rows of A and four of B run; under STOP only A's grow, and the batch is pure once B's have left."""
    b = builder()
    for i in range(6):
        b.arrive(f"a{i}", tokens("A", "A", f"{i}"))
    for i in range(4):
        b.arrive(f"b{i}", tokens("B", "B", f"{i}"))
    assert len(run_round(b)) == 10 and b.cht.tip == 0
    b.policy = strict()
    for i in range(6, 9):
        b.arrive(f"b{i}", tokens("B", "B", f"{i}"))
        b.arrive(f"a{i}", tokens("A", "A", f"{i}"))
    assert run_round(b, batch_size=10) == ["a6", "a7", "a8"]
    assert run_round(b, batch_size=13) == []
    for i in range(4):
        b.leave_batch(f"b{i}")
    assert b.cht.tip == 2 and set(b.cht.waiting) == {"b6", "b7", "b8"}


def test_the_main_branch_is_kept_while_two_rows_pass_it():
    b = builder(strict())
    tree = b.cht
    for i in range(3):
        for group in "AB":
            b.arrive(f"{group}{i}", tokens(group, group, f"{i}"))
    for r in ("A0", "A1", "B0"):
        tree.add_to_batch(r)
    assert tree.branch_loss("B1") == 2 and tree.branch_loss("A2") == 0
    tree.add_to_batch("B1")
    tree.add_to_batch("B2")  # B is larger now, but A's two rows keep the main branch
    assert tree.best_in_branch().request_id == "A2"
    tree.finish("A0")
    assert tree.branch_loss("A2") == 2 and tree.best_in_branch() is None  # B's turn; none of B waits


def test_without_a_shared_branch_nothing_is_lost():
    tree = builder().cht
    for i, name in enumerate("ABCD"):
        tree.insert(name, tokens(name))
        if i < 3:
            tree.add_to_batch(name)
    assert tree.branch_loss("D") == 0 and tree.best_in_branch() is None


def test_a_partly_shared_branch_loses_only_what_differs():
    tree = builder().cht
    for i in range(3):
        tree.insert(f"x{i}", tokens("R", "S", "T", f"{i}"))
        tree.add_to_batch(f"x{i}")
    tree.insert("other", tokens("Q"))
    tree.add_to_batch("other")
    for name, prompt, loss in (("full", "RSTZ", 0), ("two", "RSZ", 1), ("one", "RZ", 2), ("none", "Z", 3)):
        tree.insert(name, tokens(*prompt))
        assert tree.branch_loss(name) == loss, name


def test_a_lone_request_has_no_locality_to_lose():
    """Without sharing nothing is at stake, however long the prompts: every addition is free, so nobody is stopped."""
    b = builder(strict())
    for i in range(8):
        b.arrive(i, array("q", [i] * 500))
    assert run_round(b) == list(range(8))
    assert b.stops == 0


def test_a_lone_request_guards_the_prefix_that_others_wait_to_share():
    b = builder(strict())
    b.arrive("a0", tokens("A", "A", "x"))
    assert run_round(b) == ["a0"]
    b.arrive("b0", tokens("B", "B", "y"))
    assert run_round(b, batch_size=1) == ["b0"]  # nobody waits to share a0's prefix
    b.leave_batch("b0")
    b.arrive("b1", tokens("B", "B", "z"))
    b.arrive("a1", tokens("A", "A", "z"))
    assert run_round(b, batch_size=1) == ["a1"]
    assert set(b.cht.waiting) == {"b1"}
