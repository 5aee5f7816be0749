"""All that this room takes from other rooms: kernels, checksums, a run's key, files of tensors."""

from commpress.checksum import checksum_of
from commpress.collectives.transports.run_key import (
    CALLER,
    DOOR,
    LONGEST,
    NONCE,
    PROOF,
    SHORTEST,
    nonce,
    proof,
    proves,
    run_key,
)
from commpress.integrations.zero.safetensors_file import Writer as SafetensorsWriter
from commpress.kernels.cpu.exact import decode, encode
from commpress.kernels.exact_format import (
    BFLOAT16,
    BLOCK,
    FLOAT32,
    PLAIN,
    SAME,
    SPARSE,
    SPARSE_HEAD,
)

__all__ = [
    "BFLOAT16", "BLOCK", "CALLER", "DOOR", "FLOAT32", "LONGEST", "NONCE", "PLAIN", "PROOF", "SAME",
    "SHORTEST", "SPARSE", "SPARSE_HEAD", "SafetensorsWriter", "checksum_of", "decode", "encode",
    "nonce", "proof", "proves", "run_key",
]  # fmt: skip
