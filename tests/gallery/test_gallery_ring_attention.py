"""Ring attention against one process: output and gradients up to rounding, errors that do not add
up, bytes."""

import pytest
import torch
import torch.distributed as dist

from commpress.integrations.pipeline import decode_into, edge_codec, encoded
from gallery import gallery

pytestmark = pytest.mark.slow
LENGTHS = {1: [5], 2: [4, 3], 3: [3, 0, 5], 4: [2, 0, 5, 1]}


def tensors(lengths, count, *, dim=8, heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(heads, sum(lengths), dim, generator=generator, dtype=dtype)
        for _ in range(count)
    ]


def plain(q, k, v, causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ v


def attended(causal):
    rank, lengths = dist.get_rank(), LENGTHS[dist.get_world_size()]
    ring = gallery("ring_attention").Ring(lengths[rank])
    parts = [x.split(lengths, -2)[rank].clone() for x in tensors(lengths, 4)]
    q, k, v = (x.requires_grad_() for x in parts[:3])
    out = ring.attention(q, k, v, causal=causal)
    out.backward(parts[3])
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", LENGTHS)
def test_output_and_gradients_are_those_of_one_process(pool, size, causal):
    """Float64 up to its rounding, uneven lengths, a rank without positions."""
    q, k, v, gradient = tensors(LENGTHS[size], 4)
    for x in (q, k, v):
        x.requires_grad_()
    truth = plain(q, k, v, causal)
    truth.backward(gradient)
    found = pool.run(attended, causal, size=size)
    for due, parts in zip((truth, q.grad, k.grad, v.grad), zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, -2), due, atol=1e-12, rtol=1e-12)


def coded(codec):
    rank, lengths = dist.get_rank(), LENGTHS[dist.get_world_size()]
    ring = gallery("ring_attention").Ring(lengths[rank], codec)
    q, k, v = tensors(lengths, 3, dim=64, heads=8, dtype=torch.float32)
    mine = (x.split(lengths, -2)[rank].clone() for x in (q, k, v))
    return ring.attention(*mine, causal=False), ring.sent_bytes


def test_keys_and_values_are_encoded_once(pool):
    """Over 4 ranks as attending to what one process decodes; fewer bytes by the codec."""
    codec, lengths = edge_codec("int8"), LENGTHS[4]
    exact, found = (pool.run(coded, name, size=4) for name in ("none", "int8"))
    q, k, v = tensors(lengths, 3, dim=64, heads=8, dtype=torch.float32)

    def seen(x):
        parts = [part.contiguous() for part in x.split(lengths, -2)]
        for part in parts:
            if part.numel():
                decode_into(part, encoded(part, codec), codec)
        return torch.cat(parts, -2)

    out = torch.cat([out for out, _ in found], -2)
    torch.testing.assert_close(out, plain(q, seen(k), seen(v), False), atol=1e-5, rtol=1e-5)
    assert 3.5 < sum(sent for _, sent in exact) / sum(sent for _, sent in found) < 4


def bytes_of(causal):
    ring = gallery("ring_attention").Ring(4)
    ring.attention(*torch.randn(3, 1, 4, 8), causal=causal)
    return ring.sent_bytes


def test_a_causal_ring_sends_half(pool):
    whole, half = (sum(pool.run(bytes_of, causal, size=4)) for causal in (False, True))
    assert whole == 4 * 3 * 2 * 4 * 8 * 4
    assert half == whole / 2
