"""Calls as a user's editor sees them: mypy accepts what is right and notices what is not, for an
error that is missing would leave a ``type: ignore`` without use. Nothing runs this."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import commpress


def training(ddp: DistributedDataParallel, mesh: DeviceMesh) -> None:
    state = commpress.compress(ddp, "fp8", exact_steps=3, min_numel=10)
    state.counters.choice.upper()
    state.contours.clear()  # type: ignore[attr-defined]
    commpress.compress(ddp, "fp8", exact_stepz=3)  # type: ignore[call-overload]
    commpress.compress(ddp, mesh=mesh, dims={"dp": "fp8"}).by_name.keys()
    commpress.compress_fsdp(ddp.module, codec="fp8", weights="exact").counters.steps.bit_length()
    commpress.compress_fsdp(ddp.module, codex="fp8")  # type: ignore[call-arg]
    commpress.OneBitAdam(ddp.parameters(), lr=1e-3, exact_steps=10, codec="sign", mesh=mesh)
    commpress.ZeroOneAdam(ddp.parameters(), codec=commpress.PerLayer("int4", every=100))
    commpress.ZeroOneAdam(ddp.parameters(), exact_stepz=10)  # type: ignore[call-arg]
    commpress.Muon(ddp.parameters(), codec="int8").step()
    commpress.LocalUpdates(torch.optim.AdamW(ddp.parameters()), every="auto").drain()
    commpress.LocalUpdates(torch.optim.AdamW(ddp.parameters()), evry=3)  # type: ignore[call-arg]
    commpress.elastic(None, None, stepz=3)  # type: ignore[call-arg]


def trainers() -> None:
    commpress.hf.Compress("powersgd-8+fp8", min_numel=3)
    commpress.hf.Compress("fp8", minnumel=3)  # type: ignore[call-arg]
    commpress.lightning.Compress(codec="fp8", weights="int8")
    commpress.lightning.Compress(codec="fp8", wights="int8")  # type: ignore[call-arg]


def memory(model: torch.nn.Module) -> None:
    with commpress.TieredStore.open("folder", host="1GiB") as store:
        commpress.Offloaded(model.parameters(), torch.optim.AdamW, store=store, lr=1e-3).commit()
        commpress.stream(model, storr=store)  # type: ignore[call-arg]
    publisher = commpress.weights.Publisher(model, to="folder")
    print(publisher.publish().version)
    print(publisher.publish(wait=False).version)  # type: ignore[union-attr]
    commpress.weights.Receiver("folder", limt=3)  # type: ignore[call-arg]
