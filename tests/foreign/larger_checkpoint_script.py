"""A process that fine-tunes a checkpoint from its shards, and prints MiB: of the checkpoint, and of
memory that this took.

Its argument is a folder."""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import commpress
from commpress.integrations.zero.safetensors_file import INDEX, Writer

LAYERS = 24


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def write(net, folder):
    """Shards of four layers each, made without the model in memory."""
    folder.mkdir()
    shards = {}
    for name, value in net.state_dict().items():
        number = int(name.split(".")[2]) // 4 if ".layers." in name else LAYERS
        shards.setdefault(f"model-{number}.safetensors", {})[name] = value
    for file, tensors in shards.items():
        with Writer(folder / file, tensors) as writer:
            for name, value in tensors.items():
                writer.write(name, torch.full(value.shape, 0.01))
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


def main(folder):
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=64,
    )
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
    size = write(net, folder / "checkpoint")
    before = peak()
    with commpress.TieredStore.open(folder / "store", host="48MiB") as store:
        commpress.stream(net, store=store, weights=folder / "checkpoint", chunk_mb=1)
        optimizer = commpress.Offloaded(
            net.parameters(), torch.optim.SGD, store=store, lr=1e-2, chunk_mb=1
        )
        ids = torch.arange(16).view(1, 16)
        net(ids, labels=ids).loss.backward()
        optimizer.step()
    print(size, peak() - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
