"""A codec of one's own, as docs/codecs.md shows it: two bits an element, ±⅓ or ±1 times the
largest of its row."""

import torch

import commpress


class TwoBits:
    def row_bytes(self, width):
        return 4 + -(-width // 4)

    def encode(self, values):
        peak = values.abs().max().clamp(min=1e-30)
        codes = (values / peak * 1.5 + 1.5).round().to(torch.uint8)  # 0 … 3: −1, −⅓, ⅓, 1
        codes = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes.device)
        return torch.cat(
            [peak.view(1).view(torch.uint8), (codes << shifts).sum(1, dtype=torch.uint8)]
        )

    def decode(self, row, numel):
        peak, codes = row[:4].clone().view(torch.float32), row[4 : 4 + -(-numel // 4)]
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=row.device)
        return (((codes[:, None] >> shifts) & 3).flatten()[:numel].float() - 1.5) / 1.5 * peak


commpress.register_codec("two-bits", TwoBits())
