"""Policies of sharded models: codecs by role, and exact ones in the width of the tensors."""

from dataclasses import dataclass

import torch
from torch import nn

from commpress.codecs import Codec, Policy, by_role, codec_named, policy_of
from commpress.codecs.family import EXACT, NAMES
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.errors import InvalidArgument

COARSE = 8  # bits: embeddings and the output layer get at least so many


def bits(codec: Codec) -> float:
    """Per element of a long row, scales included; 0 for what does not travel in rows, which leaves out most."""
    if isinstance(codec, WholeTensorCodec):
        return 0.0
    return 8 * codec.row_bytes(1 << 20) / (1 << 20)


def policy_for(model: nn.Module, codec: str | Codec | Policy, *, min_numel: int) -> Policy:
    """A policy stays itself; a codec becomes one by role: vectors travel exactly, embeddings and the output layer at least in
    int8."""
    if hasattr(codec, "choose"):
        return codec  # type: ignore[return-value]
    codec = codec_named(codec)
    finer = NAMES["int8"] if bits(codec) < COARSE else codec
    return policy_of(by_role(model, codec, embedding=finer, output=finer), min_numel=min_numel)


@dataclass(frozen=True)
class Lossless:
    """``policy``, but what it sends exactly travels in the width of the tensors: bfloat16 loses nothing of bfloat16."""

    policy: Policy
    dtype: torch.dtype

    def choose(self, name: str, numel: int) -> Codec:
        codec = self.policy.choose(name, numel)
        return WIDTHS[self.dtype] if codec.lossless else codec


WIDTHS: dict[torch.dtype, Codec] = {
    torch.float32: EXACT,
    torch.bfloat16: NAMES["bf16"],
    torch.float16: NAMES["fp16"],
}


def check_dtype(tensor: torch.Tensor, what: str) -> None:
    if tensor.dtype not in WIDTHS:
        raise InvalidArgument(
            f"{what} has dtype {tensor.dtype}, expected float32, bfloat16 or float16: convert the model, or leave it out"
        )
