"""Publishers and copies that die at any byte: what can be had is whole, and the next one goes
on."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from commpress.integrations.weights import places, publisher
from commpress.integrations.weights.version_log import read_head
from commpress.weights import Publisher, Receiver, WeightServer, pull, verify
from ranks import FORKS


def at(version):
    """Each version is a function of its number alone, so that whoever restarts knows the next
    one."""
    draws = torch.Generator().manual_seed(0)
    value = torch.randn(3000, generator=draws).bfloat16()
    which = torch.randint(0, 3000, (version,), generator=draws)
    return value.index_add_(0, which, torch.full((version,), 2.0**-7).bfloat16())


def right(weights, version):
    return torch.equal(weights["w"].view(torch.int16), at(version).view(torch.int16))


class Dying(places.FolderPlace):
    """Ends the process, as SIGKILL does, at one of its operations or in the middle of what it
    writes."""

    left = 0

    def _next(self, path=None, content=b""):
        type(self).left -= 1
        if not self.left:
            if path is not None:
                Path(path).write_bytes(content[: len(content) // 2])
            os._exit(9)

    def write(self, name, chunks, *, anew=False):
        content = b"".join(chunks)
        self._next(self._path / f"{name}.dead.part", content)
        super().write(name, [content], anew=anew)
        self._next()

    def remove(self, name):
        self._next()
        super().remove(name)


def publish(folder, versions, operation=0):
    torch.set_num_threads(1)
    if operation:
        Dying.left = operation
        publisher.stored_place = Dying
    live = {"w": at(1)}
    with Publisher(live, folder, anchor_every=3, keep=2) as published:
        for _ in range(versions):
            live["w"].copy_(at(published.version + 1))
            published.publish(wait=published.version % 2 == 0)
            published.wait()


def copy(source, folder, operation=0):
    torch.set_num_threads(1)
    if operation:
        Dying.left = operation
        from commpress.integrations.weights import mirror

        mirror.FolderPlace = Dying
    pull(source, folder)


def process(function, *args):
    started = FORKS.Process(target=function, args=args, daemon=True)
    started.start()
    return started


def sound(folder, reader):
    """Every version that can be had is whole, and a reader and one that comes late get it."""
    found = verify(folder)
    late = Receiver(folder)
    for each in (reader, late) if reader else (late,):
        if each.prepare() is not None:
            each.install()
        assert each.version == (found[-1].version if found else 0)
        assert not each.version or right(each.weights, each.version)
    return late.version


def campaign(folder, kills):
    """Publishers that end at operation 1, 2, 3 … of theirs."""
    reader = Receiver(folder) if Path(folder).is_dir() else None
    version, died = 0, 0
    for operation in kills:
        ended = process(publish, str(folder), 4, operation)
        ended.join()
        died += ended.exitcode == 9
        now = sound(folder, reader)
        assert now >= version
        version = now
    return version, died


def test_a_publisher_that_dies_at_any_operation_leaves_whole_versions(tmp_path):
    (tmp_path / "run").mkdir()
    version, died = campaign(tmp_path / "run", range(1, 41, 4))
    assert died >= 8
    assert version > 5
    publish(str(tmp_path / "run"), 1)
    assert not list((tmp_path / "run").glob("*.part"))


def test_a_copy_that_dies_at_any_operation_leaves_whole_versions(tmp_path):
    run, place = tmp_path / "run", tmp_path / "copy"
    place.mkdir()
    died = 0
    for operation in range(1, 21, 2):
        publish(str(run), 2)
        ended = process(copy, str(run), str(place), operation)
        ended.join()
        died += ended.exitcode == 9
        sound(place, None)
    assert died >= 6
    pull(run, place)
    assert sound(place, None) == sound(run, None)


def forever(folder):
    publish(folder, 1 << 30)


def copies(source, folder):
    torch.set_num_threads(1)
    while True:
        pull(source, folder)


def head_of(folder):
    return read_head(places.FolderPlace(folder)).newest


def wait_for(holds):
    for _ in range(10_000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("nothing was published")


def killed(tmp_path, times):
    """SIGKILL at random moments: publishers, and copies that read from them over HTTP."""
    run, place, draws = tmp_path / "run", tmp_path / "copy", random.Random(0)
    publish(str(run), 1)
    server, reader, versions = WeightServer(run), Receiver(run), []
    for i in range(times):
        victims = [process(forever, str(run)), process(copies, server.url, str(place))]
        if i % 2:  # not before a version was published
            wait_for(lambda: head_of(run) > versions[-1])
        time.sleep(draws.uniform(0.0, 0.3))
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
        versions.append(sound(run, reader))
        if (place / "head").exists():
            assert sound(place, None) <= versions[-1]
        assert versions == sorted(versions), i
    server.close()
    return versions


def test_processes_killed_at_random_moments_leave_whole_versions(tmp_path):
    versions = killed(tmp_path, 5)
    assert versions[-1] > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_six_hundred_kills_leave_whole_versions(tmp_path):
    for name in ("run", "random"):
        (tmp_path / name).mkdir()
    killed(tmp_path / "random", 250)  # a publisher and a copy each time
    for _ in range(2):
        campaign(tmp_path / "run", range(1, 51))
