"""every codec on the gradients of a small GPT: the table of docs/codecs.md

Trains the demo's GPT (width 128, 4 layers) for 60 steps, then encodes the gradients of all its
tensors on one thread:
  bits           per element of all tensors, scales, places and padding included
  error          of one encoding, relative; output layer: of that tensor alone
  encode, decode GB of float32 per second, residual included

  python benchmarks codec_table
  python benchmarks codec_table --json codecs.json
"""

import argparse
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from commpress.cli import harness
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.codecs import Codec, LowRankCodec, codec_named
from commpress.codecs.family import NAMES
from commpress.kernels.cpu import low_rank as cpu_low_rank
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.matrices import Matrix, stack
from commpress.kernels.pieces import Piece, cut
from shared_options import add_output
from turns import alternately

ROWS = 4
NAMED = (
    *NAMES,
    "terngrad",
    *(f"bits{b}" for b in range(2, 9)),
    "shift8",
    "topk-16",
    "topk-64",
    "topk-256",
    "randk-32",
    "powersgd-2",
    "powersgd-8",
)
STEPS, MIN_NUMEL = 60, 256


@dataclass
class Line:
    codec: str
    bits: float  # per element of all tensors, scales, places and padding included
    error: float  # ‖g − Q(g)‖ / ‖g‖ over all tensors
    output: float  # the same for the output layer alone
    encode: float  # GB of float32 per second, one thread, residual included
    decode: float
    residual: bool
    noise: bool
    cuda: bool


def cells(line: Line) -> dict[str, str]:
    has = {"residual": line.residual, "noise": line.noise, "CUDA": line.cuda}
    return {
        "codec": f"`{line.codec}`",
        "bits": f"{line.bits:.2f}",
        "error": f"{line.error:.4f}",
        "output layer": f"{line.output:.4f}",
        "encode GB/s": f"{line.encode:.1f}",
        "decode GB/s": f"{line.decode:.1f}",
        **{name: "yes" if there else "" for name, there in has.items()},
    }


def gradients(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Of every tensor of the demo's GPT at width 128 after so many steps of Adam."""
    torch.manual_seed(0)
    model = GPT(width=128, layers=4, length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    library, draws = standard_library(), torch.Generator().manual_seed(1)
    for step in range(steps + 1):
        optimizer.zero_grad()
        model(*batch(library, 8, 64, draws)).backward()
        if step < steps:
            optimizer.step()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measure() -> tuple[list[Line], dict[str, float]]:
    """All lines, and what lossless coding of bf16's exponents would give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {name: g for name, g in gradients().items() if g.numel() >= MIN_NUMEL}
        lines = []
        for name in NAMED:
            codec = codec_named(name)
            if isinstance(codec, LowRankCodec):
                lines.append(_matrices(name, codec, found))
            else:
                lines.append(_rows(name, codec, found))
        return lines, exponents(torch.cat([g.flatten() for g in found.values()]))
    finally:
        torch.set_num_threads(threads)


def _rows(name: str, codec: Codec, found: dict[str, torch.Tensor]) -> Line:
    x, at, pieces = torch.cat([g.flatten() for g in found.values()]), 0, []
    spans = {}
    for key, g in found.items():
        pieces.append(Piece(at, g.numel(), codec.kind, codec.block, zlib.crc32(key.encode())))
        spans[key] = slice(at, at + g.numel())
        at += g.numel()
    layout = cut(pieces, ROWS)
    message, flag, out = (
        torch.zeros(ROWS, layout.row_bytes, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.uint8),
        x.clone(),
    )
    residual, left = torch.zeros(layout.residual_numel), torch.zeros(layout.residual_numel)
    encode = _seconds(
        lambda: cpu.encode(x, message, flag, layout, residual=residual, new_residual=left)
    )
    decode = _seconds(lambda: cpu.decode(message, out, layout))
    gigabytes = 4e-9 * x.numel()
    return Line(
        name,
        8 * message.numel() / x.numel(),
        _error(x, out),
        _error(x[spans["head.weight"]], out[spans["head.weight"]]),
        gigabytes / encode,
        gigabytes / decode,
        codec.feedback and not codec.lossless,
        codec.spec.startswith(("ternary", "randk", "shift")),
        True,
    )


def _matrices(name: str, codec: LowRankCodec, found: dict[str, torch.Tensor]) -> Line:
    """A warm start: the basis has seen this gradient before, as in training it has seen one like
    it. The rest is exact."""
    x, lines, at, exact, head = torch.cat([g.flatten() for g in found.values()]), [], 0, 0, slice(0)
    for key, g in found.items():
        shape = codec.matrix(g.shape)
        if shape:
            lines.append(Matrix(at, *shape, zlib.crc32(key.encode())))
        else:
            exact += g.numel()
        head = slice(at, at + g.numel()) if key == "head.weight" else head
        at += g.numel()
    matrices = stack(lines)
    m, p, q = torch.zeros(matrices.numel), torch.zeros(matrices.left), torch.zeros(matrices.right)
    basis, residual, out = torch.zeros(matrices.right), torch.zeros(matrices.numel), x.clone()
    cpu_low_rank.orthonormalize_right(basis, matrices, 0)

    def encode() -> None:
        cpu_low_rank.project(x, residual, m, p, basis, matrices)
        cpu_low_rank.orthonormalize_left(p, matrices)
        cpu_low_rank.fold(m, p, q, matrices)

    def decode() -> None:
        cpu_low_rank.expand(p, q, out, matrices)

    for _ in range(3):
        encode()
        basis.copy_(q)
        cpu_low_rank.orthonormalize_right(basis, matrices, 0)
    encode_seconds, decode_seconds = _seconds(encode), _seconds(decode)
    gigabytes = 4e-9 * matrices.numel
    return Line(
        name,
        32 * (matrices.left + matrices.right + exact) / x.numel(),
        _error(x, out),
        _error(x[head], out[head]),
        gigabytes / encode_seconds,
        gigabytes / decode_seconds,
        True,
        False,
        True,
    )


def exponents(x: torch.Tensor) -> dict[str, float]:
    """Entropy of the exponents of bf16, the size that zlib reaches, and the speed of both ways."""
    exponent = (x.bfloat16().view(torch.int16).numpy() >> 7 & 0xFF).astype(np.uint8)
    share = np.bincount(exponent, minlength=256) / len(exponent)
    entropy = float(-(share[share > 0] * np.log2(share[share > 0])).sum())
    raw = exponent.tobytes()
    packed = zlib.compress(raw, 1)
    encode, decode = (
        _seconds(lambda: zlib.compress(raw, 1)),
        _seconds(lambda: zlib.decompress(packed)),
    )
    return {
        "entropy_bits": entropy,
        "zlib_bits": 8 * len(packed) / len(raw),
        "best_share": (8 + entropy) / 16,
        "encode_gb_per_second": 2e-9 * len(raw) / encode,
        "decode_gb_per_second": 2e-9 * len(raw) / decode,
    }


def _error(x: torch.Tensor, out: torch.Tensor) -> float:
    return float((x - out).norm() / x.norm())


def _seconds(call: Callable[[], object]) -> float:
    return alternately({"": call}, least=5, most=5)[""]


def markdown(lines: list[Line], lossless: dict[str, float]) -> str:
    table = list(map(cells, lines))
    rows = ["| " + " | ".join(table[0]) + " |", "|" + " --- |" * len(table[0])]
    rows += ["| " + " | ".join(row.values()) + " |" for row in table]
    pays = (
        1
        / (1 / lossless["encode_gb_per_second"] + 1 / lossless["decode_gb_per_second"])
        * (1 - lossless["best_share"])
    )
    rows += [
        "",
        "Lossless coding of bf16's exponents: their entropy here is "
        f"{lossless['entropy_bits']:.2f} bits of 8, so no code of single exponents sends less than "
        f"{100 * lossless['best_share']:.0f} % of bf16. zlib (level 1) reaches "
        f"{lossless['zlib_bits']:.2f} bits, encoding {lossless['encode_gb_per_second']:.2f} and "
        f"decoding {lossless['decode_gb_per_second']:.2f} GB of bf16 per second and core: even "
        f"with the best code at zlib's speed it would pay only below {8 * pays:.2f} Gbit/s.",
    ]
    return "\n".join(rows)


def options(parser: argparse.ArgumentParser) -> None:
    add_output(parser, check="errors fall as bits rise, within every family of codecs")


def run(options: argparse.Namespace) -> int:
    lines, lossless = measure()
    print(markdown(lines, lossless))
    return harness.deliver(options, lines, judge=judge, exponents=lossless)


def judge(lines: list[Line]) -> list[tuple[str, bool]]:
    """More bits, smaller error: within a family of codecs, where that must hold on any
    gradients."""
    of = {line.codec: line for line in lines}
    families = [
        [f"bits{b}" for b in range(2, 9)],
        ["topk-256", "topk-64", "topk-16"],
        ["powersgd-2", "powersgd-8"],
    ]
    return [
        (
            f"errors fall: {', '.join(f'{name} {of[name].error:.3f}' for name in family)}",
            _falls([of[n].error for n in family]),
        )
        for family in families
    ]


def _falls(errors: list[float]) -> bool:
    return all(a > b for a, b in pairwise(errors))
