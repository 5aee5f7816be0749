"""Models as a collective sees them: names and shapes, and the buckets that DDP makes of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from commpress.collectives.buckets import Span
from commpress.collectives.exchange import Tensors

FIRST_BUCKET = 1 << 20  # bytes: DDP closes the first one early, so that communication begins


@dataclass(frozen=True)
class Shape:
    name: str
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class ModelBucket:
    spans: tuple[Span, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.spans)

    def tensors(self) -> Tensors:
        return [*self.spans], self.shapes


@dataclass(frozen=True)
class Model:
    """Parameters in the order of ``named_parameters``."""

    shapes: tuple[Shape, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> "Model":
        return cls(
            tuple(
                Shape(name, tuple(p.shape))
                for name, p in module.named_parameters()
                if p.requires_grad
            )
        )

    @cached_property
    def numel(self) -> int:
        return sum(shape.numel for shape in self.shapes)

    def buckets(self, bucket_mb: float = 25.0) -> list[ModelBucket]:
        """Buckets of DDP after its first step: from the last parameter on, closed once they reach
        their size."""
        result: list[ModelBucket] = []
        held: list[Shape] = []
        limit, size = min(FIRST_BUCKET, bucket_mb * 2**20), 0
        for shape in reversed(self.shapes):
            held.append(shape)
            size += 4 * shape.numel
            if size >= limit:
                result.append(bucket_of(held))
                held, size, limit = [], 0, bucket_mb * 2**20
        if held:
            result.append(bucket_of(held))
        return result

    def shares(self, bucket_mb: float = 25.0) -> tuple[float, ...]:
        """Parts of the backward, by parameters: what is computed between one full bucket and the
        next."""
        return tuple(bucket.numel / self.numel for bucket in self.buckets(bucket_mb))


def bucket_of(shapes: Sequence[Shape]) -> ModelBucket:
    """Tensors side by side in one buffer."""
    spans, at = [], 0
    for shape in shapes:
        spans.append(Span(shape.name, at, shape.numel))
        at += shape.numel
    return ModelBucket(tuple(spans), tuple(shape.sizes for shape in shapes))


def transformer(parameters: int) -> Model:
    """About so many parameters, in the shape of a transformer: what a count alone can stand for."""
    vocabulary, length = 30_000 if parameters > 50_000_000 else 256, 512
    layers = max(round((parameters / 1e8) ** 0.37 * 12), 2)
    width = 8
    while _count(width + 8, layers, vocabulary, length) <= parameters:
        width += 8
    shapes = [
        Shape("tokens.weight", (vocabulary, width)),
        Shape("positions.weight", (length, width)),
    ]
    for i in range(layers):
        for name, tall, wide in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes += _layer(f"blocks.{i}.{name}", tall * width, wide * width)
        for name in ("norm1", "norm2"):
            shapes += _layer(f"blocks.{i}.{name}", width)
    return Model((*shapes, *_layer("norm", width)))


def _layer(name: str, *sizes: int) -> list[Shape]:
    return [Shape(f"{name}.weight", sizes), Shape(f"{name}.bias", sizes[:1])]


def _count(width: int, layers: int, vocabulary: int, length: int) -> int:
    return (vocabulary + length) * width + layers * (12 * width * width + 13 * width) + 2 * width
