"""Ways of training that ``commpress demo`` lets race: what each is and the rate that was searched
for it. Loads no torch."""

import re
from dataclasses import dataclass

from commpress.codecs.registry import codec_named
from commpress.errors import InvalidArgument

UNSEARCHED = 1e-3  # the rate of codecs that are asked for by name


@dataclass(frozen=True)
class Contender:
    """``lr`` is the peak of the learning rate; ``commpress demo --lr`` tries others."""

    name: str
    what: str
    lr: float
    ours: bool = True
    own: bool = False  # exchanges by itself: no DistributedDataParallel reduces gradients
    searched: bool = True  # the rate, for this very way
    limited: bool = True  # over the slow links; else these have no limit meanwhile


FLOOR = "no-network"
CONTENDERS = {
    one.name: one
    for one in (
        Contender(
            FLOOR,
            "DistributedDataParallel, float32, links without a limit",
            1e-3,
            ours=False,
            limited=False,
        ),
        Contender("plain", "DistributedDataParallel, float32", 2e-3, ours=False),
        Contender("bf16", "torch's bf16_compress_hook", 1e-3, ours=False),
        Contender(
            "torch-powersgd1", "torch's powerSGD_hook, rank 1", 2.5e-4, ours=False, searched=False
        ),
        Contender(
            "torch-powersgd2", "torch's powerSGD_hook, rank 2", 5e-4, ours=False, searched=False
        ),
        Contender("torch-powersgd4", "torch's powerSGD_hook, rank 4", 5e-4, ours=False),
        Contender(
            "diloco",
            "DiLoCo: 30 steps, float32, Nesterov(0.7, 0.9)",
            2.5e-4,
            ours=False,
            own=True,
            searched=False,
        ),
        Contender("powersgd-4", "commpress.compress, codec powersgd-4", 5e-4),
        Contender("int8", "commpress.compress, codec int8", 1e-3),
        Contender("sign", "commpress.compress, codec sign, int8 for the output layer", 1e-3),
        Contender("zero-one", "commpress.ZeroOneAdam", 5e-4),
        Contender(
            "local",
            "commpress.LocalUpdates as it is: exchanges hide behind computing",
            1e-3,
            own=True,
        ),
    )
}


def contender(name: str) -> Contender:
    """One of the table, or any codec of commpress under AdamW."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    try:
        codec_named(name)
    except InvalidArgument as error:
        known = ", ".join(CONTENDERS)
        raise InvalidArgument(
            f"got {name!r}, expected some of {known}, or codecs of commpress ({error})"
        ) from None
    return Contender(name, f"commpress.compress, codec {name}", UNSEARCHED)


def torch_rank(name: str) -> int:
    """Rank of torch's PowerSGD; 0 of any other way."""
    match = re.fullmatch(r"(?:torch-)?powersgd(\d+)", name)
    return int(match[1]) if match else 0


def names(text: str) -> list[str]:
    """Names of contenders, each once, from 'a,b'."""
    found = list(dict.fromkeys(re.split(r"\s*,\s*", text.strip())))
    for name in found:
        contender(name)
    return found
