"""DeepSpeed's configurations as calls: lines that run, and everything that has no equivalent named."""

import json

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress import cli
from commpress.cli.from_deepspeed import converted
from commpress.errors import InvalidArgument
from commpress.schedules import DoublingIntervals

ADAM = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}}
CONFIGS = {
    "nothing": {},
    "ddp": {"optimizer": ADAM, "gradient_clipping": 1.0, "communication_data_type": "fp16"},
    "one bit": {"optimizer": ONE_BIT, "gradient_clipping": 1.0, "fp16": {"enabled": True, "initial_scale_power": 16}},
    "0/1": {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "var_freeze_step": 1000, "local_step_clipper": 16}}},
    "stage 2": {"optimizer": ADAM, "zero_optimization": {"stage": 2, "overlap_comm": True}, "gradient_clipping": 0.5},
    "warm-up": {
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}, "optimizer": ADAM,
    },
}  # fmt: skip


def run(lines, name):
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    names = {"model": model}
    exec("\n".join(lines), names)
    if name in ("one bit", "stage 2"):
        return type(names["optimizer"]).__name__, names["optimizer"].defaults["lr"]
    model(torch.randn(2, 32)).sum().backward()
    return type(names["optimizer"]).__name__, names["optimizer"].param_groups[0]["lr"]


def run_all(programs):
    assert dist.is_initialized()
    return {name: run(lines, name) for name, lines in programs.items()}


def test_every_program_runs(pool):
    programs = {name: converted(config)[0] for name, config in CONFIGS.items()}
    for found in pool.run(run_all, programs, size=2):
        assert found == {
            "nothing": ("AdamW", 1e-3), "ddp": ("AdamW", 1e-3), "one bit": ("OneBitAdam", 2e-4), "0/1": ("ZeroOneAdam", 1e-3),
            "stage 2": ("Partitioned", 1e-3), "warm-up": ("AdamW", 1e-4),
        }  # fmt: skip


def test_what_is_said_is_kept():
    lines, _ = converted(CONFIGS["one bit"])
    assert any("OneBitAdam(model.parameters(), lr=0.0002, warmup_steps=400, max_grad_norm=1.0)" in line for line in lines)
    assert any("init_scale=2.0**16" in line for line in lines)
    lines, _ = converted({"optimizer": {"type": "ZeroOneAdam", "params": {"var_update_scaler": 8}}})
    assert "optimizer = commpress.ZeroOneAdam(model.parameters(), variance_updates=8)" in lines
    lines, notes = converted(CONFIGS["0/1"])
    assert any("sync=DoublingIntervals(start=33678, period=32678, longest=16)" in line for line in lines)
    assert any("never end; from step 33678, where intervals exceed 1" in note for note in notes)
    lines, notes = converted({"optimizer": {"type": "ZeroOneAdam", "params": {"local_step_scaler": "many"}}})
    assert not any("sync=" in line for line in lines)
    assert any("local_step_scaler many: expected a positive number" in note for note in notes)
    lines, _ = converted(CONFIGS["ddp"])
    assert "state = commpress.compress(ddp, codec='fp16')" in lines
    assert any("betas=(0.8, 0.999)" in line for line in lines)


def test_larger_than_memory():
    offload = {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True}
    lines, notes = converted({"zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload}})
    text = "\n".join(lines)
    assert "TieredStore.open('/nvme'" in text
    assert text.index("commpress.stream(") < text.index("commpress.Offloaded(")
    assert any("pin_memory" in note for note in notes)
    lines, _ = converted({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}})
    assert "state = commpress.compress_fsdp(model, gradients='int4', weights='int8')" in lines
    for each in (text, "\n".join(lines)):
        compile(each, "program", "exec")
        assert {word.split("(")[0] for word in each.replace("\n", " ").split("commpress.")[1:]} - {""} <= {
            *commpress.__all__, "TieredStore.open",
        }  # fmt: skip


def test_a_scaler_comes_before_who_takes_it():
    text = "\n".join(converted(CONFIGS["one bit"])[0])
    assert text.index("GradScaler(") < text.index("commpress.OneBitAdam(")


def test_state_of_ours_that_stays_in_memory_is_named():
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    lines, notes = converted({"optimizer": ONE_BIT, "zero_optimization": zero})
    assert not any("TieredStore" in line for line in lines)
    assert any("offload_optimizer: the state of OneBitAdam stays in memory" in note for note in notes)


def test_nothing_is_lost_without_a_word():
    config = {"flops_profiler": {"enabled": True}, "zero_optimization": {"stage": 1, "elastic_checkpoint": True}, "optimizer": {
        "type": "Lion", "params": {"lr": "auto", "rho": 1}}}  # fmt: skip
    _, notes = converted(config)
    for word in ("flops_profiler", "zero_optimization.elastic_checkpoint", "optimizer.params.rho", "Lion", 'lr is "auto"'):
        assert any(word in note for note in notes), word


@pytest.mark.parametrize("text", ["", "[]", '{"optimizer": 3}', '{"zero_optimization": {"stage": 4}}', "[" * 100_000])
def test_what_is_no_configuration_is_an_error_in_one_line(tmp_path, capsys, text):
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    assert cli.main(["from-deepspeed", str(file)]) == 2
    assert capsys.readouterr().err.startswith("commpress: error: ")


def test_a_file_that_is_not_there_is_no_bad_json(tmp_path, capsys):
    assert cli.main(["from-deepspeed", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.endswith("none.json cannot be read: No such file or directory\n")


def test_the_command_prints_a_program(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIGS["stage 2"]))
    assert cli.main(["from-deepspeed", str(file)]) == 0
    out = capsys.readouterr().out
    compile(out, "program", "exec")
    assert "max_grad_norm=0.5" in out
    assert "# - the model stays bare" in out


def test_a_file_cannot_put_lines_into_the_program(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    trap = "x\nimport os"
    file.write_text(json.dumps({trap: 1, "optimizer": {"type": trap}, "scheduler": {"type": trap}, "gradient_clipping": trap}))
    assert cli.main(["from-deepspeed", str(file)]) == 0
    assert "import os" not in capsys.readouterr().out.splitlines()
    file.write_text('{"scheduler": {"type": "WarmupLR", "params": [1]}}')
    assert cli.main(["from-deepspeed", str(file)]) == 2


def test_deepspeeds_words_get_ours():
    model = torch.nn.Linear(4, 4)
    for kind, word, ours in (
        (commpress.OneBitAdam, "freeze_step", "warmup_steps="), (commpress.ZeroOneAdam, "local_step_scaler", "sync="),
        (commpress.OneBitLamb, "max_coeff", "coefficients="), (commpress.ShardedOneBitAdam, "cuda_aware", "process_group="),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=f"DeepSpeed's word; here it is {ours}"):
            kind(model.parameters(), **{word: 1})
        with pytest.raises(TypeError, match="unexpected keyword argument 'sideways'"):
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
    """Windows end where they do as long as the intervals divide what went before, as DeepSpeed asks ``step % interval``."""
    rule, step, found = DoublingIntervals(64 + 32, 32, 8), 0, []
    while step < 400:
        step += rule.interval(step, 1e-3, None)
        found.append(step)
    assert found == deepspeed_intervals(64, 32, 8, found[-1])
