"""DeMo (arXiv 2411.19870): decoupled momentum. Ranks keep momentum apart, and tell each other its
fastest components alone.

    δᵢ ← β·δᵢ + γ·gᵢ    qᵢ = the k largest of each chunk of DCT(δᵢ)    δᵢ ← δᵢ − IDCT(qᵢ)
    qᵢ to everybody     q̄: of each coefficient the mean over the ranks that sent it
    x ← (1 − γ·λ)·x − γ·sign(IDCT(q̄))

Every rank decodes what all sent, adds it in the order of ranks, and transforms it back in float64,
of which one sign is used: so parameters stay the same in every bit, which checksums hold every now
and then.
"""

from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any, Literal

import torch

from commpress.codecs import policy_of
from commpress.collectives.allreduce import exchange
from commpress.collectives.buckets import Span
from commpress.collectives.exchange import Exchanges
from commpress.collectives.frame import ALL_GATHER, HEADER, NOT_FINITE, Frame
from commpress.collectives.scalars import gathered
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, StateMismatch, check_counts
from commpress.kernels.cosine import ChunkedCosine
from commpress.kernels.sparse_blocks import SparseBlocks
from commpress.logs import warn_on_first
from commpress.optim.fixed_groups import FixedGroups
from commpress.optim.optimizer import checksum, loss_of, report_skipped, require_same
from commpress.torch_private import untraced
from commpress.work import Steps

FORMAT = 1


class DeMo(FixedGroups):
    """``DeMo(model.parameters(), lr=1e-3)``: signs of shared momentum, of some 0.3 bits a parameter
    and peer.

    Gradients are this rank's own: do not wrap the model in DistributedDataParallel, which would
    average them.

    - ``decay``: β, of the momentum that has not been sent.
    - ``topk``, ``chunk``: coefficients kept of each chunk of up to chunk × chunk elements (a
      vector's: of up to chunk).
    - ``bits``: of each value that travels; None: float32, as published. What fewer bits leave out
      stays in the momentum.
    - ``check_every``: steps between two comparisons of all ranks' parameters; 0: never.
    - ``on_nonfinite``: "skip" leaves out a step whose gradients are not finite on some rank, on all
      of them; "raise" raises.
    """

    averages_gradients = True  # of all ranks, in ``step``: nobody else may
    # scales may differ between ranks: momentum is in units without
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        decay: float = 0.999,
        topk: int = 32,
        chunk: int = 64,
        bits: int | None = None,
        weight_decay: float = 0.0,
        check_every: int = 1000,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        process_group: Any = None,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        for name, number in (("lr", lr), ("weight_decay", weight_decay)):
            if not float(number) >= 0:
                raise InvalidArgument(f"{name} is {number!r}, expected a number of at least 0")
        if not 0 <= decay < 1:
            raise InvalidArgument(
                f"decay is {decay!r}, expected a number from 0 to below 1, such as 0.999"
            )
        if not isinstance(chunk, int) or chunk not in range(2, 257):
            raise InvalidArgument(
                f"chunk is {chunk!r}, expected a whole number from 2 to 256, such as 64"
            )
        if topk not in range(1, chunk * chunk + 1):
            raise InvalidArgument(
                f"topk is {topk!r}, expected 1 to {chunk * chunk}, the coefficients of a chunk"
            )
        if bits is not None and bits not in range(1, 9):
            raise InvalidArgument(f"bits is {bits!r}, expected 1 to 8, or None for float32")
        check_counts(check_every=check_every)
        self.decay, self.topk, self.chunk, self.bits, self.check_every = (
            decay,
            topk,
            chunk,
            bits,
            check_every,
        )
        super().__init__(
            params,
            {"lr": lr, "weight_decay": weight_decay},
            "sends a part of every momentum to all",
            on_nonfinite=on_nonfinite,
            process_group=process_group,
            transport=transport,
            timeout=timeout,
        )
        flat = self._flat
        self._delta, self._next = flat.new(), flat.new()
        self._hold(delta=self._delta)
        self._transforms = [ChunkedCosine.of(p.shape, chunk) for p in flat.parameters]
        # parameters by the shape of their chunks
        self._alike: dict[tuple[int, int], list[int]] = {}
        for i, (p, transform) in enumerate(zip(flat.parameters, self._transforms, strict=True)):
            if p.numel():
                self._alike.setdefault(transform.chunk, []).append(i)
        self._coded = [
            (self._code(tall * wide), numbers) for (tall, wide), numbers in self._alike.items()
        ]
        self._sizes = [
            code.row_bytes(self._coefficients(numbers, code)) for code, numbers in self._coded
        ]

    def _code(self, elements: int) -> SparseBlocks:
        kept = min(self.topk, elements)
        return SparseBlocks(
            kept, (kept - 1).bit_length() if self.bits is None else self.bits, elements
        )

    def _coefficients(self, numbers: list[int], code: SparseBlocks) -> int:
        return (
            sum(below * beside for below, beside in (self._transforms[i].grid for i in numbers))
            * code.block
        )

    # ------------------------------------------------------------ one step

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        if not self.channel.run(self.steps()):
            report_skipped(
                self.steps_done, self.counters.skipped_steps, self.on_nonfinite, self.channel.rank
            )
        return loss

    @torch.no_grad()
    def steps(self) -> Steps[bool]:
        """One step as an algorithm that may wait; returns whether it was taken, the same on every
        rank."""
        flat, channel, sent = self._flat, self.channel, self.channel.sent_bytes
        flat.check()
        if self.check_every and self.steps_done % self.check_every == 0:
            yield from self._compare()
        self._accumulate()
        overflowed = bool(getattr(self, "found_inf", False))
        rows = yield from self._told(
            finite=not overflowed and bool(torch.isfinite(self._next).all())
        )
        if rows is not None:
            self._descend(rows)
            self._delta.copy_(self._next)
            flat.publish()
            self.steps_done += 1
        self.counters.step(
            "compressed", rows is not None, channel.sent_bytes - sent, flat.numel, channel.size
        )
        return rows is not None

    def _compare(self) -> Steps[None]:
        """Raise if parameters differ, warn if gradients do not: then somebody has averaged them."""
        gradients = [
            g
            for i in range(len(self._flat.parameters))
            if (g := self._flat.gradient(i)) is not None
        ]
        seen = checksum(gradients) if any(g.any() for g in gradients) else 0
        numbers = [checksum(self._flat.weights), self.steps_done, seen]
        every = yield from gathered(
            numbers,
            transport=self.channel.transport,
            sequence=self.channel.take(),
            device=self._flat.device,
        )
        require_same(every[:, :2], self.steps_done)
        if len(every) > 1 and every[0, 2] and (every[:, 2] == every[0, 2]).all():
            warn_on_first(
                self.channel.rank,
                "gradients are the same in every bit on all ranks: somebody averaged them already, "
                "so DeMo saves nothing. Leave DistributedDataParallel out",
            )

    def _accumulate(self) -> None:
        """The momentum to be, before anything of it is sent: β·δ + γ·g. A missing gradient is
        zero."""
        scale = getattr(self, "grad_scale", None)
        gain = 1.0 if scale is None else 1.0 / float(scale)
        torch.mul(self._delta, self.decay, out=self._next)
        for group, i in self._each():
            g = self._flat.gradient(i)
            if g is not None:
                self._flat.view(self._next, i).add_(g, alpha=group["lr"] * gain)

    def _told(self, *, finite: bool) -> Steps[list[torch.Tensor] | None]:
        """Rows of all ranks, by shape of chunk, and what this rank sent off its momentum; None if
        some rank was not finite."""
        workspace, device, transport = (
            self.channel.workspace,
            self._flat.device,
            self.channel.transport,
        )
        size, start = HEADER + sum(self._sizes), perf_counter()
        outbox, inbox = (
            workspace.rows(size, 1, device),
            workspace.rows(size, self.channel.size, device),
        )
        for (code, numbers), part in zip(
            self._coded, outbox[0, HEADER:].split(self._sizes), strict=True
        ):
            if not finite:
                part.zero_()
                continue
            transforms = [self._transforms[i] for i in numbers]
            views = [self._flat.view(self._next, i) for i in numbers]
            coefficients = torch.cat(
                [t.forward(v).view(-1) for t, v in zip(transforms, views, strict=True)]
            )
            part.copy_(code.encode(coefficients))
            told = code.decode(part, coefficients.numel())
            for i, x in self._back(told, numbers):
                self._flat.view(self._next, i).sub_(x)
        workspace.encoded(start)
        what = f"demo/{self.topk}/{self.chunk}/{self.bits or 32}"
        frame = Frame(ALL_GATHER, transport.size, what, self._flat.numel, self.channel.take())
        mark = torch.full((1,), 0 if finite else NOT_FINITE, dtype=torch.uint8, device=device)
        flags = yield from exchange(
            transport.all_gather, inbox, outbox, frame, mark, transport, workspace
        )
        rows = (
            None
            if flags & NOT_FINITE
            else [part.clone() for part in inbox[:, HEADER:].split(self._sizes, dim=1)]
        )
        workspace.give_rows(outbox, inbox)
        return rows

    def _descend(self, rows: list[torch.Tensor]) -> None:
        """x ← (1 − γ·λ)·x − γ·sign of what all ranks sent."""
        groups = {i: group for group, i in self._each()}
        for (code, numbers), part in zip(self._coded, rows, strict=True):
            total = torch.zeros(
                self._coefficients(numbers, code), dtype=torch.float64, device=part.device
            )
            count = torch.zeros_like(total)
            for places, values in code.sparse(part, total.numel()):
                # rank after rank
                for at, said in zip(places.flatten(1), values.flatten(1), strict=True):
                    total[at] += said.double()
                    count[at] += 1
            for i, x in self._back(total.div_(count.clamp_(min=1)), numbers):
                weights, group = self._flat.weights[i], groups[i]
                weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    x.sign_().to(weights.dtype) * group["lr"]
                )

    def _back(
        self, coefficients: torch.Tensor, numbers: list[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """Each parameter's number, and what has these coefficients, in its shape."""
        grids = [self._transforms[i].grid for i in numbers]
        elements = coefficients.numel() // sum(below * beside for below, beside in grids)
        parts = coefficients.split([below * beside * elements for below, beside in grids])
        return [
            (i, self._transforms[i].backward(part).reshape(self._flat.parameters[i].shape))
            for i, part in zip(numbers, parts, strict=True)
        ]

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for a bitwise resume at the same world size: every rank saves and
        loads its own."""
        own = {"kind": "exact", "rank": self.channel.rank, "size": self.channel.size}
        return super().state_dict() | {"demo": own | {"format": FORMAT, "steps": self.steps_done}}

    def elastic_state_dict(self) -> dict[str, Any]:
        """A state for any number of ranks, the same on every rank: with the mean of their momenta.
        Collective."""
        return self.channel.run(self.elastic_steps())

    @torch.no_grad()
    def elastic_steps(self) -> Steps[dict[str, Any]]:
        """``elastic_state_dict`` as an algorithm that may wait."""
        flat, mean = self._flat, self._delta.clone()
        exchanges = Exchanges(
            policy_of("none"), self.channel.size, self.channel.workspace, feedback=False
        )
        whole = exchanges.of(
            ("delta",), lambda: ([Span("delta", 0, flat.numel)], [(flat.numel,)]), flat.device
        )
        yield from whole.steps(
            self.channel, mean, sequence=self.channel.take(whole.sequences), key=0
        )
        state = super().state_dict()
        for i in range(len(flat.parameters)):
            state["state"][i] = state["state"][i] | {"delta": flat.view(mean, i).clone()}
        return state | {"demo": {"kind": "elastic", "format": FORMAT, "steps": self.steps_done}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's ``state_dict``, or anybody's ``elastic_state_dict``. Load the model
        before."""
        head = state_dict.get("demo", {})
        if head.get("format") != FORMAT:
            raise StateMismatch(
                f"expected what DeMo.state_dict() or elastic_state_dict() gave, format {FORMAT}: "
                "this is not. torch.distributed.checkpoint.state_dict leaves a part of it out: "
                "save it with torch.save, on each rank its own"
            )
        mine = self.channel.rank, self.channel.size
        if head["kind"] == "exact" and (head["rank"], head["size"]) != mine:
            raise StateMismatch(
                f"the state was saved by rank {head['rank']} of {head['size']}, this is rank "
                f"{mine[0]} of {mine[1]}: load each rank's own, or to change the world size save "
                "with elastic_state_dict()"
            )
        self._take_state(state_dict)
        self.steps_done = int(head["steps"])
