"""One rank of a Llama on 2 × 2 × 2 hosts, trained in several ways: bytes that left its interface
for each peer.

The kernel counts them (nftables): packets as they are handed to the interface, headers of TCP and
IP and acknowledgements included. Rank 0 writes what all have found.
"""

import json
import os
import subprocess
import sys
import warnings
import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import commpress
from commpress.cli.hosts import SUBNET
from test_mesh_models import Stage, llama, own

WAYS = {  # dims of compress; None: torch alone
    "torch": None,
    "none": {"dp": "none", "pp": "none"},
    "dp": {"dp": "sign", "pp": "none"},
    "pp": {"dp": "none", "pp": "int4"},
    "both": {"dp": "int4", "pp": "int4"},
}
STEPS, ROWS, LENGTH, VOCABULARY, WIDTH = 2, 4, 64, 512, 256
TABLE = "inet bytes"


def count(ranks):
    """Begin to count what leaves for each address."""
    rules = [
        f"add table {TABLE}",
        f"add chain {TABLE} out {{ type filter hook output priority 0 ; }}",
    ]
    rules += [f"add rule {TABLE} out ip daddr {SUBNET}{peer + 1} counter" for peer in range(ranks)]
    subprocess.run(["nft", "-f", "-"], input="\n".join(rules) + "\n", text=True, check=True)


def counted():
    said = subprocess.run(
        ["nft", "-j", "list", "table", *TABLE.split()],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    rules = [entry["rule"]["expr"] for entry in json.loads(said)["nftables"] if "rule" in entry]
    return [expr["counter"]["bytes"] for rule in rules for expr in rule if "counter" in expr]


def train(mesh, kind, dims):
    """Bytes for each peer in a step; those of our counters, by dimension; and what this rank's
    weights are."""
    last = mesh["pp"].get_local_rank() == 1
    part = Stage(llama(mesh, layers=2, width=WIDTH, vocabulary=VOCABULARY, length=LENGTH), last)
    if kind == "fsdp":
        for module in (*part.layers, part):
            fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(part, int(last), 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(
        stage,
        2,
        loss_fn=lambda y, ids: torch.nn.functional.cross_entropy(y.flatten(0, 1), ids.flatten()),
    )
    states = None if dims is None else commpress.compress(schedule, mesh=mesh, dims=dims)
    held = list(part.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1, foreach=False)
    for step in range(1 + STEPS):
        if step == 1:  # connections are made and settings compared in the first
            dist.barrier()
            before, ours = counted(), sent(kind, states)
            dist.barrier()
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        schedule.step(*(() if last else (ids,)), **({"target": ids, "losses": []} if last else {}))
        if states is not None:
            states.synchronize()
        elif kind == "plain":
            for p in held:
                dist.all_reduce(own(p.grad).div_(2), group=mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    bytes_of = [(after - first) / STEPS for first, after in zip(before, counted(), strict=True)]
    mine = {name: (after - ours[name]) / STEPS for name, after in sent(kind, states).items()}
    weights = zlib.crc32(b"".join(own(p).detach().numpy().tobytes() for p in held))
    return {"bytes": bytes_of, "counters": mine, "weights": weights}


def sent(kind, states):
    """Bytes that this rank has sent, as our counters say."""
    if states is None:
        return {}
    every = (
        [states["dp"].gradients, states["dp"].weights]
        if kind == "fsdp"
        else [states["dp"].counters]
    )
    return {"dp": sum(c.wire_bytes for c in every), "pp": states["pp"].counters.sent_bytes}


def main(path):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    count(size)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    found = {f"plain {way}": train(mesh, "plain", dims) for way, dims in WAYS.items()}
    found |= {f"fsdp {way}": train(mesh, "fsdp", WAYS[way]) for way in ("torch", "none", "both")}
    every = [None] * size
    dist.all_gather_object(every, found)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(every, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
