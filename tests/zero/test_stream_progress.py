"""Lines about a step that is under way: parts and blocks in order, not more often than asked."""

import re

import pytest
import torch

import commpress
from commpress.errors import InvalidArgument
from commpress.integrations.zero.stream_progress import StreamProgress
from small_store import open_store
from stream_twin import loss_of, made, offloaded

LINE = re.compile(r"step (\d+): ([a-z ]+), (\S+) \((\d+) of (\d+) blocks\), \d+ s")


def filled(module):
    """Give a module's own parameters values."""
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter, std=0.02)


def test_lines_of_two_steps_name_all_parts_and_blocks(tmp_path, capsys):
    with open_store(tmp_path / "store", host="4MiB") as store:
        with torch.device("meta"):
            net = made()
        streamed = commpress.stream(
            net, store=store, progress=1e-9, chunk_mb=0.04, initialize=filled
        )
        optimizer = offloaded(net, store)
        for step in range(2):
            loss_of(net, step, 0).backward()
            optimizer.step()
        store.commit()
        names = {group.name for group in streamed.groups}
    lines = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert all(lines)
    parts = [(int(line[1]), line[2]) for line in lines]
    in_order = [key for key, before in zip(parts, [None, *parts], strict=False) if key != before]
    assert in_order[0] == (0, "first values")
    assert {(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward")} <= set(in_order)
    assert any(part == "update" for _, part in parts)
    for part in ("first values", "forward", "backward", "update"):
        of_part = [line for line in lines if line[2] == part and line[1] == "0"]
        assert {line[3] for line in of_part} <= names or part == "update"
    last = [line for line in lines if line[1] == "0" and line[2] == "forward"][-1]
    assert (int(last[4]), int(last[5])) == (len(names) - 1, len(names)), "one group is not used"


def test_lines_come_at_most_as_often_as_asked():
    now, shown = [0.0], []
    progress = StreamProgress(5.0, 4, show=shown.append, clock=lambda: now[0])
    for block in "abcd":
        progress.reach("forward", block)
        now[0] += 2.0
    progress.end_step()
    progress.reach("forward", "a")
    now[0] += 100
    progress.reach("forward", "b")
    assert shown == [
        "step 0: forward, d (4 of 4 blocks), 6 s",
        "step 1: forward, b (2 of 4 blocks), 100 s",
    ]
    silent = StreamProgress(None, 4, show=shown.append, clock=lambda: now[0])
    silent.reach("forward", "a")
    assert len(shown) == 2


@pytest.mark.parametrize("every", [0, -1.0])
def test_a_mistake(tmp_path, every):
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises(InvalidArgument, match=r"progress is .*, expected a positive number"),
    ):
        commpress.stream(made(), store=store, progress=every)
