"""Codecs: rows of floats to rows of bytes of a size known in advance."""

from commpress.codecs.codec import Codec
from commpress.codecs.family import (
    BitsCodec,
    BlockCodec,
    CastCodec,
    RandomKCodec,
    SignCodec,
    TernaryCodec,
    TopKCodec,
)
from commpress.codecs.policy import ByName, ByRole, BySize, Policy, by_role, policy_of
from commpress.codecs.registry import codec_named, register_codec
from commpress.codecs.sparse import SparseCodec
from commpress.codecs.whole_tensors import LowRankCodec, SketchCodec

__all__ = [
    "BitsCodec",
    "BlockCodec",
    "ByName",
    "ByRole",
    "BySize",
    "CastCodec",
    "Codec",
    "LowRankCodec",
    "Policy",
    "RandomKCodec",
    "SignCodec",
    "SketchCodec",
    "SparseCodec",
    "TernaryCodec",
    "TopKCodec",
    "by_role",
    "codec_named",
    "policy_of",
    "register_codec",
]
