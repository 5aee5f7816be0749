"""Codecs: they turn rows of floats into rows of bytes, of a size known in advance.

Looking up a name loads no torch, so that the command line refuses a wrong one at once.
"""

from typing import TYPE_CHECKING

from commpress.lazy import lazily

if TYPE_CHECKING:
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
    from commpress.codecs.whole_tensors import LowRankCodec

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
    "SparseCodec",
    "TernaryCodec",
    "TopKCodec",
    "by_role",
    "codec_named",
    "policy_of",
    "register_codec",
]
__getattr__ = lazily(
    __name__,
    {
        "codec": ("Codec",),
        "family": (
            "BitsCodec",
            "BlockCodec",
            "CastCodec",
            "RandomKCodec",
            "SignCodec",
            "TernaryCodec",
            "TopKCodec",
        ),
        "policy": ("ByName", "ByRole", "BySize", "Policy", "by_role", "policy_of"),
        "registry": ("codec_named", "register_codec"),
        "sparse": ("SparseCodec",),
        "whole_tensors": ("LowRankCodec",),
    },
)
