"""DeepSpeed's configuration as a program of torch and commpress; names each key that has no
equivalent."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from textwrap import fill
from typing import Any

from commpress.documents import read_json
from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals

LARGEST = 1 << 20  # bytes of a file
OURS = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam", "onebitlamb": "OneBitLamb"}
ADAM = ("lr", "betas", "eps", "weight_decay")
TORCHS = {  # options by optimizer; DeepSpeed takes those of torch.optim by name
    "AdamW": (*ADAM, "amsgrad"),
    "Adam": (*ADAM, "amsgrad"),
    "NAdam": (*ADAM, "momentum_decay"),
    "RAdam": ADAM,
    "Adamax": ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
}
# DeepSpeed's defaults
ZERO_ONE = {"var_freeze_step": 100000, "local_step_scaler": 32678, "local_step_clipper": 16}
LAMB = {
    "coefficients": ("min_coeff", "max_coeff", 0.01, 10.0),
    "factors": ("factor_min", "factor_max", 0.5, 4.0),
}
CLIPPING, RATE = 1.0, 1e-3  # where the file has no word of them
HALF = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "bfp16": "torch.bfloat16",
    "bfloat16": "torch.bfloat16",
}
CHUNK_MB = 16
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
INSTEAD = {
    "activation_checkpointing": "torch.utils.checkpoint",
    "tensorboard": "commpress.Metrics",
    "wandb": "commpress.Metrics",
    "csv_monitor": "commpress.Metrics",
    "flops_profiler": "torch.profiler",
    "torch_autocast": "torch.autocast",
    "amp": "torch.autocast",
    "elasticity": "commpress.elastic",
    "curriculum_learning": "examples/gallery/length_curriculum.py",
}


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
    conversion = Conversion(deepcopy(dict(config)))
    return conversion.program(), conversion.notes


class Conversion:
    """One configuration: what is understood is taken out of it, and what is left over at the end is
    named."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.paths = {id(config): ""}
        self.imports = {"import torch", "import torch.distributed as dist"}
        self.setup: list[str] = []
        self.notes: list[str] = []
        self.zero, self.optimizer = self.section("zero_optimization"), self.section("optimizer")
        self.params = self.section("params", self.optimizer)
        self.stage = self.take("stage", self.zero) or 0
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

    # ------------------------------------------------------------ reading

    def take(self, key: str, of: dict[str, Any] | None = None) -> Any:
        """A value, removed from where it stood; None for what is missing or "auto"."""
        found = self.config if of is None else of
        value = found.pop(key, None)
        if value == "auto":
            self.note(f'{self.paths.get(id(found), "")}{key} is "auto": pass a value yourself')
            return None
        return value

    def section(self, key: str, of: dict[str, Any] | None = None) -> dict[str, Any]:
        """An object of the file, from which others take; empty if it is missing."""
        found = self.config if of is None else of
        value = self.take(key, found) if found.get(key) in (None, "auto") else found[key]
        if value is not None and not isinstance(value, dict):
            raise InvalidArgument(f"{key} is {value!r}, expected an object")
        if value is None:
            return {}
        self.paths[id(value)] = f"{self.paths.get(id(found), '')}{key}."
        return value

    def number(self, key: str, of: dict[str, Any], least: float = 0) -> Any:
        value = self.take(key, of)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or value < least
        ):
            self.note(f"{key} is {value!r}, expected a number of at least {least}: it is left out")
            return None
        return value

    def enabled(self, name: str) -> bool:
        found = self.section(name)
        if "enabled" in found and found["enabled"] is not False:
            return bool(self.take("enabled", found))
        return False

    # ---------------------------------------------------------- what does not depend on the program

    def precision(self) -> tuple[str, str]:
        """The half-precision dtype, and the arguments of a GradScaler."""
        fp16, bf16 = self.enabled("fp16"), self.enabled("bf16")
        if fp16 and bf16:
            raise InvalidArgument("fp16 and bf16 are both enabled, expected one of them")
        section = self.section("fp16")
        if not fp16:
            if "enabled" not in section and section.get("loss_scale") == 0:
                self.note(
                    f"fp16.loss_scale {section.pop('loss_scale')}: dynamic, as a GradScaler's"
                )
            return ("torch.bfloat16", "") if bf16 else ("", "")
        power, window = (
            self.take("initial_scale_power", section),
            self.take("loss_scale_window", section),
        )
        fixed = self.number("loss_scale", section)
        scale = f"{float(fixed)!r}" if fixed else f"2.0**{power if isinstance(power, int) else 16}"
        if fixed:
            self.note(
                f"fp16.loss_scale {fixed}: still halves after an overflow; a GradScaler has no "
                "fixed scale"
            )
        every = 2**31 - 1 if fixed else window if isinstance(window, int) and window > 0 else 1000
        return "torch.float16", f"init_scale={scale}, growth_interval={every}"

    def clipping(self) -> float | None:
        if "gradient_clipping" not in self.config:
            self.note(f"gradient_clipping is missing: {CLIPPING}, the default of DeepSpeed 0.19")
            return CLIPPING
        return self.number("gradient_clipping", self.config) or None

    def accumulation(self) -> str:
        """Backward passes of a step, as a number or as an expression."""
        steps = self.number("gradient_accumulation_steps", self.config, 1)
        size = self.number("train_micro_batch_size_per_gpu", self.config, 1)
        every = self.number("train_batch_size", self.config, 1)
        if size:
            self.note(f"train_micro_batch_size_per_gpu {size}: the batch_size of your DataLoader")
        if every and size and not steps:
            return f"max({int(every)} // ({int(size)} * dist.get_world_size()), 1)"
        if every:
            makes = (
                f"{size} × {steps or 1}" if size else f"your DataLoader's batch_size × {steps or 1}"
            )
            self.note(f"train_batch_size {every}: {makes} × the number of ranks must be that")
        return str(int(steps or 1))

    # ------------------------------------------------------------ the program

    def program(self) -> list[str]:
        state, parameters = self.offloading()
        kind = str(self.take("type", self.optimizer) or "AdamW")
        accumulation = self.accumulation()
        if kind.lower() in OURS:
            self.compressed(OURS[kind.lower()])
        else:
            torchs, keywords = self.torchs(kind)
            if self.stage == 3:
                self.streamed(torchs, keywords, parameters) if parameters else self.sharded(
                    torchs, keywords, state
                )
            elif self.stage:
                self.partitioned(torchs, keywords, state)
            else:
                self.replicated(torchs, keywords)
        scheduled = self.schedule()
        self.leftovers()
        return self.assembled(self.loop(accumulation, scheduled))

    def assembled(self, loop: list[str]) -> list[str]:
        text = "\n".join([*self.setup, *loop])
        for module in ("contextlib", "math", "os"):
            if f"{module}." in text:
                self.imports.add(f"import {module}")
        plain = sorted(line for line in self.imports if not line.startswith("from"))
        return [
            (
                "# Yours: model, loader (batches of this rank) and loss_of(model, batch). The "
                "model is on its device, and has"
            ),
            "# the same weights on every rank.",
            *plain,
            *sorted(self.imports - set(plain)),
            *(["", "import commpress"] if "commpress." in text else []),
            "",
            "if not dist.is_initialized():",
            "    dist.init_process_group()  # ranks that torchrun started",
            'device = "cuda" if torch.cuda.is_available() else "cpu"',
            *self.setup,
            "",
            *loop,
        ]

    def loop(self, accumulation: str, scheduled: bool) -> list[str]:
        """The training loop: forward, backward, and every so many batches a step."""
        many = accumulation != "1"
        loss = f"loss = loss_of({self.runs}, batch)" + " / accumulation" * many
        pad = "    " * (1 + (many and bool(self.sync)))
        lines = [f"accumulation = {accumulation}"] * many + [
            "for number, batch in enumerate(loader, 1):"
        ]
        lines += ["    last = number % accumulation == 0"] * many
        if many and self.sync:
            lines.append(f"    with contextlib.nullcontext() if last else {self.sync}:")
        if self.autocast:
            lines += [f"{pad}with torch.autocast(device, {self.half}):", f"{pad}    {loss}"]
        else:
            lines.append(pad + loss)
        lines.append(
            f"{pad}scaler.scale(loss).backward()" if self.scaled else f"{pad}loss.backward()"
        )
        lines += ["    if last:"] * many
        pad = "    " * (1 + many)
        if self.clip and not self.own_clip:
            lines += [f"{pad}scaler.unscale_(optimizer)"] * bool(self.scaled)
            lines.append(f"{pad}torch.nn.utils.clip_grad_norm_(model.parameters(), {self.clip!r})")
        if not self.scaled:
            lines.append(f"{pad}optimizer.step()")
            lines += [f"{pad}scheduler.step()"] * scheduled
        else:
            lines += [f"{pad}scale = scaler.get_scale()"] * scheduled
            lines += [f"{pad}scaler.step(optimizer)", f"{pad}scaler.update()"]
            if scheduled:
                lines += [
                    f"{pad}if scaler.get_scale() >= scale:  # not after a step that was left out"
                ]
                lines += [f"{pad}    scheduler.step()"]
        return [*lines, f"{pad}optimizer.zero_grad()"]

    def scaler(self) -> str:
        """The argument that tells ours of the loss scale, after the line that makes it."""
        if self.scaled:
            self.setup.append(f"scaler = torch.amp.GradScaler(device, {self.scaled})")
        return "scaler" if self.scaled else ""

    # ------------------------------------------------------------ optimizers

    def torchs(self, kind: str) -> tuple[str, dict[str, Any]]:
        """torch's optimizer and its options; DeepSpeed's Adam is AdamW unless told otherwise, and
        does not decay weights."""
        fused = not self.take("torch_adam", self.params)
        decoupled = self.take("adam_w_mode", self.params) is not False
        name = {
            "adam": "AdamW" if decoupled else "Adam",
            "adamw": "AdamW",
            "sgd": "SGD",
            "adagrad": "Adagrad",
        }.get(kind.lower(), kind)
        stands_in = name not in TORCHS
        if stands_in:
            word = " ".join(kind.split())
            self.setup.append(
                f"# instead of {word!r}, which torch does not have: put another class and its "
                "options here"
            )
            self.note(f"optimizer.type {word}: AdamW stands in its place")
            self.params.setdefault("lr", self.params.pop("adam_lr", RATE))
            name = "AdamW"
        keywords = self.options(TORCHS[name])
        if name in ("AdamW", "Adam") and fused:
            keywords.setdefault("weight_decay", 0.0)
        return f"torch.optim.{name}", keywords

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Those of the optimizer that the file gives as numbers, or lists of numbers."""
        found: dict[str, Any] = {}
        for name in names:
            if (value := self.take(name, self.params)) is None:
                continue
            if all(
                isinstance(each, int | float)
                for each in (value if isinstance(value, list) else [value])
            ):
                found[name] = value
            else:
                self.note(f"optimizer.params.{name} is {value!r}, expected numbers: it is left out")
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
            if updates := self.number("var_update_scaler", self.params):
                keywords["variance_updates"] = int(updates)
        elif steps := self.number("freeze_step", self.params):
            keywords["exact_steps"] = int(steps)
        else:
            self.note(
                'freeze_step is missing: DeepSpeed freezes at step 100000, "auto" when the '
                "variance is stable"
            )
        if own == "OneBitLamb":
            self.lamb_bounds(keywords)
        else:
            keywords["bias_correction"] = False  # DeepSpeed's have none, whatever the option says
        if self.clip:
            keywords["max_grad_norm"] = self.clip
        self.own_clip, self.autocast = True, bool(self.half)
        scaler = self.scaler()
        self.imports.add("from torch.nn.parallel import DistributedDataParallel")
        self.setup += [
            *assigned(f"commpress.{own}", call(keywords, grad_scaler=scaler)),
            "ddp = DistributedDataParallel(model)",
            "commpress.overlap(ddp, optimizer)  # rounds start while backward goes on",
        ]
        self.runs, self.sync = "ddp", "ddp.no_sync()"

    def lamb_bounds(self, keywords: dict[str, Any]) -> None:
        keywords["rates"] = "frozen"
        for name, (low, high, least, most) in LAMB.items():
            given = self.number(low, self.params), self.number(high, self.params)
            if given != (None, None):
                keywords[name] = (given[0] or least, given[1] or most)
        for name, word in {
            "coefficient_beta": "coeff_beta",
            "factor_change": "factor_threshold",
        }.items():
            if (value := self.number(word, self.params)) is not None:
                keywords[name] = value

    def zero_one_schedule(self, keywords: dict[str, Any]) -> None:
        """DeepSpeed's intervals of synchronisation: 1 for ``scaler`` steps after the variance is
        frozen, then 2, 4, … up to ``clipper``. Without a word of them ours."""
        given = {
            word: value for word in ZERO_ONE if (value := self.take(word, self.params)) is not None
        }
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
        self.imports.add("from commpress.schedules import DoublingIntervals")
        self.note(
            f"var_freeze_step {freeze}: updates of the variance become ever rarer and never end; "
            f"from step {freeze + scaler}, where intervals exceed 1, they wait for the end of one"
        )

    def replicated(self, torchs: str, keywords: dict[str, Any]) -> None:
        """Stage 0: DistributedDataParallel."""
        self.imports.add("from torch.nn.parallel import DistributedDataParallel")
        self.autocast, self.runs, self.sync = bool(self.half), "ddp", "ddp.no_sync()"
        self.setup.append("ddp = DistributedDataParallel(model)")
        told = ", grad_scaler=scaler" * bool(self.scaler())
        line = '# commpress.compress(ddp, "int8")  # nothing is compressed without it'
        if codec := self.codec():
            line = f"commpress.compress(ddp, {codec!r}{told})"
        self.setup.append(line)
        self.setup += assigned(torchs, call(keywords))

    def partitioned(self, torchs: str, keywords: dict[str, Any], state: str) -> None:
        """Stages 1 and 2; half-precision weights have float32 masters there."""
        if self.half:
            self.setup.append(f"model.to({self.half})")
        scaler = self.scaler()
        more: dict[str, Any] = {"stage": self.stage}
        # else they travel in half precision, and are averaged in float32
        if not self.half and (codec := self.codec()):
            more["codec"] = codec
        if state:
            self.setup += self.store(state, 16)
            more["chunk_mb"] = CHUNK_MB
        self.clipped(keywords)
        names = {"store": "store" if state else "", "grad_scaler": scaler}
        self.setup += assigned("commpress.Partitioned", call(more | keywords, torchs, **names))
        self.sync = "optimizer.no_sync()" if self.stage == 1 else ""
        self.note("the model stays bare: Partitioned averages gradients over the ranks itself")

    def sharded(self, torchs: str, keywords: dict[str, Any], state: str) -> None:
        """Stage 3 by torch's ``fully_shard``; weights are kept in float32 and computed with in half
        precision."""
        policy = ""
        self.imports.add(
            "from torch.distributed.fsdp import "
            f"{'MixedPrecisionPolicy, ' * bool(self.half)}fully_shard"
        )
        if self.half:
            word = str(self.take("communication_data_type") or "fp32")
            sent = HALF.get(word, "torch.float32")
            self.setup.append(
                f"precision = MixedPrecisionPolicy(param_dtype={self.half}, reduce_dtype={sent})"
            )
            policy = ", mp_policy=precision"
        self.setup += [
            "def blocks_of(module):  # elements of the outermost ModuleLists",
            "    for child in module.children():",
            (
                "        yield from child if isinstance(child, torch.nn.ModuleList) else "
                "blocks_of(child)"
            ),
            "for block in blocks_of(model):",
            f"    fully_shard(block{policy})",
            f"fully_shard(model{policy})",
        ]
        scaler = self.scaler()
        gradients = (
            "int4" if self.take("zero_quantized_gradients", self.zero) else self.codec() or None
        )
        weights = "int8" if self.take("zero_quantized_weights", self.zero) else None
        if gradients or weights:
            told = ", grad_scaler=scaler" * bool(scaler)
            self.setup.append(
                f"commpress.compress_fsdp(model, codec={gradients!r}, weights={weights!r}{told})"
            )
        if (size := self.take("zero_hpz_partition_size", self.zero)) not in (None, 1):
            self.note(
                f"zero_hpz_partition_size {size}: fully_shard on a mesh of two dimensions, and "
                "compress_hsdp"
            )
        if state:
            self.setup += self.store(state, 16)
            self.offloaded(torchs, keywords)
        else:
            self.setup += assigned(torchs, call(keywords))

    def streamed(self, torchs: str, keywords: dict[str, Any], path: str) -> None:
        """Stage 3 with parameters outside of memory."""
        if self.scaled:
            self.note("fp16.enabled: bfloat16 instead, for gradients in a store take no loss scale")
            self.half, self.scaled = "torch.bfloat16", ""
        if self.half:
            self.setup.append(f"model.to({self.half})")
        self.setup += self.store(path, 24)
        self.setup.append(f"streamed = commpress.stream(model, store=store, chunk_mb={CHUNK_MB})")
        self.offloaded(torchs, keywords)
        self.note(
            "offload_param: moments and masters lie in the store too, and gradients as backward "
            "makes them"
        )

    def offloaded(self, torchs: str, keywords: dict[str, Any]) -> None:
        self.clipped(keywords)
        self.setup += assigned(
            "commpress.Offloaded", call({"chunk_mb": CHUNK_MB} | keywords, torchs, store="store")
        )

    def clipped(self, keywords: dict[str, Any]) -> None:
        self.own_clip = True
        if self.clip:
            keywords["max_grad_norm"] = self.clip

    def codec(self) -> str:
        """Of gradients, if the file names a dtype to send them in."""
        word = str(self.take("communication_data_type") or "")
        if word and word not in HALF and word != "fp32":
            self.note(f"communication_data_type {word}: gradients travel as they are")
        return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(HALF.get(word, ""), "")

    # ------------------------------------------------------------ stores

    def offloading(self) -> tuple[str, str]:
        """The line of host memory and the folder of a store, where the optimizer's state and
        parameters leave the device."""
        places = {}
        for key, stages, old in (
            ("offload_optimizer", (1, 2, 3), "cpu_offload"),
            ("offload_param", (3,), "cpu_offload_param"),
        ):
            section = self.section(key, self.zero)
            device = self.take("device", section) or (
                "cpu" if self.take(old, self.zero) else "none"
            )
            path = self.take("nvme_path", section)
            if device not in ("cpu", "nvme", "none"):
                raise InvalidArgument(
                    f"{key}.device is {device!r}, expected 'cpu', 'nvme' or 'none'"
                )
            own = str(self.optimizer.get("type")).lower() in OURS
            if device != "none" and (own or self.stage not in stages):
                why = (
                    f"{OURS[str(self.optimizer['type']).lower()]} keeps its state in memory"
                    if own
                    else (
                        f"stage {self.stage} has none, expected stage "
                        f"{' or '.join(map(str, stages))}"
                    )
                )
                self.note(f"{key} is left out: {why}")
                device = "none"
            places[key] = "" if device == "none" else f"{device}:{path or 'store'}"
        return places["offload_optimizer"] or places["offload_param"], places["offload_param"]

    def store(self, place: str, each: int) -> list[str]:
        """Lines that open one; ``each``: bytes of an element that all lie in host memory, for the
        device "cpu"."""
        device, _, path = place.partition(":")
        host = '"1GiB"'
        lines = []
        if device == "cpu":
            lines = ["numel = sum(parameter.numel() for parameter in model.parameters())"]
            host = f"{each} * numel // dist.get_world_size() + 2**29"
        folder = f'os.path.join({path!r}, f"rank{{dist.get_rank()}}")'
        return [
            *lines,
            f"folder = {folder}  # if it holds a committed state, training goes on from there",
            f"host = {host}  # bytes of memory that each rank takes at once",
            "store = commpress.TieredStore.open(folder, host=host)",
        ]

    # ------------------------------------------------------------ the rest

    def schedule(self) -> bool:
        """DeepSpeed's warm-up as a factor of the learning rate; False if there is none, or none
        that is known here."""
        schedule = self.section("scheduler")
        if not schedule:
            return False
        kind = self.take("type", schedule)
        if kind not in ("WarmupLR", "WarmupDecayLR"):
            self.note(f"scheduler.type {kind}: take one of torch.optim.lr_scheduler")
            return False
        params = self.section("params", schedule)
        lr = self.rate
        warm = max(int(self.number("warmup_num_steps", params, 1) or 1000), 2)
        low = self.number("warmup_min_lr", params) or 0.0
        high = self.number("warmup_max_lr", params) or (lr if kind == "WarmupLR" else RATE)
        total = self.number("total_num_steps", params, 1) if kind == "WarmupDecayLR" else None
        linear = self.take("warmup_type", params) == "linear"
        rising = (
            f"max(step - 1, 0) / {warm}" if linear else f"math.log(max(step, 1)) / math.log({warm})"
        )
        later = f"max(0.0, ({total} + 1 - step) / {max(total - warm, 1)})" if total else "1.0"
        self.setup += [
            f"def factor(step):  # {kind}, from {low!r} to {high!r}",
            f"    part = {rising} if step <= {warm} else {later}",
            f"    return ({low!r} + {high - low!r} * part) / {lr!r}",
            "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)",
        ]
        return True

    def leftovers(self) -> None:
        """Name every key that nobody has taken, by its path."""
        engine, off = [], []
        for path, value in leaves(self.config):
            if ENGINE.fullmatch(path):
                engine.append(path)
            elif value is False or value is None:  # 0 is a number, and often means "dynamic"
                off.append(path)
            else:
                instead = INSTEAD.get(path.split(".")[0])
                self.note(f"no equivalent: {path}" + f"; see {instead}" * bool(instead))
        if off:
            self.note(f"switched off in the file: {', '.join(off)}")
        if engine:
            self.note(f"of DeepSpeed's engine, not needed here: {', '.join(engine)}")


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its path; of a section that is switched off only the section."""
    for key in sorted(config):
        path, value = f"{prefix}{key}", config[key]
        if isinstance(value, dict) and value.get("enabled") is False:
            yield path, False
        elif isinstance(value, dict):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def assigned(name: str, arguments: str) -> list[str]:
    """The line that makes the optimizer, or several."""
    line = f"optimizer = {name}({arguments})"
    if len(line) <= 100:
        return [line]
    pad = "    "
    wrapped = fill(
        arguments,
        100,
        initial_indent=pad,
        subsequent_indent=pad,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"optimizer = {name}(", *wrapped.split("\n"), ")"]


def call(keywords: Mapping[str, Any], *first: str, **names: str) -> str:
    """Arguments as they are written: values by ``repr``, lists as tuples, ``names`` as they are."""
    written = [
        "model.parameters()",
        *first,
        *(f"{key}={name}" for key, name in names.items() if name),
    ]
    return ", ".join(
        [
            *written,
            *(f"{k}={tuple(v) if isinstance(v, list) else v!r}" for k, v in keywords.items()),
        ]
    )
