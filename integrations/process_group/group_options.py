"""Options that choose which collectives of a process group are compressed; by default none."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch.distributed as dist

from commpress.codecs import Codec, LowRankCodec, codec_named
from commpress.codecs.exponents import ExponentCodec
from commpress.codecs.planned import load_plan
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.all_to_all.all_to_all import check_codec
from commpress.collectives.topology import Topology
from commpress.errors import InvalidArgument, check_counts

VARIABLE = "COMMPRESS_GROUP_OPTIONS"
_EXACT = "exact"
_ROW = 4096
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


@dataclass(frozen=True)
class GroupOptions:
    """Compress an all-reduce if all of this holds; otherwise it is exact.

    - its tensor has at least ``min_numel`` elements, in float32, bfloat16 or float16, on the CPU or
      on CUDA;
    - its reduction is one of ``ops``: "sum", "avg", also as ``ReduceOp``;
    - ``only="gradients"``: it is called inside a backward pass, where DDP reduces its buckets.
      Norms for clipping, metrics and votes are computed outside, and stay exact.
      ``only="everything"`` compresses those, too, without residuals, and requires codecs that need
      none: with eight bits or more per element, such as "int8", or unbiased, such as "terngrad".

    ``codec``: codec of all-reduces; None leaves them exact. Other collectives are exact unless they
    have a codec, too:

    - ``reduce_scatter``: codec of ``reduce_scatter_tensor``, under the same conditions for its
      input;
    - ``all_gather``: codec of ``all_gather_into_tensor`` with ``min_numel`` elements in its output,
      inside and outside a backward;
    - ``all_to_all``: codec of every ``all_to_all_single`` of these dtypes, of any length, because
      ranks may send different numbers of rows.

    ``all_gather="exact"`` and ``all_to_all="exact"`` are lossless: they code the exponents of
    bfloat16, for 1.3 to 1.43 times fewer bytes, and of float32, for 1.15, on the CPU. So does
    ``broadcast="exact"``, the only choice for broadcasts, with tensors of at least ``min_numel``
    elements.

    ``topology``: the ranks of each node, as a ``Topology``, as text ("2x4") or "auto" (from the
    launcher): all-reduces then sum exactly inside a node, and compress between nodes. Groups with
    one cannot ``reform``.
    """

    codec: str | Codec | None = "fp8"
    min_numel: int = 1 << 16
    ops: Sequence[Any] = ("sum", "avg")
    only: Literal["gradients", "everything"] = "gradients"
    reduce_scatter: str | Codec | None = None
    all_gather: str | Codec | None = None
    all_to_all: str | Codec | None = None
    broadcast: Literal["exact"] | Codec | None = None
    topology: Topology | str | None = None

    def __post_init__(self) -> None:
        if self.codec is not None and isinstance(codec_named(self.codec), LowRankCodec):
            raise InvalidArgument(
                f"codec is {self.codec!r}, which needs matrices, but an all-reduce sees flat "
                "buckets: use commpress.compress(ddp, codec=...), which knows the parameters' "
                "shapes, or another codec here"
            )
        check_counts(1, min_numel=self.min_numel)
        if self.only not in ("gradients", "everything"):
            raise InvalidArgument(f"only is {self.only!r}, expected 'gradients' or 'everything'")
        object.__setattr__(self, "ops", tuple(sorted({_op_name(op) for op in self.ops})))
        codecs = self.codecs()
        if isinstance(codecs.get("reduce_scatter"), WholeTensorCodec):
            raise InvalidArgument(
                f"reduce_scatter is {self.reduce_scatter!r}, which needs whole tensors, but a rank "
                "gets a row of one: use a codec such as 'int8' or 'sign'"
            )
        if not isinstance(codecs.get("broadcast", ExponentCodec()), ExponentCodec):
            raise InvalidArgument(
                f"broadcast is {self.broadcast!r}, expected 'exact' or None: all ranks must get "
                "the root's bits"
            )
        for name in ("all_reduce", "reduce_scatter"):
            if isinstance(codec := codecs.get(name), ExponentCodec):
                codec.refuse()
        for name in ("all_gather", "all_to_all"):
            if name in codecs and not isinstance(codecs[name], ExponentCodec):
                check_codec(codecs[name], name)
        for option, name in {"codec": "all_reduce", "reduce_scatter": "reduce_scatter"}.items():
            if self.only == "everything" and name in codecs and _needs_residuals(codecs[name]):
                raise InvalidArgument(
                    f"{option} is {getattr(self, option)!r}, which needs residuals, but "
                    "only='everything' compresses calls outside a backward, which have none: "
                    "their errors would never be sent. Use only='gradients'; or a codec such as "
                    "'int8', 'bf16' or 'terngrad'; or, for gradients, "
                    "commpress.compress(ddp, codec=...)"
                )
        if self.topology is None:
            return
        if self.codec is None:
            raise InvalidArgument(
                f"topology is {self.topology!r}, but codec is None: only compressed all-reduces "
                "use a topology, so leave it out or pass a codec"
            )
        if isinstance(self.topology, str):
            if self.topology != "auto":
                Topology.parse(self.topology)
        elif not isinstance(self.topology, Topology):
            raise InvalidArgument(
                f"topology is a {type(self.topology).__name__}, expected a Topology, text such as "
                "'2x4', 'auto' or None"
            )

    def codecs(self) -> dict[str, Codec]:
        """Return the codec of each collective that may be compressed."""
        given = {
            "all_reduce": self.codec,
            "reduce_scatter": self.reduce_scatter,
            "all_gather": self.all_gather,
            "all_to_all": self.all_to_all,
            "broadcast": self.broadcast,
        }
        return {name: codec_named(codec) for name, codec in given.items() if codec is not None}

    def accepts(self, op: Any) -> bool:
        return any(op == _OPS[name] for name in self.ops)


def group_options_from(given: GroupOptions | str | None) -> GroupOptions | None:
    """Return the options, parsed if they are text such as
    ``codec=int8,min_numel=65536,ops=sum+avg,only=gradients`` or the name of a plan's file.

    None reads ``COMMPRESS_GROUP_OPTIONS``; an empty text, or "exact", means no compression.
    """
    text = os.environ.get(VARIABLE, "") if given is None else given
    if isinstance(text, GroupOptions):
        return text
    if not isinstance(text, str):
        raise InvalidArgument(
            f"pg_options is a {type(text).__name__}, expected commpress.GroupOptions such as "
            "GroupOptions(codec='fp8'), or their text"
        )
    if text.strip() in ("", _EXACT):
        return None
    # a plan: all-reduces have no names here, so rules for single layers do not apply
    if text.strip().endswith(".json"):
        plan = load_plan(text.strip())
        return GroupOptions(plan.codec, max(plan.min_numel, 1)) if plan.compresses else None
    where = f"{VARIABLE} is" if given is None else "pg_options is"
    values: dict[str, Any] = {}
    known = [field.name for field in fields(GroupOptions)]
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals and not values:
            key, value = "codec", key  # "int8" alone
        elif not equals or key not in known or key in values:
            raise InvalidArgument(
                f"{where} {text!r}: {part!r} should be one of "
                f"{', '.join(k + '=…' for k in known)}, once"
            )
        values[key] = value
    if "min_numel" in values:
        if not values["min_numel"].isdecimal():
            raise InvalidArgument(f"{where} {text!r}: min_numel should be a number of elements")
        values["min_numel"] = int(values["min_numel"])
    if "ops" in values:
        values["ops"] = values["ops"].split("+")
    if values.get("codec") == _EXACT:
        values["codec"] = None
    return GroupOptions(**values)


def _needs_residuals(codec: Codec) -> bool:
    """Return whether a large part of a tensor would be missing from every mean without
    residuals."""
    return codec.feedback and (isinstance(codec, WholeTensorCodec) or codec.row_bytes(_ROW) < _ROW)


def _op_name(op: Any) -> str:
    given = _OPS.get(op.lower()) if isinstance(op, str) else op
    name = next((name for name, each in _OPS.items() if each == given), None)
    if name is None:
        raise InvalidArgument(
            f"ops has {op!r}, expected 'sum' and 'avg': no other reduction can be computed from "
            "averages"
        )
    return name
