"""Options that describe machines and models, for the commands that predict."""

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from commpress.cli import option_groups
from commpress.collectives.measured_links import load_links
from commpress.errors import InvalidArgument
from commpress.integrations.trainers.hf_model import model_from_config
from commpress.plan.cluster import Cluster, Node, measured_cluster
from commpress.plan.costs import Costs, device_costs, measure_costs
from commpress.plan.model import Model, transformer
from commpress.units import UNLIMITED, parse_link, parse_nodes

MESSAGE, BYTE = 6e-5, 4e-10  # of a core, over TCP by way of Gloo: see docs/simulator.md


def cluster_of(options: argparse.Namespace) -> Cluster:
    cores, on_cpu = options.cores or UNLIMITED, options.device == "cpu"
    if options.links:
        cluster = measured_cluster(load_links(options.links), cores=cores)
    else:
        rate, latency = parse_link(options.link or "1gbit,100us")
        usual = "40gbit,20us" if on_cpu else "200GB/s,5us"
        inside, near = parse_link(options.inside or usual)
        count, ranks = parse_nodes(options.nodes)
        node = Node(ranks, rate, inside, cores)
        cluster = Cluster(node, count, latency=latency, inside_latency=near)
    return replace(
        cluster,
        message_seconds=cluster.message_seconds or (MESSAGE if on_cpu else 5e-6),
        byte_seconds=cluster.byte_seconds or (BYTE if on_cpu else 0.0),
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
        return transformer(options.parameters)
    if options.config:
        with torch.device("meta"):  # without its numbers
            return Model.of(model_from_config(option_groups.read_config(options.config)))
    make = factory(options.model)
    codecs(options)
    said = f"--model is {options.model!r}, "
    try:
        model = make()
    except Exception as error:
        name = options.model.partition(":")[2]
        raise InvalidArgument(f"{said}but {name}() raises {error!r}") from error
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"{said}which returns a {type(model).__name__}, expected a torch.nn.Module"
        )
    return Model.of(model)


def factory(path: str) -> Callable[[], object]:
    """The function that 'module:function' names; modules are found as Python finds them, and beside
    the caller."""
    # only for this import: a folder of the caller's may be called as somebody's package
    before = [*sys.path]
    sys.path.append(os.getcwd())
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"--model is {path!r}, which cannot be imported: {error}") from error
    finally:
        sys.path[:] = before
    if not callable(found):
        raise InvalidArgument(f"--model is {path!r}, which is no function")
    return found
