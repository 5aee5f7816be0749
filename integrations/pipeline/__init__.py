"""Compressed edges of pipelines, over which stages of ``torch.distributed.pipelining`` exchange
tensors; and ``encoded`` tensors for your own edges."""

from commpress.integrations.pipeline.edge_codec import decode_into, edge_codec, encoded
from commpress.integrations.pipeline.edges import PipelineEdges, compress_pipeline
from commpress.integrations.pipeline.tiles import TileCodec

__all__ = [
    "PipelineEdges",
    "TileCodec",
    "compress_pipeline",
    "decode_into",
    "edge_codec",
    "encoded",
]
