"""All-to-all by every route: the flat permutation bit for bit, exact or compressed, over simulated
ranks and over Gloo."""

from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import BlockCodec, codec_named
from commpress.collectives.all_to_all.all_to_all import Way, all_to_all, compressed_all_to_all
from commpress.collectives.frame import HEADER
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import CommunicationError, InvalidArgument, Mismatch
from commpress.kernels import reference
from commpress.work import run
from recorded import Recorded
from variants import few
from ways import WAYS, transport_by

PATIENT = timedelta(seconds=60)
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
CODECS = ["int8", "int4", "fp8", "bf16", "fp16"]


def splits_of(size, seed, top=6):
    """Rows from each rank to each rank; some ranks send or get nothing."""
    counts = np.random.default_rng(seed).integers(0, top, (size, size))
    counts[seed % size, :] = 0
    counts[:, (seed // 3) % size] //= 3
    return counts


def rows_of(counts, rank, width, dtype=torch.float32):
    numel = int(counts[rank].sum()) * width
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 3
    return values.to(dtype).view(-1, width)


def expected(counts, rank, width, dtype=torch.float32):
    """The flat permutation, worked out without the code under test."""
    parts = []
    for source in range(len(counts)):
        start = int(counts[source, :rank].sum())
        parts.append(
            rows_of(counts, source, width, dtype)[start : start + int(counts[source, rank])]
        )
    return torch.cat(parts)


def exchanged(counts, width, transport, way, codec=None, dtype=torch.float32, sequence=0):
    """Steps of one rank; the rows it received."""
    rank = transport.rank
    inp = rows_of(counts, rank, width, dtype)
    out = torch.full((int(counts[:, rank].sum()), width), 77.0).to(dtype)
    splits = {"out_splits": counts[:, rank].tolist(), "in_splits": counts[rank].tolist()}
    if codec is None:
        yield from all_to_all(out, inp, transport=transport, way=way, sequence=sequence, **splits)
    else:
        yield from compressed_all_to_all(
            out, inp, codec=codec, transport=transport, way=way, sequence=sequence, **splits
        )
    return out


def simulated(counts, width, way, codec=None, dtype=torch.float32, transports=None):
    transports = transports or Loopback(len(counts)).transports()
    return simulate([exchanged(counts, width, t, way, codec, dtype) for t in transports])


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@st.composite
def nodes(draw, most=9):
    """Ranks dealt out to nodes of any size."""
    size = draw(st.integers(1, most))
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=4)) | {0, size})
    return [list(order[a:b]) for a, b in pairwise(cuts)]


# ---------------------------------------------------------------- exact


@settings(max_examples=80, deadline=None)
@given(
    nodes=nodes(),
    seed=st.integers(0, 999),
    width=st.integers(1, 5),
    flat=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_every_route_is_the_flat_permutation(nodes, seed, width, flat, dtype):
    size = sum(map(len, nodes))
    counts = splits_of(size, seed)
    way = Way() if flat else Way(nodes)
    for rank, out in enumerate(simulated(counts, width, way, dtype=dtype)):
        assert torch.equal(out, expected(counts, rank, width, dtype))


@settings(max_examples=40, deadline=None)
@given(nodes=nodes(), rows=st.integers(0, 3))
def test_even_blocks_need_no_lengths(nodes, rows):
    """x[source, destination] = source · P + destination, and twice is the identity."""
    size = sum(map(len, nodes))
    transports = [Recorded(t) for t in Loopback(size).transports()]
    inputs = [torch.arange(r * size, (r + 1) * size).repeat_interleave(rows) for r in range(size)]
    way = Way(nodes)

    def twice(rank):
        once, back = torch.empty_like(inputs[rank]), torch.empty_like(inputs[rank])
        yield from all_to_all(once, inputs[rank], transport=transports[rank], way=way)
        yield from all_to_all(back, once, transport=transports[rank], way=way, sequence=1)
        return once, back

    for rank, (once, back) in enumerate(simulate([twice(r) for r in range(size)])):
        assert once.tolist() == [s * size + rank for s in range(size) for _ in range(rows)]
        assert torch.equal(back, inputs[rank])
        # two calls, inside and between nodes: no lengths
        assert len(transports[rank].operations) == 4


@pytest.mark.parametrize(
    ("sizes", "flat", "between"), [([4, 4], True, 32), ([3, 5], False, 8), ([2] * 4, False, 24)]
)
def test_messages_between_nodes(sizes, flat, between):
    """g·h messages between two nodes flat; h with the sender's members as one. The same bytes."""
    edges = np.cumsum([0, *sizes])
    nodes = [list(range(a, b)) for a, b in pairwise(edges.tolist())]
    home = {r: i for i, node in enumerate(nodes) for r in node}
    counts = splits_of(len(home), 5) + 1
    transports = [Recorded(t) for t in Loopback(len(home)).transports()]
    simulated(counts, 3, Way() if flat else Way(nodes), transports=transports)
    abroad = [(t, r) for t in transports for r in home if home[t.rank] != home[r]]
    assert sum(t.messages_to[r] for t, r in abroad) == between
    if len(set(sizes)) == 1:  # members take turns
        each = [sum(t.messages_to[r] for s, r in abroad if s is t) for t in transports]
        assert set(each) == {between // len(home)}
    payload = sum(int(counts[a, b]) * 12 for a in home for b in home if home[a] != home[b])
    assert sum(t.bytes_to[r] for t, r in abroad) == payload + between * HEADER


# ---------------------------------------------------------------- compressed


def through(codec, block):
    """The reference's decoding of one block of float32."""
    if codec.spec in CASTS:
        return block.to(CASTS[codec.spec]).float()
    flat = block.reshape(-1).numpy()
    width = -(-len(flat) // 8) * 8
    row = reference.encode_row(flat, codec.kind, width, codec.block)
    return torch.from_numpy(
        reference.decode_row(row, codec.kind, len(flat), width, codec.block)
    ).view(block.shape)


@pytest.mark.parametrize(
    "codec", [*map(codec_named, CODECS), BlockCodec("int8", 16)], ids=lambda c: c.spec
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_block_is_encoded_by_itself(codec, dtype):
    size, width = 4, 37
    counts = splits_of(size, 3, top=20)
    for rank, out in enumerate(simulated(counts, width, Way(), codec, dtype)):
        exact = expected(counts, rank, width, dtype)
        parts = [
            through(codec, part.float())
            for part in exact.split(counts[:, rank].tolist())
            if len(part)
        ]
        assert torch.equal(bits(out), bits(torch.cat(parts).to(dtype)))


@settings(max_examples=40, deadline=None)
@given(
    nodes=nodes(),
    seed=st.integers(0, 999),
    codec=st.sampled_from(CODECS),
)
def test_compressed_by_way_of_nodes_equals_compressed_flat(nodes, seed, codec):
    counts = splits_of(sum(map(len, nodes)), seed)
    ways = simulated(counts, 19, Way(nodes), codec), simulated(counts, 19, Way(), codec)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*ways, strict=True))


@pytest.mark.parametrize("codec", ["int8", "bf16", "none"])
def test_what_is_not_finite_spoils_its_block_and_no_more(codec):
    for bad in (float("nan"), float("inf")):
        inputs = [torch.ones(4, 256), torch.ones(4, 256)]
        inputs[0][2, 5] = bad  # rank 0 to rank 1, first row of two; a block is one row
        outs = [torch.empty(4, 256) for _ in inputs]
        ranks = zip(outs, inputs, Loopback(2).transports(), strict=True)
        simulate([compressed_all_to_all(o, i, codec=codec, transport=t) for o, i, t in ranks])
        assert not torch.isfinite(outs[1][0, 5])
        assert torch.equal(torch.cat([outs[0], outs[1][1:]]), torch.ones(7, 256))


def test_bytes_on_the_wire():
    counts = np.full((4, 4), 8)
    transports = [Recorded(t) for t in Loopback(4).transports()]
    simulated(counts, 256, Way(), "int8", transports=transports)
    assert [t.sent_bytes for t in transports] == [3 * (HEADER + 8 * (256 + 4))] * 4


# ---------------------------------------------------------------- real ranks


def real(counts, ways, codecs, by):
    return all_ways(counts, ways, codecs, transport_by(by, PATIENT))


def all_ways(counts, ways, codecs, transport):
    """Tensors that one rank receives, by each way and codec."""
    ask = [(Way(*way), codec) for way in ways for codec in codecs]
    return [
        run(exchanged(counts, 70, transport, w, c, sequence=i)).numpy()
        for i, (w, c) in enumerate(ask)
    ]


def equals_the_simulation(received, size):
    """``received(counts, ways, codecs)``: what ``all_ways`` gives on every rank, bit for bit that
    of a simulation."""
    counts, codecs = splits_of(size, 11, top=300), [None, "int8", "bf16", "fp8"]
    nodes = [[0, size - 1], [r for r in range(1, size - 1)]]
    ways = [(), (nodes,)]
    twins = {c: simulated(counts, 70, Way(), c) for c in codecs}
    for rank, results in enumerate(received(counts, ways, codecs)):
        for result, codec in zip(results, codecs * len(ways), strict=True):
            np.testing.assert_array_equal(
                result.view(np.uint32), twins[codec][rank].numpy().view(np.uint32)
            )


@pytest.mark.parametrize(("by", "size"), few(WAYS, [2, 3, 4]))
def test_real_ranks_equal_the_simulation(pool, size, by):
    equals_the_simulation(lambda *ask: pool.run(real, *ask, by, size=size), size)


# ---------------------------------------------------------------- disagreement


def disagree(by, mine):
    """Rank 1 differs from the others in one argument."""
    transport = transport_by(by, timedelta(seconds=20))
    rank, size = transport.rank, transport.size
    counts = np.full((size, size), 4)
    ask = {"width": 8, "way": (), "codec": None, "sequence": 1} | (mine if rank == 1 else {})
    run(exchanged(counts, 8, transport, Way()))
    if "splits" in ask:
        counts = ask.pop("splits")
    ask["way"] = Way(*ask["way"])
    try:
        run(exchanged(counts, transport=transport, **ask))
    except CommunicationError as error:
        dist.barrier()
        return [error]
    raise AssertionError("nothing was raised")


UNEQUAL = np.array([[4, 5], [4, 4]])
DISAGREEMENTS = {
    "splits": ({"splits": UNEQUAL}, "160 bytes"),
    "codec": ({"codec": "int8"}, "'int8/256'"),
    "route": ({"way": ([[0, 1]],)}, "lengths of an all_to_all"),
}


@pytest.mark.parametrize(("by", "what"), few(WAYS, DISAGREEMENTS))
def test_disagreement_is_named_on_both_sides(pool, what, by):
    mine, says = DISAGREEMENTS[what]
    for rank, (error,) in enumerate(pool.run(disagree, by, mine)):
        assert type(error) is Mismatch, error
        assert error.ranks == (1 - rank,)
        assert (says if rank == 0 else "128 bytes") in str(error).split(", but it sent ")[1], error


def test_blocks_divided_otherwise_are_noticed_although_the_sum_is_right():
    """Ranks 0 and 1 forward to rank 2 five rows: 2 + 3 for them, 3 + 2 for it."""
    told, believed = np.full((3, 3), 1), np.full((3, 3), 1)
    told[:2, 2], believed[:2, 2] = (2, 3), (3, 2)
    transports = Loopback(3).transports()
    way = Way([[0, 1], [2]])
    with pytest.raises(Mismatch, match="rank 2 expected rank 0 to send"):
        simulate([exchanged(believed if t.rank == 2 else told, 2, t, way) for t in transports])


# ---------------------------------------------------------------- arguments

GOOD, TURNED = torch.ones(4, 2), torch.ones(2, 4).t()


@pytest.mark.parametrize(
    ("out", "inp", "options", "says"),
    [
        (GOOD, TURNED, {}, "inp of shape .* is not contiguous rows"),
        (torch.ones(3, 2), GOOD, {}, "out has 3 rows, which 2 ranks cannot share evenly"),
        (GOOD, GOOD, {"in_splits": [1, 2]}, r"inp are \[1, 2\], expected 2 lengths that add up"),
        (GOOD, GOOD, {"out_splits": [5, -1]}, "splits of out"),
        (GOOD, GOOD, {"out_splits": [1, 3]}, "rank 0 sends itself 2 rows and expects 1"),
        (GOOD.double(), GOOD, {}, "expected the same dtype, device and shape"),
        (GOOD, GOOD, {"way": Way([[0], [0, 1]])}, "every rank from 0 to 1 in exactly one node"),
        (GOOD.double(), GOOD.double(), {"codec": "int8"}, "inp has dtype torch.float64, expected"),
        (GOOD, GOOD, {"codec": "sign"}, "codec is 'sign/rms/2048', expected int8, int4, fp8"),
    ],
)
def test_what_cannot_work_is_refused(out, inp, options, says):
    call = compressed_all_to_all if "codec" in options else all_to_all
    with pytest.raises(InvalidArgument, match=says):
        run(call(out.clone(), inp, transport=Loopback(2).transport(0), **options))
