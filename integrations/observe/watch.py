"""Watches: let the parts of a run record their spans on a timeline.

timeline = commpress.Timeline(rank=dist.get_rank())
with commpress.watch(timeline, state, store=store, model=ddp, optimizer=optimizer):
    ...train...
timeline.save("rank0.json")
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.autograd import Variable

from commpress.collectives.allreduce import Workspace
from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from commpress.timeline import Timeline


def workspaces_of(state: Any) -> list[Workspace]:
    """Return the buffers in which a state or an optimizer of commpress encodes and decodes."""
    found: dict[int, Workspace] = {}
    for value in vars(state).values():
        for each in value.values() if isinstance(value, dict) else [value]:
            space = each.workspace if isinstance(each, Channel) else each
            if isinstance(space, Workspace):
                found[id(space)] = space
    return list(found.values())


def watch(
    timeline: Timeline,
    state: Any = None,
    *,
    store: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> "Watch":
    """Record spans of ``state`` (encode, wire, decode), ``store`` (disk, stalls), ``model``
    (forward, backward) and ``optimizer`` (steps) until the watch is ended or its context left."""
    watch = Watch()
    if state is not None:
        spaces = workspaces_of(state) if hasattr(state, "__dict__") else []
        if not spaces:
            raise InvalidArgument(
                f"state is a {type(state).__name__}, expected what commpress.compress or "
                "compress_fsdp returned, or an optimizer of commpress"
            )
        for part in spaces:
            watch.on(part, timeline)
    if store is not None:
        watch.on(store, timeline)
    if model is not None:
        watch.handles += _watch_model(model, timeline)
    if optimizer is not None:
        watch.handles += _watch_optimizer(optimizer, timeline)
    return watch


class Watch:
    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.handles: list[Any] = []

    def on(self, part: Any, timeline: Timeline) -> None:
        if part.timeline is not None:
            raise InvalidArgument(
                f"a {type(part).__name__} is watched already: end that watch first"
            )
        part.timeline = timeline
        self.parts.append(part)

    def end(self) -> None:
        for part in self.parts:
            part.timeline = None
        for handle in self.handles:
            handle.remove()
        self.parts, self.handles = [], []

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _watch_model(model: torch.nn.Module, timeline: Timeline) -> list[Any]:
    """Record forward, and backward until autograd has finished, by a callback at its end."""
    begun: list[float] = []

    def before(*_: Any) -> None:
        begun.append(perf_counter())

    def after(*_: Any) -> None:
        timeline.span("compute: forward", begun.pop())

    def backward(*_: Any) -> None:
        start = perf_counter()
        Variable._execution_engine.queue_callback(lambda: timeline.span("compute: backward", start))

    return [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after),
        model.register_full_backward_pre_hook(backward),
    ]


def _watch_optimizer(optimizer: torch.optim.Optimizer, timeline: Timeline) -> list[Any]:
    begun: list[float] = []
    before: Callable[..., None] = lambda *_: begun.append(perf_counter())  # noqa: E731
    after: Callable[..., None] = lambda *_: timeline.span("compute: optimizer", begun.pop())  # noqa: E731
    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
