"""Options that describe machines and models, for the commands that predict."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from commpress.cli import option_groups
from commpress.cli.refusals import several
from commpress.collectives.measured_links import load_links
from commpress.errors import InvalidArgument
from commpress.integrations.trainers.hf_model import model_from_config
from commpress.plan.cluster import Cluster, Node, measured_cluster
from commpress.plan.costs import Costs, device_costs, measure_costs
from commpress.plan.grids import MeshWork
from commpress.plan.model import Model, transformer
from commpress.units import UNLIMITED, parse_count, parse_link, parse_nodes

MESSAGE, BYTE = 6e-5, 4e-10  # of a core, over TCP by way of Gloo: see docs/simulator.md


def cluster_of(options: argparse.Namespace) -> Cluster:
    cores, on_cpu = options.cores or UNLIMITED, options.device == "cpu"
    if options.links:
        cluster = measured_cluster(load_links(options.links), cores=cores)
    else:
        cluster = _described(options, cores)
    message = cluster.message_seconds or (MESSAGE if on_cpu else 5e-6)
    byte = cluster.byte_seconds or (BYTE if on_cpu else 0.0)
    kinds = cluster.kinds
    if options.straggler != 1.0:
        (node, count), *others = kinds
        rest = [(node, count - 1)] if count > 1 else []
        kinds = ((replace(node, slowdown=options.straggler), 1), *rest, *others)
    several(cluster.size)
    return replace(
        cluster,
        kinds=kinds,
        message_seconds=message if options.message_us is None else 1e-6 * options.message_us,
        byte_seconds=byte if options.byte_ns is None else 1e-9 * options.byte_ns,
        machine_cores=options.machine_cores or cluster.machine_cores,
        rack=options.rack,
        oversubscription=options.oversubscription,
    )


def _described(options: argparse.Namespace, cores: float) -> Cluster:
    shapes = parse_nodes(options.nodes)
    links = [parse_link(text) for text in options.link or ["1gbit,100us"]]
    links = links * len(shapes) if len(links) == 1 else links
    usual = "40gbit,20us" if options.device == "cpu" else "200GB/s,5us"
    inside, inside_latency = parse_link(options.inside or usual)
    foreign = rate_of(options.foreign) if options.foreign and len(shapes) > 1 else 0.0
    kinds = tuple(
        (Node(ranks, rate, inside, cores, foreign=foreign), count)
        for (count, ranks), (rate, _) in zip(shapes, links, strict=True)
    )
    latency = max(latency for _, latency in links)
    return Cluster(kinds, latency=latency, inside_latency=inside_latency)


def work_of(options: argparse.Namespace, model: Model, ranks: int) -> MeshWork:
    """A step of the model as a grid divides it."""
    return MeshWork.of(
        model,
        1e-3 * options.compute_ms,
        batch=options.batch or 4 * ranks,
        length=options.length,
        micro=options.micro,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
    )


def costs_of(options: argparse.Namespace) -> Costs:
    if options.device == "cpu":
        print(
            "measuring the kernels on this processor (pass --device for an accelerator)",
            file=sys.stderr,
        )
        return measure_costs()
    return device_costs(parse_link(options.device)[0])


def model_of(options: argparse.Namespace, codecs: Callable[[argparse.Namespace], None]) -> Model:
    """``codecs`` looks up those that the options name, once all can be registered."""
    if options.parameters:
        return transformer(parse_count(options.parameters))
    if options.config:
        return configured(options.config)
    make = factory(options.model)
    codecs(options)
    return Model.of(made(options.model, make))


def factory(path: str) -> Callable[[], Any]:
    """The function that 'module:function' names; modules are found as Python finds them, and beside
    the caller."""
    module, _, name = path.partition(":")
    # only for this import: a folder of the caller's may be called as somebody's package
    here = os.getcwd()
    before = [*sys.path]
    sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise InvalidArgument(
            f"--model is {path!r}, but {module} cannot be imported: {error}"
        ) from error
    finally:
        sys.path[:] = before
    if not callable(found):
        raise InvalidArgument(f"--model is {path!r}, but {module} has no function {name!r}")
    return found


def made(path: str, make: Callable[[], Any]) -> torch.nn.Module:
    """The model that the function makes; it must do without arguments."""
    try:
        model = make()
    except Exception as error:
        raise InvalidArgument(
            f"--model is {path!r}, but {path.partition(':')[2]}() raises {error!r}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"--model is {path!r}, which returns a {type(model).__name__}, expected a "
            "torch.nn.Module"
        )
    return model


def configured(path: str) -> Model:
    """The model of a Hugging Face config.json, built without its numbers."""
    content = option_groups.read_config(path)
    with torch.device("meta"):
        return Model.of(model_from_config(content))


def saved_tensors(option: str, path: str, expected: str) -> dict[str, torch.Tensor]:
    """Tensors by name, as ``torch.save`` wrote them; nothing in the file is executed."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise InvalidArgument(
            f"--{option} is {path!r}, which torch.load cannot read ({first}), expected {expected}"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in content.items()
    ):
        raise InvalidArgument(
            f"--{option} is {path!r}, which holds no tensors by name, expected {expected}"
        )
    return content


def rate_of(text: str) -> float:
    """Bytes per second of '12GB/s' or '10gbit'."""
    return parse_link(text)[0]
