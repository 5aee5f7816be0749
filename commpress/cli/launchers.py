"""Commands that start the processes of one machine among several: what each must be told."""

from collections.abc import Sequence
from pathlib import PurePath

from commpress.errors import InvalidArgument

# what a launcher is told, and what torchrun would tell the only process of a machine
TORCHRUN = "--nnodes={count} --node-rank={host} --master-addr={address} --master-port=29500"
ACCELERATE = (
    "--num_machines={count} --machine_rank={host} --main_process_ip={address} "
    "--main_process_port=29500"
)
VARIABLES = (
    "MASTER_ADDR={address} MASTER_PORT=29500 RANK={host} GROUP_RANK={host} WORLD_SIZE={count} "
    "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
)
# options that say how many machines there are
TOLD = (
    *("--nnodes", "--node-rank", "--node_rank", "--standalone", "--master-addr", "--master_addr"),
    *("--rdzv-endpoint", "--rdzv_endpoint", "--num_machines", "--machine_rank"),
    "--main_process_ip",
)


def placed(
    command: Sequence[str], host: int, count: int, address: str
) -> tuple[list[str], dict[str, str]]:
    """The command and the variables with which it is machine ``host`` of ``count``.

    ``torchrun`` and ``accelerate launch`` get options; any other command is one rank, and gets the
    variables that torchrun would give it.
    """
    check(command)
    words, end = list(command), _launcher_end(command)
    accelerate = end and words[end - 1] == "launch"
    table = ACCELERATE if accelerate else TORCHRUN if end else VARIABLES
    told = table.format(host=host, count=count, address=address).split()
    if not end:
        return words, dict(word.split("=") for word in told)
    if accelerate and not _given(words[end:], ("--num_processes",)):
        told.append(f"--num_processes={count}")
    return words[:end] + told + words[end:], {}


def check(command: Sequence[str]) -> None:
    """Refuse a command that says itself how many machines there are."""
    end = _launcher_end(command)
    if not end:
        return
    found = _given(command[end:], TOLD)
    if found:
        raise InvalidArgument(
            f"the command has {found}, which commpress hosts gives to {command[end - 1]!r} itself: "
            "leave it out"
        )


def _launcher_end(command: Sequence[str]) -> int:
    """Words up to the launcher's own options; 0 if the command begins with none."""
    first = next((i for i, word in enumerate(command) if word != "env" and "=" not in word), 0)
    words = [PurePath(word).name for word in command[first : first + 3]]
    if words[:1] == ["torchrun"]:
        return first + 1
    if words[:2] == ["accelerate", "launch"]:
        return first + 2
    module = words[:1] and words[0].startswith("python") and words[1:2] == ["-m"]
    return first + 3 if module and words[2:] == ["torch.distributed.run"] else 0


def _given(words: Sequence[str], options: Sequence[str]) -> str:
    """The first of these options that the launcher was given, before the script."""
    for word in words:
        if word.endswith(".py"):
            return ""
        if word.partition("=")[0] in options:
            return word.partition("=")[0]
    return ""
