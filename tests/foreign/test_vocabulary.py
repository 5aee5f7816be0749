"""A tiny GPT-2 that is mostly vocabulary learns as under AdamW, also where its embeddings travel in
four bits."""

import copy
from functools import cache

import pytest
import torch

import commpress
import tiny_models
from commpress.codecs import codec_named
from commpress.collectives.transports.loopback import Loopback, simulate
from variants import seldom

RANKS, WORDS, LENGTH, WIDTH, STEPS, WARMUP, PEAK = 2, 1000, 16, 64, 100, 40, 2e-3


@cache
def gpt():
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_positions": LENGTH}
    return tiny_models.model("GPT2LMHeadModel", **sizes, **tiny_models.GPT2 | {"n_layer": 1})


@cache
def words(rank):
    """For every step 8 sentences: words by Zipf's law, each mostly followed by one of four
    others."""
    generator = torch.Generator().manual_seed(rank)
    chances = 1 / torch.arange(1.0, WORDS + 1)
    after = torch.multinomial(
        chances, 4 * WORDS, replacement=True, generator=torch.Generator().manual_seed(9)
    ).view(WORDS, 4)
    said = [torch.multinomial(chances, 8 * STEPS, replacement=True, generator=generator)]
    for _ in range(LENGTH - 1):
        usual = after[said[-1], torch.randint(4, (8 * STEPS,), generator=generator)]
        other = torch.multinomial(chances, 8 * STEPS, replacement=True, generator=generator)
        said.append(torch.where(torch.rand(8 * STEPS, generator=generator) < 0.1, other, usual))
    return torch.stack(said, 1).view(STEPS, 8, LENGTH)


def loss_of(model, step, rank):
    batch = words(rank)[step]
    return model(input_ids=batch, labels=batch).loss


def final_loss(models, step_all):
    """Mean over the last steps of all ranks; ``models``: one for each rank, or the same."""
    losses = []
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
        for rank, model in enumerate(models):
            loss = loss_of(model, step, rank)
            loss.backward()
            losses.append(loss.item())
        step_all(PEAK * min((step + 1) / 20, 1) * (1 - 0.9 * step / STEPS))
    return sum(losses[-20 * RANKS :]) / (20 * RANKS)


@cache
def loss_of_adam():
    model = copy.deepcopy(gpt())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def step(rate):
        for p in model.parameters():
            p.grad /= RANKS
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    return final_loss([model] * RANKS, step)


def trained(**options):
    models = [copy.deepcopy(gpt()) for _ in range(RANKS)]
    optimizers = [
        commpress.OneBitAdam(
            list(model.named_parameters()), exact_steps=WARMUP, transport=transport, **options
        )
        for model, transport in zip(models, Loopback(RANKS).transports(), strict=True)
    ]

    def step(rate):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad():
            simulate([optimizer.steps() for optimizer in optimizers])

    return final_loss(models, step), optimizers[0].counters


@pytest.mark.parametrize(("codec", "code"), [seldom("fp8", 8), ("bits4", 4)])
def test_a_vocabulary_in_fewer_bits_costs_no_loss(codec, code):
    loss, counters = trained(spiky_codec=codec)
    # one draw: which tensors wake, and when, moves it by some hundredths
    assert loss < loss_of_adam() + 0.05
    spec, (names, numel, bits) = next(iter(counters.by_codec().items()))
    assert spec == codec_named(codec).spec
    assert "transformer.wte.weight" in names
    assert code < bits < code + 0.35
    every = sum(share.numel for share in counters.shares.values())
    assert code * numel / every < counters.bits < (code + 0.35) * numel / every + 1.4


def test_what_four_bits_leave_out_must_be_kept():
    loss, _ = trained(spiky_codec="bits4", error_feedback=False)
    assert loss > loss_of_adam() + 0.1
