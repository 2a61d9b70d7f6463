"""Modes: what they are called, the load that they are chosen by, the promise, and how they rank who waits."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.adapter.refusals import refuse_policy_flags
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.admission.stand_still import SPACING, StandStill
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.modes.load import KEYS, Load
from feather_sglang.scheduling.modes.mode import DEFAULT, Mode, Prefill, Ranking
from feather_sglang.scheduling.modes.mode_policy import SHIPPED, ModePolicy
from feather_sglang.scheduling.modes.promise import SAFETY, Promise
from feather_sglang.slo import parse
from oracles.rounds import admit, builder, open_round, propose, run_round

MODES = st.builds(Mode, st.sampled_from(Ranking), st.sampled_from(Prefill), st.integers(0, 500))


@given(st.dictionaries(st.sampled_from(KEYS), MODES), MODES, st.lists(MODES).map(tuple))
def test_a_table_comes_back_from_its_file_as_it_was(tmp_path_factory, table, default, rivals):
    path = tmp_path_factory.mktemp("modes") / "modes.json"
    ModePolicy(table, default, {"why": [1, 2]}, rivals).save(path)
    back = ModePolicy.load(path)
    assert (back.table, back.default, back.provenance, back.rivals) == (table, default, {"why": [1, 2]}, rivals)


@pytest.mark.parametrize(
    "damage",
    [
        {"default": "shared"},
        {"default": "shared, at-once, stop from 0"},
        {"default": "shared, at-once, stop from x"},
        {"default": 3},
        {"table": {"free/none/small": "nonsense"}},
        {"table": {"nowhere": "shared, at-once"}},
        {"table": []},
        {"provenance": 1},
        {"rivals": "shared, at-once"},
        {"rivals": ["shared"]},
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "modes.json"
    ModePolicy({}, DEFAULT).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(FeatherError, match=r"modes.json is damaged: .+") as error:
        ModePolicy.load(path)
    assert "\n" not in str(error.value)


def test_the_shipped_table_says_what_it_was_trained_on():
    policy = ModePolicy.load(SHIPPED)
    facts = policy.provenance
    assert {"profile", "model", "slo", "sglang", "seed", "traces", "curve"} <= facts.keys()
    assert policy.table or policy.default != DEFAULT


@given(st.booleans(), st.booleans(), st.floats(0, 1), st.floats(0, 10))
def test_every_load_has_a_state(tight, short, late, step):
    assert Load(tight, short, late, step).key() in KEYS


def test_states_part_what_they_say():
    assert Load().key() == "free/none/small"
    assert Load(True, False, 0.2, 0.6).key() == "tight/some/large"
    assert Load(True, True, 0.5, 0.34).key() == "short/most/small"
    assert len({Load(t, s, late, step).key() for t, s in ((0, 0), (1, 0), (1, 1)) for late in (0, 0.1, 0.9)
                for step in (0, 0.5, 1)}) == len(KEYS)  # fmt: skip


def test_a_relative_promise_follows_what_was_measured_and_an_absolute_one_does_not():
    promise = Promise(parse("mooncake"))
    assert promise.between_tokens() is None and promise.can_come_in_time(1e9, 1e9, 1.0)
    promise.idle_decode_seconds, promise.token_seconds, promise.fixed_seconds = 0.006, 1e-3, 0.1
    assert promise.between_tokens() == pytest.approx(SAFETY * 0.03)
    assert promise.gap() == pytest.approx(0.03, rel=0.1)
    assert promise.first_token(100) == pytest.approx(10 * 0.2)
    # 50 of 100 tokens are cached: they take 0.15 s more.
    assert promise.can_come_in_time(SAFETY * 2.0 - 0.151, 50, 100)
    assert not promise.can_come_in_time(SAFETY * 2.0 - 0.149, 50, 100)
    fixed = Promise(parse("ttft=2,tbt=50"))
    assert fixed.between_tokens() == pytest.approx(SAFETY * 0.05) and fixed.first_token(1e6) == 2
    assert fixed.gap() == pytest.approx(0.05)


@pytest.mark.parametrize(("token", "counted"), [(1e-4, (1e-4, 0.03)), (0.0, (2e-4, 0.01)), (None, (2e-4, 0.01))])
def test_a_step_is_counted_once_whether_or_not_tokens_have_a_price(token, counted):
    promise = Promise(parse("mooncake"))
    choice = builder(promise=promise, mode_policy=OneMode(Mode())).mode_choice
    start = None if token is None else 0.03
    choice.choose(Readings(1.0, prefill_seconds=2e-4, fixed_seconds=0.01, start_seconds=start, token_seconds=token))
    assert (promise.token_seconds, promise.fixed_seconds) == counted


@pytest.mark.parametrize("text", ["ttft=2", "tbt=50", "tpot=20"])
def test_a_promise_has_both_bounds(text):
    with pytest.raises(FeatherError, match="give both bounds"):
        Promise(parse(text))


def test_stops_without_a_bound_are_spaced_so_that_99_of_100_gaps_are_bounded():
    still, stops, began = StandStill(0.05), [], False
    for step in range(10 * SPACING):
        if still.may_stall(0.0):
            stops.append(step)
            began = still.may_stall(0.2) and still.may_stall(0.4)  # it goes on as it began, however long
        else:
            assert not still.may_stall(0.2)
        still.result(float(step), is_decode=True)
    assert began and len(stops) == 10
    assert all(later - earlier >= SPACING > 100 for earlier, later in itertools.pairwise(stops))


# Ranking ------------------------------------------------------------------------------------------------------------


class OneMode(ModePolicy):
    """Always the same, and what it was asked."""

    def __init__(self, mode):
        super().__init__(dict.fromkeys(KEYS, mode), mode)  # a table, so that the load is looked at
        self.loads = []

    def decide(self, load):
        self.loads.append(load)
        return super().decide(load)


def ranked(ranking, waits, slo="ttft=10,tbt=50", token_seconds=0.01):
    """The order of admission of requests (seconds waited, tokens), in order of arrival; none share anything."""
    policy = OneMode(Mode(ranking))
    b = builder(promise=Promise(parse(slo)), mode_policy=policy, max_wait=1e9)
    b.state.overtaking.share = float("inf")
    now = 1000.0
    for number, (waited, tokens) in enumerate(waits):
        b.open_round(Readings(now - waited))
        b.close_round()
        b.arrive(number, [100 * number + token for token in range(tokens)])
        b.open_round(Readings(now - waited))
        b.close_round()
    open_round(b, now, None, token_seconds, 0.0)
    order = []
    while (request := propose(b, len(b.tree.active))) is not None:
        admit(b, request)
        order.append(request)
    return order, policy.loads[-1]


WAITS = st.lists(
    st.tuples(st.integers(0, 60).map(lambda n: n / 2), st.integers(1, 40).map(lambda n: 10 * n)), min_size=1, max_size=8
).map(lambda waits: sorted(waits, reverse=True))


@given(WAITS)
def test_who_can_come_in_time_goes_first_and_the_least_work_before_more(waits):
    order, load = ranked(Ranking.IN_TIME, waits)
    late = [waited + 0.01 * tokens > SAFETY * 10 for waited, tokens in waits]
    assert order == sorted(range(len(waits)), key=lambda i: (late[i], waits[i][1], i))
    assert load.late == pytest.approx(sum(late) / len(late))


@given(WAITS)
def test_each_other_ranking_is_what_it_says(waits):
    numbers = range(len(waits))
    assert ranked(Ranking.OLDEST, waits)[0] == list(numbers)
    assert ranked(Ranking.SHORTEST, waits)[0] == sorted(numbers, key=lambda i: (waits[i][1], i))
    assert ranked(Ranking.RATIO, waits)[0] == sorted(numbers, key=lambda i: (-waits[i][0] / waits[i][1], i))


def test_a_mode_stops_as_its_threshold_says_whatever_the_policy_would():
    for threshold, stops in ((0, 0), (3, 0), (2, 1)):
        b = builder(promise=Promise(parse("mooncake")), mode_policy=OneMode(Mode(stop_from=threshold)))
        for name, group in (("a", 1), ("b", 1), ("c", 2)):
            b.arrive(name, [group] * 64 + [ord(name)] * 2)
        admitted = run_round(b)
        assert len(admitted) == 3 - stops and b.stopping.stops == stops


# Refusals -----------------------------------------------------------------------------------------------------------


class Args:
    """A server's flags."""

    enable_mixed_chunk, chunked_prefill_size = False, 8192


@pytest.mark.parametrize(
    ("policy", "flags", "options", "says"),
    [
        ("feather-order", {}, {"slo": "mooncake"}, "--feather-slo cannot work; drop it"),
        ("feather", {"enable_mixed_chunk": True}, {"slo": "mooncake"}, "--feather-slo lets prefill and decode"),
        ("feather", {"chunked_prefill_size": -1}, {"slo": "mooncake"}, "--feather-slo cuts prompts into chunks"),
        ("feather", {}, {"modes": "x.json"}, "give --feather-slo, too"),
        ("feather", {}, {"modes_budget": 0.01}, "--feather-modes-budget .* give --feather-slo, too"),
    ],
)
def test_what_cannot_keep_a_promise_is_refused(policy, flags, options, says):
    from feather_sglang.adapter.options import FeatherOptions

    args = type("These", (Args,), flags)()
    with pytest.raises(FeatherError, match=says):
        refuse_policy_flags(args, policy, FeatherOptions(**options))
