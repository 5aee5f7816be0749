"""Strangers who reach the network of a run: what they can do, and what not, as SECURITY.md says
it."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from commpress.collectives.transports.membership import contact_of, is_contact
from commpress.collectives.transports.run_key import VARIABLE
from commpress.errors import InvalidArgument
from ranks import caught
from test_reform import world

KEY = "the same in every process, and longer than 32 bytes"
SECONDS = timedelta(seconds=60)
WEIGHTS = torch.arange(8.0)


def begin(store, rank, size):
    dist.destroy_process_group()
    dist.init_process_group("commpress", store=store, rank=rank, world_size=size, timeout=SECONDS)
    return world()


def contacts_of(store):
    """Everything in a store by which somebody can join, for whoever looks."""
    found = []
    for key in store.list_keys():
        words = store.get(key).decode(errors="replace")
        if len(words.split(" ")) == 3 and is_contact(contact_of(words)):
            found.append(contact_of(words))
    return found


def between_strangers(folder, keyed):
    """Ranks 0 and 1 are a group; rank 2 knows the port of its store and nothing else."""
    rank, notes, done = dist.get_rank(), dist.FileStore(f"{folder}/notes", -1), Path(folder, "done")
    dist.barrier()
    if rank == 2:
        return as_a_stranger(notes, done)
    if keyed:
        os.environ[VARIABLE] = KEY
    port = 0 if rank == 0 else int(notes.get("port"))
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=SECONDS
    )
    notes.set("port", str(store.port))
    group, weights = begin(store, rank, 2), WEIGHTS.clone()
    notes.set("begun", "")
    while group.size() == 2:
        news = torch.tensor([float(group.waiting), float(done.exists())])
        dist.all_reduce(news)
        if news[1]:
            break
        if news[0]:
            group.reform(age=5)
            dist.broadcast(weights, 0)
        time.sleep(0.01)
    return group.size(), weights


def as_a_stranger(notes, done):
    notes.get("begun")
    store = dist.TCPStore(
        "127.0.0.1",
        int(notes.get("port")),
        is_master=False,
        wait_for_workers=False,
        timeout=SECONDS,
    )
    keys, found = store.list_keys(), contacts_of(store)
    group, weights = begin(dist.HashStore(), 0, 1), torch.full_like(WEIGHTS, 666.0)
    older = caught(group.reform, join=found[0], age=10**9)
    error = caught(group.reform, join=found[0])
    if error is None:
        dist.broadcast(weights, 0)
    done.touch()
    return older, error, weights, any("cpu" in key for key in keys)


def test_without_a_key_whoever_reads_the_store_joins_and_gets_the_weights_and_does_not_win_by_age(
    mortal, tmp_path
):
    one, two, (older, error, weights, _) = mortal.run(
        between_strangers, str(tmp_path), False, size=3
    )
    assert isinstance(older, InvalidArgument)
    assert "this group has trained for 1000000000 steps and the members for 5" in str(older)
    assert "give age=0" in str(older)
    assert error is None
    for seen in (one[1], two[1], weights):
        assert torch.equal(seen, WEIGHTS)
    assert one[0] == two[0] == 3


def test_with_a_key_whoever_reads_the_store_is_refused_at_the_door(mortal, tmp_path):
    """Gloo's addresses stand in that store too, and Gloo knows no key."""
    one, two, (older, error, weights, gloo) = mortal.run(
        between_strangers, str(tmp_path), True, size=3
    )
    for refusal in (older, error):
        assert isinstance(refusal, InvalidArgument)
        assert "not of one run" in str(refusal)
        assert VARIABLE in str(refusal)
    assert weights.eq(666.0).all(), "nothing has come"
    assert one[0] == two[0] == 2, "nobody has reformed"
    assert gloo


def listeners():
    """Hosts at which this process listens."""
    found = set()
    files = {
        os.readlink(each)
        for each in Path("/proc/self/fd").iterdir()
        if each.is_symlink() and os.path.lexists(each)
    }
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in files:
                words = bytes.fromhex(local.split(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found


def reform_and_look(folder):
    rank = dist.get_rank()
    group = begin(dist.FileStore(f"{folder}/store", 3), rank, 3)
    group.reform()
    dist.barrier()
    return group.contact.rpartition("#")[0].rpartition(":")[0], listeners()


def test_a_group_that_has_reformed_listens_at_the_address_of_its_doors_alone(mortal, tmp_path):
    """torch's stores listen everywhere; that of a reform does not."""
    for host, found in mortal.run(reform_and_look, str(tmp_path), size=3):
        assert found == {host}
        assert host not in ("0.0.0.0", "::")
