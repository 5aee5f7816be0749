"""Run a stranger's first hour literally: clone, install, the README and the pages of the start.

    python docs/first_hour.py --folder /tmp/first_hour
    python docs/first_hour.py --folder /tmp/first_hour --configs ds_config_zero2.json zero3.json
    python docs/first_hour.py --folder /tmp/first_hour --ray         # installs ray[train] too

Scripts are taken from the pages as they stand, configurations of DeepSpeed from files or as its
documentation writes them. Every command is printed with its seconds; the first that fails ends the
run with what it said. The folder must not exist; outside of it only caches are written.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- run: .*? -->\n```python\n(.*?)```", re.S)
TORCHRUN = ".venv/bin/torchrun --standalone --nproc-per-node 2"
ZERO2 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8,
        "overlap_comm": True, "reduce_scatter": True, "contiguous_gradients": True,
    },
    "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip
ZERO3 = {
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        "overlap_comm": True, "sub_group_size": 1e14, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_fp16_weights_on_model_save": True,
    },
}  # fmt: skip
# a converted program needs these three names, and ends with weights that are equal on all ranks
BEFORE = """import os, torch
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), *layers, torch.nn.Linear(64, 100))
torch.manual_seed(1 + int(os.environ["RANK"]))
loader = [torch.randint(100, (8, 16)) for _ in range(20)]
def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())
"""
AFTER = """
with torch.no_grad():
    out = model(torch.arange(100)[None]).float().contiguous()
everywhere = [torch.empty_like(out) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, out)
assert all(torch.equal(everywhere[0], each) for each in everywhere), "weights differ"
assert loss < 5, loss
if dist.get_rank() == 0:
    print(f"equal on {len(everywhere)} ranks after {number} steps, loss {loss:.3f}")
dist.destroy_process_group()
"""
# FSDP2 in the Trainer, stopped and resumed; on CPUs a file of benchmarks tells Accelerate to shard
RESUMED = """import sys, torch
sys.path.insert(0, "commpress/benchmarks")
from accelerate_on_cpus import shard_trainer_on_cpus
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import commpress
{words}
def weights(steps, resume=False):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    arguments = TrainingArguments(
        "fsdp2_run", max_steps=steps, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True,
        fsdp=True, fsdp_config={{"transformer_layer_cls_to_wrap": ["GPT2Block"]}},
        lr_scheduler_type="constant",
    )
    compression = commpress.hf.Compress(codec="int8", weights="int8")
    trainer = Trainer(model, arguments, train_dataset=Words(), callbacks=[compression])
    if not torch.cuda.is_available():
        shard_trainer_on_cpus(trainer)
    trainer.train(resume_from_checkpoint="fsdp2_run/checkpoint-3" if resume else None)
    return [p.full_tensor() for p in trainer.model.parameters()]
whole = weights(6)
assert all(map(torch.equal, whole, weights(6, resume=True))), "the resumed run differs"
if torch.distributed.get_rank() == 0:
    print("FSDP2 in the Trainer: 3 steps, stopped, 3 more: every bit as 6 in one go")
"""


def block(page: str, containing: str) -> str:
    """The first example of a page that runs and has these words."""
    found = BLOCK.findall((ROOT / page).read_text())
    return next(code for code in found if containing in code)


def step(typed: str, folder: Path, *, says: str = "") -> None:
    """Run what a stranger types, and print its time; ``says``: a word of success in its output."""
    begin = perf_counter()
    ran = subprocess.run(
        typed, shell=True, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ {typed}\n{ran.stdout}")
    if ran.returncode or says not in ran.stdout:
        sys.exit(f"failed: {typed}\n{ran.stdout[-4000:]}")
    print(f"{perf_counter() - begin:7.1f} s  {typed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--configs", type=Path, nargs="*", default=[], help="of DeepSpeed")
    parser.add_argument("--ray", action="store_true", help="install ray[train] and run its example")
    options = parser.parse_args()
    folder, begin = options.folder.resolve(), perf_counter()
    folder.mkdir(parents=True)

    step(f"git clone --quiet {ROOT} commpress", folder)
    step("python3 -m venv .venv && .venv/bin/pip install --quiet torch==2.13.0", folder)
    step(".venv/bin/pip install --quiet './commpress[demo,hf]'", folder)
    step(".venv/bin/commpress doctor", folder, says=" 0 bad")
    step(".venv/bin/commpress demo --quick --ways plain,local", folder, says="picture: ")
    for name, page, containing, says in (
        ("readme.py", "README.md", "LocalUpdates", "trained 60 steps"),
        ("first.py", "docs/index.md", "torch.nn.functional.cross_entropy", "fewer bytes"),
        ("trainer.py", "docs/trainer.md", "hf.Compress", "fewer bytes"),
        ("fsdp2.py", "docs/trainer.md", "DistributedConfig", "fewer bytes than torch's FSDP2"),
    ):
        (folder / name).write_text(block(page, containing))
        step(f"{TORCHRUN} {name}", folder, says=says)
    words = re.search(
        r"^class Words.*?\n\n\n", block("docs/trainer.md", "hf.Compress"), re.M | re.S
    )
    assert words is not None
    (folder / "resumed.py").write_text(RESUMED.format(words=words[0]))
    step(f"{TORCHRUN} resumed.py", folder, says="every bit as 6 in one go")
    step(
        ".venv/bin/commpress hosts 2 --rate 100mbit -- .venv/bin/torchrun first.py", folder,
        says="fewer bytes",
    )  # fmt: skip
    for name, config in (("zero2.json", ZERO2), ("zero3.json", ZERO3)):
        (folder / name).write_text(json.dumps(config))
    for config in ["zero2.json", "zero3.json", *(path.resolve() for path in options.configs)]:
        (folder / "before.py").write_text(BEFORE)
        (folder / "after.py").write_text(AFTER)
        made = f".venv/bin/commpress from-deepspeed {config} | cat before.py - after.py >made.py"
        step(f"rm -rf store && {made} && {TORCHRUN} made.py", folder, says="equal on 2 ranks")
    if options.ray:
        step(".venv/bin/pip install --quiet 'ray[train]'", folder)
        for method in ("hook", "fsdp", "local"):
            ray = f"commpress/examples/ray_train.py --method {method} --steps 30 --storage ray"
            step(f"rm -rf ray && .venv/bin/python {ray}", folder, says="ended at step 30")
    step(".venv/bin/commpress doctor --report", folder)
    print(
        f"{perf_counter() - begin:7.1f} s  in all; what the commands said is in "
        f"{folder / 'log.txt'}"
    )


if __name__ == "__main__":
    main()
