"""Run by torchrun on two ranks: Accelerate with compressed gradients, and with a compressed
optimizer."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

import commpress
from commpress.errors import InvalidArgument


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 16))


def main():
    x = torch.randn(8, 64)
    accelerator = Accelerator(cpu=True)
    net = model()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    handler = commpress.hf.DistributedCompression(
        codec="int8", min_numel=64, ddp={"bucket_cap_mb": 1}
    ).attach(accelerator)
    net, adam = accelerator.prepare(net, adam)
    accelerator.backward(net(x).square().mean())
    adam.step()
    assert handler.state.counters.ratio > 2, handler.state.counters
    with pytest.raises(InvalidArgument, match="a second model was prepared"):
        accelerator.prepare(model())

    accelerator, net = Accelerator(cpu=True), model()
    commpress.hf.DistributedCompression().attach(accelerator)
    halves = [torch.optim.AdamW(net[0].parameters()), commpress.OneBitAdam(net[1].parameters())]
    with pytest.raises(InvalidArgument, match="optimizer 1 is OneBitAdam, which averages"):
        accelerator.prepare(net, *halves)

    accelerator, net = Accelerator(cpu=True), model()
    handler = commpress.hf.DistributedCompression().attach(accelerator)
    net, ours = accelerator.prepare(
        net, commpress.OneBitAdam(net.parameters(), lr=1e-3, exact_steps=1)
    )
    optimizer = handler.state
    assert optimizer is ours.optimizer
    for _ in range(3):
        accelerator.backward(net(x).square().mean())
        ours.step()
        ours.zero_grad()
    assert optimizer.counters.compressed_rounds == 2
    assert optimizer.counters.compressed_bytes > 0
    print("all is well")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
