"""Rules by which a leader decides: which epoch goes on, and whether without those who are lost."""

from dataclasses import asdict

import pytest

from commpress.collectives.transports.membership import Epoch, base_of, may_go_on

OLD = Epoch(4, 44, 1, ("a", "b", "c", "d"))
NEW = Epoch(5, 55, 1, ("a", "b", "c"))  # without d
NEWER = Epoch(6, 66, 1, ("a", "b"))


def report(place, epoch=OLD, ready=None, *, began=(), linked=()):
    ready = None if ready is None else asdict(ready)
    return {
        "place": place,
        "epoch": asdict(epoch),
        "ready": ready,
        "began": list(began),
        "linked": list(linked),
    }


@pytest.mark.parametrize(
    ("members", "base"),
    [
        ([report("a"), report("b"), report("c")], OLD),
        # the dead leader may have said so
        ([report("a", ready=NEW), report("b", ready=NEW), report("c", ready=NEW)], NEW),
        ([report("a", ready=NEW), report("b", ready=NEW), report("d")], NEW),  # d was none of it
        # c was not ready: nobody was told it is complete
        ([report("a", ready=NEW), report("b", ready=NEW), report("c")], OLD),
        ([report("a"), report("b", ready=NEW), report("c", ready=NEW)], OLD),
        ([report("a", ready=NEWER), report("b", ready=NEW), report("c", ready=NEW)], OLD),
        ([report("a", NEW), report("b", ready=NEW), report("c", ready=NEW)], NEW),  # a has heard it
        ([report("a", NEWER), report("b", ready=NEW)], NEWER),
        (
            [report("a", NEW, ready=NEWER), report("b", NEW, ready=NEWER), report("c", ready=NEW)],
            NEWER,
        ),
    ],
)
def test_an_epoch_in_doubt_counts_where_all_of_it_were_ready(members, base):
    for order in (members, members[::-1]):
        assert base_of(order) == (base, base.key)


@pytest.mark.parametrize(
    ("members", "dead", "linked", "goes_on"),
    [
        ([report("b"), report("c"), report("d")], [], [], True),  # most of it
        ([report("a"), report("d")], [], [], True),  # half, with the first
        ([report("c"), report("d")], [], [], False),
        ([report("c"), report("d")], ["a"], [], False),  # b may be with others
        ([report("d")], ["a", "b", "c"], [], True),
        # b may have led others, who went on with it
        ([report("d", began=["b"])], ["a", "b", "c"], [], False),
        ([report("d", began=["b"])], ["a", "b", "c"], ["b"], True),  # it has agreed with this one
        ([report("d", began=["b"], linked=["b"])], ["a", "b", "c"], [], True),
        ([report("c", linked=["b"]), report("d", began=["b"])], ["a", "b"], [], True),
        ([report("c", began=["a"], linked=["b"]), report("d")], ["a", "b"], [], False),
        ([report("d", began=["d"])], ["a", "b", "c"], [], True),
    ],
)
def test_few_go_on_only_where_nobody_else_can(members, dead, linked, goes_on):
    assert may_go_on(OLD, members, dead, linked) is goes_on
