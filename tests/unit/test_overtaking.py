"""The bound on the work of later requests before older ones: against plain lists, and on a builder alone."""

import sys
from array import array
from copy import deepcopy
from functools import partial
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import samples
from feather_sglang.scheduling.admission import overtaking as module
from feather_sglang.scheduling.admission import priorities
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.deferrals import PrefixBatching
from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.forecast import KVForecast, Outlook
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.priorities import PrioritySums
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from oracles.overtaken import ALLOWANCE, OLDEST, WINDOW, PlainLine, Witness
from oracles.rounds import admit, defers, fits, open_round, propose, skip

SHARES = st.sampled_from([0.0, 0.5, 1.0, 3.0, inf])


# Against plain lists ----------------------------------------------------------------------------------------------


class Both:
    """The same operations on the product and on plain lists."""

    def __init__(self, share):
        self.product, self.plain = Overtaking(share), PlainLine(share)
        self.now, self.came = 0.0, 0

    def arrive(self, priority, work, pending, seconds):
        self.now += seconds
        for line in (self.product, self.plain):
            line.arrive(self.came, priority, work, pending, self.now)
        self.came += 1

    def pick(self, number):
        """Somebody who waits, from the oldest (0) to the youngest."""
        waiting = self.plain.waiting()
        return waiting[number % len(waiting)].name if waiting else None

    def admit(self, number, work):
        if (name := self.pick(number)) is not None:
            self.product.admit(name, work)
            self.plain.admit(name, work)

    def leave(self, number):
        if (name := self.pick(number)) is not None:
            self.product.leave(name)
            self.plain.leave(name)

    def excuse(self, number, excused):
        name = self.pick(number)
        self.product.excuse(name, excused)  # who does not wait is nobody's business
        if name is not None:
            self.plain.excuse(name, excused)

    def check(self, some=None):
        product, plain, now = self.product, self.plain, self.now
        assert product.most_urgent() == plain.most_urgent()
        waiting = plain.waiting()
        for place in waiting if some is None else waiting[:some] + waiting[-some:]:
            assert product.overtaken(place.name) == pytest.approx(plain.overtaken(place.name))
            assert product.slack(place.name, now) == pytest.approx(plain.slack(place.name, now), abs=1e-6)
        for priority in range(4):
            self.check_shortest(priority)

    def check_shortest(self, priority):
        """The least of the oldest that may pass, the older one of two; some cannot be admitted."""
        able = {p.name: p.work for p in self.plain.waiting(priority)[:OLDEST] if p.name % 5}

        def may_pass(name, margin):
            return able[name] <= self.plain.slack(name, self.now) + margin

        found = self.product.shortest(priority, able.get, self.now)
        if found is None:
            assert not any(may_pass(name, -1e-6) for name in able)
            return
        assert may_pass(found, 1e-6)
        for name, work in able.items():
            assert not (work, name) < (able[found], found) or not may_pass(name, -1e-6)


WORKS = st.one_of(st.integers(1, 9000), st.integers(1, 300)).map(float)
OPERATIONS = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.integers(0, 2),
        WORKS,
        st.sampled_from([0.0, 700.0]),
        st.sampled_from([0.0, 1.0, 250.0, 700.0]),
    ),
    st.tuples(st.just("admit"), st.integers(0, 40), WORKS),
    st.tuples(st.just("leave"), st.integers(0, 40)),
    st.tuples(st.just("excuse"), st.integers(0, 40), st.booleans()),
)


@given(SHARES, st.lists(OPERATIONS, max_size=60))
def test_after_every_operation_all_figures_are_those_of_plain_lists(share, operations):
    """With places for few, so that the gaps are closed again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LEAST_PLACES", 2)
        both = Both(share)
        for name, *arguments in operations:
            getattr(both, name)(*arguments)
            both.check()


@settings(max_examples=samples(25, 10))
@given(SHARES, st.integers(0, 2**32), st.sampled_from([3, 30, 200]))
def test_hundreds_of_operations_on_as_many_places_as_the_product_has(share, seed, crowd):
    """The crowd that waits grows to a size and stays there, while the places are used up several times."""
    rng, both = Random(seed), Both(share)
    for step in range(700):
        waiting = len(both.plain.waiting())
        kind = rng.random()
        if (kind < 0.45 and waiting < crowd) or not waiting:
            work = float(rng.choice([rng.randint(1, 300), rng.randint(1, 9000)]))
            both.arrive(rng.choice([0, 1, 1]), work, rng.choice([0.0, 500.0]), rng.choice([0.0, 0.5, 2.0, 20.0]))
        elif kind < 0.8:
            both.admit(rng.choice([0, rng.randrange(waiting)]), float(rng.randint(0, 4000)))
        elif kind < 0.9:
            both.leave(rng.randrange(waiting))
        else:
            both.excuse(rng.randrange(waiting), rng.random() < 0.5)
        if step % 20 == 0:
            both.check(some=20)
    both.check()


def line(share=1.0, **requests):
    """Requests of one class that came at once, in order, with their works."""
    made = Overtaking(share)
    for name, work in requests.items():
        made.arrive(name, 0, work, 0.0, 0.0)
    return made


def test_the_first_bound_is_a_share_of_the_queue_that_a_request_found():
    one = line(0.5, first=1000.0, second=3000.0, third=10.0, last=90_000.0)
    assert one.slack("first", 0.0) == inf
    assert one.slack("second", 0.0) == ALLOWANCE + 500
    assert one.slack("third", 0.0) == ALLOWANCE + 500  # of the first: the second may be passed by 2,000
    one.admit("third", 400.0)
    assert (one.overtaken("first"), one.overtaken("second"), one.overtaken("last")) == (400, 400, 0)
    assert one.slack("last", 0.0) == ALLOWANCE + 100
    one.leave("first")
    assert one.slack("last", 0.0) == ALLOWANCE + 2000 - 400


def test_the_second_bound_is_the_longest_queue_and_a_grace():
    one = line(9.0, crowd=10_000.0, peak=100.0, later=5.0)
    one.admit("crowd", 10_000.0)
    # The peak found 10,100, all but the longest, 10,105; its grace is twice its own work.
    assert one.slack("later", 0.0) == pytest.approx(ALLOWANCE + 10_105 - 10_100 + 200)
    long = line(9.0, crowd=10_000.0, peak=8000.0, later=5.0)
    long.admit("crowd", 10_000.0)
    assert long.slack("later", 0.0) == pytest.approx(ALLOWANCE + 5 + 18_000 / 5)  # a fifth at most


def test_the_longest_queue_is_forgotten_after_the_window():
    one = line(9.0, crowd=10_000.0)
    one.admit("crowd", 10_000.0)
    one.arrive("a", 0, 50.0, 0.0, 1.0)
    one.arrive("b", 0, 50.0, 0.0, 2.0)
    assert one.slack("b", WINDOW) == ALLOWANCE + 9 * 50  # by its own queue
    assert one.slack("b", WINDOW + 1) == ALLOWANCE + min(450, 100 - 50 + 100)
    assert one.slack("b", 9 * WINDOW) == ALLOWANCE + min(450, 100 - 50 + 100)  # the newest counts for good


def test_classes_are_lines_of_their_own_and_the_more_urgent_stand_before_all_others():
    one = Overtaking(1.0)
    assert one.most_urgent() is None and one.shortest(0, lambda name: 1.0, 0.0) is None
    one.arrive("low", 5, 100.0, 7.0, 0.0)
    one.arrive("high", 1, 40.0, 0.0, 0.0)
    one.arrive("low too", 5, 10.0, 0.0, 0.0)
    assert one.most_urgent() == 1 and one.slack("high", 0.0) == inf
    assert one.slack("low too", 0.0) == pytest.approx(ALLOWANCE + 150 - 107 + 107 / 5)
    one.admit("high", 40.0)
    assert one.overtaken("low") == 0  # not passed, but waited for
    one.excuse("low", True)
    one.excuse("low too", True)
    assert one.most_urgent() is None and one.slack("low too", 0.0) == inf
    one.excuse("low", False)
    assert one.most_urgent() == 5 and one.slack("low too", 0.0) < inf


def test_the_shortest_of_sixteen_goes_and_no_other():
    one = Overtaking(inf)
    for number in range(17):
        one.arrive(number, 0, 100.0, 0.0, 0.0)
    assert one.shortest(0, lambda name: 50.0 - name, 0.0) == 15
    assert one.shortest(0, lambda name: None if name % 2 else 50.0, 0.0) == 0


def test_the_trees_do_not_grow_with_the_requests_that_have_gone():
    one = line(first=1.0)
    for number in range(5000):
        one.arrive(number, 0, 1.0, 0.0, float(number))
        (one.admit(number, 2.0) if number % 2 else one.leave(number))
    assert one.overtaken("first") == 5000
    (only,) = one._lines.values()
    assert len(only._taken) == 2 * module._LEAST_PLACES


# A builder alone --------------------------------------------------------------------------------------------------

CHUNK = 256


class Policies:
    """The stop policies that a builder may be given."""

    never = staticmethod(lambda: make_policy("heuristic", small_batch=1, small_batch_loss=0, max_loss=0))
    heuristic = staticmethod(lambda: make_policy("heuristic"))
    always = staticmethod(lambda: make_policy("always-add"))
    bandit = staticmethod(lambda: make_policy("bandit", seed=3))


class Engine:
    """A builder in rounds as the adapter holds them, with requests, a prefix cache and a memory made up at random."""

    def __init__(self, seed, share=1.0, policy="always", gathers=False, options=None, classes=None, named=int):
        self.rng, self.named = Random(seed), named
        self.classes = classes or self.rng.choice([1, 3])
        self.pool = self.rng.choice([20_000, 60_000])
        self.builder = Admission(
            ChunkedHashTree(CHUNK, seed=1),
            getattr(Policies, policy)(),
            prefix_batching=PrefixBatching(self.pool) if gathers else None,
            forecast=KVForecast() if gathers else None,
            outlook_of=lambda name: Outlook(len(self.tokens[name]), 0, self.most[name], True),
            overtaking=Overtaking(share),
            work=Work(self.pool),
            **deepcopy(options or {}),
        )
        self.witness = Witness(self.builder)
        self.shared = self.rng.choice([[0, 4, 12], [0, 24, 24, 24]])
        self.longest = self.rng.choice([8, 400])
        self.tokens, self.most = {}, {}
        self.cache = set()  # beginnings of prompts, in chunks
        self.now, self.came, self.chunked, self.newest, self.proposed = 0.0, 0, None, None, []
        self.readings = [self.rng.choice([None, 1e-4, 1e-2]), self.rng.choice([None, 0.01])]
        self.readings += [self.readings[0], self.rng.choice([None, 1e-4]), self.rng.choice([None, 300.0])]

    @property
    def waiting(self):
        return sorted(self.builder.tree.waiting)

    @property
    def running(self):
        return sorted(self.builder.tree.active)

    def arrive(self):
        """A prompt that shares a beginning with others of its group; most are short, some very long."""
        rng = self.rng
        shared, alone = rng.choice(self.shared), rng.choice([1, rng.randint(1, 30)])
        chunks = [rng.randrange(4)] * shared + [100 + self.came] * alone
        name, self.came = self.named(self.came), self.came + 1
        self.tokens[name] = [token for token in chunks for _ in range(CHUNK)] + [7] * rng.randint(1, CHUNK)
        self.most[name] = rng.choice([1, 4, self.longest])
        priority = rng.randrange(self.classes)
        self.builder.arrived(name, array("q", self.tokens[name]), priority=priority, most_tokens=self.most[name])

    def leave(self):
        """Somebody finishes, is aborted, or is thrown out, with what it has generated."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.15 and self.waiting:
            self.builder.aborted(rng.choice(self.waiting))
        elif kind < 0.35 and self.running:
            name = rng.choice(self.running)
            self.tokens[name] += [9] * rng.randint(0, 300)
            self.gone(name)
            self.builder.retracted(name, array("q", self.tokens[name]))
        elif self.running:
            name = rng.choice(self.running)
            self.gone(name)
            self.builder.finished(name, rng.choice([0, self.most[name]]))

    def gone(self, name):
        if name == self.chunked:
            self.chunked = None

    def beginnings(self, name):
        """Of its prompt but for the last token, in whole chunks."""
        firsts = tuple(self.tokens[name][:-1:CHUNK])
        return [firsts[:chunks] for chunks in range(1, (len(self.tokens[name]) - 1) // CHUNK + 1)]

    def cached(self, name):
        return CHUNK * sum(beginning in self.cache for beginning in self.beginnings(name))

    def compute(self, name):
        self.cache.update(self.beginnings(name))

    def round(self, refuses=0.1, skips=0.1, slots=12):
        """One round: memory may refuse somebody, which ends it, and the engine pass over others."""
        rng, builder = self.rng, self.builder
        self.now += rng.choice([0.0, 0.01, 1.0, 30.0])
        if rng.random() < 0.1:
            self.cache.clear()
        free = rng.choice([0, 3000, self.pool])
        pending = rng.randint(1, 4000) if self.chunked is not None else 0
        open_round(builder, self.now, rng.choice([None, 100.0]), *self.readings, pending_tokens=pending)
        admitted, computed = [], 0
        while len(admitted) < slots:
            name = propose(builder, len(builder.tree.active), has_room=rng.random() < 0.9)
            self.proposed.append(name)
            if name is None:
                break
            assert name in builder.tree.waiting
            if rng.random() < skips:
                skip(builder, name)
                continue
            cached, tokens = self.cached(name), self.tokens[name]
            if defers(builder, name, cached, len(tokens) - cached, free - computed):
                assert builder.round.open_proposal is None
                continue
            if not fits(builder, name, self.pool) or rng.random() < refuses:
                break
            admit(builder, name, cached)
            assert builder.round.open_proposal is None
            computed += len(tokens) - cached
            admitted.append(name)
            self.newest = name
        builder.close_round()
        self.witness.check()
        self.chunked = None
        for name in list(builder.state.deferrals.in_flight):
            if name == self.newest and rng.random() < 0.3:
                self.chunked = name  # the rest of it in the next round
            else:
                self.compute(name)
                builder.computed(name)
        return admitted


OPTIONS = st.fixed_dictionaries(
    {
        "max_wait": st.sampled_from([1e9, 1e9, 1e9, 5.0, 0.0]),
        "max_wait_rounds": st.sampled_from([20_000, 20_000, 3]),
        "prefill_delay": st.sampled_from([None, 0.1]).map(lambda bound: bound and PrefillDelay(bound)),
    }
)
ENGINES = {"seed": st.integers(0, 2**32), "share": SHARES, "gathers": st.booleans(), "options": OPTIONS}


@settings(max_examples=samples(100, 40))
@given(policy=st.sampled_from(["always", "never", "heuristic", "bandit"]), rounds=st.integers(1, 40), **ENGINES)
def test_whatever_happens_nobody_is_passed_by_more_than_the_bounds(seed, share, policy, gathers, options, rounds):
    """Nor does anybody who is not late go before a more urgent request that the engine could take."""
    engine = Engine(seed, share, policy, gathers, options)
    for _ in range(rounds):
        for _ in range(engine.rng.choice([0, 1, 3, 12])):
            engine.arrive()
        engine.round(slots=engine.rng.choice([1, 3, 12]))
        for _ in range(engine.rng.choice([0, 2, 5])):
            engine.leave()
    assert not engine.witness.disorder, engine.witness.disorder[:3]


def test_whom_the_engine_cannot_take_now_is_no_bound_in_that_round_and_one_in_the_next():
    builder = Admission(ChunkedHashTree(CHUNK, seed=1), Policies.always(), overtaking=Overtaking(0.0))
    for name, tokens, priority in (("barred", 10, 0), ("long", 9000, 1), ("next", 9000, 1), ("last", 9000, 1)):
        builder.arrived(name, array("q", [ord(name[0])] * tokens), priority=priority)
    for now, taken in ((1.0, "next"), (2.0, "last")):
        open_round(builder, now, None)
        for name in ("barred", "long"):
            assert propose(builder, len(builder.tree.active)) == name
            skip(builder, name)
        assert builder.state.overtaking.most_urgent() == 1
        assert propose(builder, len(builder.tree.active)) == taken
        admit(builder, taken, 0)
        builder.close_round()
        assert builder.state.overtaking.most_urgent() == 0
    assert builder.state.overtaking.overtaken("long") == 18_000


def test_a_late_request_does_not_go_before_a_more_urgent_one_that_awaits_its_prefix():
    builder = Admission(ChunkedHashTree(CHUNK, seed=1), Policies.always(), max_wait=10.0)
    builder.arrived("late", array("q", [1] * 2000), priority=5)
    open_round(builder, 0.0, None)
    builder.close_round()
    for name in ("urgent", "urgent twin"):
        builder.arrived(name, array("q", [2] * 2000), priority=0)
    open_round(builder, 20.0, None)
    while (name := propose(builder, len(builder.tree.active))) is not None:
        assert not defers(builder, name, 0, 2000, 100_000)
        admit(builder, name, 0)
    builder.close_round()
    assert list(builder.tree.waiting) == ["late", "urgent twin"]


@pytest.mark.parametrize(("prefix", "together"), [(100, 10), (1000, 1)])
def test_the_oldest_waits_only_for_a_prefix_that_is_worth_it_for_itself(prefix, together):
    """Where no other may go before it, a round that ends with it costs more than to compute a short prefix twice."""
    builder = Admission(ChunkedHashTree(2, seed=1), Policies.always(), overtaking=Overtaking(0.0))
    for i in range(10):
        builder.arrived(f"member {i}", array("q", [7] * prefix + [i] * 2))
    builder.arrived("long", array("q", [8] * 30_000))
    open_round(builder, 1.0, None)
    admitted = []
    while (name := propose(builder, len(admitted))) is not None and name != "long":
        admit(builder, name, 0)
        admitted.append(name)
    builder.close_round()
    assert len(admitted) == together and (name is None) == (together == 1)


def calls(act):
    """Python and built-in functions that are called while something is done."""
    count = 0

    def counts(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counts)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("goes", (True, False))
def test_an_arrival_and_the_memory_cost_the_same_however_many_classes_there_are(goes):
    """Clients may send a deadline as the priority, so that each request is a class of its own."""
    one, fairness, costs = Overtaking(1.0), Fairness(1e9, 10**9), []

    def arrive(number):
        one.arrive(number, number, 1.0, 0.0, number / 100)
        fairness.arrive(number, number)
        one.most_urgent()
        fairness.is_urgent(number)
        if goes:
            one.leave(number)
            fairness.forget(number, waiting=True)

    for number in range(6000):
        costs.append(calls(partial(arrive, number)))
    assert max(costs[5500:]) <= 1.2 * max(costs[500:1000])
    if goes:
        assert len(one._lines) + len(one._idle) <= module.IDLE_CLASSES


@given(st.lists(st.tuples(st.integers(-20, 20), st.one_of(st.none(), st.integers(1, 9))), max_size=120))
def test_sums_over_classes_are_those_of_a_plain_dictionary(changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priorities, "_BLOCK", 2)
        sums, plain = PrioritySums(), {}
        for priority, amount in changes:
            sums.set(priority, amount)
            plain = {other: kept for other, kept in {**plain, priority: amount}.items() if kept is not None}
            bounds = min(plain, default=None), max(plain, default=None)
            assert (sums.first, sums.last) == bounds
            for asked in range(-21, 22, 3):
                assert sums.up_to(asked) == sum(kept for other, kept in plain.items() if other <= asked)


@settings(max_examples=samples(40, 20))
@given(st.integers(0, 2**32), SHARES.filter(lambda share: share < inf), st.sampled_from(["always", "never"]))
def test_nobody_starves_where_more_comes_than_is_served(seed, share, policy):
    """A request is admitted once what was queued before it and what may pass it has been, if not earlier.

    No two prompts share anything, so each takes what it was expected to, and every round admits somebody.
    """
    engine = Engine(seed, share, policy, options={"max_wait": 1e9}, classes=1)
    engine.shared, engine.readings = [0], [None] * 5
    line, since, first = engine.witness.line, {}, 0
    for step in range(60):
        for _ in range(engine.rng.choice([1, 2, 4, 6]) if step < 40 else 0):
            engine.arrive()
        admitted = engine.round(refuses=0.0, skips=0.0, slots=engine.rng.choice([1, 2]))
        assert admitted or not engine.waiting
        longest = max(own for _, own in line.owns[0])
        for place in line.waiting():
            since.setdefault(place.name, 0.0)
        took = sum(len(engine.tokens[name]) for name in admitted)
        for name, place in [(place.name, place) for place in line.places if place.name in since]:
            if not place.waits:
                since.pop(name)
                continue
            since[name] += took if first <= name else 0.0
            before = place.own - place.work
            allowed = min(share * place.own, longest + place.grace - place.own) + ALLOWANCE
            assert since[name] <= before + allowed + 1e-6 * longest, (name, vars(place))
        for name in engine.running:
            engine.gone(name)
            engine.builder.finished(name, 1)


@settings(max_examples=samples(40, 20))
@given(policy=st.sampled_from(["always", "never", "heuristic"]), **ENGINES)
def test_all_are_served_in_the_end(seed, share, policy, gathers, options):
    """Whatever they were made to wait for, once memory is free and nobody else comes."""
    engine = Engine(seed, share, policy, gathers, options)
    for _ in range(15):
        for _ in range(engine.rng.choice([0, 3, 12])):
            engine.arrive()
        engine.round()
        engine.leave()
    rounds = 0
    while engine.waiting:
        engine.round(refuses=0.0, skips=0.0, slots=3)
        for name in engine.running:
            engine.gone(name)
            engine.builder.finished(name, engine.most[name])
        rounds += 1
        assert rounds <= 2 * engine.came
    assert engine.builder.state.overtaking.most_urgent() is None


class Salted:
    """A request's id with a hash of its own on each rank, as the hashes of strings are."""

    def __init__(self, number, salt):
        self.number, self.salt = number, salt

    def __hash__(self):
        return hash((self.salt, self.number))

    def __eq__(self, other):
        return isinstance(other, Salted) and self.number == other.number

    def __lt__(self, other):
        return self.number < other.number

    def __repr__(self):
        return f"request {self.number}"


@settings(max_examples=samples(25, 10))
@given(policy=st.sampled_from(["always", "never", "bandit"]), **ENGINES)
def test_ranks_decide_alike(seed, share, policy, gathers, options):
    """Of the same requests and the same readings, in whatever order their sets are."""
    ranks = []
    for salt in (1, 2):
        pacing = options["prefill_delay"] and PrefillDelay(options["prefill_delay"].bound)
        own = {**options, "prefill_delay": pacing}
        ranks.append(Engine(seed, share, policy, gathers, own, named=lambda number, salt=salt: Salted(number, salt)))
    one, other = ranks
    for _ in range(25):
        for rank in ranks:
            for _ in range(rank.rng.choice([0, 3, 12])):
                rank.arrive()
            rank.round()
            for _ in range(rank.rng.choice([0, 3])):
                rank.leave()
        assert one.proposed == other.proposed and one.running == other.running
        assert one.builder.row_order(one.running) == other.builder.row_order(other.running)
        assert one.builder.stats() == other.builder.stats()
