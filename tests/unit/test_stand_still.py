"""How long running requests stand still for prefill: a machine whose steps take other times than was said."""

import math
import random
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.stand_still import (
    FIRST_TOKENS,
    FLOOR_TOKENS,
    StandStill,
    chunk_tokens,
    with_others,
)
from feather_sglang.scheduling.meters.prefill_prices import Load, PrefillFit, PrefillPrices, Prices

prices_of_one = st.builds(
    Prices,
    fixed=st.floats(0, 0.02),
    token=st.floats(1e-6, 1e-3),
    pair=st.one_of(st.just(0.0), st.floats(1e-10, 1e-7)),
    prefix=st.one_of(st.just(0.0), st.floats(1e-9, 1e-6)),
)
prices_of_a_machine = st.tuples(prices_of_one, st.one_of(st.just(Prices()), prices_of_one)).map(
    lambda prices: PrefillPrices(*prices, launch=prices[1].fixed)
)


@given(
    prices=prices_of_a_machine,
    seconds=st.floats(-1, 10),
    context=st.integers(0, 200_000),
    others=st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 10_000)), max_size=3),
)
def test_the_tokens_are_the_most_that_fit(prices, seconds, context, others):
    load = Load()
    for other in others:
        load = load.plus(*other)
    tokens = prices.tokens(seconds, context, load)
    assert tokens >= 0
    assert not tokens or prices.step(load.plus(tokens, context)) <= seconds * (1 + 1e-9)
    assert prices.step(load.plus(tokens + 1, context)) > seconds * (1 - 1e-9)


class Machine:
    """Runs the rule step by step, results ``late`` steps after they are launched, and notes what really happens."""

    def __init__(self, bound, floor, prices, late, decode_seconds):
        self.still, self.floor, self.prices, self.late = StandStill(bound), floor, prices, late
        self.decode_seconds = decode_seconds
        self.launched = deque()  # (is a decode step, when it ends)
        self.end = 0.0  # of the last step launched
        self.fresh = 0.0  # when the last decode step ended
        self.missed = []  # of the steps since then, seconds longer than was said
        self.steps = 0  # prefill steps since then
        self.expected = []  # of the decode step, whenever a prefill step was decided on since then
        self.run(True, decode_seconds, decode_seconds)
        self.fresh = self.end

    def run(self, is_decode, said, takes):
        self.still.launch(None if is_decode else said)
        self.end += takes
        self.launched.append((is_decode, self.end))
        while len(self.launched) > self.late:
            was_decode, end = self.launched.popleft()
            self.still.result(end, was_decode)

    def turn(self, wanted, context, prefill_factor, decode_factor):
        """Prefill as far as the rule lets, else decode; returns what a decode step ended after, and what was said."""
        self.still.forget(self.late)
        stood = self.still.seconds
        room = self.still.room(stood, self.still.decode_seconds)
        if wanted and self.still.times_alone(stood, self.prices):
            wanted = 0
        tokens = min(wanted, chunk_tokens(room, stood, self.prices, context, self.floor)) if wanted else 0
        if tokens:
            self.expected.append(self.still.decode_seconds or 0.0)
            said = self.prices.step(Load().plus(tokens, context))
            self.run(False, said, said * prefill_factor)
            self.missed.append(said * (prefill_factor - 1))
            self.steps += 1
            return None
        takes = self.decode_seconds * decode_factor
        self.run(True, None, takes)
        gap, self.fresh = self.end - self.fresh, self.end
        # Earlier steps have been measured by the time that the last ones were decided on.
        missed = sum(max(0.0, each) for each in self.missed[-1 - self.late :])
        missed += max(0.0, takes - min(self.expected, default=0.0))
        steps, self.missed, self.expected, self.steps = self.steps, [], [], 0
        return gap, missed, steps


factors = st.floats(0.5, 1.5)
turns = st.lists(
    st.tuples(st.sampled_from([0, 10, 600, 3000, 100_000]), st.integers(0, 60_000), factors, factors),
    min_size=20,
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(
    prices=prices_of_a_machine,
    turns=turns,
    bound=st.floats(0.02, 1.0),
    decode_seconds=st.floats(1e-4, 0.5),
    late=st.sampled_from([0, 1]),
)
@example(
    prices=PrefillPrices(Prices(1 / 64, 1e-6)), turns=[(0, 0, 1.0, 1.0)] * 2 + [(9**6, 0, 1.0, 1.0), (0, 0, 1.0, 1.5)],
    bound=0.5, decode_seconds=0.5, late=0,
)  # fmt: skip
def test_the_bound_is_exceeded_by_no_more_than_what_the_last_step_was_longer_than_said(
    prices, turns, bound, decode_seconds, late
):
    """Where a step of the floor and a decode step fit into it; else a single prefill step: the floor's, or one that
    takes little more than any step takes."""
    machine = Machine(bound, 512, prices, late, decode_seconds)
    for turn in turns:
        if (ended := machine.turn(*turn)) is None:
            continue
        gap, missed, steps = ended
        floor = prices.step(Load().plus(512, 60_000))
        fixed = max(prices.gpu.fixed, prices.host.fixed)
        slowest = 1.5 * (max(2.1 * fixed, floor) + decode_seconds)
        assert gap <= (bound + missed if steps > 1 else max(bound + missed, slowest)) + 1e-9


@settings(max_examples=100, deadline=None)
@given(
    prices=prices_of_a_machine,
    bound=st.floats(0.02, 1.0),
    decode_seconds=st.floats(1e-4, 2.0),
    late=st.sampled_from([0, 1]),
    context=st.integers(0, 200_000),
)
def test_prefill_is_never_starved_and_decode_neither(prices, bound, decode_seconds, late, context):
    machine = Machine(bound, 512, prices, late, decode_seconds)
    since_decode = since_prefill = held_back = 0
    for _ in range(50):
        decoded = machine.turn(100_000, context, 1.0, 1.0) is not None
        since_decode, since_prefill = (0, since_prefill + 1) if decoded else (since_decode + 1, 0)
        held_back += since_prefill > 1  # so that a decode step is timed
        assert held_back <= 2
        # Each further prefill step has at least the floor's tokens, so not many fit.
        assert since_decode <= 1 + bound / prices.step(Load().plus(512, context))


def test_chunks_are_as_large_as_fit():
    prices = PrefillPrices(Prices(fixed=0.005, token=1e-4))
    still = StandStill(0.25)
    still.launch(None)
    still.result(1.0, True)
    still.launch(None)
    still.result(1.045, True)
    assert still.decode_seconds == pytest.approx(0.045) and still.seconds == 0.0
    room = still.room(still.seconds, still.decode_seconds)
    assert chunk_tokens(room, 0.0, prices, 0, 512) == pytest.approx(2000, abs=1)
    still.launch(0.105)
    assert still.seconds == pytest.approx(0.105)
    still.result(1.145, False)  # 0.1 s, as it turned out
    assert still.seconds == pytest.approx(0.1)
    room = still.room(still.seconds, still.decode_seconds)
    assert chunk_tokens(room, still.seconds, prices, 0, 512) == pytest.approx(1000, abs=1)
    assert chunk_tokens(room, still.seconds, prices, 0, 1024) == 0  # too few for a step: decode


@given(prices=prices_of_a_machine, pace=st.floats(1e-6, 1e-3), room=st.floats(-1, 1), context=st.integers(0, 60_000))
def test_no_step_has_more_tokens_than_any_was_seen_to_compute_in_its_time(prices, pace, room, context):
    tokens = chunk_tokens(room, 0.0, prices._replace(pace=pace), context, 256)
    assert tokens <= max(256, max(room, 1.1 * prices.launch, prices.gpu.fixed) / pace)
    assert tokens <= chunk_tokens(room, 0.0, prices, context, 256)


def test_no_chunk_is_longer_than_what_is_trusted_but_short_prompts_may_go_together():
    prices = PrefillPrices(Prices(fixed=0.01), trusted=600.0)
    assert chunk_tokens(0.1, 0.0, prices, 0, 256) == 600
    assert prices._replace(trusted=60.0).tokens(0.1, 0, Load(80)) > 256


def test_before_anything_was_timed_a_small_step_runs_and_then_a_decode_step():
    still = StandStill(0.25)
    room = still.room(0.0, still.decode_seconds)
    assert room == pytest.approx(0.1875)
    assert chunk_tokens(room, 0.0, None, 0, 512) == FIRST_TOKENS
    assert chunk_tokens(room, 0.01, None, 0, 512) == 0


def test_decode_steps_that_never_ran_or_were_not_announced_do_no_harm():
    still = StandStill(0.25)
    still.launch(None)  # all it would have run were gone
    still.forget()
    assert still.seconds == 0.0
    still.launch(0.1)
    still.result(2.0, False)
    still.result(2.2, True)  # the engine ran it on its own account
    assert still.seconds == 0.0 and still.decode_seconds == pytest.approx(0.2)
    still.launch(0.1)
    still.result(2.3, False)
    assert still.seconds == pytest.approx(0.1)
    still.restart()
    assert still.seconds == 0.0 and not math.isnan(still.room(0.0, None))
    still.result(9.0, False)
    assert still.decode_seconds == pytest.approx(0.2)  # no time over the pause


def test_what_a_step_took_that_ended_before_its_time_is_never_known():
    still = StandStill(0.25)
    for now in (1.0, 1.1):
        still.launch(None)
        still.result(now, True)
    still.launch(0.1)
    still.result(1.11, False)
    assert still.result(1.19, True) is None  # both took less than a decode step alone
    assert still.result(1.29, True) == 0.0


def test_nobody_stands_still_for_prefill_that_ran_while_nobody_decoded():
    still = StandStill(0.25)
    still.launch(None)  # a long prompt, alone
    still.result(5.0, False)
    assert still.seconds == 0.0
    still.launch(0.2)
    still.result(5.2, False)
    assert still.seconds == pytest.approx(0.2)


# The rule and the fit together -------------------------------------------------------------------------------------


class Server:
    """A long prompt after the other, and short ones behind cached prefixes, beside a batch that decodes.

    The host launches a step (prefill without CUDA graphs: kernel by kernel) while the GPU computes the one before, and
    looks for a step's result after it has launched the next one, or at once.

    Parameters
    ----------
    launch : seconds of the host to launch a prefill step.
    overlaps : as SGLang's scheduler does by default.
    tells : how long it waits for a result is known.
    """

    DECODE, DECODE_LAUNCH, PROCESS, STEP, TOKEN, PAIR = 0.010, 0.002, 0.003, 0.002, 25e-6, 1e-9
    LOOKED_UP = 1e-7  # seconds of the host for a token found in the cache

    def __init__(self, bound, launch, overlaps, context, tells=True):
        self.tells = tells
        self.still, self.fit = StandStill(bound), PrefillFit()
        self.launch, self.overlaps, self.context = launch, overlaps, context
        self.now = self.gpu = self.fresh = 0.0
        self.pending = deque()  # (is a decode step, prompts, when the GPU is done)
        self.gaps, self.chunks, self.together = [], [], []

    def decode(self):
        self.still.launch(None)
        begin = self.now
        self.now += self.DECODE_LAUNCH
        self.gpu = max(self.gpu, begin) + self.DECODE
        self._process((True, [], self.gpu))

    def prefill(self, said, prompts):
        self.still.launch(said, self.now)
        begin = self.now
        self.now += self.launch + self.LOOKED_UP * sum(context for _, context in prompts)
        load = load_of(prompts)
        computed = self.TOKEN * load.tokens + self.PAIR * load.pairs
        self.gpu = max(max(self.gpu, begin) + self.STEP + computed, self.now)
        self._process((False, prompts, self.gpu))

    def _process(self, step):
        self.pending.append(step)
        while len(self.pending) > self.overlaps:
            is_decode, prompts, end = self.pending.popleft()
            looked, self.now = self.now, max(self.now, end) + self.PROCESS
            tells = 0.0 if is_decode and not self.overlaps else max(0.0, end - looked)
            self.fit.waited(tells if self.tells else None)
            if prompts:
                self.fit.add(load_of(prompts))
            if (took := self.still.result(self.now, is_decode, looked)) is not None:
                self.fit.took(took)
            if is_decode:
                self.gaps.append(self.now - self.fresh)
                self.fresh = self.now

    def turn(self, short, floor=FLOOR_TOKENS):
        self.still.forget(self.overlaps)
        stood, prices = self.still.seconds, self.fit.prices
        room = self.still.room(stood, self.still.decode_seconds)
        context = 0 if short else self.context
        alone = self.still.times_alone(stood, prices)
        tokens = 0 if alone else min(8192, chunk_tokens(room, stood, prices, context, floor))
        if not tokens:
            return self.decode()
        if not short:
            said = 0.0 if prices is None else prices.step(Load().plus(tokens, context))
            self.chunks.append(tokens)
            return self.prefill(said, [(tokens, context)])
        prompts = [(20, 10_000)]
        if prices is None:
            return self.prefill(0.0, prompts)
        seconds = with_others(room, Load().plus(tokens, 0), prices)
        while 20 * (len(prompts) + 1) <= tokens and prices.tokens(seconds, 10_000, load_of(prompts)) >= 20:
            prompts.append((20, 10_000))
        self.together.append(len(prompts))
        return self.prefill(prices.step(load_of(prompts)), prompts)


def load_of(prompts):
    """A step with so many new tokens, after so many earlier ones, of each prompt."""
    load = Load()
    for prompt in prompts:
        load = load.plus(*prompt)
    return load


def serve(bound, launch, overlaps, context=0, turns=400, short=0, tells=True):
    """Run so many steps, of each hundred the last `short` with short prompts only."""
    server = Server(bound, launch, overlaps, context, tells)
    for _ in range(20):
        server.decode()
    del server.gaps[:]
    for turn in range(turns):
        server.turn(turn % 100 >= 100 - short)
    return server


def largest_chunk(bound, launch, overlaps, context):
    """That keeps gaps within the bound, in steps of 32; the floor's where none does."""
    best = FLOOR_TOKENS
    for tokens in range(FLOOR_TOKENS, 8193, 32):
        server = Server(bound, launch, overlaps, context)
        for _ in range(12):
            server.prefill(0.0, [(tokens, context)])
            server.decode()
        if max(server.gaps[4:]) <= bound:
            best = tokens
    return best


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("overlaps", [0, 1])
@pytest.mark.parametrize("launch", [0.001, 0.018])
@pytest.mark.parametrize("bound", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("context", [0, 30_000])
def test_chunks_are_nearly_as_large_as_the_bound_allows_however_long_a_launch_takes(
    overlaps, launch, bound, context, tells
):
    server = serve(bound, launch, overlaps, context, tells=tells)
    best = largest_chunk(bound, launch, overlaps, context)
    late, gaps = server.chunks[len(server.chunks) // 2 :], sorted(server.gaps[len(server.gaps) // 4 :])
    assert 0.8 * best <= sum(late) / len(late)
    assert gaps[int(0.99 * len(gaps))] <= 1.1 * bound


@pytest.mark.parametrize("overlaps", [0, 1])
@pytest.mark.parametrize("launch", [0.001, 0.018])
def test_a_batch_that_has_become_small_while_prefill_goes_on_leaves_its_time_to_prefill(overlaps, launch):
    """No two decode steps follow each other then, and what one took beside a large batch says nothing any more."""
    bound, server = 0.1, becomes_small(0.1, 0.08, launch, overlaps)
    late, gaps = server.chunks[-50:], sorted(server.gaps[-50:])
    assert 0.8 * largest_chunk(bound, launch, overlaps, 0) <= sum(late) / len(late)
    assert gaps[-1] <= 1.1 * bound
    for _ in range(3):  # nobody waits: what is charged to the next step is its own
        server.decode()
    assert not server.fit._added.any()


def test_decode_steps_that_a_launch_hides_are_timed_again():
    server = becomes_small(0.05, 0.03, launch=0.018, overlaps=0)
    late = server.chunks[-50:]
    assert 0.8 * largest_chunk(0.05, 0.018, 0, 0) <= sum(late) / len(late)
    assert server.still.decode_seconds == pytest.approx(server.DECODE + server.PROCESS, rel=0.01)


def becomes_small(bound, decode, launch, overlaps):
    """A server whose decode steps took longer once."""
    server = Server(bound, launch, overlaps, 0)
    server.DECODE = decode
    for _ in range(20):
        server.decode()
    for _ in range(100):
        server.turn(short=False)
    server.DECODE = Server.DECODE
    for _ in range(200):
        server.turn(short=False)
    return server


class HeldUp(Server):
    """Decode steps vary by a fifth, and once in a hundred steps something else holds the host up for 0.1 s."""

    def __init__(self, *arguments):
        self.random = random.Random(5)
        super().__init__(*arguments)

    @property
    def DECODE(self):
        return 0.02 * self.random.lognormvariate(0, 0.2)

    @property
    def PROCESS(self):
        return 0.003 + 0.1 * (self.random.random() < 0.01)


@pytest.mark.parametrize("overlaps", [0, 1])
@pytest.mark.parametrize("bound", [0.06, 0.15])
def test_steps_that_end_while_the_host_is_held_up_do_not_loosen_the_bound(overlaps, bound):
    server = HeldUp(bound, 0.001, overlaps, 0)
    for _ in range(20):
        server.decode()
    for _ in range(1000):
        server.turn(short=False)
    gaps = sorted(server.gaps[len(server.gaps) // 4 :])
    assert 0.7 * bound <= gaps[len(gaps) // 2] and gaps[int(0.95 * len(gaps))] <= 1.1 * bound


@pytest.mark.parametrize("overlaps", [0, 1])
@pytest.mark.parametrize("bound", [0.005, 0.03, 0.04])
def test_where_a_launch_leaves_no_room_prefill_computes_as_long_as_it_takes(bound, overlaps):
    """Else the smallest steps would fill the time with launches, and gaps would hardly be shorter."""
    launch = 0.03
    server, least = serve(bound, launch, overlaps), Server(bound, launch, overlaps, 0)
    for _ in range(50):
        least.prefill(0.0, [(FLOOR_TOKENS, 0)])
        least.decode()
    late, gaps = server.chunks[len(server.chunks) // 2 :], sorted(server.gaps[len(server.gaps) // 4 :])
    worth = launch / Server.TOKEN
    assert 0.5 * worth <= sum(late) / len(late) <= 2 * worth
    assert gaps[int(0.9 * len(gaps))] <= 1.15 * max(bound, sorted(least.gaps)[25])


@pytest.mark.parametrize("overlaps", [0, 1])
@pytest.mark.parametrize(("bound", "launch", "longest"), [(0.06, 0.018, 1.15 * 0.06), (0.03, 0.03, 0.07)])
def test_short_prompts_go_together_though_each_costs_the_host_some_time(bound, launch, longest, overlaps):
    """Also where the bound does not leave what a launch takes, and each more adds to that."""
    server = serve(bound, launch, overlaps, short=50, turns=1000)
    late = server.together[len(server.together) // 2 :]
    assert sum(late) / len(late) >= 4
    gaps = sorted(server.gaps[len(server.gaps) // 4 :])
    assert gaps[int(0.95 * len(gaps))] <= longest
