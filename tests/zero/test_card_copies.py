"""Copies between a card and host memory, on a card made of host memory that knows who has waited
for whom: what crosses is pinned, and nothing is used too early."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import commpress
from commpress.collectives.allreduce import Workspace
from commpress.integrations.zero import update_chunk
from commpress.tiered_mem import Options
from gpu.card_twin import CARD, EarlyUse, Stream, card_twin

LAYERS, WIDTH = 4, 64
SMALL = Options(
    chunk_bytes=64 << 10, pack_below=8 << 10, pack_bytes=32 << 10, segment_bytes=4 << 20
)
ADAM = {"lr": 1e-3, "fused": True}


@contextmanager
def opened(folder):
    with (
        card_twin() as twin,
        commpress.TieredStore.open(
            folder, host="8MiB", device="1MiB", options=SMALL, engine="threads"
        ) as store,
    ):
        yield twin, store


def model(device):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in net:
        layer.weight = nn.Parameter(layer.weight.detach().to(device))
    return net


def inputs():
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def backward(net, x):
    net(x).square().mean().backward()


def plain(steps):
    net, x = model("cpu"), inputs()
    optimizer = torch.optim.AdamW(net.parameters(), **ADAM)
    for _ in range(steps):
        backward(net, x)
        optimizer.step()
        optimizer.zero_grad()
    return [layer.weight.detach() for layer in net]


def offloaded(net, store, **more):
    options = {"store": store, "chunk_mb": 0.02, **ADAM, **more}
    return commpress.Offloaded(net.parameters(), torch.optim.AdamW, **options)


def test_an_offloaded_step_waits_once_a_chunk_and_all_that_crosses_is_pinned(tmp_path):
    with opened(tmp_path) as (twin, store):
        net, x = model(CARD), inputs().to(CARD)
        optimizer = offloaded(net, store)
        for step in range(3):
            backward(net, x)
            twin.counts.clear()
            optimizer.step()
            if step:
                assert twin.counts["waits of the caller"] == len(optimizer.chunks) == LAYERS
                assert twin.counts["bytes by pageable memory"] == 0
                assert twin.counts["bytes by pinned memory"] == 8 * LAYERS * WIDTH**2
            optimizer.zero_grad()
        found = [layer.weight.detach().cpu() for layer in net]
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(found, plain(3), strict=True))


@pytest.mark.parametrize("more", [{}, {"gradients": "backward"}], ids=["step", "backward"])
def test_a_streamed_forward_waits_for_no_copy_and_gradients_are_pinned(tmp_path, more):
    with opened(tmp_path) as (twin, store):
        net, x = model(CARD), inputs().to(CARD)
        streamed = commpress.stream(net, store=store, blocks=[nn.Linear], chunk_mb=0.02)
        optimizer = offloaded(net, store, **more)
        for step in range(3):
            twin.counts.clear()
            loss = net(x).square().mean()
            if step:
                assert twin.counts["waits of the caller"] == 0
            loss.backward()
            optimizer.step()
            if step:
                waits = twin.counts["waits of the caller"] + twin.counts["waits of the worker"]
                assert waits == LAYERS, "one for each gradient"
                assert twin.counts["bytes by pageable memory"] == 0
            optimizer.zero_grad()
        state = streamed.state_dict()
        found = [state[f"{i}.weight"].cpu() for i in range(LAYERS)]
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(found, plain(3), strict=True))


def test_a_second_gradient_is_added_by_way_of_pinned_memory(tmp_path):
    with opened(tmp_path) as (twin, store):
        net, x = model(CARD), inputs().to(CARD)
        commpress.stream(net, store=store, blocks=[nn.Linear], chunk_mb=0.02)
        optimizer = offloaded(net, store)
        twin.counts.clear()
        for _ in range(2):
            backward(net, x)
        assert twin.counts["bytes by pageable memory"] == 0
        optimizer.close()


@pytest.mark.parametrize("clipped", [False, True])
def test_a_norm_is_summed_on_the_card_and_only_where_it_is_wanted(tmp_path, monkeypatch, clipped):
    devices, summed = [], update_chunk._square_sum

    def square_sum(parts):
        parts = list(parts)
        devices.extend(part.device.type for part in parts)
        return summed(parts)

    monkeypatch.setattr(update_chunk, "_square_sum", square_sum)
    more = {"max_grad_norm": 1e-3} if clipped else {}
    with opened(tmp_path) as (_, store):
        net, x = model(CARD), inputs().to(CARD)
        streamed = commpress.stream(net, store=store, blocks=[nn.Linear], chunk_mb=0.02)
        optimizer = offloaded(net, store, **more)
        for _ in range(2):
            backward(net, x)
            optimizer.step()
            optimizer.zero_grad()
        assert devices == ["cuda"] * (2 * LAYERS if clipped else 0)
        if clipped:  # a second gradient is added on the host, where both are
            devices.clear()
            for _ in range(2):
                backward(net, x)
            optimizer.step()
            assert devices == ["cuda"] * LAYERS + ["cpu"] * LAYERS
        state = streamed.state_dict()
        found = [state[f"{i}.weight"].cpu() for i in range(LAYERS)]
        optimizer.close()
    if clipped:
        twin, x = model("cpu"), inputs()
        optimizer = torch.optim.AdamW(twin.parameters(), **ADAM)
        for backwards in (1, 1, 2):
            for _ in range(backwards):
                backward(twin, x)
            nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(found, twin, strict=True):
            torch.testing.assert_close(ours, theirs.weight.detach(), rtol=1e-6, atol=1e-7)


def test_values_that_a_side_stream_reads_are_not_written_before(tmp_path):
    with opened(tmp_path) as (twin, store):
        net, x = model(CARD), inputs().to(CARD)
        streamed = commpress.stream(net, store=store, blocks=[nn.Linear], chunk_mb=0.02)
        side = Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            net(x)
        twin.counts.clear()
        name = streamed.groups[0].stored[0].name
        with store.borrow(name, write=False):
            assert twin.counts["waits of the caller"] == 0, "who reads need not wait"
        with store.borrow(name) as held:
            held.add_(1)
        assert twin.counts["waits of the caller"] == 1


def test_the_twin_finds_who_writes_too_early(tmp_path):
    with opened(tmp_path) as (_, store):
        store.put("x", torch.arange(4096.0))
        into = torch.zeros(4096).to(CARD)
        with torch.cuda.stream(Stream()), store.borrow("x", write=False) as held:
            into.copy_(held, non_blocking=True)
        with store.borrow("x") as held, pytest.raises(EarlyUse, match="host writes 16384 bytes"):
            held.zero_()


@pytest.mark.parametrize("other", [False, True], ids=["one stream", "two"])
def test_a_buffer_that_comes_back_is_waited_for_by_other_streams_alone(other):
    with card_twin():
        workspace, first, second = Workspace(), Stream(), Stream()
        with first:
            buffer = workspace.lend(1000, torch.float32, CARD)
            buffer.fill_(1)
            workspace.take_back(buffer)
        before = dict(second.clock)
        with second if other else first:
            again = workspace.lend(1000, torch.float32, CARD)
            assert again.data_ptr() == buffer.data_ptr()
            again.fill_(2)
        assert (second.clock != before) == other
