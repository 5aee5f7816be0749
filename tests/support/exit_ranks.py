"""Ranks in forked interpreters that train a DDP model and end right after a collective. Prints how
each run ended.

    exit_ranks.py WHAT RUNS     WHAT: plain, hook, optimizer, backend

The C++ reducer of a DDP model that is freed after its process group was destroyed may be the
group's last owner: it then waits for Gloo's threads while it holds the interpreter's lock, for
which one of them waits to let go of a collective's tensors. Whether one does is a matter of luck,
which is helped here: with torch's DDP alone these ranks hang. A second model lives until the
interpreter ends.
"""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.transports.loopback import Loopback
from commpress.work import run

kept = []  # models, until the interpreter ends
SECONDS = 120  # after which a rank that should have ended hangs


def train(what, group=None):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(model, process_group=group)
    if what == "hook":
        commpress.compress(ddp)
    if what == "optimizer":
        commpress.overlap(
            ddp, commpress.OneBitAdam(model.parameters(), exact_steps=2, process_group=group)
        )
    for _ in range(3):
        ddp(torch.randn(8, 64)).sum().backward()
    return ddp


def free_after_its_group(what):
    group = dist.new_group([0, 1])
    ddp = train(what, group)
    dist.barrier(group=group)
    before, cores = sys.getswitchinterval(), os.sched_getaffinity(0)
    hold_gloo(group)
    dist.destroy_process_group(group)
    del group  # before the model, which is its last owner then
    del ddp
    gc.collect()
    os.sched_setaffinity(0, cores)
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread, cores)
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    sys.setswitchinterval(before)


def hold_gloo(group):
    """A thread of Gloo is about to let go of the tensors of a collective, and comes to it where
    this one waits."""
    others = [int(thread) for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()]
    core = {min(os.sched_getaffinity(0))}
    sys.setswitchinterval(SECONDS)
    dist.all_gather(
        [torch.empty(64, 64) for _ in range(2)], torch.ones(64, 64), group=group, async_op=True
    )
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:  # not sleep(), which gives the lock away
        pass
    os.sched_setaffinity(0, core)
    for thread in others:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, core)
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def rank_of(what, rank, file):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if what == "backend":
        import commpress.backend  # noqa: F401
    name = "commpress" if what == "backend" else "gloo"
    dist.init_process_group(name, init_method=f"file://{file}", rank=rank, world_size=2)
    if hasattr(os, "SCHED_IDLE"):  # Linux
        free_after_its_group(what)
    kept.append(train(what))
    dist.all_gather([torch.empty(64, 64) for _ in range(2)], torch.ones(64, 64))
    dist.destroy_process_group()


def ended(children):
    """The end of each process: its exit status, or that it hangs."""
    deadline, statuses = time.monotonic() + SECONDS, {}
    while len(statuses) < len(children):
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = "well" if status == 0 else f"status {status}"
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                statuses[child] = "hangs"
        time.sleep(0.01)
    return max(
        statuses.values(),
        key=lambda how: ("well", "hangs").index(how) if how in ("well", "hangs") else 2,
    )


def main(what, runs):
    torch.set_num_threads(1)
    # compile before the fork
    run(compressed_allreduce(torch.ones(8320), codec="sign", transport=Loopback(1).transport(0)))
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(2):
                sys.stdout.flush()
                child = os.fork()
                if child == 0:
                    rank_of(what, rank, folder + "/meeting")
                    sys.exit(0)
                children.append(child)
            print(what, ended(children), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
