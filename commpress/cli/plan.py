"""advice for given machines and links: what to use and what it gains, or that nothing should be compressed

Simulates a training step for each candidate (docs/simulator.md), counts its bytes and its memory on every tier, and ranks them.
Candidates: no compression, torch's bf16 hook, codecs under DDP in one or two levels, 1-bit and 0/1 Adam, local updates, ZeRO
stages, optimizer states on the host or on disk. It advises one. Local updates change the loss, so they must save a quarter of a
step to be advised. Of the ways that a file can name it writes the best one:

  state = commpress.compress(ddp, plan="plan.json")          DDP; "plain" in the file means: torch's own all-reduce
  Trainer(..., callbacks=[commpress.hf.Compress(plan="plan.json")])
  dist.init_process_group("commpress")                         with COMMPRESS_GROUP_OPTIONS=plan.json

--compute-ms is the step of one rank without communication, as "compute" of commpress bench train says it. With --gradients
(a file that torch.save made of {parameter name: gradient}) every layer gets a codec of its own: the fewest bytes at an error
no larger than --uniform would make on these gradients.

  commpress plan --parameters 110M --nodes 4x1 --link 1gbit,100us --compute-ms 300
  commpress plan --model mymodels:make_gpt --nodes 8x8 --link 25gbit,10us --device 900GB/s --compute-ms 250
  commpress plan --config config.json --links links.json --compute-ms 800 --out plan.json --plot plan.png
  commpress plan --parameters 1.5B --nodes 4x1 --compute-ms 900 --memory device=24GiB,host=64GiB
  commpress plan --model mymodels:make_gpt --gradients grads.pt --nodes 4x1 --compute-ms 300

A coarser way must be 3 % faster than a finer one to be chosen. Predictions are as good as the description of the machines:
docs/planning.md compares them with measurements.
"""

import argparse
from dataclasses import asdict, replace
from functools import partial

import torch

from commpress.cli import cluster_options, harness
from commpress.codecs import codec_named
from commpress.errors import InvalidArgument
from commpress.plan.candidates import HOOK, TIERS, WAYS, Candidate, Settings, advised, candidates, plan_of, recommended
from commpress.plan.choice import Assignment, assign
from commpress.tiered_mem import parse_bytes

HEAD = ["candidate", "step ms", "against plain", "MB sent/rank", "device GB", "host GB", "disk GB", "effect", "call"]


def options(parser: argparse.ArgumentParser) -> None:
    cluster_options.add_cluster(parser)
    cluster_options.add_model(parser)
    parser.add_argument("--ways", default=",".join(WAYS), metavar="A,B", help=f"codecs to consider (default {','.join(WAYS)})")
    parser.add_argument("--memory", metavar="T=SIZE,…", help="of one rank, as device=24GiB,host=64GiB (default: any)")
    parser.add_argument("--host-rate", default="12GB/s", metavar="RATE", help="between device and host (default 12GB/s)")
    parser.add_argument("--disk-rate", default="2GB/s", metavar="RATE", help="between host and disk (default 2GB/s)")
    parser.add_argument("--gradients", metavar="FILE", help="measured ones, for a codec of its own for every layer")
    parser.add_argument("--uniform", default="int4", metavar="CODEC", help="whose error bounds that choice (default int4)")
    parser.add_argument("--out", default="plan.json", metavar="FILE", help="where to write the plan (default plan.json)")
    harness.add_options(parser)


def run(options: argparse.Namespace) -> int:
    ways = options.ways.split(",")
    for way in ways:
        if way not in HOOK and way != "plain":
            codec_named(way)
    if not options.compute_ms or options.compute_ms < 0:
        raise InvalidArgument("--compute-ms is missing: what one rank takes for a step without communication")
    codec_named(options.uniform)
    model, cluster = cluster_options.model_of(options), cluster_options.cluster_of(options)
    if cluster.size < 2:
        raise InvalidArgument("a cluster of one rank sends nothing: give --nodes with at least two")
    settings = Settings(
        1e-3 * options.compute_ms, options.bucket_mb, memory_of(options.memory), cluster_options.rate_of(options.host_rate),
        cluster_options.rate_of(options.disk_rate),
    )  # fmt: skip
    found = candidates(cluster, cluster_options.costs_of(options), model, settings, ways)
    chosen = recommended(found, ways)
    plan = plan_of(chosen, found, cluster, options.bucket_mb)
    print(f"{model.numel / 1e6:.1f} M parameters on {cluster.size} ranks, {1e3 * settings.compute_seconds:.4g} ms alone")
    plain = next(c for c in found if c.codec == "plain")
    print(harness.render(HEAD, [cells(c, plain) for c in found]))
    if options.gradients and plan.compresses and not chosen.layered:
        chosen_rules = per_layer(options.gradients, cluster.size, options.uniform)
        print(
            f"a codec for every layer: {chosen_rules.gain:.2f} times fewer bytes than {options.uniform} for all, at "
            f"{chosen_rules.error / max(chosen_rules.uniform_error, 1e-300):.2f} of its error"
        )
        plan = replace(plan, codec=options.uniform, rules=chosen_rules.rules)
    plan.save(options.out)
    print(plan.why)
    print(f"advice: {advised(found, chosen)[1]}")
    print(f"saved: {options.out}")
    title = f"{model.numel / 1e6:.4g} M parameters, {cluster.size} ranks"
    return harness.deliver(options, found, draw=partial(draw, chosen=chosen, title=title), plan=asdict(plan))


def memory_of(text: str | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        tier, equals, size = part.strip().partition("=")
        if tier not in TIERS or not equals:
            raise InvalidArgument(f"--memory is {text!r}, expected such as device=24GiB,host=64GiB with {', '.join(TIERS)}")
        found[tier] = parse_bytes(size)
    return found


def per_layer(path: str, ranks: int, uniform: str) -> Assignment:
    gradients = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(gradients, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) and v.is_floating_point() for k, v in gradients.items()
    ):
        raise InvalidArgument(
            f"{path} holds no {{parameter name: gradient}}: save {{n: p.grad for n, p in model.named_parameters()}}"
        )
    return assign(gradients, ranks=ranks, uniform=uniform)


def cells(c: Candidate, plain: Candidate) -> list[str]:
    memory = [f"{c.memory[tier] / 1e9:.2f}" if tier in c.memory else "-" for tier in TIERS]
    return [
        c.name, f"{1e3 * c.seconds:.1f}", f"{plain.seconds / c.seconds:.2f}x", f"{c.sent_bytes / 1e6:.2f}", *memory,
        c.effect if c.fits else "DOES NOT FIT", c.call,
    ]  # fmt: skip


def draw(path: str, found: list[Candidate], *, chosen: Candidate, title: str) -> None:
    """Seconds and memory of all candidates."""
    from commpress.cli import charts

    names = [c.name + ("" if c.fits else " (does not fit)") for c in found]
    kinds = {
        "chosen": [c is chosen for c in found],
        "a plan can name it": [c is not chosen and bool(c.codec) for c in found],
        "done otherwise": [not c.codec for c in found],
    }
    seconds = {kind: [1e3 * c.seconds if is_it else 0.0 for c, is_it in zip(found, which, strict=True)]
               for kind, which in kinds.items()}  # fmt: skip
    memory = {tier: [c.memory.get(tier, 0.0) / 1e9 for c in found] for tier in TIERS}
    memory = {tier: sizes for tier, sizes in memory.items() if any(sizes)}
    with charts.chart(path, f"Predicted: {title}", panels=2, size=(6.6, 0.3 * len(found) + 1.8), share=True) as (times, room):
        charts.stacked(times, names, seconds, "ms a step", show="{:.4g}", colours=("#2ca02c", "#1f77b4", "#c7c7c7"))
        charts.stacked(room, names, memory, "GB on a rank, without activations", show="{:.3g}",
                       colours=("#9467bd", "#ff7f0e", "#8c564b"))  # fmt: skip
