"""Bins: few, ordered, and reversible names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import PolicyState
from feather_sglang.scheduling.policies.discretiser import FEATURES, Discretiser

counts = st.integers(-5, 2**40)
states = st.builds(PolicyState, counts, counts, counts, st.floats(-1.0, 2.0), st.none())
features = st.sampled_from(FEATURES)


def bins(discretiser, state):
    return tuple(map(int, discretiser.name(discretiser.key(state)).split(".")))


@given(features, states)
def test_keys_are_bounded_and_names_lead_back(feature, state):
    discretiser = Discretiser(feature)
    key = discretiser.key(state)
    assert 0 <= key < discretiser.states
    assert discretiser.key_of(discretiser.name(key)) == key
    assert all(0 <= b < size for b, size in zip(bins(discretiser, state), discretiser.shape, strict=True))


@given(features, states, states)
def test_every_bin_is_monotone_in_its_feature_and_blind_to_the_others(feature, one, other):
    discretiser = Discretiser(feature)
    for i in range(4):
        low, high = sorted((one[i], other[i]))
        fields = list(one)
        fields[i] = low
        below = bins(discretiser, PolicyState(*fields))
        fields[i] = high
        above = bins(discretiser, PolicyState(*fields))
        assert below[i] <= above[i]
        assert below[:i] + below[i + 1 :] == above[:i] + above[i + 1 :]


@given(st.integers(1, 2**11 - 1))
def test_batch_bins_double(batch):
    """Bin k holds 2**(k-1) to 2**k - 1, for the paper's exponential bins."""
    k = bins(Discretiser(), PolicyState(batch, 1, 1))[0]
    assert 2 ** (k - 1) <= batch < 2**k


def test_the_table_is_small():
    assert Discretiser("paper").states == 650
    assert Discretiser("headroom").states == 2600


@pytest.mark.parametrize("losses, expected", [((0, -1), 0), ((1, 2), 1), ((3, 8), 2), ((9, 32), 3), ((33, 10**6), 4)])
def test_loss_thresholds(losses, expected):
    assert {bins(Discretiser(), PolicyState(1, loss, 1))[1] for loss in losses} == {expected}


@pytest.mark.parametrize("room, expected", [(0.0, 0), (0.04, 0), (0.05, 1), (0.19, 1), (0.2, 2), (0.5, 3), (1.0, 3)])
def test_headroom_thresholds(room, expected):
    assert bins(Discretiser("headroom"), PolicyState(1, 1, 1, room))[3] == expected
    assert bins(Discretiser("paper"), PolicyState(1, 1, 1, room))[3] == 0


@pytest.mark.parametrize("name", ["", "1.2.3", "1.2.3.4.5", "13.0.0.0", "0.0.0.1", "0.-1.0.0", "a.b.c.d", "٣.0.0.0"])
def test_names_of_no_state_are_refused(name):
    with pytest.raises(ValueError, match="no state is called"):
        Discretiser().key_of(name)


def test_unknown_features_are_refused():
    with pytest.raises(FeatherError, match="choose one of paper, headroom"):
        Discretiser("all")
