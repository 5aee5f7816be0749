"""AQ-SGD (Wang et al. 2022, arXiv 2206.01299): the stages of a pipeline send an activation as its
change since the last use of the same sample.

    first time    m(ξ) ← a(ξ)                      exact, on both sides of the edge
    then          m(ξ) ← m(ξ) + Q(a(ξ) − m(ξ))     in few bits; the next stage computes with m(ξ)
    back          Q(∂f/∂m)                         quantised directly

As training converges, changes become small, and so does the quantization error: it goes to zero,
while that of Q(a) does not. Both sides keep a float32 copy of every sample's activation, so the
method serves fine-tuning on a data set that is read several times.

    torchrun --nproc-per-node 2 examples/gallery/aq_sgd.py
    torchrun --nproc-per-node 2 examples/gallery/aq_sgd.py --direct

``--direct``: activations in the same number of bits, without differences.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import commpress
from commpress.integrations.pipeline import decode_into, edge_codec, encoded

WIDTH, SAMPLES, ROWS = 64, 128, 16


class Edge:
    """The edge between two ranks on one of them; ``kept``: m of every sample."""

    def __init__(self, peer: int, codec: str, gradient_codec: str, *, direct: bool) -> None:
        self.peer, self.direct, self.sent_bytes, self.error = peer, direct, 0, 0.0
        self.codec, self.gradient_codec = edge_codec(codec), edge_codec(gradient_codec)
        self.kept = torch.zeros(SAMPLES, WIDTH)
        self.seen = torch.zeros(SAMPLES, dtype=torch.bool)

    def send_activation(self, activation: torch.Tensor, samples: torch.Tensor) -> None:
        new = not self.direct and not bool(self.seen[samples].all())
        given = activation if new or self.direct else activation - self.kept[samples]
        message = self._send(given.detach(), None if new else self.codec)
        self._keep(message, samples, new)
        left = self.kept[samples] - activation.detach()
        self.error = float(left.norm() / activation.detach().norm())

    def receive_activation(self, samples: torch.Tensor) -> torch.Tensor:
        new = not self.direct and not bool(self.seen[samples].all())
        message = self._receive((len(samples), WIDTH), None if new else self.codec)
        self._keep(message, samples, new)
        return self.kept[samples].requires_grad_()

    def send_gradient(self, gradient: torch.Tensor) -> None:
        self._send(gradient, self.gradient_codec)

    def receive_gradient(self, rows: int) -> torch.Tensor:
        return self._receive((rows, WIDTH), self.gradient_codec)

    def _keep(self, received: torch.Tensor, samples: torch.Tensor, new: bool) -> None:
        before = 0.0 if new or self.direct else self.kept[samples]
        self.kept[samples] = before + received
        self.seen[samples] = True

    def _send(self, tensor, codec) -> torch.Tensor:
        """Send a tensor; return it as the receiver decodes it."""
        message = tensor.contiguous() if codec is None else encoded(tensor, codec)
        dist.send(message, self.peer)
        self.sent_bytes += message.numel() * message.element_size()
        return self._read(message, tensor.shape, codec)

    def _receive(self, shape, codec) -> torch.Tensor:
        tensor = torch.empty(shape)
        message = tensor if codec is None else torch.empty_like(encoded(tensor.zero_(), codec))
        dist.recv(message, self.peer)
        return self._read(message, shape, codec)

    def _read(self, message, shape, codec) -> torch.Tensor:
        if codec is None:
            return message
        tensor = torch.empty(shape)
        decode_into(tensor, message, codec)
        return tensor


def train(
    steps: int, codec: str = "int4", gradient_codec: str = "int8", *, direct: bool = False
) -> tuple[list[float], float, int]:
    """Return the losses (on rank 1), the relative error of the last activation (on rank 0) and the
    bytes sent."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    first = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    rank = dist.get_rank()
    edge = Edge(1 - rank, codec, gradient_codec, direct=direct)
    optimizer = torch.optim.Adam((last if rank else first).parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        at = step * ROWS % SAMPLES
        samples = torch.arange(at, at + ROWS)
        if rank == 0:
            activation = first(x[samples])
            edge.send_activation(activation, samples)
            activation.backward(edge.receive_gradient(ROWS))
        else:
            activation = edge.receive_activation(samples)
            loss = nn.functional.mse_loss(last(activation), y[samples])
            loss.backward()
            edge.send_gradient(activation.grad)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, edge.error, edge.sent_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--direct", action="store_true")
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    losses, error, sent = train(options.steps, options.codec, direct=options.direct)
    if losses:
        print(f"loss {losses[0]:.3f} to {sum(losses[-8:]) / 8:.4f}, gradients: {sent} bytes")
    else:
        print(f"error of the last activation {error:.1e}, activations: {sent} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
