"""A small Llama of transformers in two stages: torch's pipeline with exact and compressed edges
against the whole model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import commpress
from tiny_models import model

pytest.importorskip("transformers")

VOCABULARY, WIDTH, LENGTH = 96, 64, 16


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": LENGTH, "attn_implementation": "eager"}
    return model("LlamaForCausalLM", **sizes, **heads, **more)


class Half(nn.Module):
    """Layers of one stage, with the padding mask as a second output."""

    def __init__(self, model, rank):
        super().__init__()
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.layer, self.rotary = model.model.layers[rank], model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if rank else None

    def forward(self, x, mask=None):
        if self.embed is not None:
            mask = x != 0
            x = self.embed(x)
        causal = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask[:, None, None, :]
        )
        positions = torch.arange(x.shape[1])[None]
        bias = torch.zeros_like(causal, dtype=x.dtype).masked_fill(~causal, -1e9)
        x = self.layer(
            x,
            attention_mask=bias,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )
        x = x[0] if isinstance(x, tuple) else x
        return (x, mask) if self.head is None else self.head(x)


def error_of(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(step):
    return torch.randint(
        1, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step % 2)
    )


def trained(codec, steps):
    rank = dist.get_rank()
    half = Half(llama(), rank)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    runner, counters = Schedule1F1B(stage, 4, loss_fn=error_of), None
    if codec is not None:
        counters = commpress.compress_pipeline(
            runner, codec, gradient_codec="none" if codec == "none" else "int8"
        ).counters
    optimizer, losses = torch.optim.Adam(half.parameters(), 3e-3), []
    for step in range(steps):
        found = []
        x = tokens(step)
        runner.step(
            *([x] if rank == 0 else []),
            **({"target": x.roll(-1, 1), "losses": found} if rank else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(loss.detach()) for loss in found) / 4)
    return losses, [p.detach().clone() for p in half.parameters()], counters and counters.ratio


def whole(steps):
    """The model itself, in one process."""
    net = llama()
    halves = [Half(net, 0), Half(net, 1)]
    optimizer = torch.optim.Adam([p for half in halves for p in half.parameters()], 3e-3)
    losses = []
    for step in range(steps):
        x = tokens(step)
        loss = error_of(halves[1](*halves[0](x)), x.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_llama_learns_over_four_bits_and_exactly_as_torch_over_none(pool):
    plain, exact, tiles = (pool.run(trained, codec, 12, size=2) for codec in (None, "none", "tah4"))
    for (losses, weights, _), (ours, same, ratio) in zip(plain, exact, strict=True):
        assert losses == ours
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
        assert ratio == 1
    truth = whole(12)
    assert plain[1][0] == pytest.approx(truth, rel=1e-4)
    assert tiles[1][0] == pytest.approx(truth, rel=0.03)
    assert truth[-1] < truth[0] - 1
    assert tiles[0][2] > 6
    assert tiles[1][2] > 3.8
