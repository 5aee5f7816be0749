"""Kernels of all ranks, compared when they meet: hosts with other sources are named before they compute other bits."""

import torch

from commpress.collectives.scalars import gathered
from commpress.collectives.transports.transport import Transport
from commpress.errors import Mismatch
from commpress.kernels.cpu.digest import digest
from commpress.work import run

_DIGITS = 12  # of the digest, hexadecimal: as a number it is exact in float64
_SEQUENCE = 0x1FFF  # far from the first messages, which may follow at once


def require_same_kernels(transport: Transport, device: torch.device | str = "cpu") -> None:
    """One small collective; raises ``Mismatch`` on every rank if the digests of kernel sources differ."""
    if transport.size == 1:
        return
    mine = float(int(digest()[:_DIGITS], 16))
    every = run(gathered([mine], transport=transport, sequence=_SEQUENCE, device=device))[:, 0]
    ranks = {number: [r for r, each in enumerate(every) if each == number] for number in every.tolist()}
    if len(ranks) == 1:
        return
    usual = max(ranks.values(), key=len)
    found = "; ".join(f"ranks {of} have {int(number):0{_DIGITS}x}" for number, of in ranks.items())
    raise Mismatch(
        f"ranks would compute different bits: the digests of their kernels' sources differ ({found}). Install the same "
        "version of commpress on every host, or the same checkout.",
        ranks=tuple(r for of in ranks.values() if of is not usual for r in of),
    )
