"""The process-group backend on the device: every collective against torch's own group, and what
agreement costs."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from operator import floordiv, mul

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commpress.cli.ranks import LocalRanks
from commpress.cli.ranks import Report as Told
from commpress.integrations.process_group.group_options import GroupOptions
from commpress.torch_private import all_gather_single, reduce_scatter_single
from gpu.machine import Card, Machine, Twin
from gpu.runner import Report

PATIENT = timedelta(seconds=30)
DEAREST = 50.0  # microseconds that agreement may add to a call


def backend(machine: Machine, report: Report) -> None:
    """Collectives of "cpu:commpress,cuda:commpress" with tensors of the device: torch's results,
    and the cost of a call."""
    _two_compressed(machine, report)
    import_module("commpress.backend")
    machine.join()
    ours, plain = (
        dist.new_group(backend=name, timeout=PATIENT) for name in ("commpress", machine.backend)
    )
    for name, call in _calls(machine).items():
        with report.line(name):
            report(
                f"{name}: elements that differ",
                _differ(machine, call, ours, plain),
                limit=0,
                bound="most",
            )
    for numel in (256, machine.size(1 << 20, 1 << 12), machine.size(16 << 20, 1 << 13)):
        with report.line(f"all-reduce of {4 * numel} bytes"):
            x = torch.zeros(numel, device=machine.device)
            took = {
                name: machine.seconds(partial(dist.all_reduce, x, group=group), times=30)
                for name, group in (("plain", plain), ("commpress", ours))
            }
            report(f"{machine.backend} alone, {4 * numel} bytes", 1e6 * took["plain"], "us")
            report(
                f"agreement, {4 * numel} bytes",
                1e6 * (took["commpress"] - took["plain"]),
                "us per call",
                limit=None if machine.twin else DEAREST,
                bound="most",
            )


def _two_compressed(machine: Machine, report: Report) -> None:
    """Two ranks on one card (from NCCL 2.30 on) with a codec in the group's options; before this
    process has CUDA."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    with (
        report.line("two ranks with a codec", must=machine.twin),
        LocalRanks(2, forked=True) as pool,
    ):
        for what, value, unit, limit in pool.call(_compressed, machine.twin, lambda *_: None):
            report(what, value, unit, limit=limit, bound="most")


def _compressed(
    rank: int, size: int, twin: bool, told: Told
) -> list[tuple[str, float, str, float | None]]:
    import_module("commpress.backend")
    machine: Machine = Twin() if twin else Card()
    if not twin:
        torch.cuda.set_device(0)
    found = list[tuple[str, float, str, float | None]]()
    numel = machine.size(16 << 20, 1 << 13)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    for codec in ("exact", "terngrad", "int8"):
        named = "exact" if codec == "exact" else GroupOptions(codec, 1, only="everything")
        here, there = x.to(machine.device, copy=True), x.clone()
        for each in (there, here):  # a group for each: random codecs draw by the number of a call
            group = dist.new_group(backend="commpress", timeout=PATIENT, pg_options=named)
            dist.all_reduce(each, group=group)
        machine.synchronize()
        if codec != "exact":
            wrong = float((here.cpu() != there).sum())
            found.append(
                (f"all_reduce with {codec}: elements with other bits than by the CPU", wrong, "", 0)
            )
        took = machine.seconds(
            partial(dist.all_reduce, torch.zeros_like(here), group=group), times=machine.size(10, 2)
        )
        found.append(
            (f"two ranks, all-reduce of {4 * numel} bytes, {codec}", 1e3 * took, "ms", None)
        )
    return found


def nccl_ranks(machine: Machine, report: Report) -> None:
    """Two ranks of NCCL on one card (NCCL 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1): every collective
    behind the guard."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    with report.line("two ranks", must=machine.twin), LocalRanks(2, forked=True) as pool:
        for name, wrong in pool.call(_among_two, machine.twin, lambda *_: None).items():
            report(f"{name}: elements that differ", wrong, limit=0, bound="most")


def _among_two(rank: int, size: int, twin: bool, told: Told) -> dict[str, int]:
    import_module("commpress.backend")
    machine: Machine = Twin() if twin else Card()
    if not twin:
        torch.cuda.set_device(0)
    ours, plain = (
        dist.new_group(backend=name, timeout=PATIENT) for name in ("commpress", machine.backend)
    )
    return {name: _differ(machine, call, ours, plain) for name, call in _calls(machine).items()}


def _differ(
    machine: Machine,
    call: Callable[[dist.ProcessGroup], list[torch.Tensor]],
    one: dist.ProcessGroup,
    other: dist.ProcessGroup,
) -> int:
    ours, theirs = call(one), call(other)
    machine.synchronize()
    return sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))


def _calls(machine: Machine) -> dict[str, Callable[[dist.ProcessGroup], list[torch.Tensor]]]:
    """Calls by name that return what this rank holds afterwards; one rank talks to itself."""

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1 + dist.get_rank())
        return (100 * torch.randn(*shape, generator=draw)).to(dtype).to(machine.device)

    def reduced(
        dtype: torch.dtype, op: dist.ReduceOp.RedOpType
    ) -> Callable[[dist.ProcessGroup], list[torch.Tensor]]:
        def call(group: dist.ProcessGroup) -> list[torch.Tensor]:
            x = drawn(7, 3, dtype=dtype)
            dist.all_reduce(x, op, group=group)
            return [x]

        return call

    def in_place(
        collective: Callable[..., object],
    ) -> Callable[[dist.ProcessGroup], list[torch.Tensor]]:
        def call(group: dist.ProcessGroup) -> list[torch.Tensor]:
            x = drawn(1000)
            collective(x, 0, group=group)
            return [x] if dist.get_rank() == 0 or collective is dist.broadcast else []

        return call

    def into(
        collective: Callable[..., object], shape: Callable[[int, int], int]
    ) -> Callable[[dist.ProcessGroup], list[torch.Tensor]]:
        def call(group: dist.ProcessGroup) -> list[torch.Tensor]:
            inp = drawn(1000)
            out = torch.empty(shape(1000, group.size()), device=machine.device)
            collective(out, inp, group=group)
            return [out]

        return call

    def gathered(group: dist.ProcessGroup) -> list[torch.Tensor]:
        rows = [torch.empty(9, device=machine.device) for _ in range(group.size())]
        dist.all_gather(rows, drawn(9), group=group)
        return rows

    def later(group: dist.ProcessGroup) -> list[torch.Tensor]:
        x, y = drawn(5000), drawn(11)
        works = [dist.all_reduce(t, group=group, async_op=True) for t in (x, y)]
        for work in reversed(works):
            work.wait()
        return [x, y]

    def by_future(group: dist.ProcessGroup) -> list[torch.Tensor]:
        x = drawn(1000).repeat(machine.size(1 << 14, 1))
        dist.all_reduce(x, group=group, async_op=True).get_future().wait()
        return [2 * x]

    def under_ddp(group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).to(machine.device)
        model = DistributedDataParallel(net, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(drawn(8, 64) / 100).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    reductions = {
        f"all_reduce {op} {str(dtype).removeprefix('torch.')}": reduced(dtype, ops[op])
        for op in ops
        for dtype in dtypes
    }
    return reductions | {
        "broadcast": in_place(dist.broadcast),
        "reduce": in_place(dist.reduce),
        "all_gather": gathered,
        "all_gather_into_tensor": into(all_gather_single, mul),
        "reduce_scatter_tensor": into(reduce_scatter_single, floordiv),
        "all_to_all_single": into(dist.all_to_all_single, lambda numel, _: numel),
        "all_reduce, later": later,
        "all_reduce, by its future": by_future,
        "weights after three steps of DDP": under_ddp,
    }
