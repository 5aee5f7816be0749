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


FLOOR = "no-network"
TABLE = """
no-network      | 1e-3   | DistributedDataParallel, float32, links without a limit
plain           | 2e-3   | DistributedDataParallel, float32
bf16            | 1e-3   | torch's bf16_compress_hook
torch-powersgd1 | 2.5e-4 | torch's powerSGD_hook, rank 1
torch-powersgd2 | 5e-4   | torch's powerSGD_hook, rank 2
torch-powersgd4 | 5e-4   | torch's powerSGD_hook, rank 4
diloco          | 2.5e-4 | DiLoCo: 30 steps, float32, Nesterov(0.7, 0.9)
powersgd-8+fp8  | 7e-4   | commpress.compress, codec powersgd-8+fp8
fp8             | 1e-3   | commpress.compress as it is: fp8
sign            | 1e-3   | commpress.compress, codec sign, fp8 for the output layer
zero-one        | 5e-4   | commpress.ZeroOneAdam
local           | 1e-3   | commpress.LocalUpdates as it is: exchanges hide behind computing
"""


def _read(line: str) -> Contender:
    name, lr, what = (cell.strip() for cell in line.split("|"))
    return Contender(name, what, float(lr), "commpress" in what)


CONTENDERS = {one.name: one for one in map(_read, TABLE.strip().splitlines())}


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
