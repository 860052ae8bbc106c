"""FAISS, if it is installed."""

import importlib
from types import ModuleType

from trainer.baselines.method import PackageMissing


def import_faiss() -> ModuleType:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise PackageMissing("Install doubly-sparse-softmax[baselines] for this.") from error
