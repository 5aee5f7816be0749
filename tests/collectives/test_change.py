"""Change: who was in a group and who is in it now."""

import pytest

from commpress.collectives.change import Change
from commpress.errors import InvalidArgument


def test_a_change_knows_who_is_lost_and_who_is_new():
    # ranks 1 and 3 of 4 go on as 0 and 1, two newcomers follow
    changes = [
        Change(7, rank, 4, (1, 3, None, None), (b"a", b"b", b"c", b"d")) for rank in range(4)
    ]
    assert [change.was for change in changes] == [1, 3, None, None]
    for change in changes:
        assert (change.size, change.survivors, change.new, change.lost) == (
            4,
            (0, 1),
            (2, 3),
            (0, 2),
        )


def test_nothing_changed_is_a_change_too():
    change = Change(1, 1, 2, (0, 1), (b"", b""))
    assert (change.size, change.was, change.survivors, change.new, change.lost) == (
        2,
        1,
        (0, 1),
        (),
        (),
    )


@pytest.mark.parametrize(
    ("rank", "before", "sources", "said"),
    [
        (2, 2, (0, 1), 2),  # no such rank
        (0, 2, (1, 0), 2),  # survivors change their order
        (0, 2, (0, 0), 2),  # one that is there twice
        (0, 2, (None, 0), 2),  # a newcomer before a survivor
        (0, 1, (0, 1), 2),  # more survivors than there were
        (0, 2, (0, 1), 1),  # somebody said nothing
    ],
)
def test_what_is_no_change_is_refused(rank, before, sources, said):
    with pytest.raises(InvalidArgument, match="is no change of a group"):
        Change(1, rank, before, sources, (b"",) * said)


def test_two_changes_are_one():
    first = Change(1, 0, 4, (1, 2, 3, None), (b"",) * 4)
    second = Change(2, 0, 4, (1, 3, None), (b"b",) * 3)
    assert second.after(first) == Change(2, 0, 4, (2, None, None), (b"b",) * 3)
