"""Bins: few, ordered, and reversible names."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.policies import PolicyState, discretiser

counts = st.integers(-5, 2**40)
states = st.builds(PolicyState, counts, counts, counts, st.none())


def bins(*state):
    return tuple(map(int, discretiser.name_of(discretiser.key_of(PolicyState(*state))).split(".")))


@given(states)
def test_keys_are_bounded_and_names_lead_back(state):
    key = discretiser.key_of(state)
    assert 0 <= key < prod(discretiser.SHAPE)
    assert discretiser.key_named(discretiser.name_of(key)) == key
    assert all(0 <= b < size for b, size in zip(bins(*state), (*discretiser.SHAPE, 1), strict=True))


@given(states, states)
def test_every_bin_is_monotone_in_its_feature_and_blind_to_the_others(one, other):
    for i in range(3):
        low, high = sorted((one[i], other[i]))
        fields = list(one)
        fields[i] = low
        below = bins(*fields)
        fields[i] = high
        above = bins(*fields)
        assert below[i] <= above[i]
        assert below[:i] + below[i + 1 :] == above[:i] + above[i + 1 :]


@given(st.integers(1, 2**11 - 1))
def test_batch_bins_double(batch):
    """Bin k holds 2**(k-1) to 2**k - 1, for the paper's exponential bins."""
    k = bins(batch, 1, 1)[0]
    assert 2 ** (k - 1) <= batch < 2**k


def test_the_table_is_small():
    assert prod(discretiser.SHAPE) == 650


@pytest.mark.parametrize("losses, expected", [((0, -1), 0), ((1, 2), 1), ((3, 8), 2), ((9, 32), 3), ((33, 10**6), 4)])
def test_loss_thresholds(losses, expected):
    assert {bins(1, loss, 1)[1] for loss in losses} == {expected}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1.2.3",
        "1.2.3.4.5",
        "1.2.3.4.0",
        "13.0.0.0",
        "0.5.0.0",
        "0.0.10.0",
        "0.0.0.1",
        "0.-1.0.0",
        "a.b.c.d",
        "٣.0.0.0",
    ],
)
def test_names_of_no_state_are_refused(name):
    with pytest.raises(ValueError, match="no state is called"):
        discretiser.key_named(name)
