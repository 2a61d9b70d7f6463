"""Trials of modes on machines whose every mode's worth is known, and what is counted of requests."""

import random
from itertools import pairwise
from math import sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.modes.mode import Mode, Ranking
from feather_sglang.scheduling.modes.outcomes import Outcomes
from feather_sglang.scheduling.modes.promise import Promise
from feather_sglang.scheduling.modes.trials import SECONDS, WINDOW, Trials
from feather_sglang.slo import Timing, parse

FILE = None  # the mode of the policy file
GOOD, OTHER, WORST = RIVALS = tuple(Mode(ranking) for ranking in (Ranking.SHARED, Ranking.RATIO, Ranking.OLDEST))
IN_FLIGHT = 20


class Machine:
    """A server on which a request's chance to be within the bounds is that of the mode that it comes under.

    So many that come together are late together; the load is a wave.
    """

    def __init__(self, budget, share, seed=0, wave=0.0, together=1):
        self.lines, self.rng, self.share, self.wave, self.together = [], random.Random(seed), share, wave, together
        self.trials = Trials(RIVALS, budget, self.lines.append)
        self.mode, self.came, self.ended, self.within, self.flight = FILE, 0, 0, 0, []
        self.lost = self.served = 0.0  # expected, and beside the mode of the file
        self.under = dict.fromkeys((FILE, *RIVALS), 0)

    def chance(self, mode):
        return min(1.0, max(0.0, self.share(mode, self.came) + self.wave * sin(self.came / 700)))

    def run(self, requests):
        for _ in range(requests):
            own, files = self.chance(self.mode), self.chance(FILE)
            self.lost += files - own
            self.served += files
            self.under[self.mode] += 1
            if self.came % self.together == 0:
                fate = self.rng.random()
            self.came += 1
            self.flight.append(fate < own)
            if len(self.flight) > IN_FLIGHT:
                self.ended += 1
                self.within += self.flight.pop(0)
            self.mode = self.trials.choose(self.ended, self.within, len(self.flight), float(self.came))
        return self


@pytest.mark.parametrize("wave", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_the_better_mode_is_found_and_kept(seed, wave):
    machine = Machine(0.02, lambda mode, _: {GOOD: 0.76, WORST: 0.4}.get(mode, 0.66), seed, wave).run(30_000)
    assert machine.trials.usual == GOOD and len(machine.lines) == 1
    assert f"{GOOD} from now on: +" in machine.lines[0]
    before = machine.lost
    machine.run(20_000)
    assert machine.lost - before < -0.7 * 0.1 * 20_000  # trials of the others take the rest


@pytest.mark.parametrize(("wave", "together"), [(0.0, 1), (0.15, 1), (0.0, 8), (0.15, 40)])
@pytest.mark.parametrize("seed", range(2))
def test_where_all_modes_are_equal_none_takes_the_place_of_another(seed, wave, together):
    machine = Machine(0.02, lambda mode, _: 0.66, seed, wave, together).run(40_000)
    assert machine.trials.count > 30 and not machine.lines and machine.trials.usual is FILE


@pytest.mark.parametrize("budget", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("share", [0.2, 0.66, 0.9])
@pytest.mark.parametrize("worse", [0.0, 0.1, 1.0])
def test_no_more_is_lost_than_the_budget_and_a_window(budget, share, worse):
    machine = Machine(budget, lambda mode, _: share if mode is FILE else share * (1 - worse))
    most = 0.0
    for _ in range(60):
        machine.run(500)
        most = max(most, machine.lost - budget * machine.served)
    assert most <= 2 * WINDOW
    assert machine.trials.count and not machine.lines


def test_hopeless_modes_are_left_at_once():
    machine = Machine(0.02, lambda mode, _: 0.8 if mode is FILE else 0.0).run(30_000)
    tried = sum(machine.under.values()) - machine.under[FILE]
    assert machine.trials.count > 10 and tried <= machine.trials.count * (IN_FLIGHT + 12)


@pytest.mark.parametrize("seed", range(3))
def test_a_mode_that_no_longer_does_better_gives_way(seed):
    turn = 30_000
    machine = Machine(0.02, lambda mode, n: (0.8 if n < turn else 0.3) if mode == GOOD else 0.6, seed).run(turn)
    assert machine.trials.usual == GOOD
    machine.run(6000)
    assert machine.trials.usual is not GOOD
    if machine.trials.usual is FILE:
        assert machine.lines[-1].startswith("the mode of the policy file from now on: +")


def test_a_mode_under_which_nobody_is_within_the_bounds_any_more_earns_nothing_and_gives_way():
    machine = Machine(0.01, lambda mode, n: (0.9 if n < 40_000 else 0.0) if mode == GOOD else 0.6).run(40_000)
    assert machine.trials.usual == GOOD
    machine.run(8000)
    assert machine.trials.usual is not GOOD


def test_where_nothing_can_be_gained_nothing_is_tried():
    machine = Machine(0.05, lambda mode, _: 1.0).run(20_000)
    assert not machine.trials.count


def test_without_a_budget_nothing_is_tried():
    machine = Machine(0.0, lambda mode, _: 0.5).run(5000)
    assert not machine.trials.count and machine.under[FILE] == 5000


def test_a_mode_under_which_nothing_ends_is_left_after_a_while():
    machine = Machine(0.1, lambda mode, _: 0.5)
    while machine.mode is FILE:
        machine.run(1)
    for later in range(1, 10_000):
        mode = machine.trials.choose(machine.ended, machine.within, IN_FLIGHT + later, float(machine.came + later))
        if mode is FILE:
            break
    assert later <= 4 * (2 * SECONDS + IN_FLIGHT + 2 * WINDOW) + 2


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1), st.floats(0, 60)), max_size=200))
def test_ranks_that_are_told_the_same_do_the_same(seed, told):
    ranks = [Trials(RIVALS, 0.3) for _ in range(2)]
    judged, within, now = 0, 0, 0.0
    for new, share, seconds in told:
        judged, within, now = judged + new, within + int(share * new), now + seconds
        one, other = (rank.choose(judged, within, (seed + judged) % 90, now) for rank in ranks)
        assert one == other
    assert ranks[0].stats() == ranks[1].stats()


# What is counted ----------------------------------------------------------------------------------------------------

BOUND, WITHIN = 2.0, 0.05


class Server:
    """One step after the other; who runs has a token from each decode step."""

    def __init__(self):
        self.outcomes = Outcomes(Promise(parse(f"ttft={BOUND},tbt={1e3 * WITHIN}")))
        self.now, self.came, self.tokens, self.first, self.done = 0.0, {}, {}, {}, {}

    def admit(self, name, came):
        self.came[name] = came
        self.outcomes.arrived(name, came)
        self.outcomes.admitted(name, 100)

    def prefill(self, names, seconds):
        self.now += seconds
        for name in names:
            self.outcomes.computed(name, self.now)
            self.tokens.setdefault(name, []).append(self.now)

    def decode(self, seconds):
        self.now += seconds
        self.outcomes.decoded(self.now)
        for name in self.tokens:
            if name not in self.done:
                self.tokens[name].append(self.now)

    def end(self, name):
        self.outcomes.ended(name, len(self.tokens[name]))
        self.outcomes.forget(name)
        times = self.tokens[name]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        self.done[name] = Timing.of(times[0] - self.came[name], gaps)


@given(st.integers(0, 2**32))
def test_who_was_within_the_bounds_is_what_the_judge_of_a_run_says(seed):
    rng, server, number = random.Random(seed), Server(), 0
    for _ in range(400):
        if rng.random() < 0.1:
            names = range(number, number := number + rng.randint(1, 3))
            for name in names:
                server.admit(name, server.now - rng.choice([0.0, 1.0, 1.9, 3.0]))
            server.prefill(names, rng.choice([0.01, 0.04, 0.2]))
        server.decode(rng.choice([0.01, 0.01, 0.04, 0.06] if rng.random() < 0.05 else [0.01]))
        for name in list(server.tokens):
            if name not in server.done and rng.random() < 0.02:
                server.end(name)
    for name in set(server.tokens) - set(server.done):
        server.end(name)
    slo = server.outcomes.promise.slo
    assert server.outcomes.judged == len(server.done)
    assert server.outcomes.within == sum(slo.met(timing) for timing in server.done.values())
    assert not server.outcomes._before and not server.outcomes._due


def test_who_was_thrown_out_stood_still_once_more():
    for tokens, within in ((50, False), (150, True)):
        server = Server()
        server.admit("a", 0.0)
        server.prefill(["a"], 0.1)
        for _ in range(tokens):
            server.decode(0.01)
        server.outcomes.admitted("a", 100)
        server.prefill(["a"], 1.0)
        server.outcomes.ended("a", len(server.tokens["a"]))
        assert (server.outcomes.judged, server.outcomes.within) == (1, within)


def test_who_was_aborted_is_not_judged():
    server = Server()
    for name in ("waits", "runs"):
        server.admit(name, 0.0)
    server.prefill(["runs"], 0.1)
    for name in ("waits", "runs", "unknown"):
        server.outcomes.forget(name)
        server.outcomes.ended(name, 3)
    assert (server.outcomes.judged, server.outcomes.within) == (0, 0)


def test_nothing_is_kept_of_those_who_have_all_their_tokens_from_prefill():
    """Such as health checks on an idle server, which come for weeks."""
    server = Server()
    for number in range(9):
        server.admit(f"h{number}", server.now)
        server.prefill([f"h{number}"], 0.1)
        server.end(f"h{number}")
    assert server.outcomes.within == 9
    assert not any(kept for kept in vars(server.outcomes).values() if isinstance(kept, list | dict))


def test_what_a_lone_request_takes_counts_once_it_was_measured():
    promise = Promise(parse("mooncake"))
    outcomes = Outcomes(promise)
    for name in ("early", "late"):
        outcomes.arrived(name, 0.0)
    outcomes.admitted("early", 100)
    outcomes.computed("early", 1e6)
    for step in range(5):
        outcomes.decoded(1e6 + step)
    promise.token_seconds, promise.idle_decode_seconds = 1e-3, 0.01
    outcomes.admitted("late", 100)
    outcomes.computed("late", 1e6)
    outcomes.ended("early", 6)
    assert (outcomes.judged, outcomes.within) == (2, 1)
