"""Tokens of simulated ranks, sent to experts that scale them, and back."""

import numpy as np
import torch


class Batch:
    """Tokens, choices and gates of every rank; some ranks have none."""

    def __init__(self, size, experts, k, seed, width=24, most=9, dtype=torch.float32):
        draw = np.random.default_rng(seed)
        counts = draw.integers(0, most, size)
        counts[seed % size] = 0 if size > 1 and seed % 3 == 0 else most
        self.topk = [
            torch.from_numpy(
                np.stack([draw.permutation(experts)[:k] for _ in range(n)] or [np.zeros(k)])[:n]
            ).to(torch.int64)
            for n in counts
        ]
        for idx in self.topk:
            idx[torch.from_numpy(draw.random(idx.shape) < 0.1)] = -1
        self.tokens = [torch.from_numpy(draw.standard_normal((n, width))).to(dtype) for n in counts]
        self.gates = [torch.from_numpy(draw.random((n, k))).float() for n in counts]
        self.experts, self.k, self.size, self.width, self.dtype = experts, k, size, width, dtype


def applied(exchange, routing, rows, gates, numbers, scales):
    """Experts that multiply by a number of their own, then by the gate."""
    mine = torch.tensor(exchange.placement.on(exchange.channel.rank))
    plan = routing.handle.rows
    if routing.layout == "flat":
        out = torch.zeros(rows.shape, dtype=torch.float32)
        for slot in range(gates.shape[1]):
            here = numbers[:, slot] >= 0
            factor = scales[mine[numbers[here, slot]]] * gates[here, slot]
            out[here] = out[here] + factor[:, None] * rows[here].float()
        return out.to(rows.dtype)
    out = torch.zeros_like(rows)
    for i, (start, count) in enumerate(zip(plan.starts[:-1], plan.counts, strict=True)):
        part = slice(int(start), int(start + count))
        out[part] = (scales[mine[i]] * gates[part, None] * rows[part].float()).to(rows.dtype)
    return out


def through(exchange, batch, scales, layout="expert_major"):
    """Steps of one rank: there and back."""
    rank, channel = exchange.channel.rank, exchange.channel
    routing = yield from exchange.routing_steps(batch.topk[rank], layout=layout)
    plan = routing.handle
    rows, gates = yield from exchange.out_steps(
        plan, batch.tokens[rank], batch.gates[rank], plan.rows.count, exchange.codec, channel.take()
    )
    done = applied(exchange, routing, rows, gates, plan.rows.local, scales)
    return (
        yield from exchange.back_steps(plan, done, None, exchange.combine_codec, channel.take())
    )[0]
