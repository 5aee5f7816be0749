"""What a parameter is for decides how few bits it bears."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from commpress.codecs import Codec, Policy, codec_named
from commpress.codecs.codec import NotOfRows
from commpress.codecs.family import EXACT, NAMES
from commpress.errors import InvalidArgument

VECTOR, EMBEDDING, OUTPUT, MATRIX = "vector", "embedding", "output", "matrix"
COARSE = 8  # bits: embeddings and the output layer get at least so many


def roles_of(model: nn.Module) -> dict[str, str]:
    """Norms and biases are vectors; the last Linear is the output; what an Embedding holds is an embedding."""
    roles = {name: VECTOR if parameter.dim() < 2 else MATRIX for name, parameter in model.named_parameters()}
    last = ""
    for path, module in model.named_modules():
        weight = f"{path}.weight".lstrip(".")
        if isinstance(module, nn.Linear) and weight in roles:
            last = weight
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and weight in roles:
            roles[weight] = EMBEDDING
    if last and roles[last] == MATRIX and len(roles) > 2:
        roles[last] = OUTPUT
    return roles


@dataclass(frozen=True)
class ByRole:
    """Vectors and tensors below ``min_numel`` exactly; embeddings and the output layer in int8 where ``codec`` is coarser."""

    roles: Mapping[str, str]
    codec: Codec
    min_numel: int = 0

    def choose(self, name: str, numel: int) -> Codec:
        role = self.roles.get(name, MATRIX)
        if role == VECTOR or numel < self.min_numel:
            return EXACT
        if role in (EMBEDDING, OUTPUT) and bits(self.codec) < COARSE:
            return NAMES["int8"]
        return self.codec


def bits(codec: Codec) -> float:
    """Per element of a long row, scales included; 0 for what does not travel in rows, which leaves out most."""
    if isinstance(codec, NotOfRows):
        return 0.0
    return 8 * codec.row_bytes(1 << 20) / (1 << 20)


def policy_for(model: nn.Module, codec: str | Codec | Policy, *, min_numel: int) -> Policy:
    """A policy stays itself; a codec becomes one by role."""
    if hasattr(codec, "choose"):
        return codec  # type: ignore[return-value]
    return ByRole(roles_of(model), codec_named(codec), min_numel)


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
