"""Edges of a pipeline: tensors that torch's schedules send from stage to stage are encoded, and
decoded on arrival.

A schedule asks a stage for its sends and receives, and runs forward or backward of a micro-batch
after a receive. These sends and receives get messages in place of tensors, and messages are decoded
into the tensors before these are used. So shapes, schedules, meshes and autograd are torch's own.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commpress.codecs import Codec
from commpress.collectives.buckets import FLOATS
from commpress.errors import InvalidArgument, Mismatch, check_counts
from commpress.integrations.pipeline import edge_choice
from commpress.integrations.pipeline.edge_codec import (
    EdgeCodec,
    decode_into,
    edge_codec,
    encoded,
    exact_bytes,
    width_of,
)
from commpress.integrations.pipeline.tiles import TileCodec
from commpress.torch_private import (
    learning,
    pipeline_stages,
    reshards_after_forward,
    splits_backward,
)
from commpress.totals import Totals

NAMES = (
    "get_fwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_send_ops",
    "get_bwd_recv_ops",
    "forward_one_chunk",
    "backward_one_chunk",
)
_WORDS = 256  # bytes for a rank's options as text


@dataclass
class EdgeCounters(Totals):
    """Totals of one rank since its stages were compressed. Bytes are those that this rank sent to
    other stages."""

    messages: int = 0
    sent_bytes: int = 0
    exact_bytes: int = 0  # bytes that torch alone would have sent
    compressed_elements: int = 0
    exact_elements: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Factor by which bytes are fewer than torch's."""
        return self.exact_bytes / self.sent_bytes if self.sent_bytes else 1.0


class PipelineEdges:
    """State of compressed edges on one rank; ``compress_pipeline`` makes it."""

    def __init__(
        self,
        stages: Sequence[Any],
        codecs: Callable[[int, int, bool], EdgeCodec | None],
        *,
        min_numel: int,
        gradients_only: bool,
        choice: Mapping[tuple[int, int], str],
    ) -> None:
        self.stages, self.codecs = list(stages), codecs
        self.min_numel, self.gradients_only = min_numel, gradients_only
        self.choice = dict(choice)  # with codec="auto": (from, to) ranks of the group → codec
        self.counters = EdgeCounters()
        self.edges = [StageEdges(stage, self) for stage in self.stages]
        for edge in self.edges:
            edge.enter()

    def remove(self) -> None:
        """Let the stages send exact tensors again; call it on every rank."""
        for edge in self.edges:
            edge.leave()


class StageEdges:
    """Edges of one stage, to the stages before and after it."""

    def __init__(self, stage: Any, owner: PipelineEdges) -> None:
        self.stage, self.owner, self.kind = stage, owner, type(stage)
        self.rank = dist.get_rank(stage.group)
        # decodings by direction and micro-batch
        self.due: dict[tuple[bool, int], list[Callable[[], None]]] = {}

    def enter(self) -> None:
        """Change the stage's class to one that compresses, as ``fully_shard`` does with a
        module."""
        self.stage.__class__ = _compressed(self.kind, self)

    def leave(self) -> None:
        self.stage.__class__ = self.kind

    # ------------------------------------------------------------ sending

    def sends(self, ops: list[dist.P2POp], chunk: int, *, forward: bool) -> list[dist.P2POp]:
        """Return the sends with messages in place of tensors."""
        each = self._each(ops, forward, outputs=True)
        return [_instead(op, self._message(op, forward, lossy)) for op, lossy in each]

    def _message(self, op: dist.P2POp, forward: bool, lossy: bool) -> torch.Tensor:
        counters, tensor = self.owner.counters, op.tensor
        codec = self._codec(op, (self.rank, self._peer(op)), forward) if lossy else None
        counters.messages += 1
        counters.exact_bytes += exact_bytes(tensor)
        message = tensor
        if codec is not None:
            start = perf_counter()
            message = encoded(tensor, codec)
            counters.encode_seconds += perf_counter() - start
            counters.compressed_elements += tensor.numel()
        else:
            counters.exact_elements += tensor.numel()
        counters.sent_bytes += exact_bytes(message)
        return message

    # ------------------------------------------------------------ receiving

    def receives(self, ops: list[dist.P2POp], chunk: int, *, forward: bool) -> list[dist.P2POp]:
        """Return the receives with messages in place of tensors; ``settle`` decodes them."""
        found: list[dist.P2POp] = []
        due: list[Callable[[], None]] = []
        for op, lossy in self._each(ops, forward, outputs=False):
            codec = self._codec(op, (self._peer(op), self.rank), forward) if lossy else None
            message = op.tensor
            if codec is not None:
                size = codec.size(message.numel(), width_of(message))
                message = torch.empty(size, dtype=torch.uint8, device=message.device)
                due.append(partial(decode_into, op.tensor, message, codec))
            found.append(_instead(op, message))
        self.due[forward, chunk] = due
        return found

    def settle(self, chunk: int, *, forward: bool) -> None:
        """Decode the messages received for a micro-batch."""
        start = perf_counter()
        for decode in self.due.pop((forward, chunk), ()):
            decode()
        self.owner.counters.decode_seconds += perf_counter() - start

    # ------------------------------------------------------------ codecs

    def _each(
        self, ops: list[dist.P2POp], forward: bool, *, outputs: bool
    ) -> list[tuple[dist.P2POp, bool]]:
        """Return each op and whether it may be lossy, equal on both sides."""
        learns = (
            learning(self.stage, outputs=outputs) if forward and self.owner.gradients_only else None
        )
        if learns is None or len(learns) != len(ops):
            learns = (True,) * len(ops)
        least = self.owner.min_numel
        return [
            (op, learns_ and op.tensor.dtype in FLOATS and op.tensor.numel() >= least)
            for op, learns_ in zip(ops, learns, strict=True)
        ]

    def _codec(self, op: dist.P2POp, ends: tuple[int, int], forward: bool) -> EdgeCodec | None:
        found = self.owner.codecs(*ends, not forward)
        return None if found is not None and found.spec == _OWN.get(op.tensor.dtype) else found

    def _peer(self, op: dist.P2POp) -> int:
        """Return the rank of the other end in the pipeline's group; torch may use another group for
        each edge."""
        group = self.stage.group or dist.group.WORLD
        assert group is not None
        return dist.get_group_rank(group, op.peer)


_OWN = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # casts without effect, by dtype


def _compressed(kind: type, own: StageEdges) -> type:
    """Make a subclass of ``kind`` for one stage: the schedule's sends and receives go through
    ``own``."""

    class Compressed(kind):
        edges = own

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
            return own.sends(super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id, forward=True)

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
            return own.receives(super().get_fwd_recv_ops(fwd_chunk_id), fwd_chunk_id, forward=True)

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
            return own.sends(super().get_bwd_send_ops(bwd_chunk_id), bwd_chunk_id, forward=False)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
            return own.receives(super().get_bwd_recv_ops(bwd_chunk_id), bwd_chunk_id, forward=False)

        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            own.settle(fwd_chunk_id, forward=True)
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            own.settle(bwd_chunk_id, forward=False)
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    Compressed.__name__ = Compressed.__qualname__ = f"Compressed{kind.__name__}"
    return Compressed


def _instead(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    return op if tensor is op.tensor else dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)


def compress_pipeline(
    stages_or_schedule: Any,
    codec: str | Codec | TileCodec = "int4",
    *,
    gradient_codec: str | Codec | TileCodec | None = None,
    min_numel: int = 256,
    gradients_only: bool = True,
) -> PipelineEdges:
    """Compress the tensors that stages of a pipeline exchange. Call it on every rank of the
    pipeline's group, before the first step.

    ``stages_or_schedule``: a stage, this rank's stages, or the schedule that runs them
    (``torch.distributed.pipelining``).

    - ``codec``: codec of activations: int4, int8, fp8, bf16, fp16, bits3 … bits8, tah4 (rotated
      tiles), none, a registered one, or "auto": the fastest of none, bf16, int8 and int4 on each
      edge, by a measurement of its link now.
    - ``gradient_codec``: codec of their gradients (default: as ``codec``).
    - ``min_numel``: smaller tensors are sent exactly.
    - ``gradients_only``: floats without a gradient, such as masks, are sent exactly. Pass False if
      the first stage has no trainable parameters.

    Integers, float64 and tensors between stages of one rank are exact. Gradients pass through the
    codec as if it were the identity.
    """
    stages = _stages(stages_or_schedule)
    check_backwards(stages_or_schedule, stages)
    check_counts(min_numel=min_numel)
    gradient_codec = codec if gradient_codec is None else gradient_codec
    fixed = [
        None if each == "auto" else edge_codec(each, name)
        for each, name in ((codec, "codec"), (gradient_codec, "gradient_codec"))
    ]
    group, device = stages[0].group, stages[0].device
    words = [None if each is None else each.spec for each in fixed]
    options = words, codec == "auto", gradient_codec == "auto", min_numel, gradients_only
    _agree(group, hashlib.sha256(repr(options).encode()).hexdigest()[:16], codec, device)
    choice = edge_choice.measured(group, device) if "auto" in (codec, gradient_codec) else {}
    chosen = {ends: edge_codec(name) for ends, name in choice.items()}

    def codecs(sender: int, receiver: int, gradient: bool) -> EdgeCodec | None:
        wanted = gradient_codec if gradient else codec
        return chosen.get((sender, receiver)) if wanted == "auto" else fixed[gradient]

    return PipelineEdges(
        stages,
        codecs,
        min_numel=min_numel,
        gradients_only=gradients_only,
        choice=choice,
    )


def check_backwards(schedule: Any, stages: Sequence[Any]) -> None:
    """Raise ``InvalidArgument`` where torch would silently lose gradients, because
    ``autograd.grad`` runs no hooks."""
    if not splits_backward(schedule):
        return
    why = (
        f"and {type(schedule).__name__} computes gradients of weights apart from those of "
        "activations"
    )
    for stage in stages:
        if isinstance(stage.submod, DistributedDataParallel):
            raise InvalidArgument(
                f"stage {stage.stage_index} is under DistributedDataParallel, {why}, which runs no "
                "hook of DDP: replicas would diverge. Leave DDP out: compress(schedule, mesh=mesh, "
                "dims=...) averages in synchronize()"
            )
        if isinstance(stage.submod, FSDPModule) and reshards_after_forward(stage.submod):
            raise InvalidArgument(
                f"stage {stage.stage_index} is under fully_shard, which frees weights after "
                f"forward, {why}: torch does not find these weights and leaves their gradients "
                "out. Pass reshard_after_forward=False to every fully_shard"
            )


def _stages(given: Any) -> list[Any]:
    """Return this rank's stages, after checking that torch made them and that they are not yet
    compressed."""
    if isinstance(given, Sequence):
        stages = list(given)
    else:
        stages = [given] if hasattr(given, "stage_index") else pipeline_stages(given)
    if not stages:
        raise InvalidArgument(
            "stages_or_schedule has no stage: pass the stages that this rank runs"
        )
    for stage in stages:
        missing = [name for name in NAMES if not callable(getattr(stage, name, None))]
        if missing or not hasattr(stage, "stage_index"):
            raise InvalidArgument(
                f"stages_or_schedule has a {type(stage).__name__}, expected stages of torch's "
                "pipelining, or a schedule"
            )
        if isinstance(getattr(stage, "edges", None), StageEdges):
            raise InvalidArgument(
                f"stage {stage.stage_index} is compressed already: call remove() of its edges first"
            )
    if len({id(stage.group) for stage in stages}) > 1:
        raise InvalidArgument(
            "the stages of this rank have different groups, expected one for the whole pipeline"
        )
    return stages


def _agree(group: Any, options: str, codec: Any, device: torch.device) -> None:
    words = f"{options} {codec!s}".encode()[:_WORDS].ljust(_WORDS)
    rows = torch.empty(dist.get_world_size(group), _WORDS, dtype=torch.uint8, device=device)
    dist.all_gather(
        list(rows), torch.tensor(list(words), dtype=torch.uint8, device=device), group=group
    )
    every = [bytes(row).decode(errors="replace").strip().split(" ", 1) for row in rows.tolist()]
    if len({each[0] for each in every}) > 1:
        rank = dist.get_rank(group)
        others = tuple(r for r, each in enumerate(every) if each[0] != options)
        raise Mismatch(
            f"rank {rank} compresses the pipeline with codec={codec!s} and other options than "
            f"ranks {list(others)}, which have {sorted({each[1] for each in every})}: call "
            "compress_pipeline with the same options on all of them",
            ranks=others,
        )
