"""Compressed edges of torch's pipelines against one process that encodes and decodes at each cut,
for every schedule."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

import commpress
from commpress.errors import InvalidArgument, Mismatch
from commpress.integrations.pipeline import edge_choice
from commpress.integrations.pipeline.edge_choice import fastest
from commpress.integrations.pipeline.edge_codec import decode_into, edge_codec, encoded
from variants import first

WIDTH, BATCH, CHUNKS = 64, 16, 4
SINGLE = ["GPipe", "1F1B"]
FOLDED = ["ZBVZeroBubble", "DualPipeV"]
CODECS = {
    "none": ("none", "none"),
    "int4": ("int4", "int8"),
    "tah4": ("tah4", "tah4"),
}


class Part(nn.Module):
    """A stage with two outputs: activations, and a mask that comes along."""

    def __init__(self, number, frozen=False):
        super().__init__()
        torch.manual_seed(number)
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.number = number

    def forward(self, x, mask=None, weights=None):
        if mask is None:
            mask, weights = x[:, :1] > 0, x[:, 1:2].expand(-1, 512).contiguous()
        y = self.two(torch.tanh(self.one(x))) * torch.where(mask, weights[:, :1], 1.0) + x
        return y, mask.clone(), weights.clone()


class Last(Part):
    def forward(self, x, mask=None, weights=None):
        return super().forward(x, mask, weights)[0]


def parts(count):
    return [(Last if i == count - 1 else Part)(i) for i in range(count)]


def error_of(y, target):
    return (y - target).square().mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(
        BATCH, WIDTH, generator=generator
    )


def homes(schedule, ranks, count):
    """The rank of each stage."""
    if schedule in FOLDED:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(count)]


def count_of(schedule, ranks):
    return ranks if schedule in SINGLE else 2 * ranks


def chunks_of(schedule):
    return 2 * CHUNKS if schedule == "DualPipeV" else CHUNKS


def pipeline(schedule, codec, steps=2, poison=None, **options):
    """Losses of this rank, its gradients by stage, bytes that its stages sent, and counters."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = count_of(schedule, ranks)
    modules, where = parts(count), homes(schedule, ranks, count)
    stages = [
        PipelineStage(modules[i], i, count, torch.device("cpu"))
        for i in range(count)
        if where[i] == rank
    ]
    kind = schedules.get_schedule_class(schedule)
    runner = kind(
        stages[0] if schedule in SINGLE else stages, chunks_of(schedule), loss_fn=error_of
    )
    edges = None
    if codec is not None:
        activations, gradients = CODECS[codec]
        edges = commpress.compress_pipeline(
            runner, activations, gradient_codec=gradients, min_numel=1, **options
        )
    before, sent = schedules._batch_p2p, []

    def counted(ops, *args, **more):
        sent.extend(
            op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.isend
        )
        return before(ops, *args, **more)

    losses = []
    schedules._batch_p2p = counted  # what leaves, whoever made it
    try:
        for step in range(steps):
            sent.clear()
            x, target = batch(step)
            if poison is not None:
                x[poison] = torch.nan
            last, first = where[-1] == rank, where[0] == rank
            found = []
            runner.step(
                *([x] if first else []), **({"target": target, "losses": found} if last else {})
            )
            losses += [float(loss.detach()) for loss in found]
    finally:
        schedules._batch_p2p = before
    gradients = {s.stage_index: [p.grad.clone() for p in s.submod.parameters()] for s in stages}
    return losses, gradients, sum(sent), edges and edges.counters.as_dict()


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activations, gradients):
        ctx.codec = gradients
        return crossed(x, activations)

    @staticmethod
    def backward(ctx, gradient):
        return crossed(gradient, ctx.codec), None, None


def crossed(x, codec):
    if codec is None:
        return x.clone()
    there = torch.empty_like(x)
    decode_into(there, encoded(x, codec), codec)
    return there


def one_process(schedule, codec, ranks, steps=2, poison=None):
    """The same steps without a pipeline: losses, and gradients by stage."""
    count = count_of(schedule, ranks)
    modules, where = parts(count), homes(schedule, ranks, count)
    activations, gradients = (edge_codec(name) for name in CODECS[codec])
    losses, chunks = [], chunks_of(schedule)
    for step in range(steps):
        (x, target), found = batch(step), []
        if poison is not None:
            x[poison] = torch.nan
        for piece, goal in zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True):
            rest = ()
            for i, module in enumerate(modules):
                if i and where[i] != where[i - 1]:
                    piece = Cut.apply(piece, activations, gradients)
                elif i:
                    piece = piece.clone()
                out = module(piece, *rest)
                piece, *rest = out if isinstance(out, tuple) else (out,)
            found.append(error_of(piece, goal))
        for loss in reversed(found) if schedule == "LoopedBFS" else found:
            loss.backward()
        losses += [float(loss.detach()) for loss in found]
        for module in modules:
            for p in module.parameters():
                p.grad /= chunks
    return losses, {i: [p.grad for p in module.parameters()] for i, module in enumerate(modules)}


OFTEN = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


@pytest.mark.parametrize(
    "schedule", first(len(OFTEN), [*OFTEN, "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
)
def test_every_schedule_sends_what_one_process_computes(pool, schedule):
    """Exactly as torch alone with codec none, and with others as encoding and decoding at each cut,
    to the last bit."""
    for size in (2, 4) if schedule in SINGLE else (2,):
        plain = pool.run(pipeline, schedule, None, size=size)
        assert same(plain, pool.run(pipeline, schedule, "none", size=size))
    for codec in ("int4", "tah4") if schedule in SINGLE else ("int4",):
        found = pool.run(pipeline, schedule, codec, size=2)
        losses, gradients = one_process(schedule, codec, 2)
        assert list(chain.from_iterable(one[0] for one in found)) == losses
        theirs = {stage: each for one in found for stage, each in one[1].items()}
        assert all(
            torch.equal(a, b)
            for stage in theirs
            for a, b in zip(theirs[stage], gradients[stage], strict=True)
        )


def same(some, others):
    return all(
        one[0] == other[0]
        and all(
            torch.equal(a, b) for i in one[1] for a, b in zip(one[1][i], other[1][i], strict=True)
        )
        for one, other in zip(some, others, strict=True)
    )


def test_bytes_are_those_of_the_codecs(pool):
    """Codes of activations and of gradients leave, and exactly the mask and floats that need no
    gradient."""
    plain, found = (pool.run(pipeline, "GPipe", codec, size=2) for codec in (None, "int4"))
    rows, row = BATCH // CHUNKS, edge_codec("int4").size
    aside = rows * (1 + 4 * 512)
    assert [one[2] for one in plain] == [
        CHUNKS * (4 * rows * WIDTH + aside),
        CHUNKS * 4 * rows * WIDTH,
    ]
    codes = edge_codec("int8").size(rows * WIDTH, WIDTH)
    assert [one[2] for one in found] == [
        CHUNKS * (row(rows * WIDTH, WIDTH) + aside),
        CHUNKS * codes,
    ]
    for one, exact in zip(found, plain, strict=True):
        counters = one[3]
        assert (counters["sent_bytes"], counters["exact_bytes"]) == (2 * one[2], 2 * exact[2])
        assert counters["compressed_elements"] == 2 * CHUNKS * rows * WIDTH


def test_nan_in_one_micro_batch_spoils_that_one_alone(pool):
    found = pool.run(pipeline, "1F1B", "int4", 1, 5, size=2)  # row 5 is in the second
    losses, _ = one_process("1F1B", "int4", 2, steps=1, poison=5)
    said = list(chain.from_iterable(one[0] for one in found))
    assert [loss != loss for loss in said] == [False, True, False, False]
    assert [loss for loss in said if loss == loss] == [loss for loss in losses if loss == loss]


def evaluated():
    """Output of the last stage: of the compressed pipeline, evaluated between steps; and refusals
    on the way."""
    rank, said = dist.get_rank(), []
    module = parts(2)[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    runner = pipelining.ScheduleGPipe(stage, CHUNKS, loss_fn=error_of)
    edges = commpress.compress_pipeline([stage], "int8", min_numel=1)
    x, target = batch(0)
    out = []
    for step in (runner.step, runner.eval, runner.step):
        with torch.set_grad_enabled(step == runner.step):
            out.append(step(*([x] if rank == 0 else []), **({"target": target} if rank else {})))
    try:
        commpress.compress_pipeline(stage)
    except InvalidArgument as error:
        said.append(str(error))
    edges.remove()
    assert type(stage) is PipelineStage
    out.append(runner.step(*([x] if rank == 0 else []), **({"target": target} if rank else {})))
    try:
        commpress.compress_pipeline(stage, "int4" if rank else "int8")
    except Mismatch as error:
        said.append(str(error))
    return [y.detach() for y in out] if rank else None, said


def test_evaluates_between_steps_and_can_be_removed(pool):
    (_, said), (out, also) = pool.run(evaluated, size=2)
    exact = out[3]
    first = parts(2)
    with torch.no_grad():
        # some processors round a matrix of other rows otherwise
        y = torch.cat([first[1](*first[0](x)) for x in batch(0)[0].chunk(CHUNKS)])
    assert torch.equal(out[0], out[2])
    assert torch.equal(exact, y)
    assert not torch.equal(out[0], exact)
    assert torch.allclose(out[0], exact, atol=0.1)
    assert torch.allclose(out[1], exact, atol=0.1)
    for lines in (said, also):
        assert "compressed already" in lines[0]
        assert "other options than ranks" in lines[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_hold_tokens_with_outliers(dtype):
    """Tokens whose other elements int4 rounds to next to nothing. A NaN spoils its tile of 64
    alone."""
    draws = torch.Generator().manual_seed(1)
    codec, x = edge_codec("tah4"), torch.randn(40, 192, generator=draws).to(dtype)
    x[:, 70] *= 100
    x[::2] *= 1e4
    out, message = torch.empty_like(x), encoded(x, codec)
    decode_into(out, message, codec)
    assert 8 * len(message) / x.numel() == 4.625
    rest = [i for i in range(192) if i != 70]
    assert float((out - x)[:, rest].norm() / x[:, rest].norm()) < 0.1
    x[3, 5] = torch.nan
    decode_into(out, encoded(x, codec), codec)
    wrong = out.isnan()
    assert wrong[3, :64].all()
    assert int(wrong.sum()) == 64
    x[3] = 0
    decode_into(out, encoded(x, codec), codec)
    assert not out[3].any()


def test_the_fastest_codec_of_a_link_is_never_slower_than_none():
    seconds = {"bf16": 1e-4, "int8": 4e-4, "int4": 5e-4}
    chosen = [fastest(bandwidth, seconds) for bandwidth in (1e6, 1.25e7, 1.25e8, 3e9, 1e11)]
    assert chosen == ["int4", "int4", "int4", "bf16", "none"]
    for bandwidth in (1e9, 1e10, 1e11):
        assert fastest(bandwidth, dict.fromkeys(seconds, 1.0)) == "none"


def both_ways():
    """Codecs of the edge between two ranks: of activations and of gradients, where either is
    "auto"; and a choice that was measured."""
    rank, found = dist.get_rank(), []
    stage = PipelineStage(parts(2)[rank], rank, 2, torch.device("cpu"))
    before, edge_choice.measured = edge_choice.measured, lambda *_: {(0, 1): "bf16", (1, 0): "int8"}
    try:
        for codecs in (("int4", "tah4"), ("int4", "auto"), ("auto", "int4")):
            edges = commpress.compress_pipeline(stage, codecs[0], gradient_codec=codecs[1])
            found.append((edges.codecs(0, 1, False).spec, edges.codecs(1, 0, True).spec))
            edges.remove()
    finally:
        edge_choice.measured = before
    return found, commpress.compress_pipeline(stage, "auto").choice


def test_gradients_have_a_codec_of_their_own_and_all_ranks_know_each_choice(pool):
    names = [("int4", "tah4"), ("int4", "int8"), ("bf16", "int4")]
    wanted = [tuple(edge_codec(name).spec for name in each) for each in names]
    (found, measured), other = pool.run(both_ways, size=2)
    assert (found, measured) == other
    assert found == wanted
    assert measured.keys() == {(0, 1), (1, 0)}


@pytest.mark.parametrize("codec", ["sign", "topk-64", "bits2", "ternary", "shift4"])
def test_codecs_that_need_feedback_are_refused(codec):
    with pytest.raises(InvalidArgument, match="no error feedback"):
        edge_codec(codec)


def test_what_is_no_stage_is_refused():
    with pytest.raises(InvalidArgument, match="expected stages of torch"):
        commpress.compress_pipeline([nn.Linear(2, 2)])
    with pytest.raises(InvalidArgument, match=r"the stages of a .* cannot be found"):
        commpress.compress_pipeline(nn.Linear(2, 2))


class EdgeGroupStage(PipelineStage):
    """Each directed edge has a group of its own, as in torch from 2.15 on if it is asked."""

    def __init__(self, *args, groups, **options):
        super().__init__(*args, **options)
        self.groups = groups

    def _regrouped(self, ops):
        for op in ops:
            ends = (dist.get_rank(), op.peer) if op.op is dist.isend else (op.peer, dist.get_rank())
            yield dist.P2POp(op.op, op.tensor, op.peer, self.groups[ends])

    def get_fwd_send_ops(self, chunk):
        return list(self._regrouped(super().get_fwd_send_ops(chunk)))

    def get_fwd_recv_ops(self, chunk):
        return list(self._regrouped(super().get_fwd_recv_ops(chunk)))

    def get_bwd_send_ops(self, chunk):
        return list(self._regrouped(super().get_bwd_send_ops(chunk)))

    def get_bwd_recv_ops(self, chunk):
        return list(self._regrouped(super().get_bwd_recv_ops(chunk)))


def by_edge(grouped):
    """Losses, gradients and bytes where each edge has a codec of its own."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = {(a, b): dist.new_group([a, b]) for a in range(ranks) for b in range(ranks) if a != b}
    kind, options = (EdgeGroupStage, {"groups": groups}) if grouped else (PipelineStage, {})
    stage = kind(parts(ranks)[rank], rank, ranks, torch.device("cpu"), **options)
    runner = schedules.ScheduleGPipe(stage, CHUNKS, loss_fn=error_of)
    edges = commpress.compress_pipeline(stage, "int4", min_numel=1)
    named = {(a, b): edge_codec("int4" if max(a, b) == 1 else "int8") for a, b in groups}
    edges.codecs = lambda sender, receiver, gradient: named[sender, receiver]
    losses = []
    for step in range(2):
        x, target = batch(step)
        last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
        runner.step(*([x] if rank == 0 else []), **last)
    gradients = [p.grad.clone() for p in stage.submod.parameters()]
    return [float(loss.detach()) for loss in losses], gradients, edges.counters.sent_bytes


def test_an_edge_is_known_by_its_ranks_whatever_group_carries_it(pool):
    alone, grouped = (pool.run(by_edge, each, size=3) for each in (False, True))
    for one, other in zip(alone, grouped, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        assert one[2] == other[2] > 0
