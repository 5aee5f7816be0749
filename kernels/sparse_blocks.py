"""Sparse blocks in plain torch: the largest elements of each block, with places in few bits and
values in fewer.

    [bin means float32][low bits of the places][high bits of the places, unary][codes]  of one block

Places are in ascending order (Elias-Fano code): their low bits are concatenated, their high bits
are the positions of ones in a bitmap, bit (place >> low) + i for the i-th. 64 places among 4096
need 8 bits each, 0.6 more than the lower bound of any code.

Values: the codes are bins that divide 6σ around the mean of the kept values, and the means of the
bins are sent. With no more values than bins, these are the values themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SparseBlocks:
    """Keep ``kept`` elements of every ``block``, with values in ``bits`` bits.
    ``registered.PlainCodec`` explains the methods."""

    kept: int
    bits: int
    block: int

    def row_bytes(self, width: int) -> int:
        whole, rest = divmod(width, self.block)
        return whole * sum(self._fields(self.block)) + (sum(self._fields(rest)) if rest else 0)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        parts = self._parts(len(values))
        return torch.cat(
            [
                self._encode(values[start:stop].view(-1, span)).view(-1)
                for start, stop, span in parts
            ]
        )

    def decode(self, row: torch.Tensor, numel: int) -> torch.Tensor:
        out = torch.zeros(numel, dtype=torch.float32, device=row.device)
        for places, values in self.sparse(row[None], numel):
            out[places.view(-1)] = values.view(-1)
        return out

    def sparse(self, rows: torch.Tensor, numel: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield places and values of the rows, [rows, blocks, kept]: of whole blocks, then of a
        short last one."""
        at = 0
        for start, stop, span in self._parts(numel):
            size, shape = (
                sum(self._fields(span)),
                (len(rows), (stop - start) // span, self._count(span)),
            )
            part = rows[:, at : at + shape[1] * size].reshape(-1, size)
            places, values = (each.view(shape) for each in self._decode(part, span))
            yield places + torch.arange(start, stop, span, device=rows.device)[:, None], values
            at += shape[1] * size

    def _parts(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first element, end and length of the blocks."""
        whole = numel - numel % self.block
        if whole:
            yield 0, whole, self.block
        if whole < numel:
            yield whole, numel, numel - whole

    # ------------------------------------------------------------ one block

    @property
    def _low(self) -> int:
        return (self.block // self.kept).bit_length() - 1

    def _count(self, span: int) -> int:
        return -(-span * self.kept // self.block)

    def _fields(self, span: int) -> tuple[int, int, int, int]:
        """Return the bytes of means, low bits, high bits and codes."""
        count = self._count(span)
        high = count + (span - 1 >> self._low) + 1
        codes = 0 if count <= 1 << self.bits else self.bits
        return (
            4 * min(count, 1 << self.bits),
            -(-count * self._low // 8),
            -(-high // 8),
            -(-count * codes // 8),
        )

    def _encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Encode float32[blocks, span] as uint8[blocks, bytes of one]."""
        count, span = self._count(blocks.shape[1]), blocks.shape[1]
        places = blocks.abs().topk(count, dim=1, sorted=False).indices.sort(dim=1).values
        codes, means = self._quantised(blocks.gather(1, places))
        order = torch.arange(count, device=blocks.device)
        bitmap = torch.zeros(
            len(blocks), 8 * self._fields(span)[2], dtype=torch.uint8, device=blocks.device
        )
        bitmap.scatter_(1, (places >> self._low) + order, 1)
        # the means are the values themselves
        sent = codes if self._fields(span)[3] else codes[:, :0]
        parts = (
            means.view(torch.uint8),
            _packed(places, self._low),
            _bytes(bitmap),
            _packed(sent, self.bits),
        )
        return torch.cat(parts, dim=1)

    def _quantised(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bin of each value, and the mean of each bin."""
        bins = 1 << self.bits
        if values.shape[1] <= bins:
            return torch.arange(values.shape[1], device=values.device).expand_as(
                values
            ), values.contiguous()
        exact = values.double()
        mean = exact.mean(1, keepdim=True)
        width = 6 / bins * (exact - mean).square().mean(1, keepdim=True).sqrt()
        edges = mean + width * (torch.arange(1, bins, device=values.device) - bins / 2)
        codes = torch.searchsorted(edges, exact, right=True)
        means = torch.zeros(len(values), bins, dtype=torch.float64, device=values.device)
        for each in range(bins):
            inside = codes == each
            means[:, each] = (exact * inside).sum(1) / inside.sum(1).clamp(min=1)
        return codes, means.float()

    def _decode(self, rows: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places within a block and values, for uint8[blocks, bytes of one]."""
        count = self._count(span)
        means, low, high, codes = rows.split(self._fields(span), dim=1)
        order = torch.arange(count, device=rows.device)
        above = _bits(high).nonzero()[:, 1].view(len(rows), count) - order
        places = (above << self._low) + _unpacked(low, self._low, count)
        table = means.reshape(-1).clone().view(torch.float32).view(len(rows), -1)  # aligned
        return places, table.gather(1, _unpacked(codes, self.bits, count)) if codes.shape[
            1
        ] else table


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    """Pack uint8[rows, n] of zeros and ones into uint8[rows, n / 8], the first in the highest
    bit."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return (bits.reshape(len(bits), bits.shape[1] // 8, 8) << shifts).sum(2, dtype=torch.uint8)


def _bits(octets: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=octets.device)
    return ((octets[:, :, None] >> shifts) & 1).flatten(1)


def _packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the lowest ``bits`` of each number into one stream a row, padded with zeros."""
    shifts = torch.arange(bits - 1, -1, -1, device=numbers.device)
    stream = ((numbers[:, :, None] >> shifts) & 1).to(torch.uint8).flatten(1)
    return _bytes(torch.nn.functional.pad(stream, (0, -stream.shape[1] % 8)))


def _unpacked(octets: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    shifts = torch.arange(bits - 1, -1, -1, device=octets.device)
    stream = _bits(octets)[:, : count * bits].reshape(len(octets), count, bits)
    return (stream.long() << shifts).sum(2)
