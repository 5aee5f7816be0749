"""Fragments of a model that is trained locally: parameters that are exchanged together, with their shared weights."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from commpress.checksum import checksum_of
from commpress.collectives.buckets import Span
from commpress.errors import InvalidArgument
from commpress.optim.outer import Outer, State


@dataclass(eq=False)
class Fragment:
    """Parameters that are exchanged together: their shared weights, and what has been trained on since."""

    number: int
    parameters: list[torch.Tensor]  # local shards where they are distributed
    spans: list[Span]
    weights: torch.Tensor  # Θ, flat float32
    state: State  # of the outer step
    work: torch.Tensor  # Δ on its way, where the parameters are
    steps: int = 0
    tokens: int = 0
    layout: int = 0  # of names and shapes

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[s.source : s.source + s.numel].view(p.shape) for s, p in zip(self.spans, self.parameters, strict=True)]

    def change(self) -> None:
        """``work`` := Θ as the parameters would hold it, minus the parameters."""
        for shared, out, p in zip(self.views(self.weights), self.views(self.work), self.parameters, strict=True):
            out.copy_(shared.to(device=p.device, dtype=p.dtype)).sub_(p)

    def set_change(self, change: torch.Tensor) -> None:
        """Parameters := Θ − change."""
        for shared, moved, p in zip(self.views(self.weights), self.views(change), self.parameters, strict=True):
            p.copy_(shared - moved.to(shared.device))

    def merge(self, alpha: float) -> None:
        for shared, p in zip(self.views(self.weights), self.parameters, strict=True):
            if alpha:
                p.copy_(torch.lerp(shared.to(device=p.device, dtype=p.dtype), p, alpha))
            else:
                p.copy_(shared)

    def take_over(self) -> None:
        """Θ := parameters."""
        for shared, p in zip(self.views(self.weights), self.parameters, strict=True):
            shared.copy_(p)

    def digest(self) -> int:
        """64 bits of Θ, and of which parameters it is."""
        bits = self.weights.detach().cpu().numpy()
        return checksum_of(bits.data.cast("B"), self.layout)

    def halves(self) -> tuple[float, float]:
        """The 64 bits of ``digest`` in two numbers that float64 holds exactly."""
        digest = self.digest()
        return float(digest >> 32), float(digest & 0xFFFFFFFF)


def fragments_of(
    named: Sequence[tuple[str, torch.Tensor]], fragments: int | Sequence[Sequence[torch.Tensor]], outer: Outer,
    keep: Literal["host", "device"],
) -> list[Fragment]:
    """Fragments of these parameters: so many of about equal size, or those given as lists of parameters."""
    if isinstance(fragments, int):
        if not 1 <= fragments <= len(named):
            raise InvalidArgument(f"fragments is {fragments}, expected 1 to {len(named)}, the number of parameters")
        parts = _even(list(named), fragments)
    else:
        names = {id(p): name for name, p in named}
        parts = [[(names.get(id(p), ""), p) for p in part] for part in fragments]
        if sorted(id(p) for part in parts for _, p in part) != sorted(names) or not all(parts):
            raise InvalidArgument("fragments do not hold each parameter of inner once: every list must, and no other")
    return [_fragment(number, part, outer, keep) for number, part in enumerate(parts)]


@torch.no_grad()
def _fragment(number: int, part: Sequence[tuple[str, torch.Tensor]], outer: Outer, keep: Literal["host", "device"]) -> Fragment:
    spans, at = [], 0
    local = [local_part(p) for _, p in part]
    for (name, _), p in zip(part, local, strict=True):
        spans.append(Span(name, at, p.numel()))
        at += p.numel()
    device = local[0].device
    if any(p.device != device for p in local):
        raise InvalidArgument(f"parameters of fragment {number} are on several devices: give each device its own fragments")
    weights = torch.empty(at, dtype=torch.float32, device="cpu" if keep == "host" else device)
    layout = zlib.crc32(repr([(s.name, tuple(p.shape)) for s, p in zip(spans, local, strict=True)]).encode())
    work = torch.empty(at, dtype=torch.float32, device=device)
    fragment = Fragment(number, local, spans, weights, {}, work, layout=layout)
    fragment.take_over()
    fragment.state = outer.state(weights)
    return fragment


def local_part(p: torch.Tensor) -> torch.Tensor:
    """A plain tensor: the local shard of a distributed one."""
    to_local = getattr(p, "to_local", None)
    return p.detach() if to_local is None else to_local().detach()


def _even(named: list[tuple[str, torch.Tensor]], count: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Consecutive parts of about equal size, none empty."""
    parts: list[list[tuple[str, torch.Tensor]]] = []
    left, rest = sum(p.numel() for _, p in named), list(named)
    for more in range(count, 0, -1):
        part, size = [rest.pop(0)], 0
        size = part[0][1].numel()
        while len(rest) > more - 1 and (more == 1 or size + rest[0][1].numel() / 2 <= left / more):
            size += rest[0][1].numel()
            part.append(rest.pop(0))
        left -= size
        parts.append(part)
    return parts
