"""Frameworks that tests need: a missing one is skipped visibly, or is a failure where OFFLOAD_REQUIRE_FRAMEWORKS=1."""

import importlib
import os
from importlib.util import find_spec
from types import ModuleType

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# How a Trainer gets the engine. By default some tests run both ways, the others one of them.
ONE_WAY = [pytest.param("mixin", marks=pytest.mark.full), "callback"]


def need(name: str) -> ModuleType:
    """The framework's module."""
    if find_spec(name) is None:
        if os.environ.get("OFFLOAD_REQUIRE_FRAMEWORKS") == "1":
            pytest.fail(f"OFFLOAD_REQUIRE_FRAMEWORKS=1, and {name} is not installed", pytrace=False)
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return importlib.import_module(name)
