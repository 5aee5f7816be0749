"""Large batches with adversarial noise (ScaLA): 1-bit LAMB on embeddings that are perturbed to
increase the loss.

    torchrun --nproc-per-node 2 examples/gallery/adversarial_lamb.py
    torchrun --nproc-per-node 2 examples/gallery/adversarial_lamb.py --radius 0          LAMB alone

After a quarter of the steps every batch is used twice: δ takes one ascent step in a ball around
each sample's embeddings, and the model learns from the noisy loss in addition to the clean one.
Each rank computes its own noise, so no further bytes are sent.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import commpress

VOCABULARY, LENGTH, WIDTH, CLASSES, BATCH = 64, 12, 32, 4, 128


class Classifier(nn.Module):
    """Network that classifies which of four groups of tokens is the most frequent in a sequence."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def embedded(self, tokens):
        return self.tokens(tokens)

    def loss(self, embedded, labels):
        return nn.functional.cross_entropy(self.body(embedded.mean(1)), labels)


def batch(generator, rows=BATCH):
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    own = torch.rand((rows, LENGTH), generator=generator) < 0.5
    group = labels[:, None] * (VOCABULARY // CLASSES) + tokens % (VOCABULARY // CLASSES)
    return torch.where(own, group, tokens), labels


def noise(model, embedded, labels, radius, generator):
    """Take one normalized ascent step from a random point, projected to the ball of each sample."""
    start = torch.randn(embedded.shape, generator=generator) * 1e-3
    delta = start.requires_grad_()
    (slope,) = torch.autograd.grad(model.loss(embedded.detach() + delta, labels), delta)
    moved = (
        start.detach()
        + radius * slope / slope.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None]
    )
    return moved * (radius / moved.flatten(1).norm(dim=1).clamp(min=radius))[:, None, None]


def train(steps, *, radius=0.3, after=None, codec="sign", seed=0):
    """Return the losses without noise, for the same batch on every rank, and the model."""
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = commpress.OneBitLamb(
        model.named_parameters(),
        lr=2e-2,
        weight_decay=0.01,
        exact_steps=max(steps // 4, 2),
        codec=codec,
    )
    after = steps // 4 if after is None else after
    draws = torch.Generator().manual_seed(100 + dist.get_rank())
    tests, losses = batch(torch.Generator().manual_seed(0), 512), []
    for step in range(steps):
        tokens, labels = batch(draws)
        embedded = model.embedded(tokens)
        loss = model.loss(embedded, labels)
        if radius and step >= after:
            delta = noise(model, embedded, labels, radius, draws)
            loss = (loss + model.loss(embedded + delta, labels)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(model.loss(model.embedded(tests[0]), tests[1])))
    return losses, model


def worst(model, radius):
    """Return the loss of the test batch with the noise of one ascent step."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = batch(generator, 512)
    embedded = model.embedded(tokens).detach()
    return model.loss(embedded + noise(model, embedded, labels, radius, generator), labels).item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--radius", type=float, default=0.3, help="radius of the ball, 0: no noise (default 0.3)"
    )
    parser.add_argument("--codec", default="sign")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses, model = train(options.steps, radius=options.radius, codec=options.codec)
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; with noise of 0.3: {worst(model, 0.3):.3f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
