"""Codecs: rows of floats to rows of bytes of a size known in advance."""

from commpress.codecs.codec import Codec, codec_named
from commpress.codecs.family import BlockCodec, CastCodec, SignCodec, TernaryCodec
from commpress.codecs.policy import ByName, ByRole, BySize, Policy, by_role, policy_of
from commpress.codecs.sparse import BitsCodec, RandomKCodec, TopKCodec
from commpress.codecs.user import register_codec
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
    "TernaryCodec",
    "TopKCodec",
    "by_role",
    "codec_named",
    "policy_of",
    "register_codec",
]
