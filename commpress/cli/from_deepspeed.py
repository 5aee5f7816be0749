"""DeepSpeed's configuration as a program of torch and commpress; names each key that has no
equivalent."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from commpress.documents import read_json
from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals

LARGEST = 1 << 20  # bytes of a file
OURS = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam", "onebitlamb": "OneBitLamb"}
ADAM = ("lr", "betas", "eps", "weight_decay")
# options by optimizer; DeepSpeed takes those of torch.optim by name
OPTIMIZERS = """
    AdamW    lr betas eps weight_decay amsgrad
    Adam     lr betas eps weight_decay amsgrad
    NAdam    lr betas eps weight_decay momentum_decay
    RAdam    lr betas eps weight_decay
    Adamax   lr betas eps weight_decay
    SGD      lr momentum dampening weight_decay nesterov
    Adadelta lr rho eps weight_decay
    Adagrad  lr lr_decay weight_decay initial_accumulator_value eps
    RMSprop  lr alpha eps weight_decay momentum centered
"""
TORCHS = {name: given for name, *given in map(str.split, OPTIMIZERS.strip().splitlines())}
# DeepSpeed's defaults
ZERO_ONE = {"var_freeze_step": 100000, "local_step_scaler": 32678, "local_step_clipper": 16}
LAMB = {
    "coefficients": ("min_coeff", "max_coeff", 0.01, 10.0),
    "factors": ("factor_min", "factor_max", 0.5, 4.0),
}
LAMB_WORDS = {"coeff_beta": "coefficient_beta", "factor_threshold": "factor_change"}
CLIPPING, RATE = 1.0, 1e-3  # where the file has no word of them
HALF = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "bfp16": "torch.bfloat16",
    "bfloat16": "torch.bfloat16",
}
CHUNK_MB, OWN_SIZE = 16, "your DataLoader's batch_size"
# settings of how DeepSpeed's engine moves data, prints and checks: nothing here takes them
ENGINE = re.compile(
    r"""
    (steps_per_print | wall_clock_breakdown | dump_state | prescale_gradients
      | zero_allow_untested_optimizer | zero_force_ds_cpu_optimizer | gradient_predivide_factor
      | disable_allgather | memory_breakdown | sparse_gradients | checkpoint | aio) (\..*)?
    | optimizer\.(legacy_fusion | params\.(comm_backend_name | cuda_aware))
    | zero_optimization\.(
        allgather_partitions | allgather_bucket_size | overlap_comm | reduce_scatter
        | reduce_bucket_size | contiguous_gradients | round_robin_gradients | sub_group_size
        | ignore_unused_parameters
        | stage3_(prefetch_bucket_size | param_persistence_threshold | max_live_parameters
          | max_reuse_distance | gather_(16bit | fp16)_weights_on_model_save)
        | offload_optimizer\.(pin_memory | buffer_count | fast_init | pipeline_read
          | pipeline_write | cpuadam_cores_perc)
        | offload_param\.(pin_memory | buffer_count | buffer_size | max_in_cpu))
    """,
    re.VERBOSE,
)
OTHERS = """
    activation_checkpointing torch.utils.checkpoint
    tensorboard              commpress.Metrics
    wandb                    commpress.Metrics
    csv_monitor              commpress.Metrics
    flops_profiler           torch.profiler
    torch_autocast           torch.autocast
    amp                      torch.autocast
    elasticity               commpress.elastic
    curriculum_learning      examples/gallery/length_curriculum.py
"""
INSTEAD = dict(map(str.split, OTHERS.strip().splitlines()))
SECTIONS = (
    *("zero_optimization", "optimizer", "optimizer.params", "fp16", "bf16"),
    *("scheduler", "scheduler.params"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
)
PARAMS = "optimizer.params"
# sections → stages, and their older names
OFFLOAD = {
    "offload_optimizer": ((1, 2, 3), "cpu_offload"),
    "offload_param": ((3,), "cpu_offload_param"),
}
IMPORTS = """
    contextlib.              import contextlib
    math.                    import math
    os.                      import os
    torch.                   import torch
    dist.                    import torch.distributed as dist
    MixedPrecisionPolicy(    from torch.distributed.fsdp import MixedPrecisionPolicy
    fully_shard(             from torch.distributed.fsdp import fully_shard
    DistributedDataParallel( from torch.nn.parallel import DistributedDataParallel
    commpress.               import commpress
    DoublingIntervals(       from commpress.schedules import DoublingIntervals
"""
PROGRAM = """\
# Yours: model, loader (batches of this rank) and loss_of(model, batch). The model is on its device, and has
# the same weights on every rank.
{imports}

if not dist.is_initialized():
    dist.init_process_group()  # ranks that torchrun started
device = "cuda" if torch.cuda.is_available() else "cpu"
{setup}

{loop}"""  # noqa: E501
SHARDED = """\
def blocks_of(module):  # elements of the outermost ModuleLists
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else blocks_of(child)
for block in blocks_of(model):
    fully_shard(block{policy})
fully_shard(model{policy})"""
STORE = """\
folder = os.path.join({path!r}, f"rank{{dist.get_rank()}}")  # if it holds a committed state, training goes on from there
host = {host}  # bytes of memory that each rank takes at once
store = commpress.TieredStore.open(folder, host=host)"""  # noqa: E501
SCHEDULER = """\
def factor(step):  # {kind}, from {low!r} to {high!r}
    part = {rising} if step <= {warm} else {later}
    return ({low!r} + {span!r} * part) / {lr!r}
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"""
SCALED = """\
scaler.step(optimizer)
scaler.update()"""
SCALED_SCHEDULED = f"""\
scale = scaler.get_scale()
{SCALED}
if scaler.get_scale() >= scale:  # not after a step that was left out
    scheduler.step()"""


def run(options: argparse.Namespace) -> int:
    lines, notes = converted(read(options.config))
    if notes:
        lines += ["", "# Differences:"]
    # a comment stays one, whatever the file says
    lines += [f"# - {' '.join(note.split())}" for note in notes]
    print("\n".join(lines))
    return 0


def read(path: Path) -> dict[str, Any]:
    config = read_json(path, LARGEST, "a ds_config.json")
    if not isinstance(config, dict):
        raise InvalidArgument(
            f"{path} holds a {type(config).__name__}, expected an object as DeepSpeed documents it"
        )
    return config


def converted(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The lines of a program, and notes on what is not in them."""
    conversion = Conversion(config)
    return conversion.program().split("\n"), conversion.notes


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its path."""
    for key in sorted(config):
        if isinstance(config[key], dict):
            yield from leaves(config[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", config[key]


class Conversion:
    """One configuration: what is understood is taken out of it, and what is left over at the end is
    named."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.left = dict(leaves(config))  # by path
        self.setup: list[str] = []
        self.notes: list[str] = []
        for name in SECTIONS:
            if (value := self.take(name)) is not None:
                raise InvalidArgument(f"{name} is {value!r}, expected an object")
        self.stage = self.zero("stage") or 0
        if self.stage not in (0, 1, 2, 3):
            raise InvalidArgument(
                f"zero_optimization.stage is {self.stage!r}, expected 0, 1, 2 or 3"
            )
        self.half, self.scaled = self.precision()
        self.clip = self.clipping()
        self.runs = "model"  # what a batch goes through
        self.sync = ""  # of a backward that is not the last one of a step
        self.autocast = self.own_clip = False
        self.rate = RATE

    def note(self, text: str) -> None:
        self.notes.append(text)

    def write(self, text: str) -> None:
        self.setup += text.split("\n")

    # ------------------------------------------------------------ reading

    def take(self, path: str) -> Any:
        """A value, removed from where it stood; None for what is missing or "auto"."""
        value = self.left.pop(path, None)
        if value == "auto":
            self.note(f'{path} is "auto": pass a value yourself')
            return None
        return value

    def zero(self, key: str) -> Any:
        return self.take(f"zero_optimization.{key}")

    def number(self, path: str, least: float = 0) -> Any:
        value, key = self.take(path), path.rpartition(".")[2]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or value < least
        ):
            self.note(f"{key} is {value!r}, expected a number of at least {least}: it is left out")
            return None
        return value

    def enabled(self, name: str) -> bool:
        # switched off it stays: a section is named at the end
        return self.left.get(f"{name}.enabled") is not False and bool(self.take(f"{name}.enabled"))

    # ---------------------------------------------------------- what does not depend on the program

    def precision(self) -> tuple[str, str]:
        """The half-precision dtype, and the arguments of a GradScaler."""
        said = "fp16.enabled" in self.left and self.left["fp16.enabled"] != "auto"
        fp16, bf16 = self.enabled("fp16"), self.enabled("bf16")
        if fp16 and bf16:
            raise InvalidArgument("fp16 and bf16 are both enabled, expected one of them")
        if not fp16:
            if not said and self.left.get("fp16.loss_scale") == 0:
                scale = self.take("fp16.loss_scale")
                self.note(f"fp16.loss_scale {scale}: dynamic, as a GradScaler's")
            return ("torch.bfloat16", "") if bf16 else ("", "")
        power, window = self.take("fp16.initial_scale_power"), self.take("fp16.loss_scale_window")
        fixed = self.number("fp16.loss_scale")
        if fixed:
            self.note(
                f"fp16.loss_scale {fixed}: still halves after an overflow; a GradScaler has no "
                "fixed scale"
            )
        scale = f"{float(fixed)!r}" if fixed else f"2.0**{power if isinstance(power, int) else 16}"
        every = 2**31 - 1 if fixed else window if isinstance(window, int) and window > 0 else 1000
        return "torch.float16", f"init_scale={scale}, growth_interval={every}"

    def clipping(self) -> float | None:
        if "gradient_clipping" not in self.left:
            self.note(f"gradient_clipping is missing: {CLIPPING}, the default of DeepSpeed 0.19")
            return CLIPPING
        return self.number("gradient_clipping") or None

    def accumulation(self) -> str:
        """Backward passes of a step, as a number or as an expression."""
        steps = self.number("gradient_accumulation_steps", 1)
        size = self.number("train_micro_batch_size_per_gpu", 1)
        every = self.number("train_batch_size", 1)
        if size:
            self.note(f"train_micro_batch_size_per_gpu {size}: the batch_size of your DataLoader")
        if every and size and not steps:
            return f"max({int(every)} // ({int(size)} * dist.get_world_size()), 1)"
        if every:
            parts = f"{size or OWN_SIZE} × {steps or 1}"
            self.note(f"train_batch_size {every}: {parts} × the number of ranks must be that")
        return str(int(steps or 1))

    # ------------------------------------------------------------ the program

    def program(self) -> str:
        state, parameters = self.offloading()
        kind = str(self.take("optimizer.type") or "AdamW")
        accumulation = self.accumulation()
        if kind.lower() in OURS:
            self.compressed(OURS[kind.lower()])
        else:
            torchs, keywords = self.torchs(kind)
            if self.stage == 3 and parameters:
                self.streamed(torchs, keywords, parameters)
            elif self.stage == 3:
                self.sharded(torchs, keywords, state)
            elif self.stage:
                self.partitioned(torchs, keywords, state)
            else:
                self.replicated(torchs, keywords)
        scheduled = self.schedule()
        self.leftovers()
        setup, loop = "\n".join(self.setup), self.loop(accumulation, scheduled)
        lines = (line.split(maxsplit=1) for line in IMPORTS.strip().splitlines())
        imports = [line for word, line in lines if word in PROGRAM + setup + loop]
        return PROGRAM.format(imports="\n".join(imports), setup=setup, loop=loop)

    def loop(self, accumulation: str, scheduled: bool) -> str:
        """The training loop: forward, backward, and every so many batches a step."""
        many = accumulation != "1"
        loss = f"loss = loss_of({self.runs}, batch)" + " / accumulation" * many
        if self.autocast:
            loss = f"with torch.autocast(device, {self.half}):\n    {loss}"
        both = f"{loss}\n{'scaler.scale(loss)' if self.scaled else 'loss'}.backward()"
        if many and self.sync:
            head = f"with contextlib.nullcontext() if last else {self.sync}:"
            both = f"{head}\n{indent(both, '    ')}"
        step = ""
        if self.clip and not self.own_clip:
            step += "scaler.unscale_(optimizer)\n" * bool(self.scaled)
            step += f"torch.nn.utils.clip_grad_norm_(model.parameters(), {self.clip!r})\n"
        if self.scaled:
            step += SCALED_SCHEDULED if scheduled else SCALED
        else:
            step += "optimizer.step()" + "\nscheduler.step()" * scheduled
        step += "\noptimizer.zero_grad()"
        if many:
            both = f"last = number % accumulation == 0\n{both}"
            step = f"if last:\n{indent(step, '    ')}"
        first = f"accumulation = {accumulation}\n" * many
        head = "for number, batch in enumerate(loader, 1):\n"
        return first + head + indent(f"{both}\n{step}", "    ")

    def scaler(self) -> str:
        """The argument that tells ours of the loss scale, after the line that makes it."""
        if self.scaled:
            self.write(f"scaler = torch.amp.GradScaler(device, {self.scaled})")
        return "scaler" if self.scaled else ""

    # ------------------------------------------------------------ optimizers

    def torchs(self, kind: str) -> tuple[str, dict[str, Any]]:
        """torch's optimizer and its options; DeepSpeed's Adam is AdamW unless told otherwise, and
        does not decay weights."""
        fused = not self.take(f"{PARAMS}.torch_adam")
        decoupled = self.take(f"{PARAMS}.adam_w_mode") is not False
        name = {
            "adam": "AdamW" if decoupled else "Adam",
            "adamw": "AdamW",
            "sgd": "SGD",
            "adagrad": "Adagrad",
        }.get(kind.lower(), kind)
        if name not in TORCHS:
            word = " ".join(kind.split())
            self.write(
                f"# instead of {word!r}, which torch does not have: put another class and its "
                "options here"
            )
            self.note(f"optimizer.type {word}: AdamW stands in its place")
            self.left.setdefault(f"{PARAMS}.lr", self.left.pop(f"{PARAMS}.adam_lr", RATE))
            name = "AdamW"
        keywords = self.options(TORCHS[name])
        if name in ("AdamW", "Adam") and fused:
            keywords.setdefault("weight_decay", 0.0)
        return f"torch.optim.{name}", keywords

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Those of the optimizer that the file gives as numbers, or lists of numbers."""
        found: dict[str, Any] = {}
        for name in names:
            if (value := self.take(f"{PARAMS}.{name}")) is None:
                continue
            each = value if isinstance(value, list) else [value]
            if all(isinstance(number, int | float) for number in each):
                found[name] = value
            else:
                self.note(f"{PARAMS}.{name} is {value!r}, expected numbers: it is left out")
        self.rate = found.get("lr", RATE) or RATE
        return found

    def compressed(self, own: str) -> None:
        """One of the 1-bit optimizers, which averages over the ranks itself."""
        if self.stage:
            self.note(
                f"zero_optimization.stage {self.stage}: DeepSpeed refuses it with {own}, and it is "
                "left out. ShardedOneBitAdam and ShardedZeroOneAdam divide the state"
            )
        keywords = self.options(ADAM)
        if own == "ZeroOneAdam":
            self.zero_one_schedule(keywords)
            if updates := self.number(f"{PARAMS}.var_update_scaler"):
                keywords["variance_updates"] = int(updates)
        elif steps := self.number(f"{PARAMS}.freeze_step"):
            keywords["exact_steps"] = int(steps)
        else:
            self.note(
                'freeze_step is missing: DeepSpeed freezes at step 100000, "auto" when the '
                "variance is stable"
            )
        if own == "OneBitLamb":
            keywords["rates"] = "frozen"
            for name, (low, high, least, most) in LAMB.items():
                given = self.number(f"{PARAMS}.{low}"), self.number(f"{PARAMS}.{high}")
                if given != (None, None):
                    keywords[name] = (given[0] or least, given[1] or most)
            for word, name in LAMB_WORDS.items():
                if (value := self.number(f"{PARAMS}.{word}")) is not None:
                    keywords[name] = value
        else:
            keywords["bias_correction"] = False  # DeepSpeed's have none, whatever the option says
        self.clipped(keywords)
        self.autocast = bool(self.half)
        scaler = self.scaler()
        self.write(assigned(f"commpress.{own}", call(keywords, grad_scaler=scaler)))
        self.write("ddp = DistributedDataParallel(model)")
        self.write("commpress.overlap(ddp, optimizer)  # rounds start while backward goes on")
        self.runs, self.sync = "ddp", "ddp.no_sync()"

    def zero_one_schedule(self, keywords: dict[str, Any]) -> None:
        """DeepSpeed's intervals of synchronisation: 1 for ``scaler`` steps after the variance is
        frozen, then 2, 4, … up to ``clipper``. Without a word of them ours."""
        given = {word: self.take(f"{PARAMS}.{word}") for word in ZERO_ONE}
        given = {word: value for word, value in given.items() if value is not None}
        if not given:
            return
        freeze, scaler, clipper = (ZERO_ONE | given).values()
        if not all(isinstance(value, int) and value > 0 for value in (freeze, scaler, clipper)):
            self.notes += [
                f"{word} {value}: expected a positive number; sync='qsr' stays"
                for word, value in given.items()
            ]
            return
        keywords["sync"] = DoublingIntervals(freeze + scaler, scaler, clipper)
        self.note(
            f"var_freeze_step {freeze}: updates of the variance become ever rarer and never end; "
            f"from step {freeze + scaler}, where intervals exceed 1, they wait for the end of one"
        )

    def replicated(self, torchs: str, keywords: dict[str, Any]) -> None:
        """Stage 0: DistributedDataParallel."""
        self.autocast, self.runs, self.sync = bool(self.half), "ddp", "ddp.no_sync()"
        self.write("ddp = DistributedDataParallel(model)")
        told = ", grad_scaler=scaler" * bool(self.scaler())
        if codec := self.codec():
            self.write(f"commpress.compress(ddp, {codec!r}{told})")
        else:
            self.write('# commpress.compress(ddp, "int8")  # nothing is compressed without it')
        self.write(assigned(torchs, call(keywords)))

    def partitioned(self, torchs: str, keywords: dict[str, Any], state: str) -> None:
        """Stages 1 and 2; half-precision weights have float32 masters there."""
        if self.half:
            self.write(f"model.to({self.half})")
        scaler = self.scaler()
        more: dict[str, Any] = {"stage": self.stage}
        # else they travel in half precision, and are averaged in float32
        if not self.half and (codec := self.codec()):
            more["codec"] = codec
        if state:
            self.store(state, 16)
            more["chunk_mb"] = CHUNK_MB
        names = {"store": "store" if state else "", "grad_scaler": scaler}
        self.write(assigned("commpress.Partitioned", call(more | keywords, torchs, **names)))
        self.own_clip = True
        if self.clip:
            self.write(f"optimizer.max_grad_norm = {self.clip}")
        self.sync = "optimizer.no_sync()" if self.stage == 1 else ""
        self.note("the model stays bare: Partitioned averages gradients over the ranks itself")

    def sharded(self, torchs: str, keywords: dict[str, Any], state: str) -> None:
        """Stage 3 by torch's ``fully_shard``; weights are kept in float32 and computed with in half
        precision."""
        if self.half:
            word = str(self.take("communication_data_type") or "fp32")
            sent = HALF.get(word, "torch.float32")
            self.write(
                f"precision = MixedPrecisionPolicy(param_dtype={self.half}, reduce_dtype={sent})"
            )
        self.write(SHARDED.format(policy=", mp_policy=precision" * bool(self.half)))
        told = ", grad_scaler=scaler" * bool(self.scaler())
        gradients = "int4" if self.zero("zero_quantized_gradients") else self.codec() or None
        weights = "int8" if self.zero("zero_quantized_weights") else None
        if gradients or weights:
            self.write(
                f"commpress.compress_fsdp(model, codec={gradients!r}, weights={weights!r}{told})"
            )
        if (size := self.zero("zero_hpz_partition_size")) not in (None, 1):
            self.note(
                f"zero_hpz_partition_size {size}: fully_shard on a mesh of two dimensions, and "
                "compress_hsdp"
            )
        if state:
            self.store(state, 16)
            self.offloaded(torchs, keywords)
        else:
            self.write(assigned(torchs, call(keywords)))

    def streamed(self, torchs: str, keywords: dict[str, Any], path: str) -> None:
        """Stage 3 with parameters outside of memory."""
        if self.scaled:
            self.note("fp16.enabled: bfloat16 instead, for gradients in a store take no loss scale")
            self.half, self.scaled = "torch.bfloat16", ""
        if self.half:
            self.write(f"model.to({self.half})")
        self.store(path, 24)
        self.write(f"streamed = commpress.stream(model, store=store, chunk_mb={CHUNK_MB})")
        self.offloaded(torchs, keywords)
        self.note(
            "offload_param: moments and masters lie in the store too, and gradients as backward "
            "makes them"
        )

    def offloaded(self, torchs: str, keywords: dict[str, Any]) -> None:
        self.clipped(keywords)
        given = call({"chunk_mb": CHUNK_MB} | keywords, torchs, store="store")
        self.write(assigned("commpress.Offloaded", given))

    def clipped(self, keywords: dict[str, Any]) -> None:
        self.own_clip = True
        if self.clip:
            keywords["max_grad_norm"] = self.clip

    def codec(self) -> str:
        """Codec of gradients, if the file names a dtype to send them in."""
        word = str(self.take("communication_data_type") or "")
        if word and word not in HALF and word != "fp32":
            self.note(f"communication_data_type {word}: gradients travel as they are")
        return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(HALF.get(word, ""), "")

    # ------------------------------------------------------------ stores

    def offloading(self) -> tuple[str, str]:
        """Device and folder of a store, as "cpu:folder", where the optimizer's state and parameters
        leave the device."""
        places, own = {}, OURS.get(str(self.left.get("optimizer.type")).lower())
        for key, (stages, old) in OFFLOAD.items():
            device = self.zero(f"{key}.device") or ("cpu" if self.zero(old) else "none")
            path = self.zero(f"{key}.nvme_path")
            if device not in ("cpu", "nvme", "none"):
                raise InvalidArgument(
                    f"{key}.device is {device!r}, expected 'cpu', 'nvme' or 'none'"
                )
            if device != "none" and (own or self.stage not in stages):
                able = " or ".join(map(str, stages))
                why = f"stage {self.stage} has none, expected stage {able}"
                why = f"{own} keeps its state in memory" if own else why
                self.note(f"{key} is left out: {why}")
                device = "none"
            places[key] = "" if device == "none" else f"{device}:{path or 'store'}"
        return places["offload_optimizer"] or places["offload_param"], places["offload_param"]

    def store(self, place: str, each: int) -> None:
        """Open one; ``each``: bytes of an element that all lie in host memory, for the device
        "cpu"."""
        device, _, path = place.partition(":")
        host = '"1GiB"'
        if device == "cpu":
            self.write("numel = sum(parameter.numel() for parameter in model.parameters())")
            host = f"{each} * numel // dist.get_world_size() + 2**29"
        self.write(STORE.format(path=path, host=host))

    # ------------------------------------------------------------ the rest

    def schedule(self) -> bool:
        """DeepSpeed's warm-up as a factor of the learning rate; False if there is none, or none
        that is known here."""
        if not any(path.startswith("scheduler.") for path in self.left):
            return False
        kind, params = self.take("scheduler.type"), "scheduler.params"
        if kind not in ("WarmupLR", "WarmupDecayLR"):
            self.note(f"scheduler.type {kind}: take one of torch.optim.lr_scheduler")
            return False
        warm = max(int(self.number(f"{params}.warmup_num_steps", 1) or 1000), 2)
        low = self.number(f"{params}.warmup_min_lr") or 0.0
        usual = self.rate if kind == "WarmupLR" else RATE
        high = self.number(f"{params}.warmup_max_lr") or usual
        total = self.number(f"{params}.total_num_steps", 1) if kind == "WarmupDecayLR" else None
        linear = self.take(f"{params}.warmup_type") == "linear"
        rising = (
            f"max(step - 1, 0) / {warm}" if linear else f"math.log(max(step, 1)) / math.log({warm})"
        )
        later = f"max(0.0, ({total} + 1 - step) / {max(total - warm, 1)})" if total else "1.0"
        self.write(
            SCHEDULER.format(
                kind=kind,
                low=low,
                high=high,
                rising=rising,
                warm=warm,
                later=later,
                span=high - low,
                lr=self.rate,
            )
        )
        return True

    def leftovers(self) -> None:
        """Name every key that nobody has taken, by its path."""
        engine, off = list[str](), list[str]()
        disabled = [
            path.removesuffix("enabled")
            for path, value in self.left.items()
            if value is False and path.endswith(".enabled")
        ]
        for path, value in self.left.items():
            section = next((name[:-1] for name in disabled if path.startswith(name)), path)
            if ENGINE.fullmatch(section):
                engine.append(section)
            elif section != path or value is False or value is None:
                off.append(section)  # 0 is a number, and often means "dynamic"
            else:
                instead = INSTEAD.get(path.split(".")[0])
                self.note(f"no equivalent: {path}" + f"; see {instead}" * bool(instead))
        if off:
            self.note(f"switched off in the file: {', '.join(dict.fromkeys(off))}")
        if engine:
            self.note(f"of DeepSpeed's engine, not needed here: {', '.join(dict.fromkeys(engine))}")


def assigned(name: str, arguments: str) -> str:
    """The line that makes the optimizer, or several."""
    line = f"optimizer = {name}({arguments})"
    if len(line) <= 100:
        return line
    pad = "    "
    wrapped = fill(
        arguments,
        100,
        initial_indent=pad,
        subsequent_indent=pad,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"optimizer = {name}(\n{wrapped}\n)"


def call(keywords: Mapping[str, Any], *first: str, **names: str) -> str:
    """Arguments as they are written: values by ``repr``, lists as tuples, ``names`` as they are."""
    named = [f"{key}={name}" for key, name in names.items() if name]
    values = [f"{k}={tuple(v) if isinstance(v, list) else v!r}" for k, v in keywords.items()]
    return ", ".join(["model.parameters()", *first, *named, *values])
