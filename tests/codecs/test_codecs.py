"""Codecs and policies: names, sizes, choices, and errors that say what to do."""

import pytest
import torch

from commpress.codecs import (
    BitsCodec,
    BlockCodec,
    ByName,
    CastCodec,
    LowRankCodec,
    RandomKCodec,
    SignCodec,
    TernaryCodec,
    TopKCodec,
    by_role,
    codec_named,
    policy_of,
)
from commpress.codecs.family import EXACT, NAMES
from commpress.codecs.policy import Same, roles_of
from commpress.errors import InvalidArgument
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import Piece, cut, width_of

EVERY = [
    *NAMES.values(),
    *(codec_named(name) for name in ("terngrad", "bits3", "shift8", "topk-64", "randk-32")),
    SignCodec(block=0),
    SignCodec("l1", 0),
    *(SignCodec(scale, 2**k) for scale in ("l1", "rms") for k in (3, 7)),
    TernaryCodec(8),
    *(BlockCodec(number, 64) for number in ("int8", "int4", "fp8")),
]


@pytest.mark.parametrize("codec", EVERY, ids=lambda codec: codec.spec)
@pytest.mark.parametrize(("numel", "ranks"), [(1, 1), (8, 2), (1000, 3), (4096, 2), (9001, 4)])
def test_row_bytes_is_what_encode_writes(codec, numel, ranks):
    """Written bytes are those that do not depend on what lay there before: all of a row and nothing
    behind it."""
    pieces = cut([Piece(0, numel, codec.kind, codec.block)], ranks)
    x, flag, after = torch.randn(numel), torch.zeros(1, dtype=torch.uint8), []
    for before in (0x00, 0xFF):
        message = torch.full((ranks, pieces.row_bytes + 16), before, dtype=torch.uint8)
        cpu.encode(x, message[:, : pieces.row_bytes], flag, pieces)
        after.append(message)
    size = codec.row_bytes(width_of(numel, ranks))
    assert torch.equal(after[0][:, :size], after[1][:, :size])
    assert not after[0][:, size:].any()
    assert (after[1][:, size:] == 0xFF).all()
    assert size <= pieces.row_bytes < size + 16


def test_sizes_that_users_count_on():
    """Bytes of 4096 elements: one bit each and a scale per block, half a byte, a byte, two bytes,
    three bits."""
    assert {name: codec.row_bytes(4096) for name, codec in NAMES.items()} == {
        "sign": 512 + 2 * 4,
        "sign-l1": 512 + 2 * 4,
        "ternary": 1024 + 2 * 4,
        "int4": 2048 + 16 * 4,
        "int8": 4096 + 16 * 4,
        "fp8": 4096 + 16 * 4,
        "log3": 1536 + 16 * 4,
        "bf16": 8192,
        "fp16": 8192,
        "none": 16384,
    }
    assert SignCodec(block=0).row_bytes(4096) == 512 + 4


def test_a_name_stands_for_its_codec():
    for name, codec in NAMES.items():
        assert codec_named(name) is codec_named(codec) is codec
    assert codec_named("bits5") == BitsCodec(5)
    assert codec_named("topk-100") == TopKCodec(0.01)
    assert codec_named("randk-16") == RandomKCodec(16)
    assert codec_named("terngrad") == TernaryCodec(clip=2.5)
    assert codec_named("powersgd-8") == LowRankCodec(8)
    assert [name for name, codec in NAMES.items() if codec.lossless] == ["none"]


def test_specs_tell_all_codecs_apart():
    """The spec in a header is all that two ranks compare."""
    assert len({codec.spec for codec in EVERY}) == len(EVERY) == len(set(EVERY))
    assert all(len(codec.spec.encode("ascii")) <= 24 for codec in EVERY)


# ---------------------------------------------------------------- policies


def test_by_name_takes_the_first_pattern_that_matches_anywhere():
    policy = ByName(
        {r"norm": EXACT, r"^head\.": NAMES["int8"], r"weight$": NAMES["int4"]}, Same(NAMES["sign"])
    )
    assert policy.choose("layers.0.norm.weight", 10) is EXACT
    assert policy.choose("head.weight", 10) is NAMES["int8"]
    assert policy.choose("ahead.weight", 10) is NAMES["int4"]
    assert policy.choose("layers.0.bias", 10) is NAMES["sign"]
    assert policy.choose("", 10) is NAMES["sign"]


def test_policy_of_composes_size_and_exclusion():
    policy = policy_of("sign", min_numel=100, exclude=("embed", r"\.bias$"))
    for name, numel, chosen in (
        ("fc.weight", 100, "sign"),
        ("fc.weight", 99, "none"),
        ("embed.weight", 10**6, "none"),
        ("fc.bias", 10**6, "none"),
        ("fc.biases", 10**6, "sign"),
    ):
        assert policy.choose(name, numel) == NAMES[chosen], (name, numel)
    mine = ByName({"a": NAMES["int8"]}, Same(NAMES["bf16"]))
    assert policy_of(mine) is mine
    assert policy_of(mine, min_numel=10).choose("a", 10) is NAMES["int8"]
    assert policy_of(mine, min_numel=10).choose("a", 9) is EXACT
    assert policy_of(mine, exclude=("a",)).choose("a", 10) is EXACT


class Transformer(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.attn = torch.nn.Module()
        self.attn.q_proj = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 32)
        self.head = torch.nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_roles_of_a_transformer():
    roles = {
        "embed.weight": "embedding",
        "attn.q_proj.weight": "attention",
        "attn.q_proj.bias": "bias",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "up.weight": "body",
        "up.bias": "bias",
        "head.weight": "output",
    }
    assert roles_of(Transformer(tied=False)) == roles
    del roles["head.weight"]
    assert roles_of(Transformer(tied=True)) == roles
    model = Transformer(tied=False)
    assert roles.keys() <= {name for name, _ in model.named_parameters()}


def test_by_role_spends_bits_where_errors_cost_most():
    policy = by_role(Transformer(tied=False), "powersgd-2", attention="int8")
    chosen = {
        name: policy.choose(name, 100).spec
        for name in ("up.weight", "attn.q_proj.weight", "embed.weight", "up.bias")
    }
    assert chosen == {
        "up.weight": "powersgd/2/2",
        "attn.q_proj.weight": "int8/256",
        "embed.weight": "fp8/256",
        "up.bias": "none",
    }
    assert policy.choose("unknown", 100).spec == "powersgd/2/2"
    assert by_role(Transformer(tied=False), "sign").choose("attn.q_proj.weight", 1) == NAMES["sign"]
    with pytest.raises(InvalidArgument, match="codec is 'singn'"):
        by_role(Transformer(tied=False), "singn")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: codec_named("singn"), "expected one of 'sign', .*: did you mean 'sign'?"),
        (lambda: codec_named("zip"), "codec is 'zip', expected one of 'sign', "),
        (lambda: codec_named(8), "codec is 8, expected a name or a codec"),
        (lambda: codec_named(None), "codec is None, expected a name or a codec"),
        (lambda: policy_of("one-bit"), "codec is 'one-bit', expected one of"),
        (lambda: SignCodec("l2"), "scale is 'l2', expected 'l1' or 'rms'"),
        (lambda: SignCodec(block=4), "power of two from 8 to 2048 or 0"),
        (lambda: SignCodec(block=4096), "block is 4096"),
        (lambda: TernaryCodec(0), "block is 0, expected a power of two from 8 to 2048$"),
        (
            lambda: BlockCodec("int2"),
            "number is 'int2', expected one of 'int8', 'int4', 'fp8', 'log3'",
        ),
        (lambda: BlockCodec("int8", 0), "block is 0"),
        (lambda: BlockCodec("int8", 300), "block is 300"),
        (lambda: CastCodec("fp64"), "number is 'fp64', expected 'bf16', 'fp16' or 'none'"),
        (lambda: codec_named("bits9"), "bits is 9, expected a whole number from 2 to 8"),
        (lambda: codec_named("bits"), "codec is 'bits', expected one of"),
        (lambda: codec_named("topk-0"), "codec is 'topk-0', expected one of .*mean 'topk-64'"),
        (lambda: codec_named("topk-4096"), "density is .*, expected a share from 1/2048"),
        (lambda: TopKCodec(1.5), "density is 1.5"),
        (lambda: codec_named("randk-3"), "run is 3, expected a divisor of the block 2048"),
        (lambda: RandomKCodec(0), "run is 0"),
        (lambda: TernaryCodec(clip=-1), "clip is -1"),
        (lambda: TernaryCodec(mean="ternary"), "mean is 'ternary', expected one of 'shift4'"),
        (lambda: BitsCodec(3, 100), "block is 100"),
        (lambda: LowRankCodec(0), "rank is 0, expected"),
        (lambda: LowRankCodec(2.5), "rank is 2.5, expected"),
        (lambda: LowRankCodec(2, min_rate=0), "min_rate is 0"),
        (lambda: codec_named("powersgd"), "did you mean|or 'powersgd-4'"),
    ],
)
def test_a_wrong_value_says_what_came_and_what_was_expected(make, says):
    with pytest.raises(InvalidArgument, match=says):
        make()


def test_codecs_are_frozen():
    with pytest.raises(AttributeError):
        SignCodec().block = 8
