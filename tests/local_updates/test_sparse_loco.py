"""SparseLoCo: its codec and its outer step against their equations in float64, its bytes, and a
peer that is wild."""

import numpy as np
import pytest
import torch

from commpress.codecs import codec_named
from commpress.collectives import all_gather_mean
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import Average, SparseLoCo
from local_twin import RATE, Ranks, flat
from recorded import Recorded

CODEC = "topk-64+bits2"
SHAPES = [(90, 50), (5,), (7, 30), (300,)]  # a whole block and a short one


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def noise(size, step):
    return [drawn(1000 * (step + 1) + r) for r in range(size)]


def sparse(size=3, **options):
    return Ranks(
        size, start=drawn(0), **{"codec": CODEC, "outer": SparseLoCo(), "every": 2} | options
    )


def owed(local):
    """All that one rank owes is of what it sent: nobody reduces rows."""
    places = local.exchanges.residuals.places()
    assert not any(reduced.any() for *_, reduced in places)
    return flat([sent for _, sent, _ in places])


# ---------------------------------------------------------------- the codec


def blocks_of(x, kept=64, bits=2, block=4096):
    """Of each block: places, and what the values come back as, in float64."""
    for start in range(0, len(x), block):
        part = x[start : start + block]
        places = np.sort(np.argsort(-np.abs(part), kind="stable")[: -(-len(part) * kept // block)])
        values = part[places].astype(np.float64)
        if len(values) > 1 << bits:
            edges = values.mean() + 6 * values.std() / (1 << bits) * (
                np.arange(1, 1 << bits) - (1 << bits) / 2
            )
            codes = (values[:, None] >= edges).sum(1)
            values = np.array([values[codes == code].mean() for code in codes])
        yield start + places, values


def twin(x, **options):
    out = np.zeros(len(x))
    for places, values in blocks_of(x, **options):
        out[places] = values
    return out


@pytest.mark.parametrize("numel", [1, 7, 64, 65, 300, 4095, 4096, 4097, 9001])
@pytest.mark.parametrize(
    ("name", "kept", "bits"), [(CODEC, 64, 2), ("topk-2+bits4", 2048, 4), ("topk-4096+bits1", 1, 1)]
)
def test_the_codec_is_what_the_equations_say(name, kept, bits, numel):
    x = np.random.default_rng(numel).standard_t(3, numel).astype(np.float32)
    code = codec_named(name).arithmetic
    row = code.encode(torch.from_numpy(x))
    assert row.numel() <= code.row_bytes(-(-numel // 8) * 8)
    back = code.decode(row, numel).double().numpy()
    np.testing.assert_allclose(back, twin(x, kept=kept, bits=bits), rtol=1e-6)
    assert np.square(x - back).sum() < np.square(x).sum()


def test_a_block_of_equal_or_of_no_numbers():
    code = codec_named(CODEC).arithmetic
    for value, count in ((0.0, 0), (3.0, 64), (-1e38, 64)):
        back = code.decode(code.encode(torch.full((4096,), value)), 4096)
        assert int((back != 0).sum()) == count
        torch.testing.assert_close(back[back != 0], torch.full((count,), value))


def test_its_row_takes_three_sixteenths_of_a_bit_and_a_little():
    codec = codec_named(CODEC)
    assert codec.row_bytes(4096) == 1 + 96
    assert max(8 * codec.row_bytes(n) / n for n in range(4096, 40_000, 8)) < 0.25


@pytest.mark.parametrize("name", ["topk-1+bits2", "topk-64+bits5", "topk-64+bits0", "topk-64+int4"])
def test_codecs_that_are_none_are_refused(name):
    with pytest.raises(InvalidArgument, match=r"density|bits|codec"):
        codec_named(name)


# ---------------------------------------------------------------- the outer step


class Twin:
    """The published equations, rank by rank and block by block."""

    def __init__(self, size, *, beta=0.95, lr=1.0, clip=True):
        self.shared = flat(drawn(0))
        self.owed = [np.zeros_like(self.shared) for _ in range(size)]
        self.theta, self.beta, self.lr, self.clip = (
            [self.shared.copy() for _ in range(size)],
            beta,
            lr,
            clip,
        )

    def inner(self, gradients):
        for theta, g in zip(self.theta, gradients, strict=True):
            theta -= RATE * flat(g)

    def outer(self, weights=None):
        size = len(self.theta)
        weights = np.ones(size) if weights is None else np.array(weights, float)
        said = {}
        for r, theta in enumerate(self.theta):
            self.owed[r] *= self.beta
            if weights[r]:
                self.owed[r] += self.shared - theta
                said[r] = list(blocks_of(self.owed[r]))
                self.owed[r] -= twin(self.owed[r])
        mean = np.zeros_like(self.shared)
        for b in range(len(next(iter(said.values())))):
            norms = sorted(norm for every in said.values() if (norm := np.linalg.norm(every[b][1])))
            for r, every in said.items():
                places, values = every[b]
                norm = np.linalg.norm(values)
                held = min(1.0, norms[(len(norms) - 1) // 2] / norm) if self.clip and norm else 1.0
                mean[places] += weights[r] / weights.sum() * held * values
        self.shared = self.shared - self.lr * mean
        self.theta = [self.shared.copy() for _ in self.theta]


@pytest.mark.parametrize(
    ("size", "clip"),
    [(1, True), (2, True), (2, False), (3, True), (3, False), (8, True), (64, True)],
)
def test_it_is_what_the_equations_say(size, clip):
    ranks = sparse(size, outer=SparseLoCo(lr=0.8, clip=clip), weight="tokens")
    paper, tokens = Twin(size, lr=0.8, clip=clip), [2 * (1 + r % 3) for r in range(size)]
    for step in range(2 if size == 64 else 6):
        gradients = noise(size, step)
        paper.inner(gradients)
        ranks.step(gradients, tokens)
        if step % 2:
            paper.outer(tokens)
        np.testing.assert_allclose(ranks.shared(), paper.shared, atol=1e-5)
        assert ranks.agree()
    for local, due in zip(ranks.local, paper.owed, strict=True):
        np.testing.assert_allclose(owed(local), due, atol=1e-5)
    for mine in ranks.parameters:
        np.testing.assert_array_equal(flat(mine), ranks.shared())


def test_a_rank_that_is_not_finite_is_left_out_and_goes_on_owing():
    ranks, paper = sparse(), Twin(3)
    for step in range(6):
        gradients = noise(3, step)
        paper.inner(gradients)
        ranks.inner_step(gradients)
        if step == 3:
            with torch.no_grad():
                ranks.parameters[1][0][3, 3] = torch.nan
        simulate([local.steps() for local in ranks.local])
        if step % 2:
            paper.outer([1, 0, 1] if step == 3 else None)
    np.testing.assert_allclose(ranks.shared(), paper.shared, atol=1e-5)
    assert ranks.agree()
    assert [local.counters.dropped for local in ranks.local] == [1, 1, 1]


def test_who_says_nothing_has_no_say_in_the_median():
    """Two of three ranks never trained on these: what the third says is not clipped to nothing."""
    norms = torch.tensor(
        [[0.0, 3.0, 1.0, 0.0], [0.0, 0.0, 2.0, 0.0], [5.0, 1.0, 8.0, 0.0]], dtype=torch.float64
    )
    factors = all_gather_mean.within_median(norms)
    assert factors.tolist() == [[1, 1 / 3, 1, 1], [1, 1, 1, 1], [1, 1, 1 / 4, 1]]


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(
    "shapes", [[(300, 341), (77,)], [(129,)] * 801 + [(1,)] * 9], ids=["two", "many"]
)
def test_bytes_on_the_wire_of_a_round(size, shapes):
    """At most (K − 1)·N/4 bits a rank, headers, votes, short blocks and small tensors included."""
    switch = Loopback(size)
    recorded = [Recorded(switch.transport(r)) for r in range(size)]
    locals_ = []
    for transport in recorded:
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        for p in parameters:
            p.grad = torch.rand_like(p)
        inner = torch.optim.SGD(parameters, lr=0.1)
        locals_.append(
            LocalUpdates(inner, every=1, outer=SparseLoCo(), codec=CODEC, process_group=transport)
        )
        inner.step()
    numel = sum(p.numel() for p in parameters)
    assert numel >= 100_000
    simulate([local.steps() for local in locals_])
    for transport, local in zip(recorded, locals_, strict=True):
        assert transport.sent_bytes == local.counters.sent_bytes
        assert 0.18 * numel * (size - 1) < 8 * transport.sent_bytes <= 0.25 * numel * (size - 1)


def test_several_messages_give_the_bits_of_one(monkeypatch):
    def trained():
        ranks = sparse(2, every=1)
        for step in range(3):
            ranks.step(noise(2, step))
        return ranks.shared()

    one = trained()
    monkeypatch.setattr(all_gather_mean, "MESSAGE", 4096)
    np.testing.assert_array_equal(one, trained())


def test_what_two_phases_left_behind_is_sent_on():
    """Residuals of owners of rows, from a run with another outer step, become part of what is owed:
    nothing is lost."""
    other = sparse(3, outer=Average(), feedback_decay=1.0, min_numel=0)
    for step in range(2):
        other.step(noise(3, step))
    ranks = sparse(3, outer=SparseLoCo(clip=False), feedback_decay=1.0)
    due = np.zeros_like(ranks.shared())
    for r, local in enumerate(other.local):
        ranks.local[r].exchanges.residuals.load(dict(local.exchanges.residuals.every()))
        at = 0
        for _, sent, reduced in local.exchanges.residuals.places():
            part = due[at : at + sent.numel()]
            part += sent.double().numpy() / 3
            mine = part[r * reduced.numel() :][: reduced.numel()]
            mine += reduced.double().numpy()[: mine.size]
            at += sent.numel()
    before = ranks.shared()
    ranks.step(noise(3, 2))
    ranks.inner_step(noise(3, 3))
    due += before - np.mean([flat(mine) for mine in ranks.parameters], axis=0)
    simulate([local.steps() for local in ranks.local])
    left = np.mean([owed(local) for local in ranks.local], axis=0)
    np.testing.assert_allclose(before - ranks.shared() + left, due, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "int4"}, "codec is 'int4/256'"),
        ({"codec": None}, "codec is 'none'"),
        ({"outer": (0.0, True)}, "lr of the outer step"),
        ({"outer": (1.0, "yes")}, "clip is 'yes'"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_makes_no_sense_is_refused(options, words, size):
    with pytest.raises(InvalidArgument, match=words):
        sparse(
            size,
            **{
                name: SparseLoCo(*value) if name == "outer" else value
                for name, value in options.items()
            },
        )
