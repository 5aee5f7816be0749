"""Train PyTorch models over slow networks: compressed collectives, communication hooks and what belongs to them.

Importing this package has no effect: names below are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "compress": "commpress.integrations.ddp",
    "CompressedState": "commpress.integrations.ddp",
    "compressed_allreduce_hook": "commpress.integrations.ddp",
    "SignCodec": "commpress.codecs",
    "TernaryCodec": "commpress.codecs",
    "BlockCodec": "commpress.codecs",
    "CastCodec": "commpress.codecs",
    "BySize": "commpress.codecs",
    "ByName": "commpress.codecs",
    "ErrorFeedback": "commpress.feedback",
    "compressed_allreduce": "commpress.collectives.allreduce",
    "CommpressError": "commpress.errors",
}

if TYPE_CHECKING:
    from commpress.codecs import BlockCodec, ByName, BySize, CastCodec, SignCodec, TernaryCodec
    from commpress.collectives.allreduce import compressed_allreduce
    from commpress.errors import CommpressError
    from commpress.feedback import ErrorFeedback
    from commpress.integrations.ddp import CompressedState, compress, compressed_allreduce_hook

__all__ = [
    "compress",
    "CompressedState",
    "compressed_allreduce_hook",
    "SignCodec",
    "TernaryCodec",
    "BlockCodec",
    "CastCodec",
    "BySize",
    "ByName",
    "ErrorFeedback",
    "compressed_allreduce",
    "CommpressError",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'commpress' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
