"""Batch formation: FINDBEST, ADD or STOP, the fairness bound, row order."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission import deferrals
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.deferrals import MIN_SHARE_RATE, PrefixBatching
from feather_sglang.scheduling.policies import Action, make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from oracles.rounds import admit, builder, defers, judged_round, open_round, propose, skip
from oracles.scripted import Scripted


def strict():
    """A policy that never gives up shared prefix."""
    return make_policy("heuristic", small_batch=1, small_batch_loss=0, max_loss=0, many_peers_loss=0)


def tokens(*chunks):
    """Two equal tokens per named chunk."""
    return array("q", [ord(c) for name in chunks for c in name * 2])


def run_round(b, batch_size=0, now=0.0, slots=100, barred=(), reward=None):
    open_round(b, now, reward)
    admitted = []
    while (r := propose(b, batch_size + len(admitted), has_room=len(admitted) < slots)) is not None:
        if len(admitted) >= slots:
            break
        if r in barred:
            skip(b, r)
            continue
        admit(b, r)
        admitted.append(r)
    b.close_round()
    return admitted


def test_the_best_candidate_is_found_again_after_each_add():
    b = builder()
    for name, prompt in (("a1", "AB"), ("c1", "CD"), ("a2", "AB"), ("c2", "CD"), ("a3", "AE")):
        b.arrived(name, tokens(*prompt))
    assert run_round(b) == ["a1", "a2", "a3", "c1", "c2"]


def test_stop_ends_the_round_and_leaves_the_rest_waiting():
    policy = Scripted(Action.ADD, Action.STOP)
    b = builder(policy)
    for name in ("a1", "a2", "b1"):
        b.arrived(name, tokens(name[0].upper()))
    assert run_round(b) == ["a1", "a2"]  # the first into an empty batch is not asked about
    assert set(b.tree.waiting) == {"b1"} and b.stopping.stops == 1
    assert [s.batch_size for s in policy.states] == [1, 2]
    assert [s.tip_loss for s in policy.states] == [0, 1]


def test_an_empty_batch_is_never_stopped():
    b = builder(Scripted(*[Action.STOP] * 10))
    b.arrived("a", tokens("A"))
    assert run_round(b) == ["a"]


def test_the_policy_is_not_asked_when_no_slot_is_free():
    policy = Scripted()
    b = builder(policy)
    for i in range(3):
        b.arrived(i, tokens("A"))
    assert run_round(b, batch_size=5, slots=1) == [0]
    assert len(policy.states) == 1


def test_an_add_that_was_not_carried_out_is_cancelled():
    policy = Scripted()
    b = builder(policy)
    b.arrived("a", tokens("A"))
    open_round(b, 0.0, None)
    assert propose(b, 3) == "a"  # the scheduler then runs out of tokens
    b.close_round()
    assert policy.cancelled == 1 and set(b.tree.waiting) == {"a"}


def long_prompt(*groups, tail):
    """256 tokens per group, then four of one's own."""
    return array("q", [token for group in groups for token in [group] * 256] + [1000 + tail] * 4)


def propose_all(b, cached, batch_size=0):
    """One open round: everything proposed is admitted, with so many tokens in the cache."""
    open_round(b, 0.0, None)
    admitted = []
    while (r := propose(b, batch_size + len(admitted))) is not None:
        admit(b, r, cached)
        admitted.append(r)
    b.close_round()
    return admitted


def test_who_shares_a_prefix_that_is_being_computed_comes_after_it():
    b = builder()
    for i in range(3):
        b.arrived(f"a{i}", long_prompt(1, tail=i))
        b.arrived(f"b{i}", long_prompt(2, tail=i))
    assert propose_all(b, cached=0) == ["a0", "b0"]
    assert set(b.state.deferrals.in_flight) == {"a0", "b0"} and b.tree.find_best().request_id == "a1"
    assert propose_all(b, cached=256, batch_size=2) == []  # both are still at it
    b.computed("a0")
    assert propose_all(b, cached=256, batch_size=2) == ["a1", "a2"]
    assert set(b.state.deferrals.in_flight) == {"b0"}  # the rest of theirs is not worth a wait
    b.finished("b0")  # aborted: the next one computes it
    assert propose_all(b, cached=0, batch_size=3) == ["b1"]


def test_who_shares_only_what_is_cached_already_is_not_deferred():
    b = builder()
    for name, groups in (("a0", (1, 2)), ("a1", (1, 2)), ("c0", (1, 3)), ("c1", (1, 3))):
        b.arrived(name, long_prompt(*groups, tail=int(name[1])))
    assert propose_all(b, cached=256) == ["a0", "c0"]  # both levels of 1, the second of 2 and 3


def test_requests_deferred_still_count_as_peers_and_can_be_overdue():
    policy = Scripted()
    b = builder(policy, max_wait=5.0)
    for name, group in (("a0", 1), ("a1", 1), ("a2", 1), ("b0", 2)):
        b.arrived(name, long_prompt(group, tail=int(name[1])))
    assert propose_all(b, cached=0) == ["a0", "b0"]
    first = policy.states[0]  # b0's: a1 and a2 still wait, and will be in the batch before long
    assert (first.batch_size, first.tip_loss, first.peers) == (3, 128, 2)
    open_round(b, 5.0, None)
    assert propose(b, 2) == "a1"
    b.close_round()


def test_a_skipped_request_waits_for_the_next_round_at_its_age():
    b = builder()
    b.arrived("old", tokens("A"))
    b.arrived("new", tokens("A"))
    assert run_round(b, barred={"old"}) == ["new"]
    assert run_round(b) == ["old"]


def test_the_reward_reaches_the_policy_once():
    policy = Scripted()
    b = builder(policy)
    open_round(b, 0.0, None)
    open_round(b, 1.0, 42.0)
    assert policy.rewards == [42.0]


@pytest.mark.parametrize("bounds", [{"max_wait": 5.0}, {"max_wait_rounds": 5}])
def test_nobody_starves_behind_a_favoured_group(bounds):
    """Group A arrives for ever and STOP keeps B out; the bound, counted from the first round, admits B next."""
    b = builder(strict(), **{"max_wait": 1e9, "max_wait_rounds": 10**9, **bounds})
    b.arrived("a0", tokens("A"))
    run_round(b, now=0.0)
    b.arrived("b", tokens("B"))
    waited = 0
    for step in range(1, 50):
        b.arrived(f"a{step}", tokens("A"))
        admitted = run_round(b, batch_size=step, now=float(step))
        assert f"a{step}" in admitted
        if "b" in admitted:
            waited = step
            break
    assert waited == 6
    assert b.overdue_admissions == 1 and b.longest_wait == 5.0


def test_without_the_bound_it_would_starve():
    b = builder(strict(), max_wait=1e9, max_wait_rounds=10**9)
    b.arrived("a0", tokens("A"))
    b.arrived("a1", tokens("A"))
    run_round(b)
    b.arrived("b", tokens("B"))
    assert all(run_round(b, batch_size=2, now=float(step)) == [] for step in range(1, 50))


def test_late_requests_of_the_urgent_class_do_not_hide_behind_older_ones_of_another():
    b = builder(make_policy("always-add"), max_wait=10.0)
    b.arrived("background", [9] * 40, priority=9)
    b.arrived("a0", [1] * 40, priority=0)
    open_round(b, 0.0, None)
    assert propose(b, 0) == "a0"
    admit(b, "a0")
    b.close_round()
    b.arrived("stranger", [5] * 40, priority=0)
    b.arrived("stranger's twin", [5] * 40, priority=0)
    admitted = []
    for step in range(1, 30):  # others come all the time that match the batch better
        b.arrived(f"a{step}", [1] * 40, priority=0)
        open_round(b, float(step), None)
        admitted.append(propose(b, len(b.tree.active)))
        admit(b, admitted[-1])
        b.close_round()
        if step > 1:
            b.finished(admitted[-2])
    assert (admitted.index("stranger"), admitted.index("stranger's twin")) == (10, 11)
    assert "background" not in admitted and b.overdue_admissions >= 2


def test_an_overdue_request_yields_to_a_more_urgent_class_only():
    b = builder(Scripted(), max_wait=1.0)
    b.arrived("late", tokens("A"), priority=5)
    run_round(b, batch_size=1, now=8.0, slots=0)
    b.arrived("urgent", tokens("B"), priority=0)
    b.arrived("same", tokens("C"), priority=5)
    assert run_round(b, now=10.0) == ["urgent", "late", "same"]


def test_requeued_requests_keep_their_age_and_forget_nothing():
    b = builder(max_wait=3.0)
    b.arrived("a", tokens("A"))
    run_round(b)
    b.retracted("a", tokens("A", "X"))
    b.arrived("z", tokens("Z"))
    assert b.tree.missing_count("a") == 2
    assert run_round(b, batch_size=1, now=4.0) == ["a", "z"]
    b.finished("a")
    b.finished("z")
    assert len(b.tree) == 0 and not b.state.fairness.arrivals


def test_the_oracle_stops_at_the_group_border():
    b = builder(make_policy("oracle"))
    b.order.group_of = lambda r: r[0]
    for name in ("a1", "b1", "a2", "b2"):
        b.arrived(name, tokens(name[0].upper()))
    assert run_round(b) == ["a1", "a2"]


def neighbours_at_every_level(prompts):
    for level in range(1, 7):
        seen, last = set(), None
        for prefix in (tuple(prompt[:level]) if len(prompt) >= level else None for prompt in prompts):
            if prefix is not None and prefix != last and prefix in seen:
                return False
            seen.add(prefix)
            last = prefix
    return True


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12), st.randoms(), st.randoms())
def test_rows_of_one_prefix_are_neighbours_at_every_level(prompts, random, states):
    b = builder()
    for i, prompt in enumerate(prompts):
        b.arrived(i, array("q", [token for t in prompt for token in (t, t)]))
        if states.random() < 0.7:
            open_round(b, 0.0, None)
            admit(b, i)
    rows = list(range(len(prompts)))
    random.shuffle(rows)
    order = b.row_order(rows)
    ordered = rows if order is None else [rows[i] for i in order]
    assert sorted(ordered) == sorted(rows)
    assert b.row_order(ordered) is None  # in order: nothing to permute
    assert neighbours_at_every_level([prompts[r] for r in ordered])
    # Nobody is moved without need.
    assert (order is None) == neighbours_at_every_level([prompts[r] for r in rows])


def test_rows_that_have_left_the_tree_come_first():
    b = builder()
    for name in ("a1", "b1", "a2"):
        b.arrived(name, tokens(name[0].upper(), name[1]))
    order = b.row_order(["a1", "gone", "a2", "b1"])
    assert order[0] == 1 and b.row_order(["gone", "a1", "a2", "b1"]) is None


def test_a_mixed_batch_finds_back_to_one_prefix():
    """Six rows of A and four of B run; under STOP only A's grow, and the batch is pure once B's have left."""
    b = builder()
    for i in range(6):
        b.arrived(f"a{i}", tokens("A", "A", f"{i}"))
    for i in range(4):
        b.arrived(f"b{i}", tokens("B", "B", f"{i}"))
    assert len(run_round(b)) == 10 and b.tree.tip == 0
    b.policy = strict()
    for i in range(6, 9):
        b.arrived(f"b{i}", tokens("B", "B", f"{i}"))
        b.arrived(f"a{i}", tokens("A", "A", f"{i}"))
    assert run_round(b, batch_size=10) == ["a6", "a7", "a8"]
    assert run_round(b, batch_size=13) == []
    for i in range(4):
        b.finished(f"b{i}")
    assert b.tree.tip == 2 and set(b.tree.waiting) == {"b6", "b7", "b8"}


def test_the_main_branch_is_kept_while_two_rows_pass_it():
    b = builder(strict())
    tree = b.tree
    for i in range(3):
        for group in "AB":
            b.arrived(f"{group}{i}", tokens(group, group, f"{i}"))
    for r in ("A0", "A1", "B0"):
        tree.add_to_batch(r)
    assert tree.branch_loss("B1") == 2 and tree.branch_loss("A2") == 0
    tree.add_to_batch("B1")
    tree.add_to_batch("B2")  # B is larger now, but A's two rows keep the main branch
    assert tree.best_in_branch().request_id == "A2"
    tree.finish("A0")
    assert tree.branch_loss("A2") == 2 and tree.best_in_branch() is None  # B's turn; none of B waits


def test_a_batch_that_is_still_small_gathers_around_the_prefix_that_is_being_computed():
    """A lone leftover shares nothing, so one of A joins it. The others of A wait for that one: B must not slip in."""
    b = Admission(ChunkedHashTree(chunk_size=64, seed=1), strict())
    b.arrived("lone", array("q", [7] * 640))
    assert run_round(b) == ["lone"]
    for i in range(3):
        for group in "AB":
            b.arrived(f"{group}{i}", array("q", [ord(group)] * 640 + [i] * 64))
    open_round(b, 1.0, None)
    assert propose(b, 1) == "A0"
    admit(b, "A0", cached_tokens=0)
    assert b.tree.deferred == 2 and b.tree.branch_loss("B0") == 10 and b.tree.branch_loss("A1") == 0
    assert propose(b, 2) is None
    b.close_round()
    b.computed("A0")
    assert run_round(b, batch_size=2) == ["A1", "A2"]


def test_without_a_shared_branch_nothing_is_lost():
    tree = builder().tree
    for i, name in enumerate("ABCD"):
        tree.insert(name, tokens(name))
        if i < 3:
            tree.add_to_batch(name)
    assert tree.branch_loss("D") == 0 and tree.best_in_branch() is None


def test_a_partly_shared_branch_loses_only_what_differs():
    tree = builder().tree
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
        b.arrived(i, array("q", [i] * 500))
    assert run_round(b) == list(range(8))
    assert b.stopping.stops == 0


def test_a_lone_request_guards_the_prefix_that_others_wait_to_share():
    b = builder(strict())
    b.arrived("a0", tokens("A", "A", "x"))
    assert run_round(b) == ["a0"]
    b.arrived("b0", tokens("B", "B", "y"))
    assert run_round(b, batch_size=1) == ["b0"]  # nobody waits to share a0's prefix
    b.finished("b0")
    b.arrived("b1", tokens("B", "B", "z"))
    b.arrived("a1", tokens("A", "A", "z"))
    assert run_round(b, batch_size=1) == ["a1"]
    assert set(b.tree.waiting) == {"b1"}


# Prefixes that wait ---------------------------------------------------------------------------------------------


class Told(PrefixBatching):
    """A stub of prefix batching: the test says whether memory is short and how many requests a prefix waits for."""

    def __init__(self, enough=10**9, is_short=True):
        super().__init__(0)
        self.enough, self.is_short = enough, is_short
        self.asked = []

    def short(self, demand_tokens, running):
        return self.is_short

    def waits(self, missing_tokens, together, waited, running):
        self.asked.append((missing_tokens, together, waited, running))
        return together < self.enough


def gathering_builder(enough=10**9, policy=None, **bounds):
    return builder(policy, prefix_batching=Told(enough), **bounds)


PREFIX, PROMPT = 768, 772
ROOM = 10**9  # nothing has to be evicted


def prompt_of(name):
    return long_prompt(*[ord(name[0])] * 3, tail=int(name[1:]))


def arrive_all(b, *names):
    """Group and number: a request of group "a" begins with PREFIX tokens like every other of group "a"."""
    for name in names:
        b.arrived(name, prompt_of(name))


def round_of(b, now=0.0, cached=0, slots=1000):
    """A round in which the cache has as much of everybody's prompt."""
    return judged_round(b, lambda r: cached, PROMPT, ROOM, now, slots)


def test_a_prefix_waits_with_all_who_share_it_and_others_behind_it_do_not():
    b = gathering_builder(3)
    arrive_all(b, "a0", "a1", "b0", "b1", "b2", "c0")
    assert round_of(b) == ["b0"]
    assert set(b.state.deferrals.batching) == {"a0", "c0"} and b.stats()["deferrals"]["batching"] == 2
    assert round_of(b, cached=PREFIX) == ["b1", "b2"]  # theirs is computed
    arrive_all(b, "a2", "c1")
    assert round_of(b) == ["a0"]  # three, so it is worth it
    assert round_of(b, cached=PREFIX) == ["a1", "a2"]
    assert set(b.state.deferrals.batching) == {"c0"} and set(b.tree.waiting) == {"c0", "c1"}
    assert b.stats()["postponements"] == 2  # a wait of many rounds counts once


def test_the_rule_is_told_who_waits_how_long_beside_how_many():
    b = gathering_builder()
    b.state.deferrals.prefix_batching.enough = 0
    arrive_all(b, "x0")
    assert round_of(b) == ["x0"]
    b.state.deferrals.prefix_batching.enough, b.state.deferrals.prefix_batching.asked = 10**9, []
    arrive_all(b, "a0", "a1")
    assert round_of(b, now=2.0) == []
    assert b.state.deferrals.prefix_batching.asked == [(PROMPT, 2, 0.0, 1)]
    arrive_all(b, "a2")
    assert round_of(b, now=7.0) == []
    assert b.state.deferrals.prefix_batching.asked[1:] == [(PROMPT, 3, 5.0, 1)]


def test_nothing_waits_where_memory_is_not_short():
    b = gathering_builder()
    b.state.deferrals.prefix_batching.is_short = False
    arrive_all(b, "a0", "b0")
    assert round_of(b) == ["a0", "b0"] and not b.state.deferrals.prefix_batching.asked
    b.state.deferrals.prefix_batching.is_short = True
    arrive_all(b, "c0", "d0")
    assert round_of(b) == [] and set(b.state.deferrals.batching) == {"c0", "d0"}
    b.state.deferrals.prefix_batching.is_short = False
    assert round_of(b) == ["c0", "d0"] and not b.state.deferrals.batching


def test_whose_prefix_runs_or_is_cached_never_waits():
    b = gathering_builder(0)
    arrive_all(b, "a0")
    assert round_of(b) == ["a0"]
    b.state.deferrals.prefix_batching.enough = 10**9
    arrive_all(b, "a1", "a2", "b0", "c0")
    open_round(b, 0.0, None)
    assert propose(b, 1) == "a1"
    # Not even where the cache has not got it yet: another one computes it.
    assert not defers(b, "a1", 0, PROMPT, ROOM)
    assert not defers(b, "a1", PREFIX, 4, ROOM)
    admit(b, "a1", PREFIX)
    assert propose(b, 2) == "a2"
    assert not defers(b, "b0", PREFIX, 4, ROOM) and defers(b, "c0", 0, PROMPT, ROOM)
    b.close_round()


def test_a_group_stays_when_its_first_one_leaves_and_goes_on_when_another_computes_it():
    b = gathering_builder()
    arrive_all(b, "a0", "a1", "a2")
    assert round_of(b) == []
    b.aborted("a0")
    assert round_of(b) == [] and len(b.state.deferrals.batching) == 1
    b.state.deferrals.prefix_batching.enough = 0
    assert round_of(b) == ["a1"]
    b.state.deferrals.prefix_batching.enough = 10**9
    assert round_of(b, cached=PREFIX) == ["a2"] and not b.state.deferrals.batching


def test_a_lone_one_is_out_of_sight_for_the_round_only():
    b = gathering_builder()
    arrive_all(b, "a0")
    for _ in range(3):
        open_round(b, 0.0, None)
        if propose(b, 0) == "a0":
            assert defers(b, "a0", 0, PROMPT, ROOM)
        assert propose(b, 0) is None and defers(b, "a0", 0, PROMPT, ROOM) is False
        b.close_round()
        b.tree.check_invariants()
        assert set(b.tree.waiting) == {"a0"} and b.tree.find_best().request_id == b.tree.oldest() == "a0"
    b.state.deferrals.prefix_batching.enough = 0
    assert round_of(b) == ["a0"]


@pytest.mark.parametrize("bounds", [{"max_wait": 5.0}, {"max_wait_rounds": 5}])
def test_who_has_waited_too_long_is_admitted_whatever_the_rule_says(bounds):
    b = gathering_builder(**{"max_wait": 1e9, "max_wait_rounds": 10**9, **bounds})
    arrive_all(b, "a0", "b0", "b1", "b2")
    assert [round_of(b, now=float(now)) for now in range(5)] == [[]] * 5
    arrive_all(b, "c0")
    assert round_of(b, now=5.0) == ["a0", "b0", "b1", "b2"]
    assert b.longest_wait == 5.0 and b.overdue_admissions == 4
    assert [round_of(b, now=float(now)) for now in range(6, 11)] == [[], [], [], [], ["c0"]]
    assert not b.state.deferrals.batching


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=25), st.integers(0, 4), st.data())
def test_nobody_starves_and_nothing_is_left(arrivals, enough, data):
    """Rounds with arrivals of up to six groups under a rule that may never let them go, and random departures."""
    b = gathering_builder(enough or 10**9, max_wait_rounds=6)
    first_seen, step = {}, 0
    while step < len(arrivals) or b.tree.waiting:
        for group in arrivals[step] if step < len(arrivals) else ():
            name = "abcdef"[group] + str(len(first_seen))
            first_seen[name] = step
            arrive_all(b, name)
        if b.tree.waiting and data.draw(st.integers(0, 3)) == 0:
            b.aborted(data.draw(st.sampled_from(sorted(b.tree.waiting))))
        for r in round_of(b, now=float(step)):
            assert step - first_seen[r] <= 6
        for r in sorted(b.tree.active)[step % 3 :: 2]:
            if data.draw(st.booleans()):
                b.finished(r, 8)
            elif step < len(arrivals):
                first_seen[r] = step + 6  # overdue as soon as it is back: at its original age
                b.retracted(r, prompt_of(r))
        assert all(step - first_seen[r] < 7 for r in b.tree.waiting)
        step += 1
    for r in list(b.tree.active):
        b.finished(r, 8)
    round_of(b, now=float(step))
    assert len(b.tree) == 0 and not b.state.deferrals.batching and not b.state.fairness.arrivals


def test_few_are_asked_in_a_round_and_few_wait_at_a_time(monkeypatch):
    monkeypatch.setattr(deferrals, "_DEFERRALS_PER_ROUND", 3)
    monkeypatch.setattr(deferrals, "_BATCHING_PREFIXES", 5)
    b = gathering_builder(0)
    arrive_all(b, "z0")
    assert round_of(b) == ["z0"]
    b.state.deferrals.prefix_batching.enough = 2
    arrive_all(b, *(f"{group}0" for group in "abcdefghi"))
    waits = []
    for _ in range(4):
        assert round_of(b) == []
        waits.append(len(b.state.deferrals.batching))
    assert waits == [3, 5, 5, 5]
    arrive_all(b, "a1", "i1")
    assert round_of(b)[0] == "a0" and "f0" in b.state.deferrals.batching  # its place went to the next in line
    assert len(b.state.deferrals.batching) == 5


def test_as_many_as_documented_are_asked_and_wait():
    b = gathering_builder()
    arrive_all(b, *(f"{chr(65 + group)}0" for group in range(30)))
    waits = []
    for _ in range(4):
        assert round_of(b) == []
        waits.append(len(b.state.deferrals.batching))
    assert waits == [8, 16, 16, 16] and b.stats()["deferrals"]["batching"] == 16


def test_those_of_a_running_prefix_are_not_held_up_by_the_many_that_wait():
    b = gathering_builder(0)
    arrive_all(b, "z0")
    assert round_of(b) == ["z0"]
    b.state.deferrals.prefix_batching.enough = 10**9
    arrive_all(b, *(f"{chr(65 + group)}0" for group in range(20)))
    for _ in range(3):
        assert round_of(b) == []
    arrive_all(b, "z1")
    assert round_of(b, cached=PREFIX) == ["z1"]
    b.arrived("short", tokens("A"))  # too short to wait, whatever is cached
    assert "short" in round_of(b, cached=PREFIX)


def test_what_leaves_takes_its_wait_along():
    b = gathering_builder(max_wait=50.0)
    arrive_all(b, "a0", "b0", "b1")
    assert round_of(b) == [] and set(b.state.deferrals.batching) == {"a0", "b0"}
    b.aborted("a0")
    b.aborted("b0")
    assert not b.state.deferrals.batching
    b.arrived("a0", prompt_of("q1"))  # the id again, for another prompt
    b.state.deferrals.prefix_batching.asked = []
    b.state.deferrals.prefix_batching.enough = 1
    assert round_of(b, now=9.0) == ["b1", "a0"]
    assert b.state.deferrals.prefix_batching.asked == [(PROMPT, 1, 9.0, 0), (PROMPT, 1, 0.0, 1)]
    b.retracted("a0", prompt_of("q1"))  # retracted
    assert not b.state.deferrals.batching and round_of(b, now=60.0) == ["a0"]
    for name in ("b1", "a0"):
        b.finished(name)
    assert len(b.tree) == 0 and not b.state.fairness.arrivals and not b.state.deferrals.batching


def test_nobody_makes_a_retracted_request_wait():
    b = gathering_builder(0)
    arrive_all(b, "a0", "b0", "c0")
    assert round_of(b) == ["a0", "b0", "c0"]
    b.state.deferrals.prefix_batching.enough = 10**9
    for name in ("a0", "c0"):
        b.finished(name)
    arrive_all(b, "a1", "c1")
    assert round_of(b) == [] and set(b.state.deferrals.batching) == {"a1", "c1"}
    b.retracted("b0", long_prompt(*[ord("b")] * 3, 0, tail=0))  # it has generated so much that newcomers go first
    arrive_all(b, "b1", "b2")
    assert round_of(b) == ["b1"]
    assert round_of(b, cached=PREFIX) == ["b2", "b0"] and set(b.state.deferrals.batching) == {"a1", "c1"}
    for name in ("b0", "b1", "b2"):
        b.finished(name)
    arrive_all(b, "b3")
    assert round_of(b) == [] and "b3" in b.state.deferrals.batching  # it is done: newcomers wait like any other


def with_a_queue(policy):
    """Who waits came at 0 s: from 1 s on it is a queue."""
    b = gathering_builder(policy=policy)
    b.state.deferrals.prefix_batching.is_short = False
    arrive_all(b, "a0")
    open_round(b, 0.0)
    b.close_round()
    return b


@pytest.mark.parametrize("explores", [True, False])
def test_stop_is_tried_where_somebody_has_waited_for_a_second(explores):
    """A trial makes requests wait: where nobody does, they would for its sake alone."""
    policy = make_policy("bandit", seed=0)
    policy.explore = explores
    b, found = with_a_queue(policy), []
    for now in (0.5, 0.9, 1.0, 2.0):
        open_round(b, now)
        found.append(policy.explore)
        b.close_round()
    b.aborted("a0")
    arrive_all(b, "a1")
    for now in (3.0, 3.9, 4.0):
        open_round(b, now)
        found.append(policy.explore)
        b.close_round()
    assert found == [explores and queue for queue in (False, False, True, True, False, False, True)]


@pytest.mark.parametrize("explores", [True, False])
@pytest.mark.parametrize("kind", ["bandit", "heuristic"])
def test_stop_is_not_tried_while_memory_is_short(kind, explores):
    policy = make_policy(kind, seed=0)
    policy.explore = explores
    b, found = with_a_queue(policy), []
    for short in (False, True, True, False, False, True, False):
        b.state.deferrals.prefix_batching.is_short = short
        open_round(b, 1.0, None)
        found.append(policy.explore)
        b.close_round()
    assert found == [explores and not short for short in (False, True, True, False, False, True, False)]


def test_decisions_before_memory_became_short_get_no_reward():
    policy = Scripted()
    b = with_a_queue(policy)
    policy.ended = False
    open_round(b, 1.0, None)
    assert not policy.ended
    b.state.deferrals.prefix_batching.is_short = True
    open_round(b, 1.0, None)
    assert policy.ended


@pytest.mark.parametrize("explores", [True, False])
def test_another_policy_does_not_inherit_whether_the_last_one_explored(explores):
    """Training sets one policy after the other into a builder."""
    first, second = make_policy("bandit", seed=0), make_policy("bandit", seed=0)
    second.explore = explores
    b = with_a_queue(first)
    open_round(b, 1.0, None)
    b.policy = second
    for short in (True, False):
        b.state.deferrals.prefix_batching.is_short = short
        open_round(b, 1.0, None)
        assert second.explore == (explores and not short)
        assert first.explore


def test_the_policy_does_not_count_on_those_who_stay():
    policy = Scripted()
    b = gathering_builder(3, policy=policy)
    arrive_all(b, "z0", "z1", "z2")
    assert round_of(b) == ["z0"] and round_of(b, cached=PREFIX) == ["z1", "z2"]
    arrive_all(b, "a0", "a1", *(f"b{i}" for i in range(4)), "c0")
    policy.states = []
    assert round_of(b) == ["b0"]
    # a0; b0, after a0 and a1 stay behind; c0, when three more of b join as soon as theirs is computed.
    assert [state.batch_size for state in policy.states] == [3, 3, 4 + 3]
    assert policy.cancelled == 2  # a0 and c0 were not carried out
    policy.states = []
    assert round_of(b, cached=PREFIX) == ["b1", "b2", "b3"]
    assert [state.batch_size for state in policy.states] == [4, 5, 6]


def test_a_preemption_within_the_round_does_not_make_the_batch_smaller_than_it_is():
    policy = Scripted()
    b = gathering_builder(4, policy=policy)
    arrive_all(b, *(f"z{i}" for i in range(4)))
    assert round_of(b) == ["z0"] and round_of(b, cached=PREFIX) == ["z1", "z2", "z3"]
    arrive_all(b, "a0", "a1", "a2")
    open_round(b, 0.0, None)
    assert propose(b, 4) == "a0" and defers(b, "a0", 0, PROMPT, ROOM)
    b.retracted("z3", prompt_of("z3"))
    policy.states = []
    assert propose(b, 3) == "z3"
    assert policy.states[0].batch_size == 3
    b.close_round()
    b.tree.check_invariants()


def test_without_gathering_nothing_waits():
    names = [f"{group}{i}" for i in range(3) for group in "abc"]
    found = []
    for gathering in (None, PrefixBatching(10)):  # the second knows no prefill time
        b = builder(prefix_batching=gathering)
        arrive_all(b, *names)
        found.append([round_of(b), round_of(b, cached=PREFIX), b.stats()])
        assert not b.state.deferrals.batching and b.stats()["deferrals"]["batching"] == 0
    assert found[0] == found[1] and found[0][0] == ["a0", "b0", "c0"]
    b = builder()
    arrive_all(b, "a0")
    open_round(b, 0.0, None)
    assert not defers(b, "a0", 0, 10**6, ROOM)


# What gathering is told of the load -----------------------------------------------------------------------------


def big_prompt(group, tail):
    return array("q", [group] * 1000 + [1000 + tail] * 50)


def test_arrivals_that_meet_another_one_waiting_for_their_prefix():
    b = builder(prefix_batching=PrefixBatching(10**6))

    def share(*prompts):
        """The share noted for these arrivals, as a first reading of each."""
        noted = []
        for prompt in prompts:
            b.state.deferrals.prefix_batching.share_rate = 0.0
            b.arrived(len(b.tree), prompt)
            noted.append(b.state.deferrals.prefix_batching.share_rate > 0)
        return noted

    assert share(big_prompt(1, 0), big_prompt(2, 0), big_prompt(1, 1), big_prompt(2, 1)) == [False, False, True, True]
    assert share(array("q", [1] * 600 + [9] * 800)) == [False]  # less than half of it
    assert share(array("q", [1] * 600 + [9] * 400)) == [True]
    assert share(array("q", [3] * 100), array("q", [3] * 100)) == [False, False]  # too short to matter
    open_round(b, 0.0, None)
    admit(b, 0, 0)
    b.close_round()
    assert share(big_prompt(1, 7)) == [False]  # a running one has its prefix: nothing to compute, nothing to note


def test_outputs_and_prefill_time_reach_the_rule():
    b = builder(prefix_batching=PrefixBatching(10**6))
    b.arrived("a", tokens("A"), most_tokens=500)
    assert b.state.deferrals.prefix_batching.output_tokens == 500
    open_round(b, 0.0, None, 2e-4)
    assert b.state.deferrals.prefix_batching.seconds_per_token == 2e-4
    admit(b, "a")
    b.close_round()
    b.finished("a", 40)
    assert b.state.deferrals.prefix_batching.output_tokens == 40
    open_round(b, 0.0, None)
    assert b.state.deferrals.prefix_batching.seconds_per_token is None


def test_the_whole_rule_over_a_load_that_does_not_fit():
    """A pool of three prefixes, eight groups: lone ones wait beside a large batch until they are several."""
    b = builder(prefix_batching=PrefixBatching(3200), max_wait=1e9)
    for group in range(8):
        for i in range(8):
            b.arrived((group, i), big_prompt(group, i), most_tokens=4)
    assert b.state.deferrals.prefix_batching.share_rate >= MIN_SHARE_RATE
    open_round(b, 0.0, None, 1e-4)
    for r in [(group, i) for group in range(2) for i in range(8)]:
        admit(b, r)
    b.close_round()
    for group in range(2, 8):
        for i in range(1, 8):
            b.aborted((group, i))
    # A lone prefix: 4 * 184 < 0.5 * 16 * 1050; its bound is 16 * 1050 * 1e-4 s.
    assert big_round(b, 0.0) == [] and len(b.state.deferrals.batching) == 6
    for i in range(10, 25):
        b.arrived((3, i), big_prompt(3, i), most_tokens=4)
    assert {r[0] for r in big_round(b, 0.1)} == {3}
    assert {r[0] for r in big_round(b, 1.6)} == {3} and len(b.state.deferrals.batching) == 5
    bound = len(b.tree.active) * 1050 * 1e-4
    assert bound > 3 and big_round(b, bound - 0.1) == [] and len(b.state.deferrals.batching) == 5
    assert {r[0] for r in big_round(b, bound + 0.1)} == {2}  # the batch is larger by one: the others wait on
    assert {r[0] for r in big_round(b, 5.0)} == {4, 5, 6, 7}


def big_round(b, now):
    open_round(b, now, None, 1e-4)
    admitted = []
    while (r := propose(b, len(b.tree.active))) is not None:
        covered = 2 * (b.tree.depth(r) - b.tree.missing_count(r))
        if not defers(b, r, covered, 1050 - covered, ROOM):
            admit(b, r, covered)
            admitted.append(r)
    b.close_round()
    b.tree.check_invariants()
    for r in list(b.state.deferrals.in_flight):
        b.computed(r)
    return admitted
