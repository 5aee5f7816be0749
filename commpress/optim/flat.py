"""Places of all parameters in a flat float32 buffer, and buffers with this layout.

Note: why flat. A message then is a table of runs in one buffer, whichever parameters it carries,
and one call of a kernel walks all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from commpress.errors import InvalidArgument
from commpress.kernels.adam import Segments
from commpress.optim.layout import check_parameter, local, version_of
from commpress.torch_private import adam

ALIGN = 16  # elements: every parameter starts on a cache line


class Flat:
    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        if not parameters:
            raise InvalidArgument("params is empty, expected at least one parameter")
        self.parameters, self.names = list(parameters), list(names)
        self.device = parameters[0].device
        for p, name in zip(parameters, names, strict=True):
            check_parameter(name, p)
            if p.device != self.device:
                raise InvalidArgument(
                    f"parameter {name!r} is on {p.device} and {names[0]!r} on {self.device}: all "
                    "parameters of one optimizer must be on one device, make one optimizer per "
                    "device"
                )
        self.index = {id(p): i for i, p in enumerate(parameters)}
        twice = [names[i] for i, p in enumerate(parameters) if self.index[id(p)] != i]
        if twice:
            raise InvalidArgument(
                f"parameter {twice[0]!r} is in params twice: pass a tied one once, as "
                "model.parameters() does"
            )
        if len(set(names)) < len(names):
            alike = next(name for i, name in enumerate(names) if name in names[:i])
            raise InvalidArgument(
                f"two parameters are called {alike!r}, and what compression leaves behind is kept "
                "by name: pass named parameters under the names that the whole model gives them, "
                "or all without names"
            )
        shards = [local(p) for p in parameters]
        self.shapes = [shard.shape for shard in shards]  # of this rank's shards
        self.places: list[tuple[int, int]] = []
        at = 0
        for shard in shards:
            self.places.append((at, shard.numel()))
            at += -(-shard.numel() // ALIGN) * ALIGN
        self.numel = at
        self._dtypes = [p.dtype for p in parameters]
        self.shadowed = [
            i for i, p in enumerate(shards) if p.dtype != torch.float32 or not p.is_contiguous()
        ]
        # float32 weights of parameters of other dtypes
        self.master = self.new() if self.shadowed else None
        self._cast: torch.Tensor | None = None
        self._placed: dict[range | tuple[int, ...], Segments] = {}
        self.weights: list[torch.Tensor] = [shard.detach() for shard in shards]
        self._seen: dict[int, tuple[int, int]] = {}  # of parameters with a copy, see ``trust``
        self.adopt()

    def new(self) -> torch.Tensor:
        """Return a buffer of zeros aligned to a cache line. NumPy asks for huge pages, torch does
        not."""
        if self.device.type == "cpu":
            room = np.zeros(self.numel + ALIGN, np.float32)
            first = -room.ctypes.data % (4 * ALIGN) // 4
            return torch.from_numpy(room[first : first + self.numel])
        return torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    def grown(self, before: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of ``before``, a buffer of fewer parameters, extended with zeros."""
        buffer = self.new()
        if before is not None:
            buffer[: before.numel()] = before
        return buffer

    def shard(self, i: int) -> torch.Tensor:
        """Return this rank's values of a parameter: its shard if it is a DTensor, else all."""
        return local(self.parameters[i]).detach()

    def follow(self, before: "Flat") -> None:
        """Copy float32 weights of the first parameters from ``before``, where they may be more
        exact."""
        for i in before.shadowed:
            self.weights[i].copy_(before.weights[i])
        self._seen |= before._seen

    def view(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        first, numel = self.places[i]
        return buffer[first : first + numel].view(self.shapes[i])

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [self.view(buffer, i) for i in range(len(self.parameters))]

    def adopt(self) -> None:
        """Copy float32 weights from the parameters."""
        for i in self.shadowed:
            assert self.master is not None
            self.weights[i] = self.view(self.master, i)
            self.weights[i].copy_(self.shard(i))
        self.trust(self.shadowed)

    def publish(self) -> None:
        """Write float32 weights into parameters of other dtypes."""
        for i in self.shadowed:
            self.shard(i).copy_(self.weights[i])
        self.trust(self.shadowed)

    def trust(self, indices: Iterable[int]) -> None:
        """Record that these parameters and the copies of them belong together as they are now."""
        self._seen |= {i: self._place_of(i) for i in indices}

    def _place_of(self, i: int) -> tuple[int, int]:
        p = self.parameters[i]
        return version_of(p), local(p).data_ptr()

    def rewritten(self) -> list[int]:
        """Return the parameters that were written since ``trust``, as by
        ``model.load_state_dict``."""
        return [i for i, seen in self._seen.items() if self._place_of(i) != seen]

    def readopt(self) -> None:
        """Update float32 weights where parameters are no longer these, rounded."""
        for i in {*self.rewritten()}.intersection(self.shadowed):
            p, weights = self.shard(i), self.weights[i]
            weights.copy_(torch.where(p == weights.to(p.dtype), weights, p.float()))

    def check(self) -> None:
        """Check that parameters have not moved, as ``module.to()`` does, and follow those that
        were written."""
        shadowed = set(self.shadowed)
        for i, dtype in enumerate(self._dtypes):
            p = local(self.parameters[i])
            moved = i not in shadowed and p.data_ptr() != self.weights[i].data_ptr()
            if p.device != self.device or p.dtype != dtype or (moved and not p.is_contiguous()):
                raise InvalidArgument(
                    f"parameter {self.names[i]!r} is now {p.dtype} on {p.device}, it was {dtype} "
                    f"on {self.device}: construct the optimizer after moving or converting the "
                    "model"
                )
            if moved:
                self.weights[i] = p.detach()
                self._placed.clear()
        self.readopt()

    def gradient(self, i: int, given: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return a gradient, float32 and contiguous; None stands for zeros, so that a missing
        gradient stops no rank."""
        g = self.parameters[i].grad if given is None else given
        if g is None:
            return None
        g = local(g)
        if g.layout != torch.strided:
            g = g.to_dense()
        if g.dtype == torch.float32 and g.is_contiguous():
            return g
        if self._cast is None:
            self._cast = self.new()
        return self.view(self._cast, i).copy_(g)

    def placed(self, indices: range | tuple[int, ...]) -> Segments:
        """Return segments of parameters without their gradients."""
        if indices not in self._placed:
            weights, places = [self.weights[i] for i in indices], [self.places[i] for i in indices]
            self._placed[indices] = Segments(weights, [None] * len(weights), places)
        return self._placed[indices]

    def segments(
        self,
        indices: Iterable[int],
        given: Mapping[int, torch.Tensor] | Sequence[torch.Tensor] | None = None,
    ) -> Segments:
        """Return segments. ``given``: gradients by parameter number, in place of ``grad``."""
        every = indices if isinstance(indices, range) else tuple(indices)
        gradients = [self.gradient(i, None if given is None else given[i]) for i in every]
        return self.placed(every).having(gradients)


def adam_step(
    group: dict[str, Any],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
    variances: list[torch.Tensor],
    counts: list[torch.Tensor],
) -> None:
    """Take Adam's step with torch's fused kernel, so equal bit for bit. ``counts``: steps taken by
    each parameter, on the host; ``ENDLESS`` without bias correction."""
    steps = counts  # that kernel reads and advances them where the weights are
    if weights and weights[0].device.type != "cpu":
        steps = list(torch.stack(counts).to(weights[0].device, non_blocking=True).unbind())
        torch._foreach_add_(counts, 1.0)
    adam(
        weights,
        gradients,
        momenta,
        variances,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        decoupled_weight_decay=True,
    )
