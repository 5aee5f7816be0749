"""Codecs: rows of floats to rows of bytes of a size known in advance."""

from commpress.codecs.codec import Codec, codec_named
from commpress.codecs.family import BlockCodec, CastCodec, SignCodec, TernaryCodec
from commpress.codecs.policy import ByName, BySize, Policy, policy_of

__all__ = [
    "BlockCodec",
    "ByName",
    "BySize",
    "CastCodec",
    "Codec",
    "Policy",
    "SignCodec",
    "TernaryCodec",
    "codec_named",
    "policy_of",
]
