"""DeepSpeed's configuration as calls of torch and commpress; names what has no equivalent."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals

LARGEST = 1 << 20  # bytes of a file
COMPRESSED = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam", "onebitlamb": "OneBitLamb"}
PLAIN = {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}
ZERO_ONE = {"var_freeze_step": 100000, "local_step_scaler": 32678, "local_step_clipper": 16}  # DeepSpeed's defaults
COMMON = ("lr", "betas", "eps", "weight_decay", "momentum")
NONE_NEEDED = {  # keys that say nothing here
    "train_batch_size", "steps_per_print", "wall_clock_breakdown", "dump_state", "prescale_gradients",
    "zero_allow_untested_optimizer", "gradient_predivide_factor", "disable_allgather", "memory_breakdown",
}  # fmt: skip
ZERO_TUNING = {  # of how DeepSpeed's engine overlaps and cuts; ours has no such options
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
    "contiguous_gradients", "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters", "zero_quantized_nontrainable_weights",
}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    lines, notes = converted(read(options.config))
    print("\n".join(lines))
    if notes:
        print("\n# Differences:")
        print("\n".join(f"# - {' '.join(note.split())}" for note in notes))  # a comment stays one, whatever the file says
    return 0


def read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise InvalidArgument(f"{path} has more than {LARGEST} bytes: expected a ds_config.json")
        config = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} holds a {type(config).__name__}, expected an object as DeepSpeed documents it")
    return config


def converted(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The lines of a program, and notes on what is not in them."""
    conversion = Conversion(dict(config))
    conversion.convert()
    return conversion.lines, conversion.notes


class Conversion:
    """One configuration: what is understood is taken out of it, and what is left over at the end is named."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.lines = ["import torch", "from torch.nn.parallel import DistributedDataParallel", "", "import commpress", ""]
        self.notes: list[str] = []

    def take(self, key: str, of: dict[str, Any] | None = None) -> Any:
        """A value, removed from where it stood; None for what is missing or "auto"."""
        value = (self.config if of is None else of).pop(key, None)
        if value == "auto":
            self.notes.append(f'{key} is "auto": pass a value yourself')
            return None
        return value

    def section(self, key: str, of: dict[str, Any] | None = None) -> dict[str, Any]:
        value = self.take(key, of)
        if value is not None and not isinstance(value, dict):
            raise InvalidArgument(f"{key} is {value!r}, expected an object")
        return dict(value or {})

    def convert(self) -> None:
        zero, optimizer = self.section("zero_optimization"), self.section("optimizer")
        stage = self.take("stage", zero) or 0
        if stage not in (0, 1, 2, 3):
            raise InvalidArgument(f"zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3")
        kind = str(self.take("type", optimizer) or "AdamW")
        params = self.section("params", optimizer)
        clip = self.take("gradient_clipping")
        own = COMPRESSED.get(kind.lower())
        keywords = {key: value for key in COMMON if (value := self.take(key, params)) is not None}
        if own and stage:
            self.notes.append(f"ZeRO stage {stage} with {kind}: ShardedOneBitAdam, ShardedZeroOneAdam divide the state")
        parameters, disk = self.offloading(zero)
        if parameters:
            self.lines += ["store = " + (disk or "commpress.TieredStore.open('store', host='8GiB')")]
            self.lines += ["commpress.stream(model, store=store)            # first of all; the model may be on meta"]
            disk = "store"
        self.precision()
        if own:
            if disk:
                self.notes.append(f"offload_optimizer: the state of {own} stays in memory; Offloaded takes optimizers of torch")
            self.compressed(own, keywords, params, clip)
        else:
            self.plain(kind, keywords, stage, disk, clip, zero)
        self.schedule()
        self.rest(params, zero, optimizer)

    # ------------------------------------------------------------ optimizers

    def compressed(self, own: str, keywords: dict[str, Any], params: dict[str, Any], clip: Any) -> None:
        """One of the 1-bit optimizers, which averages over the ranks itself."""
        if own == "ZeroOneAdam":
            self.zero_one_schedule(keywords, params)
            if (updates := self.take("var_update_scaler", params)) is not None:
                keywords["variance_updates"] = updates
        elif (steps := self.take("freeze_step", params)) is not None:
            keywords["warmup_steps"] = steps
        for word, ours in {"max_coeff": 1, "min_coeff": 0, "factor_max": 1, "factor_min": 0}.items():
            if (value := self.take(word, params)) is not None:
                where = "coefficients" if "coeff" in word else "factors"
                self.notes.append(f"{word} {value}: {where}=(…, …)[{ours}] with rates='frozen', DeepSpeed's rule")
        if clip:
            keywords["max_grad_norm"] = clip
        self.lines += [f"optimizer = commpress.{own}({call(keywords)})", "ddp = DistributedDataParallel(model)"]
        self.lines += ["commpress.overlap(ddp, optimizer)               # rounds start while backward goes on"]
        self.notes.append("clip with max_grad_norm=, never with clip_grad_norm_: gradients are local")

    def zero_one_schedule(self, keywords: dict[str, Any], params: dict[str, Any]) -> None:
        """DeepSpeed's intervals of synchronisation: 1 for ``scaler`` steps after the variance is frozen, then 2, 4, … up to
        ``clipper``. Without a word of them ours."""
        given = {word: value for word in ZERO_ONE if (value := self.take(word, params)) is not None}
        if not given:
            return
        freeze, scaler, clipper = (ZERO_ONE | given).values()
        if not all(isinstance(value, int) and value > 0 for value in (freeze, scaler, clipper)):
            self.notes += [f"{word} {value}: expected a positive number; sync='qsr' stays" for word, value in given.items()]
            return
        keywords["sync"] = DoublingIntervals(freeze + scaler, scaler, clipper)
        self.lines.append("from commpress.schedules import DoublingIntervals")
        self.notes.append(
            f"var_freeze_step {freeze}: updates of the variance become ever rarer and never end; from step {freeze + scaler}, "
            "where intervals exceed 1, they wait for the end of one"
        )

    def plain(
        self, kind: str, keywords: dict[str, Any], stage: int, disk: str, clip: Any, zero: dict[str, Any]
    ) -> None:
        """An optimizer of torch, whole, divided or offloaded."""
        if kind.lower() not in PLAIN:
            self.notes.append(f"optimizer {kind}: torch has none of that name, AdamW stands here")
        torchs = f"torch.optim.{PLAIN.get(kind.lower(), 'AdamW')}"
        ours = bool(disk) or stage in (1, 2)
        if ours and clip:
            keywords["max_grad_norm"] = clip
        shards = self.take("zero_quantized_weights", zero), self.take("zero_quantized_gradients", zero)
        if disk:
            if disk != "store":
                self.lines.append(f"store = {disk}")
            self.lines.append(f"optimizer = commpress.Offloaded({call(keywords, torchs, store='store')})")
            if stage == 3:
                self.notes.append("ZeRO-3 with offloading: stream(..., process_group=…) divides rows among ranks")
        elif stage in (1, 2):
            self.lines.append(f"optimizer = commpress.Partitioned({call({'stage': stage} | keywords, torchs)})")
            self.notes.append("the model stays bare, from the same seed on every rank: Partitioned averages gradients itself")
        elif stage == 3:
            self.lines += ["from torch.distributed.fsdp import fully_shard", "", "for block in model.children():"]
            self.lines += ["    fully_shard(block)", "fully_shard(model)"]
            named = {"gradients": "int4" if shards[1] else "int8", "weights": "int8"}
            self.lines.append(f"state = commpress.compress_fsdp(model, {', '.join(f'{k}={v!r}' for k, v in named.items())})")
            self.lines.append(f"optimizer = {torchs}({call(keywords)})")
        else:
            dtype = str(self.take("communication_data_type") or "")
            codec = {"fp16": "fp16", "bfp16": "bf16", "bf16": "bf16", "fp32": "none"}.get(dtype, "int8")
            self.lines += ["ddp = DistributedDataParallel(model)", f"state = commpress.compress(ddp, codec={codec!r})"]
            self.lines.append(f"optimizer = {torchs}({call(keywords)})")
        if clip and not ours:
            self.lines.append(f"# before optimizer.step(): torch.nn.utils.clip_grad_norm_(model.parameters(), {clip!r})")
        if self.take("zero_hpz_partition_size", zero):
            self.notes.append("zero_hpz_partition_size: fully_shard with a mesh of two dimensions, and compress_hsdp")

    def offloading(self, zero: dict[str, Any]) -> tuple[bool, str]:
        """True if parameters leave memory, and the store that optimizer state lies in."""
        parameters, state = self.section("offload_param", zero), self.section("offload_optimizer", zero)
        places = [each for each in (state, parameters) if each.get("device", "none") in ("cpu", "nvme")]
        if not places:
            return False, ""
        path = next((each.get("nvme_path") for each in places if each.get("nvme_path")), "store")
        if any(each["device"] == "cpu" for each in places):
            self.notes.append('device "cpu": the store keeps what fits within host=, and the rest on disk')
        for each in places:
            if others := sorted(each.keys() - {"device", "nvme_path"}):
                self.notes.append(f"of offloading, no equivalent: {', '.join(others)}")
        on = parameters.get("device", "none") in ("cpu", "nvme")
        return on, f"commpress.TieredStore.open({path!r}, host='8GiB')"

    # ------------------------------------------------------------ the rest

    def precision(self) -> None:
        if self.section("bf16").get("enabled"):
            self.lines.append("# around forward: with torch.autocast('cuda', torch.bfloat16):")
        fp16 = self.section("fp16")
        if fp16.get("enabled"):
            power = fp16.get("initial_scale_power")
            scale = f"init_scale=2.0**{int(power)}" if isinstance(power, int) else ""
            self.lines.append(f"scaler = torch.amp.GradScaler('cuda'{', ' * bool(scale)}{scale})     # pass it as grad_scaler=")

    def schedule(self) -> None:
        schedule = self.section("scheduler")
        if not schedule:
            return
        kind, params = str(schedule.get("type")), self.section("params", schedule)
        warm = params.get("warmup_num_steps")
        if kind in ("WarmupLR", "WarmupDecayLR") and isinstance(warm, int):
            total = params.get("total_num_steps") if kind == "WarmupDecayLR" else None
            later = f"max(({total} - step) / {max(total - warm, 1)}, 0.0)" if isinstance(total, int) else "1.0"
            factor = f"min((step + 1) / {max(warm, 1)}, {later})"
            self.lines.append(f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {factor})")
        else:
            self.notes.append(f"scheduler {kind}: take one of torch.optim.lr_scheduler")

    def rest(self, params: dict[str, Any], zero: dict[str, Any], optimizer: dict[str, Any]) -> None:
        steps = self.take("gradient_accumulation_steps")
        if isinstance(steps, int) and steps > 1:
            self.notes.append(f"gradient_accumulation_steps {steps}: ddp.no_sync() around {steps - 1} of {steps} backwards")
        if (size := self.take("train_micro_batch_size_per_gpu")) is not None:
            self.notes.append(f"train_micro_batch_size_per_gpu {size}: the batch_size of your DataLoader")
        for where, left in (
            ("", self.config.keys() - NONE_NEEDED), ("optimizer.", optimizer.keys() - {"legacy_fusion"}),
            ("optimizer.params.", params.keys() - {"comm_backend_name", "cuda_aware", "adam_w_mode", "torch_adam"}),
            ("zero_optimization.", zero.keys() - ZERO_TUNING),
        ):  # fmt: skip
            self.notes += [f"no equivalent: {where}{key}" for key in sorted(left)]


def call(keywords: Mapping[str, Any], *first: str, **names: str) -> str:
    """Arguments as they are written: values by ``repr``, lists as tuples, ``names`` as they are."""
    written = ["model.parameters()", *first, *(f"{key}={name}" for key, name in names.items())]
    return ", ".join([*written, *(f"{k}={tuple(v) if isinstance(v, list) else v!r}" for k, v in keywords.items())])
