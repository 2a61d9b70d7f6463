"""Trials of STOP: when a run starts, what it may cost, how long it is followed by rest."""

import pytest

from feather_sglang.scheduling.policies.trial import Trial


def ordinary(trial, rewards, rate=100.0):
    for _ in range(rewards):
        trial.observe(rate, rate)


def run(trial, rate, at_most=10_000):
    """Start a run that measures `rate` where 100 is usual; returns its length."""
    assert trial.may_start()
    trial.start()
    length = 0
    while trial.running and length < at_most:
        trial.observe(rate, 100.0)
        length += 1
    return length


def rest(trial):
    """Ordinary rewards until the next run may start."""
    length = 0
    while not trial.may_start():
        ordinary(trial, 1)
        length += 1
    return length


@pytest.fixture
def ready():
    trial = Trial(longest=300)
    ordinary(trial, 128)
    return trial


def test_no_run_before_ordinary_throughput_is_known():
    trial = Trial(longest=300)
    ordinary(trial, 127)
    assert not trial.may_start()
    ordinary(trial, 1)
    assert trial.may_start()


def test_a_run_that_costs_nothing_lasts_its_length(ready):
    assert run(ready, 100.0) == 300


@pytest.mark.parametrize("rate, length", [(0.0, 2), (50.0, 3), (90.0, 12)])
def test_a_run_ends_when_it_has_lost_its_stake(ready, rate, length):
    assert run(ready, rate) == length


def test_what_the_states_under_add_are_known_to_give_is_the_measure_while_load_rises(ready):
    ready.start()
    for _ in range(10):
        ready.observe(150.0, 300.0)  # better than before the run, worse than ADD would be
    assert not ready.running


def test_ordinary_operation_earns_an_allowance_up_to_a_limit():
    short, long, longer = Trial(longest=300), Trial(longest=300), Trial(longest=300)
    for trial, earned in ((short, 128), (long, 4000), (longer, 40_000)):
        ordinary(trial, earned)
    assert run(short, 50.0) < run(long, 50.0) < run(longer, 50.0) == 13  # 1 at stake, 5 saved


def test_rest_after_runs_that_do_not_pay_doubles_and_is_bounded(ready):
    factors = []
    for _ in range(8):
        length = run(ready, 50.0)
        factors.append(rest(ready) / length)
    assert factors == [10, 20, 40, 80, 160, 200, 200, 200]


def test_a_run_that_pays_is_followed_by_no_rest(ready):
    run(ready, 50.0)
    rest(ready)
    run(ready, 110.0)
    assert ready.may_start()
    run(ready, 100.5)  # hardly better: did not pay
    assert rest(ready) == 10 * 300


def test_long_run_cost_where_stop_never_pays():
    """Lost throughput and the share of run time, over a long life of a machine on which STOP costs a tenth."""
    trial, lost, inside = Trial(longest=300), 0.0, 0
    for _ in range(100_000):
        if trial.may_start():
            trial.start()
        lost += 0.1 * trial.running
        inside += trial.running
        trial.observe(90.0 if trial.running else 100.0, 100.0)
    assert lost / 100_000 < 0.001
    assert inside / 100_000 < 0.01


def test_habit():
    """An action's rewards count as far as it has been usual; where STOP is usual, trying it needs no run."""
    trial = Trial(longest=300)
    ordinary(trial, 128)
    assert (trial.settled(0), trial.settled(1)) == (1.0, 0.0)
    for _ in range(20):
        trial.decided(stops=1, decisions=1)
    assert 0.2 < trial.settled(1) < 0.4
    trial.start()
    assert trial.running
    trial.pause()
    for _ in range(300):
        trial.decided(stops=3, decisions=3)
    assert trial.settled(1) > 0.98 and trial.settled(0) + trial.settled(1) == 1.0
    trial.start()
    assert not trial.running


def test_a_pause_ends_a_run_and_asks_for_ordinary_operation_anew(ready):
    ready.start()
    ready.pause()
    assert not ready.running and not ready.may_start()
    ordinary(ready, 128, rate=5.0)
    assert ready.may_start()


def test_state_survives_export(ready):
    run(ready, 50.0)
    ordinary(ready, 7)
    other = Trial(longest=300)
    other.restore(ready.export())
    assert other == ready
