"""DeepSpeed's configurations as calls: lines that run, and everything that has no equivalent
named."""

import json
from functools import partial
from itertools import product

import pytest
import torch

import commpress
import deepspeed_twin as twin
from commpress import cli
from commpress.cli.from_deepspeed import converted
from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals
from variants import first

ONE_BIT = {
    "type": "OneBitAdam",
    "params": {"lr": 2e-4, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"},
}
OFFLOADS, PRECISIONS = ("none", "optimizer", "parameters", "both"), ("fp32", "fp16", "bf16")
PROGRAMS = list(product(range(4), OFFLOADS, PRECISIONS))
DIFFERENT = [
    (0, "none", "fp16"), (1, "none", "bf16"), (2, "both", "fp16"), (3, "none", "fp16"),
    (3, "parameters", "bf16"),
]  # fmt: skip


# of the way that weights went; what is left out moves them half of it
LIMITS = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


def check(pool, programs, folder, **options):
    for found in pool.run(partial(twin.compared, **options), programs, folder, seconds=600):
        for (stage, offload, precision), (apart, alike) in zip(programs, found, strict=True):
            assert alike, (stage, offload, precision)
            limit = LIMITS[twin.computed(stage, offload, precision)]
            assert apart <= limit, (stage, offload, precision, apart)


def test_programs_end_where_deepspeed_means_to(pool, tmp_path):
    """Every way to average gradients and to keep state, with accumulation, clipping, a schedule and
    a loss scale."""
    check(pool, DIFFERENT, tmp_path, small=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", range(4))
def test_every_program_ends_where_deepspeed_means_to(pool, tmp_path, stage):
    """As printed, with the memory that it asks for."""
    check(pool, [program for program in PROGRAMS if program[0] == stage], tmp_path)


def left_out():
    """Distances of twins of which one leaves something out."""
    clipped, free = twin.twin("fp32"), twin.twin("fp32", wrong="clipping")
    found = {
        wrong: twin.apart(twin.twin("fp32", wrong=wrong), clipped)
        for wrong in ("accumulation", "average", "schedule")
    }
    found["division"] = twin.apart(twin.twin("fp32", wrong="division clipping"), free)
    found["decoupling"] = twin.apart(twin.twin("fp32", kind=torch.optim.Adam), clipped)
    return found | {"clipping": twin.apart(free, clipped)}


def test_the_comparison_notices_what_is_left_out(pool):
    for found in pool.run(left_out):
        assert min(found.values()) > 10 * LIMITS["bf16"], found


def adam(**more):
    return {"type": "Adam", "params": twin.ADAM["params"] | more}


FREEZING = {"type": "OneBitAdam", "params": twin.ADAM["params"] | {"freeze_step": 100}}
SETTINGS = {  # stage, precision, what else the file says, and the twin of it
    "train_batch_size": (
        0,
        "fp32",
        {"gradient_accumulation_steps": None, "train_batch_size": 16},
        {},
    ),
    "1-bit Adam, fp16": (0, "fp16", {"optimizer": FREEZING}, {"kind": twin.Uncorrected}),
    "no clipping": (2, "fp32", {"gradient_clipping": 0}, {"wrong": "clipping"}),
    "Adam": (1, "fp32", {"optimizer": adam(adam_w_mode=False)}, {"kind": torch.optim.Adam}),
    "1-bit Adam": (0, "fp32", {"optimizer": FREEZING}, {"kind": twin.Uncorrected}),
    "fixed scale": (2, "fp16", {"fp16": {"enabled": True, "loss_scale": 64}}, {}),
    "reduced in bfloat16": (3, "bf16", {"communication_data_type": "bf16"}, {}),
    "fp16 on the wire": (0, "fp32", {"communication_data_type": "fp16"}, {}),
    "bf16 on the wire of stage 1": (1, "fp32", {"communication_data_type": "bf16"}, {}),
    "fp16 on the wire of stage 2": (2, "fp32", {"communication_data_type": "fp16"}, {}),
    "bf16 on the wire of stage 3": (3, "fp32", {"communication_data_type": "bf16"}, {}),
}
QUANTISED = {"stage": 3, "zero_quantized_gradients": True, "zero_quantized_weights": True}
LOSSY = {  # those have no twin in plain torch
    "ZeRO++": (3, "fp16", {"zero_optimization": QUANTISED}),
    "Muon": (1, "fp32", {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.95}}}),
    "0/1 Adam": (
        0,
        "fp16",
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "var_freeze_step": 2}}},
    ),
    "1-bit LAMB": (
        0,
        "bf16",
        {"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 2, "max_coeff": 3.0}}},
    ),
    "SGD": (
        2,
        "bf16",
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": True}}},
    ),
    "Adagrad": (3, "fp32", {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}),
    "overflow": (2, "fp16", {"fp16": {"enabled": True, "initial_scale_power": 24}}),
}


def ended(folder, stage, precision, more, **meant):
    given = twin.config(stage, "none", precision, folder) | more
    ours = twin.trained({key: value for key, value in given.items() if value is not None})
    finite = all(bool(p.isfinite().all()) for p in ours)
    return twin.apart(ours, twin.twin(precision, **meant)), twin.alike(ours) and finite


@pytest.mark.parametrize("name", first(3, list(SETTINGS)))
def test_other_settings_end_where_deepspeed_means_to(pool, tmp_path, name):
    stage, precision, more, meant = SETTINGS[name]
    limit = LIMITS["fp16" if "wire" in name else precision]
    for apart, alike in pool.run(partial(ended, **meant), tmp_path, stage, precision, more):
        assert alike
        assert apart <= limit


@pytest.mark.parametrize("name", first(2, list(LOSSY)))
def test_what_has_no_twin_runs_and_keeps_ranks_alike(pool, tmp_path, name):
    assert all(alike for _, alike in pool.run(ended, tmp_path, *LOSSY[name]))


def text_of(config):
    return "\n".join(converted(config)[0])


def test_what_is_said_is_kept():
    said = " ".join(text_of({"optimizer": ONE_BIT, "fp16": {"enabled": True}}).split())
    assert (
        "OneBitAdam( model.parameters(), grad_scaler=scaler, lr=0.0002, exact_steps=400, "
        "bias_correction=False"
    ) in said
    assert "init_scale=2.0**16, growth_interval=1000" in said
    assert said.index("GradScaler(") < said.index("commpress.OneBitAdam(")
    said = text_of({"optimizer": {"type": "ZeroOneAdam", "params": {"var_update_scaler": 8}}})
    assert "variance_updates=8" in said
    lines, notes = converted(
        {"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 1000}}}
    )
    assert any(
        "sync=DoublingIntervals(start=33678, period=32678, longest=16)" in line for line in lines
    )
    assert any("never end; from step 33678, where intervals exceed 1" in note for note in notes)
    lines, notes = converted(
        {"optimizer": {"type": "ZeroOneAdam", "params": {"local_step_scaler": "many"}}}
    )
    assert not any("sync=" in line for line in lines)
    assert any("local_step_scaler many: expected a positive number" in note for note in notes)
    said = text_of(
        {"optimizer": {"type": "OneBitLamb", "params": {"max_coeff": 5.0, "factor_min": 0.25}}}
    )
    assert "rates='frozen', coefficients=(0.01, 5.0), factors=(0.25, 4.0)" in " ".join(said.split())


def test_nothing_lossy_is_added_unasked():
    for stage in range(4):
        said = [
            line
            for line in converted({"zero_optimization": {"stage": stage}})[0]
            if not line.startswith("#")
        ]
        assert not any(
            "compress(" in line or "int8" in line or "compress_fsdp" in line for line in said
        )


def test_the_usual_offload_of_stage_2_averages_over_the_ranks():
    """As in Hugging Face's pages: everything that the Trainer knows is "auto"."""
    config = {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
    }
    lines, notes = converted(config)
    said = " ".join("\n".join(lines).split())
    assert (
        "commpress.Partitioned( model.parameters(), torch.optim.AdamW, store=store, stage=2" in said
    )
    assert "Offloaded" not in said
    assert 'f"rank{dist.get_rank()}"' in said
    assert "// dist.get_world_size()" in said
    for key in (
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "scheduler.params.warmup_max_lr",
        "train_batch_size",
    ):
        assert f'{key} is "auto": pass a value yourself' in notes


def test_larger_than_memory():
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": dict(offload)}
    lines, notes = converted({"zero_optimization": zero, "fp16": {"enabled": True}})
    said = "\n".join(lines)
    assert "os.path.join('/nvme', " in said
    assert said.index("commpress.stream(") < said.index("commpress.Offloaded(")
    assert "GradScaler" not in said
    assert any("fp16.enabled: bfloat16 instead" in note for note in notes)


def test_offloading_that_deepspeed_has_not_is_left_out_with_the_reason():
    zero = {
        "stage": 2,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
    }
    lines, notes = converted({"optimizer": ONE_BIT, "zero_optimization": zero})
    assert not any("TieredStore" in line for line in lines)
    assert "offload_optimizer is left out: OneBitAdam keeps its state in memory" in notes
    _, notes = converted({"zero_optimization": zero})
    assert "offload_param is left out: stage 2 has none, expected stage 3" in notes


def test_every_key_that_is_not_translated_is_named():
    config = {
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "train_batch_size": 64,
        "wandb": {"enabled": False, "group": "x"},
        "zero_optimization": {
            "stage": 2,
            "elastic_checkpoint": True,
            "sub_group_size": 1e9,
            "zero_quantized_gradients": True,
            "offload_optimizer": {"device": "cpu", "ratio": 0.3, "buffer_count": 5},
        },
        "optimizer": {"type": "Lion", "params": {"lr": "auto", "rho": 1}},
        "fp16": {"enabled": True, "hysteresis": 2},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}},
    }
    said = "\n".join(converted(config)[1])
    for path in (
        "flops_profiler.profile_step",
        "wandb",
        "train_batch_size 64",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.sub_group_size",
        "zero_optimization.zero_quantized_gradients",
        "OneCycle",
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_optimizer.buffer_count",
        "optimizer.params.rho",
        "optimizer.type Lion",
        'optimizer.params.lr is "auto"',
        "fp16.hysteresis",
        "scheduler.params.cycle_min_lr",
        "gradient_clipping is missing: 1.0",
    ):
        assert path in said, path
    engine = said.partition("of DeepSpeed's engine, not needed here: ")[2]
    assert "zero_optimization.sub_group_size" in engine
    assert "zero_optimization.offload_optimizer.buffer_count" in engine


def keys_of(config, prefix=""):
    for key, value in config.items():
        yield from (
            keys_of(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else [(f"{prefix}{key}", key)]
        )


@pytest.mark.parametrize("stage", range(4))
def test_a_key_is_in_the_program_or_in_a_note(stage):
    """Odd names in every section: none of them vanishes."""
    config = twin.config(stage, "both", "fp16", "/nvme")
    for place in (
        config,
        *(v for v in config.values() if isinstance(v, dict)),
        config["optimizer"]["params"],
    ):
        place[f"odd_{len(place)}"] = 1
    config["zero_optimization"]["offload_param"]["odd_in_it"] = config["scheduler"]["params"][
        "odd_in_it"
    ] = 1
    said = "\n".join(converted(config)[1])
    for path, key in keys_of(config):
        assert not key.startswith("odd") or f"no equivalent: {path}" in said, path


@pytest.mark.parametrize(
    "text", ["", "[]", '{"optimizer": 3}', '{"zero_optimization": {"stage": 4}}', "[" * 100_000]
)
def test_what_is_no_configuration_is_an_error_in_one_line(tmp_path, capsys, text):
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    assert cli.main(["from-deepspeed", str(file)]) == 2
    assert capsys.readouterr().err.startswith("commpress: error: ")


def test_a_file_that_is_not_there_is_no_bad_json(tmp_path, capsys):
    assert cli.main(["from-deepspeed", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.endswith(
        "none.json' cannot be read (No such file or directory), expected a ds_config.json\n"
    )


def test_the_command_prints_a_program(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}))
    assert cli.main(["from-deepspeed", str(file)]) == 0
    out = capsys.readouterr().out
    compile(out, "program", "exec")
    assert "optimizer.max_grad_norm = 0.5" in out
    assert "# - the model stays bare" in out


def test_a_file_cannot_put_lines_into_the_program(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    trap = "x\nimport os"
    file.write_text(
        json.dumps(
            {
                trap: 1,
                "optimizer": {"type": trap},
                "scheduler": {"type": trap},
                "gradient_clipping": trap,
            }
        )
    )
    assert cli.main(["from-deepspeed", str(file)]) == 0
    assert "import os" not in capsys.readouterr().out.splitlines()
    file.write_text('{"scheduler": {"type": "WarmupLR", "params": [1]}}')
    assert cli.main(["from-deepspeed", str(file)]) == 2


def test_deepspeeds_words_get_ours():
    model = torch.nn.Linear(4, 4)
    for kind, word, ours in (
        (commpress.OneBitAdam, "freeze_step", "exact_steps="),
        (commpress.ZeroOneAdam, "local_step_scaler", "sync="),
        (commpress.OneBitLamb, "max_coeff", "coefficients="),
        (commpress.ShardedOneBitAdam, "cuda_aware", "process_group="),
    ):
        with pytest.raises(InvalidArgument, match=f"DeepSpeed's word; here it is {ours}"):
            kind(model.parameters(), **{word: 1})
        with pytest.raises(
            InvalidArgument, match=f"{kind.__name__} got sideways=1, which it does not take"
        ):
            kind(model.parameters(), sideways=1)


def deepspeed_intervals(freeze, scaler, clipper, steps):
    """The steps on which DeepSpeed's ZeroOneAdam synchronises, from 1, by its own counters."""
    interval, counter, found = 1, 0, []
    for step in range(1, steps + 1):
        if step <= freeze or step % interval == 0:
            found.append(step)
        if step > freeze:
            counter += 1
            if counter == scaler:
                counter, interval = 0, min(clipper, interval * 2)
    return found


def test_intervals_double_where_those_of_deepspeed_do():
    """Windows end where they do as long as the intervals divide what went before, as DeepSpeed asks
    ``step % interval``."""
    rule, step, found = DoublingIntervals(64 + 32, 32, 8), 0, []
    while step < 400:
        step += rule.interval(step, 1e-3, None)
        found.append(step)
    assert found == deepspeed_intervals(64, 32, 8, found[-1])


@pytest.mark.parametrize("enabled", [True, "auto"])
def test_a_loss_scale_of_0_is_dynamic_and_not_switched_off(enabled):
    lines, notes = converted({"fp16": {"enabled": enabled, "loss_scale": 0}})
    assert any("GradScaler(device, init_scale=2.0**16" in line for line in lines) == (
        enabled is True
    )
    assert ("fp16.loss_scale 0: dynamic, as a GradScaler's" in notes) == (enabled == "auto")
    assert not any("switched off" in note for note in notes)
