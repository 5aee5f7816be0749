"""Engines of others read what is published: vLLM's abstract classes, SGLang's folders, both as they
are installed or, where they are not, as written down in tests/support."""

import json
import runpy
import struct
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import sources
import vllm_contract
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.weights import vllm_plugin
from commpress.weights import Publisher

# ---------------------------------------------------------------- vLLM


@pytest.fixture(scope="module")
def vllm():
    """vLLM's factories, with our engines."""
    before = set(sys.modules)
    if find_spec("vllm") is None:
        vllm_contract.stand_in()
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may do so
    yield import_module(vllm_contract.FACTORY)
    for name in set(sys.modules) - before:
        if name.startswith("vllm") or name == vllm_plugin.MODULE:
            del sys.modules[name]


class Served(nn.Module):
    """A model of a worker, which names its parameters otherwise."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
        self.calls, self.fails = [], False

    def reload(self, what):
        self.calls.append(what)

    def load_weights(self, weights):
        for name, value in weights:
            if self.fails and name == "k":
                raise RuntimeError("no room")
            self.qkv.data["qkv".index(name) * 2 :][:2] = value


class Client:
    """Carries a trainer's calls to the engine of one worker."""

    def __init__(self, engine):
        self.engine, self.versions = engine, []

    def init_weight_transfer_engine(self, info):
        self.engine.init_transfer_engine(self.engine.init_info_cls(**info))

    def start_weight_update(self):
        self.engine.start_weight_update()

    def update_weights(self, info):
        self.engine.receive_weights(self.engine.update_info_cls(**info))

    def finish_weight_update(self, weight_version=None):
        self.engine.finish_weight_update()
        self.versions.append(weight_version)


@pytest.fixture
def worker(vllm):
    config = SimpleNamespace(model_config=None, parallel_config=None)
    backend = SimpleNamespace(backend="commpress")
    engine = vllm.WeightTransferEngineFactory.create_engine(
        backend, config, torch.device("cpu"), Served()
    )
    yield engine
    engine.shutdown()


def weights():
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(2, 4, generator=draws).bfloat16() for name in "qkv"}


def trainer_of(vllm, client, source, to, **options):
    module = import_module(vllm_plugin.MODULE)
    info = module.PublisherInitInfo(to=str(to), rank=0, **options)
    return vllm.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def test_vllm_finds_the_engines_by_their_entry_point():
    named = sources.project()["project"]["entry-points"]["vllm.general_plugins"]["commpress"]
    assert EntryPoint("commpress", named, "vllm.general_plugins").load() is vllm_plugin.register


def test_vllms_workers_hold_what_its_trainer_published(vllm, worker, tmp_path):
    live, client = weights(), Client(worker)
    trainer = trainer_of(vllm, client, live, tmp_path / "run")
    for step in range(3):
        live["k"][0, step] += 1
        trainer.send_weights()
        assert torch.equal(worker.model.qkv.data, torch.cat([live[name] for name in "qkv"]))
    assert client.versions == ["1", "2", "3"]
    trainer.shutdown()


def test_a_weight_source_of_vllm_is_published_gathered(vllm, worker, tmp_path):
    live = weights()

    class Source(import_module(vllm_contract.BASE).WeightSource):
        def iter_full(self):
            return iter(live.items())

    Source.metadata = []
    Source.__abstractmethods__ = frozenset()
    trainer = trainer_of(vllm, Client(worker), Source(), tmp_path / "run", dtype="bfloat16")
    trainer.send_weights()
    assert torch.equal(worker.model.qkv.data, torch.cat(list(live.values())))
    trainer.shutdown()


def test_a_version_that_could_not_be_loaded_is_loaded_when_it_is_asked_for_again(
    vllm, worker, tmp_path
):
    live, client = weights(), Client(worker)
    trainer = trainer_of(vllm, client, live, tmp_path / "run")
    worker.model.fails = True
    with pytest.raises(RuntimeError, match="no room"):
        trainer.send_weights()
    worker.model.fails = False
    for version in (1, None):
        worker.start_weight_update()
        client.update_weights({"version": version})
        worker.finish_weight_update()
    assert torch.equal(worker.model.qkv.data, torch.cat(list(live.values())))
    trainer.shutdown()


def test_vllms_calls_out_of_turn_are_refused_by_name(vllm, worker, tmp_path):
    with pytest.raises(StateMismatch, match="start_weight_update"):
        worker.receive_weights(worker.update_info_cls())
    with pytest.raises(InvalidArgument, match="source is None"):
        trainer_of(vllm, Client(worker), None, tmp_path / "run")
    with pytest.raises(InvalidArgument, match="dtype is 'b16'"):
        trainer_of(vllm, Client(worker), weights(), tmp_path / "run", dtype="b16")


# ---------------------------------------------------------------- SGLang

LOCAL = "sglang.srt.weight_sync.local_checkpoint"
SGLANG = find_spec("sglang") is not None and find_spec(LOCAL) is not None
SIDECAR = str(sources.ROOT / "examples" / "sglang_sidecar.py")


def pull(local: Path, base: Path, source: Path, target: int) -> None:
    """SGLang's own reader where it is installed, else one written down from its format."""
    if SGLANG:
        import_module(LOCAL).pull(str(local), str(base), str(source), target)
        return
    state = local / "state.json"
    applied = json.loads(state.read_text()) if state.exists() else 0
    for version in range(applied + 1, target + 1):
        folder = source / f"weight_v{version:06d}"
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            for path in folder.iterdir():
                (local / path.name).write_bytes(path.read_bytes())
        else:
            patch(local / "model.safetensors", folder, json.loads(index.read_text()), version)
        state.write_text(json.dumps(version))


def entries(path: Path) -> tuple[dict, bytearray, int]:
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content, 8 + length


def patch(checkpoint: Path, folder: Path, index: dict, version: int) -> None:
    about = index["metadata"]
    assert (int(about["version"]), int(about["base_version"])) == (version, version - 1)
    assert (about["delta_encoding"], about["compression_format"]) == ("xor", "zstd")
    where, content, start = entries(checkpoint)
    decompress = import_module("zstandard").ZstdDecompressor().decompress
    for name, filename in index["weight_map"].items():
        header, delta, first = entries(folder / filename)
        begin, end = header[name]["data_offsets"]
        plain = decompress(bytes(delta[first + begin : first + end]))
        a, b = (start + at for at in where[name]["data_offsets"])
        new = np.frombuffer(plain, np.uint8) ^ np.frombuffer(content[a:b], np.uint8)
        assert header["__metadata__"][name] == f"{zlib.adler32(new.data):08x}"
        content[a:b] = new.tobytes()
    checkpoint.write_bytes(content)


def load(local: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(local / "model.safetensors")


@pytest.fixture
def places(tmp_path):
    pytest.importorskip("zstandard")
    found = SimpleNamespace(**{name: tmp_path / name for name in ("run", "sgl", "local", "base")})
    found.local.mkdir()
    found.base.mkdir()
    (found.base / "config.json").write_text("{}")
    (found.base / "model.safetensors").write_bytes(b"of the base")
    found.folder = runpy.run_path(SIDECAR)["SglangFolder"]
    return found


def test_sglangs_folders_give_every_version_also_across_restarts_and_gaps(places):
    live = {**weights(), "scalar": torch.tensor(1.5), "flags": torch.tensor([True, False])}
    whole = []
    with Publisher(live, places.run) as publisher:
        folder = places.folder(places.run, places.sgl, beside=places.base)
        assert folder.update() == folder.version == 0
        for version in range(1, 8):
            live["k"][0, 1] += version
            live["flags"] ^= version % 2 == 0
            publisher.publish()
            if version == 5:
                continue  # then 6 does not follow from what the folder has
            if version == 3:
                folder = places.folder(places.run, places.sgl, beside=places.base)
                assert folder.version == 2
            assert folder.update() == folder.update() == version
            kind = places.sgl / f"weight_v{version:06d}"
            whole += [version] * (kind / "model.safetensors").exists()
            if version < 5:
                pull(places.local, places.base, places.sgl, version)
                loaded = load(places.local)
                assert loaded.keys() == live.keys()
                for name, value in live.items():
                    assert torch.equal(loaded[name].view(-1), value.view(-1)), (version, name)
    assert whole == [1, 6]
    assert (places.sgl / "weight_v000001" / "config.json").exists()
    assert not (places.sgl / "weight_v000002" / "config.json").exists()


def test_an_interrupted_version_of_a_folder_is_written_anew(places):
    live = weights()
    with Publisher(live, places.run) as publisher:
        publisher.publish()
        folder = places.folder(places.run, places.sgl)
        folder.update()
        live["q"][0, 0] = 7
        publisher.publish()
        half = places.sgl / "weight_v000002"
        half.mkdir()
        (half / "delta.safetensors").write_bytes(b"half")
        again = places.folder(places.run, places.sgl)
        assert again.version == 1
        assert again.update() == 2
        pull(places.local, places.base, places.sgl, 2)
        assert torch.equal(load(places.local)["q"], live["q"])


def test_a_folder_without_what_belongs_beside_is_refused(places):
    with pytest.raises(InvalidArgument, match="expected a folder with a config"):
        places.folder(places.run, places.sgl, beside=places.run / "none")


def test_the_sidecar_has_the_engine_pull_and_load_each_version(places):
    """Run the script from the command line, with an engine that applies what SGLang would."""
    live, loaded = weights(), []

    class Engine(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/pull_weights":
                where = Path(asked["local_checkpoint_dir"])
                pull(where, places.base, Path(asked["source_dir"]), asked["target_version"])
            else:
                assert self.path == "/update_weights_from_disk"
                loaded.append(float(load(Path(asked["model_path"]))["v"][1, 1]))
            answer = b'{"success": true}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Engine) as engine, Publisher(live, places.run) as publisher:
        threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True).start()
        publisher.publish()
        command = [sys.executable, SIDECAR, places.run, places.sgl, "--beside", places.base]
        command += ["--engine", f"http://127.0.0.1:{engine.server_port}", "--versions", "2"]
        command += ["--checkpoint", places.local]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sidecar:
            assert "version 1 is in" in sidecar.stdout.readline()
            live["v"][1, 1] = 9
            publisher.publish()
            assert "version 2 is in" in sidecar.stdout.readline()
        assert sidecar.returncode == 0
        engine.shutdown()
    assert [value == 9 for value in loaded] == [False, True]
    assert (places.local / "config.json").exists()
