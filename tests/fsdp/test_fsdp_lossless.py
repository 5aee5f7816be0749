"""weights="exact": training of the very bits of plain FSDP2, over fewer bytes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commpress
from commpress.collectives import exact_rows
from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from fsdp_twin import Plan, both, equal
from variants import seldom

LOSSLESS = {"codec": None, "weights": "exact"}
BF16 = torch.bfloat16


# two ranks: the next test; one and four differ in no line
@pytest.mark.parametrize(("size", "steps"), [(3, 16), *(seldom(size, 50) for size in (1, 2, 3, 4))])
def test_many_steps_give_the_bits_of_plain_fsdp2(pool, size, steps):
    """Mixed precision in bfloat16; torch reduces the gradients."""
    for plain, ours in pool.run(both, Plan(**LOSSLESS, dtype=BF16, steps=steps), size=size):
        equal(plain, ours)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(**LOSSLESS, reshard=False, recompute=True),
        Plan(**LOSSLESS, dtype=BF16, options={"regather": True}),
        Plan(**LOSSLESS, dtype=BF16, accumulate=2, columns=True),
        Plan(codec="none", weights="exact", dtype=BF16, accumulate=3, sync_last=True),
        seldom(Plan(**LOSSLESS, model_dtype=BF16, options={"overlap": False})),
    ],
    ids=str,
)
def test_every_kind_of_step_gives_the_bits_of_plain_fsdp2(pool, plan):
    for plain, ours in pool.run(both, plan, size=2):
        equal(plain, ours)


class Watched(nn.Module):
    """Keeps the bits that every forward has seen of a weight without a gradient."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values, self.seen = nn.Parameter(values), []
        self.scale = nn.Parameter(torch.ones(8, dtype=values.dtype))

    def forward(self, x):
        self.seen.append(self.values.detach().view(torch.int16).clone())
        return x * self.scale


def watch(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    every = torch.randperm(1 << 16, generator=generator).to(torch.int32).to(torch.int16).view(BF16)
    model = Watched(every.clone())
    fully_shard(model)
    state = commpress.compress_fsdp(model, None, "exact")
    due = []
    for step in range(3):
        if step == 2:  # no step of an optimizer: a bit that no float compare would notice
            mine = model.values.to_local().detach()
            mine.copy_(torch.where(mine == 0, -mine, mine))
        due.append(model.values.full_tensor().view(torch.int16).clone())
        model(torch.ones(8, dtype=BF16))
        model.reshard()
    assert state.weights.wire_bytes > 0
    return list(zip(due, model.seen, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_every_pattern_of_bits_arrives_also_signs_of_zero_and_payloads_of_nan(pool, size):
    for rank in pool.run(watch, 7, size=size):
        assert torch.equal(rank[0][0].sort().values, torch.arange(-(1 << 15), 1 << 15).short())
        assert not torch.equal(rank[1][0], rank[2][0])
        for due, seen in rank:
            assert torch.equal(due, seen)


def weigh(dtype, keep: bool) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)))
    for part in (*model, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    state = commpress.compress_fsdp(model, None, "exact", regather=not keep)
    for _ in range(3):
        model(torch.randn(4, 512)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
        model.zero_grad()
    assert state.memory()["weights"] == 0 or keep
    return state.weights.logical_bytes, state.weights.wire_bytes


@pytest.mark.parametrize(("dtype", "least"), [(BF16, 1.35), (None, 1.14)])
def test_gathers_send_fewer_bytes_and_kept_codes_halve_them(pool, dtype, least):
    for logical, wire in pool.run(weigh, dtype, False, size=2):
        assert least < logical / wire < 1.5
        twice = logical / wire
    for logical, wire in pool.run(weigh, dtype, True, size=2):
        assert 1.9 * twice < logical / wire < 2.1 * twice


def gather(kind: str, dtype: torch.dtype, numel: int) -> int:
    """Rows of rank r, gathered twice; the bytes of the second time."""
    channel = Channel.among(dist.group.WORLD, name="exact")

    def row(rank: int) -> torch.Tensor:
        random = np.random.default_rng(rank)
        if kind == "normal" or (kind == "one wild" and rank):
            return torch.from_numpy(random.standard_normal(numel).astype(np.float32)).to(dtype)
        if kind == "zeros":
            return torch.zeros(numel, dtype=dtype)
        return torch.frombuffer(bytearray(random.bytes(numel * dtype.itemsize)), dtype=dtype)

    plan = exact_rows.exact_messages(numel, channel.size, dtype)
    for learn in (True, False):
        out, before = torch.empty(numel * channel.size, dtype=dtype), channel.sent_bytes
        channel.run(
            exact_rows.gather_exactly(
                row(channel.rank), out, plan, channel.call(2 * len(plan)), learn=learn
            )
        )
        for rank, part in enumerate(out.view(channel.size, -1)):
            assert torch.equal(part.view(torch.uint8), row(rank).view(torch.uint8))
    return channel.sent_bytes - before


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "one wild", "noise", "zeros"])
@pytest.mark.parametrize("numel", [1, 77, 300_001])
def test_rows_of_any_content_arrive_and_cost_little_more_than_themselves(pool, kind, dtype, numel):
    for sent in pool.run(gather, kind, dtype, numel, size=3):
        raw = 2 * dtype.itemsize * numel
        assert sent <= 1.03 * raw + 2 * 3 * 256
        if kind in ("normal", "zeros") and numel > 1000:
            assert sent < raw / (1.35 if dtype == BF16 else 1.14)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"codec": "exact"}, "weights='exact'"),
        ({"weights": commpress.ByName({"0": "exact"}, "int8")}, "weights='exact'"),
        ({"weights": commpress.Difference("exact")}, "weights='exact'"),
        ({"weights": "exact"}, "bfloat16 or float32"),
    ],
    ids=str,
)
def test_what_the_codec_cannot_do_is_refused_by_name(pool, arguments, says):
    (raised,) = pool.run(refuse, arguments, size=1)
    assert says in raised


def refuse(arguments) -> str:
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    with pytest.raises(InvalidArgument) as raised:
        commpress.compress_fsdp(model, **arguments)
    return str(raised.value)


def mix() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    exact = {"param_dtype_override_fn": lambda p: torch.float32 if p.dim() == 1 else None}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, **exact))
    with pytest.raises(InvalidArgument) as raised:
        commpress.compress_fsdp(model, weights="exact")
    return str(raised.value)


@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"),
    reason="policies have one dtype for all parameters before torch 2.15",
)
def test_parameters_of_several_dtypes_in_one_gather_are_refused(pool):
    (raised,) = pool.run(mix, size=1)
    assert "in several dtypes" in raised
