"""Fine-tune the low-rank adapters (LoRA) of a causal language model over a slow network.

    torchrun --nproc-per-node 2 examples/lora.py                  a tiny GPT-2 with random weights
    torchrun --nnodes 2 --nproc-per-node 1 ... examples/lora.py \\
        --model FOLDER                                            one that transformers can load

Only the adapters have gradients, so a step sends little; min_numel is lower here because many of
them are small.
"""

import argparse
import warnings

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import commpress
from commpress.cli.gpt import batch, standard_library


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a folder or name for transformers; a tiny GPT-2 over bytes if left out"
    )
    parser.add_argument(
        "--modules", default="c_attn", help="layers that get adapters, separated by commas"
    )
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    # peft asks transformers by its old name
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    dist.init_process_group()
    torch.manual_seed(0)
    if options.model:
        base = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        sizes = {
            "n_embd": options.width,
            "n_layer": options.layers,
            "n_head": 2,
            "n_positions": options.length,
        }
        base = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
        base.loss_type = "ForCausalLM"  # which transformers does not see in the name of the class
    adapters = LoraConfig(
        r=options.rank,
        lora_alpha=16,
        target_modules=options.modules.split(","),
        fan_in_fan_out=True,
    )
    model = get_peft_model(base, adapters)
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, codec=options.codec, min_numel=64)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    text, draws = standard_library(), torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(options.steps):
        ids, _ = batch(text, 4, options.length, draws)
        loss = ddp(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % max(options.steps // 10, 1) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        model.save_pretrained("adapters")
        print(state.counters.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
