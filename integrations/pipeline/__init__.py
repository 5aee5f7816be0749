"""Edges of pipelines: what stages of ``torch.distributed.pipelining`` send each other,
compressed."""

from commpress.integrations.pipeline.edges import PipelineEdges, compress_pipeline
from commpress.integrations.pipeline.tiles import TileCodec

__all__ = ["PipelineEdges", "TileCodec", "compress_pipeline"]
