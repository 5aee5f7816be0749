"""Groups of different size for sequences of different length: each once, where it has room, early;
and what trains on them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gallery import gallery

pytestmark = pytest.mark.slow


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 17))
def test_sequences_are_divided_among_groups(lengths, ranks):
    """Each once, where it has room, groups at multiples of their size; never later than all in one
    group after another."""
    largest = 1 << ranks.bit_length() - 1
    most = -(-max(lengths) // largest)
    found, end = gallery("flexsp").divide_sequences(lengths, ranks, most)
    assert sorted(i for _, own in found for i in own) == list(range(len(lengths)))
    assert [r for group, _ in found for r in group] == list(range(ranks))
    for group, own in found:
        width = len(group)
        assert width & width - 1 == 0
        assert group[0] % width == 0
        assert all(lengths[i] <= most * width for i in own)
    last = max(sum(lengths[i] ** 2 for i in own) / len(group) for group, own in found)
    assert last == pytest.approx(end)
    assert last <= sum(n**2 for n in lengths) / largest + 1e-6


def test_long_sequences_get_many_ranks():
    divide = gallery("flexsp").divide_sequences
    lengths = [4000, *[500] * 8]
    for between, width in ((0.0, 8), (1e5, 4)):  # beyond a node of 4 a position's way costs
        found, _ = divide(lengths, 8, 1000, node=4, between=between)
        assert [len(group) for group, own in found if 0 in own] == [width]
    with pytest.raises(ValueError, match="the largest group"):
        divide([4000], 2, 1000)


def trained():
    names = gallery("flexsp")
    losses, divided = names.train(30, "none")
    return losses, names.train(30)[0], [len(group) for group, _ in divided]


@pytest.mark.parametrize(("size", "widths"), [(2, [1, 1]), (4, [2, 1, 1])])
def test_a_model_trains_in_groups_of_different_size_as_in_one_process(pool, size, widths):
    for losses, alone, found in pool.run(trained, size=size):
        assert found == widths
        assert losses == pytest.approx(alone, abs=1e-4)
        assert losses[-1] < 0.2 * losses[0]
