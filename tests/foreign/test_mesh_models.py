"""A Llama of transformers under torch's tensor parallelism, one call for its mesh: torch's own weights without a codec."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import commpress
from ranks import Ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # the import alone takes seconds, on each rank; ``tests/test_meshes.py`` has a smaller model

STEPS, BAD, RATE = 4, 2, 0.1
PLAN = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
PLAN |= {name: RowwiseParallel() for name in ("o_proj", "down_proj")}


def llama(mesh, layers=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, attn_implementation="eager",
        )
    )  # fmt: skip
    paths = [path for path, _ in model.named_modules() if path.split(".")[-1] in PLAN]
    parallelize_module(model, mesh["tp"], {path: PLAN[path.split(".")[-1]] for path in paths})
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == 7 * layers
    return model


def words(mesh, step):
    generator = torch.Generator().manual_seed(step)
    size = mesh["dp"].size()
    ids = torch.randint(0, 64, (2 * size, 8), generator=generator)
    return ids.chunk(size)[mesh["dp"].get_local_rank()]


def own(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(named):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def trained(kind, codec, fault=None):
    """Weights as this rank knows them, bytes sent and bytes that torch would send over the data dimension."""
    warnings.filterwarnings("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net = llama(mesh)
    if kind == "ddp":
        _pre_dp_module_transform(model)
        net = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    if kind == "fsdp":
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh["dp"])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=fault == "overflow" and kind != "fsdp")
    options = {"grad_scaler": scaler} if scaler.is_enabled() else {}
    states = commpress.compress(net, mesh=mesh, dims={"dp": codec}, **options) if codec else None
    held = list(net.named_parameters())
    optimizer = torch.optim.SGD([p for _, p in held], lr=RATE, foreach=False)
    now = {"step": 0}
    value = {"NaN": float("nan"), "overflow": float("inf"), None: 1.0, "clip": 1e4}[fault]
    if dist.get_rank() == 0 and kind != "fsdp":
        next(p for n, p in held if "up_proj" in n).register_hook(lambda g: g * value if now["step"] == BAD else g)
    for now["step"] in range(STEPS):
        ids = words(mesh, now["step"])
        loss = net(input_ids=ids, labels=ids).loss
        spoilt = kind == "fsdp" and now["step"] == BAD and dist.get_rank() == 0
        scaler.scale(loss * value if spoilt else loss).backward()
        if states is None and kind == "plain":
            for _, p in held:
                dist.all_reduce(own(p.grad).div_(2), group=mesh["dp"].get_group())
        if fault == "clip":
            states.clip_grad_norm_(0.5)
        # DTensors and tensors in one list are too much for torch's scaler: do as it would
        if all(own(p.grad).div_(scaler.get_scale()).isfinite().all() for _, p in held):
            optimizer.step()
        else:
            assert (fault, now["step"]) == ("overflow", BAD)
        optimizer.zero_grad()
    counters = None if states is None else getattr(states["dp"], "gradients", None) or states["dp"].counters
    sent = None if counters is None else (counters.wire_bytes, counters.logical_bytes, counters.skipped_buckets)
    return whole(held), sent


def apart(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_without_a_codec_weights_are_torchs_in_every_bit(pool, kind):
    for (weights, (sent, plain, _)), (expected, _) in zip(
        pool.run(trained, kind, "none", size=4), pool.run(trained, kind, None, size=4), strict=True
    ):
        assert apart(weights, expected) == 0.0
        assert sent < 1.1 * plain


@pytest.mark.parametrize(("kind", "codec", "ratio"), [("plain", "sign", 15), ("ddp", "int4", 5), ("fsdp", "int8", 1.8)])
def test_bytes_fall_and_replicas_stay_equal_whatever_befalls_a_shard(pool, kind, codec, ratio):
    faults = {"plain": ("NaN", "overflow", "clip"), "ddp": ("NaN", "clip"), "fsdp": ("NaN",)}[kind]
    for fault in faults:
        results = pool.run(trained, kind, codec, fault, size=4)
        for rank, (weights, (sent, plain, skipped)) in enumerate(results):
            twin = results[(rank + 2) % 4][0]  # of the other replica, with the same shard
            assert apart(weights, twin) == 0.0
            if kind != "ddp":  # whole on every rank
                assert apart(weights, results[0][0]) == 0.0
            assert all(torch.isfinite(w).all() for w in weights.values())
            assert plain > ratio * sent
            assert (skipped > 0) == (fault != "clip")


# ---------------------------------------------------------------- pipelines


class Stage(torch.nn.Module):
    """The first or the last half of a model's layers."""

    def __init__(self, model, last):
        super().__init__()
        self.last, half = last, len(model.model.layers) // 2
        self.layers = model.model.layers[half:] if last else model.model.layers[:half]
        self.rotary = model.model.rotary_emb
        if last:
            self.norm, self.head = model.model.norm, model.lm_head
        else:
            self.embed = model.model.embed_tokens

    def forward(self, x):
        h = x if self.last else self.embed(x)
        places = self.rotary(h, torch.arange(h.shape[1])[None])
        for layer in self.layers:
            h = layer(h, position_embeddings=places)
            h = h[0] if isinstance(h, tuple) else h
        return self.head(self.norm(h)) if self.last else h


def loss_of(logits, ids):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def piped(codec, bad):
    warnings.filterwarnings("ignore")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    last = mesh["pp"].get_local_rank() == 1
    part = Stage(llama(mesh, layers=2), last)
    stage = PipelineStage(part, int(last), 2, torch.device("cpu"), group=mesh["pp"].get_group())
    states = commpress.compress([stage], mesh=mesh, dims={"dp": codec}) if codec else None
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    held = list(part.named_parameters())
    optimizer = torch.optim.SGD([p for _, p in held], lr=RATE, foreach=False)
    for step in range(STEPS):
        ids = words(mesh, step)
        if last:
            schedule.step(target=ids, losses=[])
        else:
            schedule.step(ids)
        gradients = [own(p.grad) for _, p in held]
        if bad and step == BAD and dist.get_rank() == 0:
            gradients[0][0] = float("nan")
        if states is None:
            for gradient in gradients:
                dist.all_reduce(gradient.div_(2), group=mesh["dp"].get_group())
        else:
            states.synchronize()
            if bad:
                states.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    counters = None if states is None else states["dp"].counters
    return whole(held), counters and (counters.wire_bytes, counters.logical_bytes, counters.skipped_steps)


def test_eight_ranks_two_by_two_by_two():
    """Data, tensor and pipeline parallelism at once; NaN in one shard of one stage leaves the step out in all of them."""
    eight = Ranks(8, forked=True)
    try:
        expected, exact = eight.run(piped, None, False, size=8), eight.run(piped, "none", False, size=8)
        for (weights, _), (torchs, _) in zip(exact, expected, strict=True):
            assert apart(weights, torchs) == 0.0
        results = eight.run(piped, "int4", True, size=8)
        for rank, (weights, (sent, plain, skipped)) in enumerate(results):
            stage = results[4 * (rank // 4)][0]
            assert apart(weights, stage) == 0.0
            assert all(torch.isfinite(w).all() for w in weights.values())
            assert skipped == 1
            assert plain > 5 * sent
    finally:
        eight.close()
