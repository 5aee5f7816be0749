"""Run on two ranks: Lightning's Trainer with the callback; asserts what must hold. The argument is
a folder."""

import sys

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

import commpress
from commpress.schedules import DoublingIntervals


class Module(LightningModule):
    def __init__(self, ours):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.ours = (
            torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)),
            ours,
        )

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        weights = torch.cat([p.detach().view(-1) for p in self.net.parameters()])
        everywhere = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(everywhere, weights)
        assert torch.equal(everywhere[0], everywhere[1]), "replicas differ in validation"

    def configure_optimizers(self):
        if self.ours:
            sync = DoublingIntervals(4, 100)
            return commpress.ZeroOneAdam(
                self.net.parameters(), lr=1e-3, sync=sync, variance_updates=2
            )
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)


def main(folder):
    data = torch.utils.data.TensorDataset(
        torch.randn(84, 32, generator=torch.Generator().manual_seed(3))
    )
    for ours in (True, False):
        callback = commpress.lightning.Compress(None if ours else "sign")
        trainer = Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=3,
            callbacks=[callback],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            log_every_n_steps=0 if ours else 7,
            num_sanity_val_steps=0,
        )
        loader = torch.utils.data.DataLoader(data, batch_size=6)
        trainer.fit(Module(ours), loader, torch.utils.data.DataLoader(data, batch_size=42))
        assert callback.state.counters.steps == 21
        if ours:
            assert callback.state.counters.local_steps > 0
            assert callback.state.counters.local_bytes == 0
        else:
            assert callback.state.counters.ratio > 10
    print("all is well")


if __name__ == "__main__":
    main(sys.argv[1])
    dist.destroy_process_group()
