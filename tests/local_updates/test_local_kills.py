"""Ranks of local updates that are killed: survivors stop with an error that names them, and a
restart loses nothing."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commpress

PATIENCE = timedelta(seconds=20)  # of the group
STEPS, EVERY, SIZE = 24, 4, 3


class Mortal(commpress.Nesterov):
    """Outer step that ends its own process at a point of the round, as a power cut would."""

    def __init__(self, point, count):
        super().__init__(lr=0.5, momentum=0.8)
        for name, value in (("point", point), ("left", count)):
            object.__setattr__(self, name, value)

    def _pass(self, point):
        if point == self.point:
            object.__setattr__(self, "left", self.left - 1)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def exchange(self, *args, **kwargs):
        self._pass("before it sends")
        steps = super().exchange(*args, **kwargs)
        yield next(steps)
        self._pass("after it has sent a part")
        return (yield from steps)

    def step(self, *args, **kwargs):
        self._pass("as the mean arrives")
        super().step(*args, **kwargs)


def parameters():
    draw = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=draw))
        for shape in [(120, 100), (7,), (200, 90), (64, 3, 5)]
    ]


def newest(folder):
    """The last step of which every rank's file is there."""
    steps = [
        {int(path.stem.split("-")[1]) for path in folder.glob(f"{rank}-*.pt")}
        for rank in range(SIZE)
    ]
    return max(set.intersection(*steps), default=0)


def train(folder, victim, point, count, delay):
    """From the last committed round to the end. The victim ends at its point, or ``delay`` steps'
    time after step ``count``."""
    rank, mine = dist.get_rank(), parameters()
    mortal = Mortal(point, count) if rank == victim else commpress.Nesterov(lr=0.5, momentum=0.8)
    local = commpress.LocalUpdates(
        torch.optim.AdamW(mine, lr=1e-2),
        every=EVERY,
        codec="int4",
        outer=mortal,
        fragments=2,
        overlap=1,
        min_numel=0,
        timeout=PATIENCE,
    )
    folder = Path(folder)
    begin = newest(folder)
    if begin:
        state = torch.load(folder / f"{rank}-{begin}.pt", weights_only=True)
        with torch.no_grad():
            for p, saved in zip(mine, state["parameters"], strict=True):
                p.copy_(saved)
        local.load_state_dict(state["local"])
    pace = 0.01
    for step in range(begin, STEPS):
        if rank == victim and point is None and step == count:
            # the kernel ends the process, as by SIGKILL
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(delay * pace, 1e-6))
        draw, start = torch.Generator().manual_seed(1000 * step + rank), time.monotonic()
        for p in mine:
            p.grad = torch.randn(p.shape, generator=draw)
        try:
            local.step()
            if (step + 1) % EVERY == 0:
                state = {"parameters": [p.detach() for p in mine], "local": local.state_dict()}
                torch.save(state, folder / f"{rank}-{step + 1}.tmp")
                os.replace(folder / f"{rank}-{step + 1}.tmp", folder / f"{rank}-{step + 1}.pt")
        except commpress.CommpressError as error:
            return "stopped", type(error).__name__, str(error), time.monotonic() - start
        pace = time.monotonic() - start
    if rank == victim:
        time.sleep(60)  # it is killed in these
    try:
        local.drain()
    except commpress.CommpressError as error:
        return "stopped", type(error).__name__, str(error), time.monotonic() - start
    digest = local.digest()
    local.close()
    return "ended", digest, [float(p.double().sum()) for p in mine], begin


def survive(ranks, folder, victim, point, count, delay, undisturbed):
    """One killing; the survivors' outcomes, and from which step the restart went on."""
    outcomes = ranks.outcomes(
        train, str(folder), victim, point, count, delay, size=SIZE, lost=[victim]
    )
    ranks.close()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "stopped", outcome
            assert outcome[1] == "PeerFailure", outcome
            assert f"rank {victim}" in outcome[2] or f"ranks [{victim}]" in outcome[2], outcome
            assert outcome[3] < PATIENCE.total_seconds(), outcome
    again = ranks.run(train, str(folder), -1, None, -1, 0, size=SIZE)
    assert [each[:3] for each in again] == [each[:3] for each in undisturbed]
    return outcomes, again[0][3]


@pytest.mark.parametrize(
    "point", ["before it sends", "after it has sent a part", "as the mean arrives"]
)
def test_a_rank_that_is_killed_is_named_and_a_restart_has_the_same_weights(mortal, tmp_path, point):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = mortal.run(train, str(tmp_path / "undisturbed"), -1, None, -1, 0, size=SIZE)
    assert len({each[1] for each in undisturbed}) == 1
    (tmp_path / "killed").mkdir()
    _, begin = survive(mortal, tmp_path / "killed", 1, point, 8, 0, undisturbed)
    assert 0 < begin < STEPS
