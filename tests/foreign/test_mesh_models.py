"""A Llama of transformers under data, tensor and pipeline parallelism at once: torch's own weights
without a codec. ``tests/ddp/test_meshes.py`` has meshes of two dimensions and a smaller model.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpress
import tiny_models
from ranks import Ranks

pytest.importorskip("transformers")
# the import alone takes seconds, on each rank
pytestmark = pytest.mark.slow

RATE = 0.1
PLAN = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
PLAN |= {name: RowwiseParallel() for name in ("o_proj", "down_proj")}


def llama(mesh, layers=1, width=32, vocabulary=64, length=16):
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width}
    heads = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": length, "tie_word_embeddings": False}
    model = tiny_models.model(
        "LlamaForCausalLM", **sizes, **heads, **more, attn_implementation="eager"
    )
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
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named
    }


def apart(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


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


FAULTS = {1: float("nan"), 2: float("inf"), 4: 1e4}  # by step; the last is to be clipped
KINDS = ("plain", "fsdp", "partitioned")


def piped(kind, codec, faulty):
    """Weights as this rank knows them; bytes and what torch would send, of gradients and edges;
    skipped steps and the scale."""
    warnings.filterwarnings("ignore")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    last, rank = mesh["pp"].get_local_rank() == 1, dist.get_rank()
    part = Stage(llama(mesh, layers=2), last)
    if kind == "fsdp":
        for module in (*part.layers, part):
            fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(part, int(last), 2, torch.device("cpu"), group=mesh["pp"].get_group())
    scaler, now = torch.amp.GradScaler("cpu", init_scale=64.0), {"factor": 1.0}
    scaler.scale(torch.ones(()))  # begins
    dims = {"pp": "none" if codec == "none" else "int4"} | (
        {} if kind == "partitioned" else {"dp": codec}
    )
    options = {"grad_scaler": scaler} if "dp" in dims else {}
    states = commpress.compress([stage], mesh=mesh, dims=dims, **options) if codec else None

    def loss_of(logits, ids):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return scaler.scale(loss * now["factor"])

    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    held = list(part.named_parameters())
    if kind == "partitioned":
        among = {"process_group": mesh["dp"].get_group(), "agree_over": mesh}
        options = {
            "codec": codec,
            "weights": "none" if codec == "none" else "int8",
            "grad_scaler": scaler,
        }
        optimizer = commpress.Partitioned(
            held, torch.optim.SGD, lr=RATE, foreach=False, **among, **options
        )
    else:
        optimizer = torch.optim.SGD([p for _, p in held], lr=RATE, foreach=False)
    for step in range(6):
        fault, ids = FAULTS.get(step, 1.0) if faulty else 1.0, words(mesh, step)
        if kind == "fsdp":  # in the loss of one rank, or of one replica
            now["factor"] = fault if rank in ((4,) if fault != 1e4 else (4, 5)) else 1.0
        with optimizer.no_sync() if kind == "partitioned" else nullcontext():
            schedule.step(
                *(() if last else (ids,)), **({"target": ids, "losses": []} if last else {})
            )
        if kind != "fsdp" and rank == 0:
            own(next(p for n, p in held if "up_proj" in n).grad).mul_(fault)
        if kind == "partitioned":
            optimizer.synchronize()
            if faulty:
                optimizer.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
        else:
            average(kind, held, states, mesh)
            scale = scaler.get_scale()
            # DTensors and tensors are too much for torch's scaler
            gradients = [own(p.grad).div_(scale) for _, p in held]
            finite = all(gradient.isfinite().all() for gradient in gradients)
            if faulty:
                states.clip_grad_norm_(0.5)
            if finite:
                optimizer.step()
            scaler.update(scale * (1.0 if finite else 0.5))
        optimizer.zero_grad()
    sent = None
    if states is not None:
        data = optimizer if kind == "partitioned" else states["dp"]
        sent = (
            *bytes_of(kind, data, held),
            states["pp"].counters.sent_bytes,
            states["pp"].counters.exact_bytes,
        )
    return whole(held), sent, scaler.get_scale()


def average(kind, held, states, mesh):
    if states is not None:
        states.synchronize()
    elif kind == "plain":
        for _, p in held:
            dist.all_reduce(own(p.grad).div_(2), group=mesh["dp"].get_group())


def bytes_of(kind, data, held):
    """Sent over the data dimension, and what float32 takes."""
    if kind == "partitioned":
        return sum(data.bytes_per_pass().values()), 4 * sum(own(p).numel() for _, p in held)
    every = [data.gradients, data.weights] if kind == "fsdp" else [data.counters]
    return sum(c.wire_bytes for c in every), sum(c.logical_bytes for c in every)


@pytest.fixture(scope="module")
def eight():
    ranks = Ranks(8)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks_train_as_torch_does_in_every_bit(eight, kind):
    """Data, tensor and pipeline parallelism at once, without a codec. ``Partitioned`` has torch's
    optimizer as its twin."""
    expected = eight.run(piped, "plain" if kind == "partitioned" else kind, None, False, size=8)
    for (weights, *_), (torchs, *_) in zip(
        eight.run(piped, kind, "none", False, size=8), expected, strict=True
    ):
        assert apart(weights, torchs) == 0.0


@pytest.mark.parametrize(
    ("kind", "codec", "ratio"),
    [("plain", "sign", 12), ("fsdp", "int4", 2.5), ("partitioned", "sign", 2)],
)
def test_eight_ranks_stay_equal_whatever_befalls_one_shard(eight, kind, codec, ratio):
    """NaN and infinity in one stage leave the step out in both and halve the scale on all ranks;
    clipping is by one factor."""
    results = eight.run(piped, kind, codec, True, size=8)
    for rank, (weights, (sent, plain, edges, exact_edges), scale) in enumerate(results):
        assert apart(weights, results[4 * (rank // 4)][0]) == 0.0
        assert all(torch.isfinite(w).all() for w in weights.values())
        assert scale == 16.0
        assert plain > ratio * sent > 0
        assert exact_edges > 5 * edges > 0
