"""No bit that changes between two ranks is taken for a number: its sender is named, nobody hangs,
no two ranks go on apart.

Bits are changed on arrival, where one rank alone can see it: below the transport, in the stream of
a connection, or above it.
"""

import ast
import random
import time
import warnings
import zlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
import sources
from commpress.codecs import policy_of
from commpress.codecs.family import NAMES
from commpress.collectives.agreement import gathered
from commpress.collectives.all_to_all.all_to_all import Way, compressed_all_to_all
from commpress.collectives.allreduce import Call, Workspace, compressed_allreduce
from commpress.collectives.frame import HEADER, rows_of
from commpress.collectives.reduce_scatter import Part, deals, gather_rows, reduce_rows
from commpress.collectives.topology import Topology, agree
from commpress.collectives.transports import sockets
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.transports.transport import part_of
from commpress.collectives.two_level import hierarchy_of
from commpress.errors import CommunicationError, Corrupted
from one_reduction import hierarchical_allreduce
from ranks import meet
from recorded import Recorded

WIDTH = 24

# -------------------------------------------------------------- above the transport, in one process


class Flipping(Recorded):
    """Changes one bit of the row that comes from ``sender``, in the ``nth`` exchange."""

    def __init__(self, inner, *, sender, nth, place, bit, flips):
        super().__init__(inner)
        self.sender, self.nth, self.place, self.bit, self.flips = sender, nth, place, bit, flips

    def all_to_all(self, out, inp, tag):
        return self._spoilt(self.inner.all_to_all(out, inp, tag), rows_of(out))

    def all_gather(self, out, inp, tag):
        return self._spoilt(self.inner.all_gather(out, inp, tag), rows_of(out))

    def exchange(self, out, inp, wanted, tag):
        return self._spoilt(self.inner.exchange(out, inp, wanted, tag), out)

    def subset(self, ranks):
        """Of the same ranks' rows: a flip is counted in each part by itself."""
        part = part_of(self.inner, ranks)
        if part is None or self.sender not in ranks:
            return part
        sender = sorted(ranks).index(self.sender)
        return Flipping(
            part, sender=sender, nth=self.nth, place=self.place, bit=self.bit, flips=self.flips
        )

    def _spoilt(self, work, rows):
        self.nth -= 1
        return (
            _Spoilt(self, work, rows) if self.nth == -1 and self.sender in rows.payloads else work
        )


class _Spoilt:
    def __init__(self, flipping, work, rows):
        self.flipping, self.work, self.rows = flipping, work, rows

    def wait(self):
        self.work.wait()
        flipping, payload = self.flipping, self.rows.payloads[self.flipping.sender]
        place = (
            int(flipping.place * (HEADER + payload.numel()))
            if isinstance(flipping.place, float)
            else flipping.place
        )
        row, at = (
            (self.rows.headers[flipping.sender], place)
            if place < HEADER
            else (payload, place - HEADER)
        )
        row[at] ^= 1 << flipping.bit
        flipping.flips.append(place)


def averaged(codec, transport):
    return compressed_allreduce(torch.arange(300.0), codec=codec, transport=transport)


def averaged_in_two_levels(transport):
    hierarchy = hierarchy_of(Topology(((0, 1), (2,))), transport)
    return hierarchical_allreduce(torch.arange(300.0), codec="int8", hierarchy=hierarchy)


def exchanged(codec, nodes, transport):
    inp = torch.arange(3.0 * WIDTH).view(3, WIDTH)
    way = Way(nodes)
    return compressed_all_to_all(
        torch.empty_like(inp), inp, codec=codec, transport=transport, way=way
    )


def sharded_and_gathered(hop, transport):
    """Do with a gradient and with weights as ``compress_fsdp`` does."""
    ranks, row = transport.size, torch.arange(100.0)
    plan = deals(
        [Part("w", 0, 100, 300)], policy_of("int8", min_numel=0), rank=transport.rank, ranks=ranks
    )
    call = Call(transport, Workspace())
    if hop == "scatter":
        yield from reduce_rows(torch.arange(300.0), row, [None] * len(plan), plan, call)
    else:
        yield from gather_rows(row, torch.empty(300), plan, call)


STEPS = {
    **{f"all-reduce, {name}": partial(averaged, name) for name in NAMES if name != "none"},
    "all-reduce, exact": partial(averaged, "none"),
    "two levels": averaged_in_two_levels,
    "reduce-scatter": partial(sharded_and_gathered, "scatter"),
    "all-gather of weights": partial(sharded_and_gathered, "gather"),
    "scalars": lambda transport: gathered([1.0, 2.0], transport=transport, sequence=0),
    "topology": lambda transport: agree(transport, Topology(((0, 1), (2,)))),
    "all-to-all": partial(exchanged, "none", None),
    "all-to-all, int8": partial(exchanged, "int8", None),
    "all-to-all by way of nodes": partial(exchanged, "int8", [[0, 1], [2]]),
}
# every field of the header, and the payload
PLACES = [0, 2, 3, 4, 5, 6, 20, 33, 41, 45, 50, 57, 61, HEADER, 0.6, 0.9999]


@pytest.mark.parametrize("path", STEPS)
def test_a_changed_bit_is_named_by_whom_it_comes_from(path):
    """On every path: in every exchange, in every field of the header and in the payload, a random
    bit."""
    chance, trials = random.Random(path), 0
    for nth in range(4):
        for place in PLACES:
            transports, flips = Loopback(3).transports(), []
            spoilt = Flipping(
                transports[0], sender=1, nth=nth, place=place, bit=chance.randrange(8), flips=flips
            )
            error = None
            try:
                simulate([STEPS[path](t) for t in (spoilt, *transports[1:])])
            except Corrupted as caught:
                error = caught
            assert (error is not None) == bool(flips), (nth, place)
            if error is not None:
                assert error.ranks == (1,), (nth, place, error)
                trials += 1
    assert trials >= len(PLACES)


def test_nothing_goes_over_a_transport_but_stamped_and_checked():
    """``exchange`` does both for rows of one length, ``Executor`` and the hand-over for others;
    nobody else calls one."""
    transports = {
        f"collectives/transports/{name}.py" for name in ("loopback", "transport", "mpi", "staged")
    }
    wrappers = transports | {
        "collectives/channel.py",  # counts what passes
        "collectives/all_to_all/executor.py",
        "collectives/handover.py",
    }
    # times bare transports; counts sizes, sends nothing
    others = {"commpress/cli/probe.py", "commpress/plan/local_ways.py"}
    found = set()
    for path in sources.files():
        if path.suffix != ".py":
            continue
        tree = ast.parse((sources.ROOT / path).read_text())
        if path.as_posix() == "collectives/allreduce.py":
            tree.body = [node for node in tree.body if getattr(node, "name", "") != "exchange"]
        for node in ast.walk(tree):
            names = ("all_to_all", "all_gather", "exchange")
            if isinstance(node, ast.Attribute) and node.attr in names:
                whose = (
                    node.value.id
                    if isinstance(node.value, ast.Name)
                    else getattr(node.value, "attr", "")
                )
                if whose in ("transport", "inner", "inside", "link", "between"):
                    found.add(path.as_posix())
    assert found - others == wrappers & found
    assert "collectives/all_to_all/executor.py" in found


# --------------------------------------------------------------- below the transport, on real ranks


class Tape:
    """Bytes that rank 0 has received of rank 1, over all connections of ours; one bit of it is
    changed."""

    def __init__(self):
        self.seen, self.at, self.bit = 0, -1, 0

    def play(self, room, count):
        if self.seen <= self.at < self.seen + count:
            room[self.at - self.seen] ^= 1 << self.bit
        self.seen += count


class SpoiltSocket:
    def __init__(self, inner, tape):
        self.inner, self.tape = inner, tape

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def recv_into(self, room):
        count = self.inner.recv_into(room)
        self.tape.play(room, count)
        return count


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def backward(model, step):
    model(torch.full((2, WIDTH), 1.0 + dist.get_rank() + step)).square().sum().backward()


def trained(model, optimizer):
    def step(number):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    return step


def hook(**options):
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    commpress.compress(ddp, min_numel=8, **options)
    return trained(ddp, torch.optim.SGD(ddp.parameters(), lr=1e-3))


def sharded():
    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    commpress.compress_fsdp(model, "int8", "int8", min_numel=0)
    step = trained(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return lambda number: [p.to_local() for p in step(number)]


def older():
    """FSDP1 with whole weights on every rank: others would wait for torch's own gather, until the
    rank that failed ends."""
    options = {
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about this class
        model = FullyShardedDataParallel(net(), **options)
    model.register_comm_hook(
        commpress.FlatShardState("int8"), commpress.compressed_reduce_scatter_hook
    )
    return trained(model, torch.optim.SGD(model.parameters(), lr=1e-3))


def optimized(kind, **options):
    model = net()
    return trained(model, kind(model.parameters(), lr=1e-3, **options))


def dispatched():
    exchange = commpress.AllToAll("int8", topology=Topology(((0, 1), (2,))))
    return lambda number: [exchange(torch.full((3, WIDTH), 1.0 + dist.get_rank() + number))]


PATHS = {
    "hook": partial(hook, codec="sign"),
    "hook, two levels": partial(hook, codec="int8", topology=Topology(((0, 1), (2,)))),
    "FSDP2": sharded,
    "FSDP1": older,
    "1-bit Adam": partial(optimized, commpress.OneBitAdam, exact_steps=1),
    "ZeRO": partial(optimized, commpress.Partitioned, optimizer=torch.optim.AdamW),
    "all-to-all by way of nodes": dispatched,
}
ENVELOPE = 24
FIELDS = [2, 9, 15, 20, ENVELOPE + 1, ENVELOPE + 4, ENVELOPE + 40, ENVELOPE + 62, ENVELOPE + HEADER]


def digest(tensors):
    return [zlib.crc32(t.contiguous().view(-1).numpy().tobytes()) for t in tensors]


def take(step, first, count):
    """Everything that each step left, until one failed."""
    left = []
    try:
        for number in range(first, first + count):
            left.append(digest(step(number)))
    except CommunicationError as error:
        return left, error
    return left, None


def spoil(names, trials, seed):
    """Rank 0 gets a changed bit from rank 1, in one trial after the other."""
    tape, engine, chance = Tape(), sockets.SocketEngine, random.Random(seed)
    if dist.get_rank() == 0:
        sockets.SocketEngine = lambda all_: engine(
            {r: SpoiltSocket(c, tape) if r == 1 else c for r, c in all_.items()}
        )
    store = dist.distributed_c10d._get_default_store()
    found, meetings, held = {}, 0, []

    def together():
        nonlocal meetings
        meetings += 1
        meet(f"spoil {meetings}", dist.get_world_size())

    try:
        for name in names:
            good, length = None, 0
            for trial in range(trials[name] + 1):
                step = PATHS[name]()
                take(step, 0, 2)
                together()
                start = tape.seen
                bit, place = chance.randrange(8), chance.random()
                if trial:
                    field = trial <= len(FIELDS) < trials[name]
                    tape.bit, tape.at = (
                        bit,
                        start + (FIELDS[trial - 1] if field else int(place * length)),
                    )
                begin = time.monotonic()
                left, error = take(step, 2, 3)
                seconds, tape.at = time.monotonic() - begin, -1
                if trial:
                    found[name, trial] = left == good[: len(left)], error, seconds
                else:
                    good, error = left, error
                    assert error is None, error
                    if dist.get_rank() == 0:
                        store.set(f"length of {name}", str((tape.seen - start) // 3))
                    together()
                    length = int(store.get(f"length of {name}"))
                held.append(step)  # a DDP model may hang where it ends amid others
                together()
    finally:
        sockets.SocketEngine = engine
    return found


def assert_all_end(results, *, seconds=30):
    """Rank 0 names rank 1, the others end too, soon, and nobody has taken a step with other
    numbers."""
    for rank, found in enumerate(results):
        for trial, (right, error, lasted) in found.items():
            assert right, (trial, rank)
            assert isinstance(error, CommunicationError), (trial, rank, error)
            assert lasted < seconds, (trial, rank, lasted, error)
            if rank == 0:
                assert type(error) is Corrupted, (trial, error)
                # found out while it waited for rank 2 alone
                part = trial[0] == "hook, two levels" and not error.ranks
                assert error.ranks == (1,) or part, (trial, error)
            else:
                words = "rank 0 gave up: " in str(error)
                assert words or (rank == 1 and "rank 0 closed its connection" in str(error)), (
                    trial,
                    rank,
                    error,
                )


def test_a_changed_bit_of_any_field_ends_training_on_all_ranks(pool):
    """Of the envelope, of the header, of the payload."""
    assert_all_end(pool.run(spoil, ["hook"], {"hook": len(FIELDS) + 6}, 1, size=3))


def test_a_changed_bit_ends_training_on_every_path(pool):
    names = [name for name in PATHS if name != "hook"]  # each with one bit, anywhere in a step
    results = pool.run(spoil, names, dict.fromkeys(names, 1), 2, size=3)
    assert len(results[0]) == len(names)
    assert_all_end(results)
