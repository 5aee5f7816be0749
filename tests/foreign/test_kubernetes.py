"""The manifest of ``examples/kubernetes.yaml`` against Kubeflow's own schema."""

import argparse
import importlib.util

import pytest
import yaml

import sources

MANIFEST = sources.ROOT / "examples" / "kubernetes.yaml"


def test_the_manifest_runs_an_example_with_options_that_it_takes(monkeypatch):
    job = yaml.safe_load(MANIFEST.read_text())
    launcher, script = job["spec"]["trainer"]["command"]
    assert launcher == "torchrun"
    spec = importlib.util.spec_from_file_location("example", sources.ROOT / script)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parsed(parser):
        raise Parsed(parse(parser, job["spec"]["trainer"]["args"]))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(Parsed) as found:
        example.main()
    assert found.value.args[0].optimizer == "zero-one"


def test_the_manifest_keeps_to_the_schema_of_kubeflow():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    job = yaml.safe_load(MANIFEST.read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert without_nothing(read.to_dict()) == job  # no key is unknown
    job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match=r"num_nodes|numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(job)


def without_nothing(tree):
    """The tree without entries that are None or empty."""
    if isinstance(tree, dict):
        kept = {key: without_nothing(value) for key, value in tree.items()}
        return {key: value for key, value in kept.items() if value not in (None, {}, [])}
    return [without_nothing(each) for each in tree] if isinstance(tree, list) else tree
