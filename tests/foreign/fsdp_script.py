"""Run by torchrun: FSDP2 in trainers of others, compressed by one line; asserts what must hold.
Gets what to do, and a folder.

trainer       Trainer of transformers: the same bits as a loop of one's own, and a run that goes on
              from a checkpoint
kinds         the same in bf16, with accumulation, activation checkpoints, efficient loading and
              torch.compile
again         LoRA, training twice, the best model
native        a model that transformers shards when it loads it
accelerate    Accelerate, as accelerate launch has configured it
lightning     Lightning's ModelParallelStrategy
fabric        Fabric, with its
save, resume  on some ranks, and on another number of them
refusals      pairs that do not fit
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers.distributed.configuration_utils import DistributedConfig

import commpress

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tiny_gpt2
from accelerate_on_cpus import shard_on_cpus, shard_trainer_on_cpus
from commpress.cli.connections import sent_bytes
from commpress.errors import InvalidArgument
from commpress.integrations.trainers.compression import Compression, wrapper_of
from tiny_gpt2 import Words, arguments, flat, lightning, same

SMALL = {"min_numel": 64}  # so that tiny layers are compressed
CODECS = {"codec": "fp8", "weights": "int8"}
BATCH, STEPS, HALF = 4, 6, 3
SHARDED = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}


def model():
    return tiny_gpt2.model(layers=2)


def batch_of(step, part=0, accumulate=1):
    """The batch that a Trainer gives this rank, without shuffling."""
    number = (step * accumulate + part) * dist.get_world_size() + dist.get_rank()
    ids = torch.stack([Words(512)[number * BATCH + i]["input_ids"] for i in range(BATCH)])
    return {"input_ids": ids, "labels": ids}


# ---------------------------------------------------------------- a loop of one's own


def sharded(net, dtype=None):
    """As Accelerate shards GPT-2, whose embedding and output layer share their weights."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    for block in net.transformer.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(
        [net.transformer.ln_f, net.transformer.wte, net.lm_head],
        mp_policy=policy,
        reshard_after_forward=False,
    )
    return fully_shard(net, mp_policy=policy)


def by_hand(net, *, accumulate=1, compressed=True, bf16=False, shifted=False, **codecs):
    """Weights after a few steps, and bytes that left this process in them, of ``net`` sharded
    already."""
    state = commpress.compress_fsdp(net, **CODECS | SMALL | codecs) if compressed else None
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0
    )
    net.train()
    dist.barrier()
    before = sent_bytes()
    for step in range(STEPS):
        for part in range(accumulate):
            net.set_requires_gradient_sync(part == accumulate - 1)
            batch = batch_of(step, part, accumulate)
            # as a Trainer counts them, of GPT-2 the first ones too
            counted = accumulate * batch["labels"][:, shifted:].numel()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = net(**batch, num_items_in_batch=counted).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return flat(net), sent_bytes() - before, state


# ---------------------------------------------------------------- Trainer


def trainer_of(
    folder,
    *,
    net=None,
    callback=None,
    fsdp=None,
    steps=STEPS,
    shards=True,
    eval_dataset=None,
    **options,
):
    if shards:
        options |= {"fsdp": True, "fsdp_config": SHARDED | (fsdp or {})}
    callback = callback or commpress.hf.Compress(**CODECS, **SMALL)
    given = arguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        average_tokens_across_devices=False,
        **{"save_steps": HALF, "logging_steps": 1} | options,
    )
    trainer = Trainer(
        net or model(),
        given,
        train_dataset=Words(512),
        eval_dataset=eval_dataset,
        callbacks=[callback],
    )
    if shards:
        shard_trainer_on_cpus(trainer)
    return trainer, callback


def trained(folder, *, resume=None, **options):
    trainer, callback = trainer_of(folder, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return flat(trainer.model), callback, trainer


def in_a_trainer(folder):
    mine, sent, state = by_hand(sharded(model()))
    _, plainly, _ = by_hand(sharded(model()), compressed=False)
    # of all that TCP carried: headers, and what is too small to compress
    assert sent < 0.45 * plainly, (sent, plainly)
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        place, options = folder / kind, {"fsdp": {"state_dict_type": kind}}
        weights, callback, trainer = trained(place, **options)
        same(weights, mine, kind)
        wire = callback.state.counters.wire_bytes
        assert wire == state.counters.wire_bytes < 0.25 * state.logical_bytes
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        per_step = state.wire_bytes / STEPS
        assert all(entry["commpress/bytes_per_step"] == per_step for entry in logs), logs
        assert logs[-1]["commpress/ratio"] > 4
        assert logs[-1]["commpress/encode_ms"] > 0
        resumed, callback, _ = trained(place, resume=place / f"checkpoint-{HALF}", **options)
        same(resumed, mine, f"{kind}, resumed")
        assert (callback.state.step, callback.state.counters.steps) == (STEPS, STEPS - HALF)
    lost, _, _ = trained(
        folder / "lost", resume=without_residuals(folder / "FULL_STATE_DICT" / f"checkpoint-{HALF}")
    )
    assert not torch.equal(lost, mine), "residuals change what is trained"
    weights, _, _ = trained(folder / "default", callback=commpress.hf.Compress(**SMALL))
    same(weights, mine, "fp8 and int8 unless told otherwise")


def without_residuals(checkpoint_folder):
    dist.barrier()
    (checkpoint_folder / f"commpress-{dist.get_rank()}.pt").unlink()
    dist.barrier()
    return checkpoint_folder


def lora():
    torch.manual_seed(1)
    return get_peft_model(model(), LoraConfig(r=4, target_modules=["c_attn"]))


def in_a_trainer_otherwise(folder):
    mine, _, _ = by_hand(sharded(model()))
    half, _, _ = by_hand(sharded(model(), torch.bfloat16), bf16=True)
    summed, _, _ = by_hand(sharded(model()), accumulate=2)
    for name, expected, options in (
        ("bf16", half, {"bf16": True}),
        ("accumulated", summed, {"gradient_accumulation_steps": 2}),
        ("checkpoints", mine, {"fsdp": {"activation_checkpointing": True}}),
        ("compiled", mine, {"torch_compile": True, "torch_compile_backend": "eager"}),
        ("efficient", mine, {"fsdp": {"cpu_ram_efficient_loading": True}}),
    ):
        weights, callback, _ = trained(folder / name, **options)
        same(weights, expected, name)
        assert callback.state.counters.ratio > (2 if name == "bf16" else 4)
    resumed, _, _ = trained(folder / name, resume=folder / name / f"checkpoint-{HALF}", **options)
    same(resumed, mine, f"{name}, resumed")
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)


def in_a_trainer_again(folder):
    adapters = {"min_numel": 16}
    mine, _, _ = by_hand(sharded_lora(lora()), **adapters)
    for resume in (None, folder / "lora" / f"checkpoint-{HALF}"):
        callback = commpress.hf.Compress(**CODECS, **adapters)
        weights, _, _ = trained(folder / "lora", net=lora(), callback=callback, resume=resume)
        same(weights, mine, f"LoRA, resumed: {resume}")
        assert callback.state.gradients.compressed_elements > 0

    trainer, callback = trainer_of(folder / "twice", steps=2)
    trainer.train()
    state = callback.state
    trainer.train()
    assert callback.state is state, "a Trainer keeps its model, and residuals go on"
    assert state.step == 4

    differences = commpress.hf.Compress(codec="int8", weights=commpress.Difference("int4"), **SMALL)
    trainer, _ = trainer_of(
        folder / "best",
        eval_dataset=Words(8),
        callback=differences,
        eval_strategy="steps",
        eval_steps=HALF,
        load_best_model_at_end=True,
        metric_for_best_model="step_of",
        greater_is_better=False,
        save_total_limit=2,
    )
    evaluate, losses = trainer.evaluate, []

    def counted(*args, **named):
        found = evaluate(*args, **named)
        losses.append(found["eval_loss"])
        return found | {"eval_step_of": float(trainer.state.global_step)}  # the first is the best

    trainer.evaluate = counted
    trainer.train()
    assert trainer.state.best_global_step == HALF
    assert abs(evaluate()["eval_loss"] - losses[0]) < abs(losses[1] - losses[0]) / 10, (
        "weights of the best, not of the last"
    )


def sharded_lora(net):
    for block in net.base_model.model.transformer.h:
        fully_shard(block)
    inner = net.base_model.model
    fully_shard([inner.transformer.wte, inner.lm_head], reshard_after_forward=False)
    return fully_shard(net)


def by_transformers(folder):
    """A Llama that transformers shards when it loads it, which Accelerate leaves as it is."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=50, max_position_embeddings=16, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    dist.barrier()

    def loaded():
        return LlamaForCausalLM.from_pretrained(
            folder / "llama", distributed_config=DistributedConfig(fsdp_size=2)
        )

    mine, _, _ = by_hand(loaded(), shifted=True)
    weights, callback, _ = trained(
        folder / "native", net=loaded(), shards=False, save_strategy="no"
    )
    same(weights, mine, "sharded by transformers")
    assert callback.state.counters.ratio > 4


# ---------------------------------------------------------------- Accelerate


def accelerated(folder, *, resume=False, **codecs):
    os.environ |= {  # as accelerate launch sets them
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block",
    }
    accelerator, net = Accelerator(cpu=True), model()
    shard_on_cpus(accelerator)
    accelerator.free_memory()
    compression = commpress.hf.DistributedCompression(**codecs or CODECS, **SMALL).attach(
        accelerator
    )
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    )
    if resume:
        accelerator.load_state(str(folder))
    for step in range(HALF if resume else 0, STEPS):
        if step == HALF and not resume:
            accelerator.save_state(str(folder))
        batch = batch_of(step)
        accelerator.backward(net(**batch, num_items_in_batch=batch["labels"].numel()).loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return flat(net), compression


def in_accelerate(folder):
    mine, _, _ = by_hand(sharded(model()))
    for resume in (False, True):
        weights, compression = accelerated(folder, resume=resume)
        same(weights, mine, f"Accelerate, resumed: {resume}")
        assert compression.state.counters.steps == (STEPS - HALF if resume else STEPS)
    options = {"codec": "int4", "weights": commpress.Difference("int4")}
    whole, _ = accelerated(folder / "difference", **options)
    again, _ = accelerated(folder / "difference", **options, resume=True)
    same(whole, again, "differences, resumed")


# ---------------------------------------------------------------- Lightning


DATA = torch.randn(360, 32, generator=torch.Generator().manual_seed(3))
EPOCHS, ROWS = 2, 20  # three batches an epoch on three ranks, and of as many rows on two


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = ((32, 64), (64, 64), (64, 8))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - 1).square().mean()


def batches():
    return DATA[dist.get_rank() :: dist.get_world_size()][: 3 * ROWS].split(ROWS)


def sharded_net(net, mesh=None):
    for layer in net.layers[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def net_by_hand(accumulate=1, **codecs):
    net = sharded_net(Net())
    commpress.compress_fsdp(net, **CODECS | SMALL | codecs)
    optimizer = adamw(net.parameters())
    for _ in range(EPOCHS):
        for number, x in enumerate(batches(), 1):
            # reduced in every backward, as Lightning lets FSDP2 do
            (net(x) / accumulate).backward()
            if number % accumulate == 0 or number == 3:
                optimizer.step()
                optimizer.zero_grad()
    return flat(net)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def configure_model(self):
        if self.device_mesh is not None:
            sharded_net(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return adamw(self.net.parameters())


class Attached(commpress.lightning.Compress):
    """Remembers what it owes after it has loaded, before it moves."""

    loaded = None

    def _load(self, saved):
        super()._load(saved)
        self.loaded = owed(self.state)


def owed(state):
    """Means of the ranks' residuals, whole."""
    return {
        name: shard.full_tensor() for name, shard in state.elastic_state_dict()["residuals"].items()
    }


def sharding(strategy, **options):
    size = dist.get_world_size()
    return strategy(data_parallel_size=size, tensor_parallel_size=1, **options)


def fitted(
    folder,
    *,
    resume=None,
    one_file=False,
    elastic=False,
    accumulate=1,
    callback=None,
    strategy=None,
    **codecs,
):
    callback = callback or Attached(elastic=elastic, **CODECS | SMALL | codecs)
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    strategy = strategy or sharding(ModelParallelStrategy, save_distributed_checkpoint=not one_file)
    options = {"strategy": strategy, "accumulate_grad_batches": accumulate}
    trainer = lightning(callback, saves, max_epochs=EPOCHS, **options)
    rows = torch.cat(batches())
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=ROWS), ckpt_path=resume)
    return flat(module.net), callback


def in_lightning(folder):
    mine = net_by_hand()
    for one_file in (False, True):
        for resume in (None, folder / str(one_file) / "epoch=0.ckpt"):
            weights, callback = fitted(folder / str(one_file), resume=resume, one_file=one_file)
            same(weights, mine, f"one file {one_file}, {resume}")
            assert callback.state.counters.ratio > 3
            assert callback.state.counters.steps == (3 if resume else 6)
    weights, _ = fitted(folder / "accumulated", accumulate=2)
    same(weights, net_by_hand(accumulate=2), "accumulated")


def in_fabric(folder):
    mine = net_by_hand()
    for resume in (False, True):
        callback = commpress.lightning.Compress(**CODECS, **SMALL)
        fabric = Fabric(
            accelerator="cpu",
            devices=dist.get_world_size(),
            callbacks=[callback],
            strategy=sharding(
                FabricStrategy,
                parallelize_fn=lambda net, mesh: sharded_net(net, mesh["data_parallel"]),
            ),
        )
        fabric.launch()
        net = fabric.setup(Net())
        optimizer = fabric.setup_optimizers(adamw(net.parameters()))
        everything = {"model": net, "optimizer": optimizer, "compression": callback}
        if resume:
            rest = fabric.load(folder / "half", {"model": net, "optimizer": optimizer})
            callback.load_state_dict(rest["compression"])
        for epoch in range(resume, EPOCHS):
            for x in batches():
                fabric.backward(net(x))
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 0:
                fabric.save(folder / "half", everything)
        same(flat(net), mine, f"Fabric, resumed: {resume}")
        assert callback.state.counters.steps == (3 if resume else 6)
        assert callback.state.counters.ratio > 3
    with pytest.raises(InvalidArgument, match="serves only one"):
        fabric.setup(Net())


# ---------------------------------------------------------------- another number of ranks


class Watched(commpress.hf.Compress):
    """Remembers what it owes after it has loaded, before it moves."""

    loaded = None

    def _load(self, into):
        super()._load(into)
        self.loaded = owed(into)


def mean_of(states):
    """Means of residuals by parameter, flat, from the states of all ranks."""
    means = {}
    for state in states:
        for key, residual in state["residuals"].items():
            means[key] = means.get(key, 0) + residual / len(states)
    whole = {}
    for key in sorted(means, key=lambda key: (key.split("@")[0], int(key.split("@")[1]))):
        whole.setdefault(key.split("@")[0], []).append(means[key])
    return {name: torch.cat(parts) for name, parts in whole.items()}


def compare(loaded, saved):
    assert saved
    assert any(float(part.abs().max()) > 0 for part in saved.values())
    for name, part in saved.items():
        torch.testing.assert_close(loaded[name].reshape(-1), part, rtol=1e-5, atol=1e-8)


def save(folder):
    trained(folder / "trainer", steps=HALF)
    fitted(folder / "lightning")
    fitted(folder / "elastic", elastic=True)


def resume(folder):
    place = folder / "trainer" / f"checkpoint-{HALF}"
    _, callback, _ = trained(folder / "trainer", callback=Watched(**CODECS, **SMALL), resume=place)
    states = [torch.load(file, weights_only=True) for file in sorted(place.glob("commpress-*.pt"))]
    assert len(states) == 3
    compare(callback.loaded, mean_of(states))
    assert callback.state.step == STEPS
    for kind in ("lightning", "elastic"):
        place = folder / kind / "epoch=0.ckpt"
        _, callback = fitted(folder / kind, resume=place)
        (saved,) = (
            each["ranks"]
            for name, each in torch.load(place / "meta.pt", weights_only=True)["callbacks"].items()
            if "Attached" in name
        )
        assert len(saved) == (1 if kind == "elastic" else 3)
        expected = {name: part.reshape(-1) for name, part in saved[0]["residuals"].items()}
        compare(callback.loaded, expected if kind == "elastic" else mean_of(saved))


# ---------------------------------------------------------------- pairs that do not fit


def refusals(folder):
    hf, light = commpress.hf, commpress.lightning
    for make, options, why in (
        (
            hf.Compress,
            {"codec": "int4", "exclude": ("head",), "weights": "int8"},
            "exclude=, for replicas .* and weights=, for",
        ),
        (hf.Compress, {"weights": "int8", "exact_steps": 3}, "exact_steps=.* and weights="),
        (hf.Compress, {"weight": "int8"}, "did you mean weights="),
        (light.Compress, {"plan": "p", "weights": "int8"}, "plan=.* and weights="),
        (
            hf.DistributedCompression,
            {"weights": "int8", "ddp": {"bucket_cap_mb": 1}},
            "weights=.* and ddp=",
        ),
    ):
        with pytest.raises(InvalidArgument, match=why):
            make(**options)

    for number, (callback, options, why) in enumerate(
        (
            (
                hf.Compress("int8"),
                {},
                r"codec='int8' alone, .* sharded by FSDP2, .* weights=None to send",
            ),
            (hf.Compress(exact_steps=3), {}, "exact_steps=, an option for replicas"),
            (
                hf.Compress(weights="int8"),
                {"shards": False},
                "weights=.* on CPUs it ignores fsdp=",
            ),
            (hf.LocalTraining(), {}, "LocalTraining .* is sharded by FSDP2"),
        )
    ):
        with pytest.raises(InvalidArgument, match=why):
            trained(folder / str(number), callback=callback, **options)
        PartialState().distributed_type = AcceleratorState().distributed_type = (
            DistributedType.MULTI_CPU
        )

    given = arguments(folder, max_steps=1)
    with pytest.raises(InvalidArgument, match="codec=, but the optimizer is OneBitAdam"):
        Trainer(
            model(),
            given,
            optimizer_cls_and_kwargs=(commpress.OneBitAdam, {}),
            callbacks=[hf.Compress("int4")],
            train_dataset=Words(8),
        ).train()
    local = commpress.LocalUpdates(adamw(Net().parameters()), every=4)
    with pytest.raises(InvalidArgument, match=r"LocalUpdates: .* LocalTraining"):
        Trainer(
            model(),
            given,
            optimizers=(local, None),
            callbacks=[hf.Compress()],
            train_dataset=Words(8),
        ).train()
    local.close()

    with pytest.raises(InvalidArgument, match="OneBitAdam, which averages"):
        Compression("Compress", None, {}).shard(
            sharded_net(Net()), None, commpress.OneBitAdam(Net().parameters(), lr=1e-3)
        )
    with pytest.raises(InvalidArgument, match="FSDP1"):
        Compression("Compress", None, {}).check(
            wrapper_of(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))
        )

    accelerator = Accelerator(cpu=True)
    commpress.hf.DistributedCompression(**CODECS).attach(accelerator)
    net = Net()
    with pytest.raises(InvalidArgument, match=r"weights=.* runs under DistributedDataParallel"):
        accelerator.prepare(net, adamw(net.parameters()))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net(), adamw(net.parameters()))
    with pytest.raises(InvalidArgument, match="before it"):
        commpress.hf.DistributedCompression("int8").attach(accelerator)

    for callback, why, strategy in (
        (light.Compress("int8"), "sharded by FSDP2", None),
        (light.Compress(**CODECS), "runs under DistributedDataParallel", "ddp"),
        (light.LocalTraining(), "LocalTraining .* is sharded by FSDP2", None),
    ):
        with pytest.raises(InvalidArgument, match=why):
            fitted(folder / "lightning", callback=callback, strategy=strategy)


MODES = {
    "trainer": in_a_trainer,
    "kinds": in_a_trainer_otherwise,
    "again": in_a_trainer_again,
    "native": by_transformers,
    "accelerate": in_accelerate,
    "lightning": in_lightning,
    "fabric": in_fabric,
    "save": save,
    "resume": resume,
    "refusals": refusals,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    MODES[sys.argv[1]](Path(sys.argv[2]))
    print("all is well")
    dist.destroy_process_group()
