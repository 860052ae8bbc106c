"""The committed demo bundle: the golden file of format version 1, and a model worth showing."""

import subprocess
import sys

import numpy as np
from helpers.paths import DEMO

from service import bundle
from service.engine import Engine

# The first test item of eight classes spread over the super-clusters.
SAMPLE_CLASSES = [0, 1421, 2852, 4283, 5705, 7136, 8567, 9999]


def test_it_is_readable_small_and_labelled() -> None:
    demo = bundle.read(DEMO)
    assert demo.manifest.format_version == 1
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 8_000_000
    assert demo.labels is not None and demo.labels[1207] == "super 12 / sub 7"
    assert demo.samples is not None and len(demo.samples) == 8


def test_its_experts_are_the_super_clusters() -> None:
    demo = bundle.read(DEMO)
    supers = [set((demo.expert_classes(expert) // 100).tolist()) for expert in range(100)]
    assert all(len(held) == 1 for held in supers)
    assert set.union(*supers) == set(range(100))
    assert demo.manifest.training.flops_speedup >= 45


def test_it_answers_its_samples_as_it_always_did() -> None:
    demo = bundle.read(DEMO)
    assert demo.samples is not None
    answer = Engine(demo).topk(demo.samples, 1)
    assert answer.classes[:, 0].tolist() == SAMPLE_CLASSES
    # With one expert per super-cluster, the expert of a class is the one that holds it.
    held = [demo.expert_classes(expert).tolist() for expert in answer.experts]
    assert all(cls in classes for cls, classes in zip(SAMPLE_CLASSES, held, strict=True))
    assert (np.exp(answer.log_probs) > 0.5).all()


def test_dss_verify_accepts_it() -> None:
    command = [sys.executable, "-m", "service.cli", "verify", str(DEMO)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
