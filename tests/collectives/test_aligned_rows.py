"""Rows begin at multiples of 16 bytes, on a card and wherever else they meet those of a card: NCCL
copies others byte by byte."""

from itertools import accumulate

import pytest
import torch

from commpress.codecs import codec_named, policy_of
from commpress.codecs.family import NAMES
from commpress.collectives.all_to_all import all_to_all
from commpress.collectives.all_to_all.tokens import PacketForm
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span, messages
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.reduce_scatter import Part, deals
from commpress.collectives.transports.loopback import simulate
from commpress.kernels.pieces import COLUMN, aligned
from gpu.card_twin import CARD, CardGroup, card_twin

RANKS = 4
CODECS = [*NAMES, "shift3", "topk-64", "topk-64+bits2"]
ODD = (40_008, 5003, 4104, 1)  # elements of tensors


def spans(numels):
    return [
        Span(f"t{i}", end - numel, numel)
        for i, (end, numel) in enumerate(zip(accumulate(numels), numels, strict=True))
    ]


def reduced(codec, numels=ODD):
    """An all-reduce among four ranks on a card."""
    where = spans(numels), [(n,) for n in numels]
    channels = [Channel(transport) for transport in CardGroup(RANKS).transports()]
    exchanges = [Exchanges(policy_of(codec, min_numel=0), RANKS, c.workspace) for c in channels]
    draw = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    buffers = [torch.randn(sum(numels), generator=each).to(CARD) for each in draw]
    parts = zip(exchanges, channels, buffers, strict=True)
    for outcomes in simulate(
        [
            exchange.of(("all",), lambda: where, CARD).steps(channel, buffer, channel.call(8))
            for exchange, channel, buffer in parts
        ]
    ):
        settle(outcomes, taken=True)
    return [buffer.cpu() for buffer in buffers]


@pytest.mark.parametrize("codec", ["sign", "none"])
def test_rows_of_an_all_reduce_on_a_card(codec):
    with card_twin() as twin:
        every = reduced(codec)
    assert all(torch.equal(every[0], each) for each in every)
    assert twin.counts["bytes of rows"] > 0
    assert twin.counts["bytes of rows off 16"] == 0


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_every_codec(codec):
    policy = policy_of(codec, min_numel=0)
    for message in messages(spans(ODD), policy, RANKS):
        assert message.pieces.row_bytes % 16 == message.mean.row_bytes % 16 == 0
        assert not (message.pieces.table[:, COLUMN] % 16).any()
    parts = [Part("a", 0, 1000, 3997), Part("b", 1000, 3, 10), Part("c", 1003, 77, 305)]
    for deal in deals(parts, policy, rank=1, ranks=RANKS):
        assert deal.size % 16 == 0
        assert not (deal.every.pieces.table[:, COLUMN] % 16).any()


@pytest.mark.parametrize("codec", ["int8", "sign", "int4"])
def test_blocks_of_an_all_to_all_begin_there_and_are_as_long_at_both_ends(codec):
    for numels in ([8, 24, 1000, 40], [1000, 0, 7, 9]):
        pieces = all_to_all._pieces(codec_named(codec), numels)
        lengths = all_to_all._lengths(pieces, numels)
        assert not any(length % 16 for length in lengths)
        alone = [all_to_all._pieces(codec_named(codec), [n]).row_bytes for n in numels if n]
        assert [length for length in lengths if length] == alone


@pytest.mark.parametrize("width", [8, 40, 129, 768])
def test_packets_of_tokens(width):
    for extra in range(4):
        for name in ("none", "int8", "sign"):
            form = PacketForm(codec_named(name), width, torch.float32, extra)
            assert form.row_bytes == aligned(form.token_bytes + 4 * extra)
            assert form.row_bytes % 16 == 0
