"""Scripts of users on ranks with the environment of torchrun, forked from a process that has
everything loaded.

torch, transformers and Lightning take seconds of each process that imports them. ``Scripts``
imports them once, in a process of its own, and forks the ranks of each run from there.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

LOADED = [
    "torch.distributed",
    "transformers.trainer",
    "accelerate",
    "lightning.pytorch",
    "peft",
    "commpress.integrations.trainers.hf",
    "commpress.integrations.trainers.lightning",
    "commpress.integrations.ddp",
]
SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
SECONDS = 280


class Scripts:
    """A process that has ``LOADED`` and forks ranks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, *arguments: object, folder: Path, ranks: int = 2) -> str:
        """Output of the script on ``ranks`` ranks, none of which may fail; 0: in a process that is
        no rank."""
        # as torchrun's agent has one
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryFile("w+") as output:
            asked = {
                "script": str(script),
                "arguments": [str(a) for a in arguments],
                "folder": str(folder),
                "ranks": ranks,
                "output": f"/proc/{os.getpid()}/fd/{output.fileno()}",
                "port": store.port,
            }
            codes = self._ask(asked)
            output.seek(0)
            text = output.read()
        assert codes, f"silent for {SECONDS} s\n{text[-6000:]}"
        assert not any(codes), f"exit codes {codes}\n{text[-6000:]}"
        return text

    def close(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _ask(self, asked: dict[str, Any]) -> list[int]:
        """Exit codes; none if nothing was heard in time."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=os.environ | SETTINGS,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        heard, *_ = select.select([self._process.stdout], [], [], SECONDS)
        line = self._process.stdout.readline() if heard else ""
        if not line:
            self.close()
        return json.loads(line) if line else []


# ---------------------------------------------------------------- in the process that forks


def serve() -> dict[str, Any] | None:
    """Fork ranks as asked, and say how they ended. Returns in a rank, with its task; None at the
    end."""
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # else each collection in a rank walks all of them
    for line in sys.stdin:
        asked = json.loads(line)
        ranks: dict[int, int] = {}
        for rank in range(max(asked["ranks"], 1)):
            process = os.fork()
            if process == 0:
                return asked | {"rank": rank}
            ranks[process] = rank
        codes: dict[int, int] = {}
        while len(codes) < len(ranks):
            process, status = os.wait()
            codes[ranks[process]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[process]]:  # as torchrun ends those that wait for it
                for other in (p for p, r in ranks.items() if r not in codes):
                    os.kill(other, signal.SIGKILL)
        print(json.dumps([codes[rank] for rank in sorted(codes)]), flush=True)
    return None


def act(task: dict[str, Any]) -> None:
    """Be a rank of a script."""
    with open(task["output"], "a") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(task["folder"])
    rank, ranks = str(task["rank"]), str(task["ranks"])
    if task["ranks"]:
        os.environ |= {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(task["port"]),
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    sys.argv = [task["script"], *task["arguments"]]
    sys.path.insert(0, str(Path(task["script"]).parent))
    runpy.run_path(task["script"], run_name="__main__")


if __name__ == "__main__" and (mine := serve()) is not None:
    act(mine)
