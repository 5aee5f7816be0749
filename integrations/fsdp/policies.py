"""Policies of sharded models: codecs by role, and exact ones in the tensors' own width."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from commpress.codecs import Codec, Policy, by_role, codec_named, policy_of
from commpress.codecs.family import NAMES, BitsCodec, BlockCodec, CastCodec
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.buckets import WIDTHS
from commpress.errors import InvalidArgument

COARSE = 8  # fewest bits of embeddings and of the output layer


def bits(codec: Codec) -> float:
    """Return bits per element of a long row, with scales; 0 for codecs of whole tensors, the
    coarsest."""
    if isinstance(codec, WholeTensorCodec):
        return 0.0
    return 8 * codec.row_bytes(1 << 20) / (1 << 20)


def policy_for(model: nn.Module, codec: str | Codec | Policy, *, min_numel: int) -> Policy:
    """Return a policy unchanged; turn a codec into one by role: vectors are sent exactly,
    embeddings and the output layer with at least int8."""
    if hasattr(codec, "choose"):
        return codec  # type: ignore[return-value]
    codec = codec_named(codec)
    finer = NAMES["int8"] if bits(codec) < COARSE else codec
    return policy_of(by_role(model, codec, embedding=finer, output=finer), min_numel=min_numel)


class _Width(CastCodec):
    """bfloat16 codec for bfloat16 tensors, without residuals."""

    feedback: ClassVar[bool] = False


@dataclass(frozen=True)
class Lossless:
    """Follow ``policy``, but send exact tensors in their own width: bfloat16 is exact for bfloat16.

    ``scaled``: multiples of the tensors are encoded (GradScaler), which their width may not
    represent: then residuals are kept.
    """

    policy: Policy
    dtype: torch.dtype
    scaled: bool = True

    def choose(self, name: str, numel: int) -> Codec:
        codec = self.policy.choose(name, numel)
        if not codec.lossless:
            return codec
        width = WIDTHS[self.dtype]
        return width if self.scaled or width.lossless else _Width(width.number)


def residual_codec(error_feedback: str | Codec) -> Codec:
    """Return the codec of residuals, with at least eight bits, because its error is lost."""
    codec = codec_named(error_feedback)
    if (
        isinstance(codec, WholeTensorCodec)
        or not isinstance(codec, (BlockCodec, BitsCodec, CastCodec))
        or bits(codec) < COARSE
    ):
        raise InvalidArgument(
            f"error_feedback is {codec.spec!r}, expected True (float32), False, 'bf16', or a codec "
            "of at least eight bits such as 'shift8'"
        )
    return codec


def check_dtype(tensor: torch.Tensor, what: str) -> None:
    if tensor.dtype not in WIDTHS:
        raise InvalidArgument(
            f"{what} has dtype {tensor.dtype}, expected float32, bfloat16 or float16: convert the "
            "model, or leave it out"
        )
