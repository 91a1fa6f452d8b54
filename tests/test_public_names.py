"""What completion offers: the public names of the package and of the handle, and nothing of their inside."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

PACKAGE = """
import rlcompleter
import offload
completer = rlcompleter.Completer(globals())
found = []
while (name := completer.complete("offload.", len(found))) is not None:
    found.append(name)
print([name.removeprefix("offload.").rstrip("()") for name in found])
print([name for name in dir(offload) if name.startswith("_")])
print(offload.__all__)
"""

HANDLE = """
import rlcompleter
import torch, offload
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
handle = offload.enable(model, min_tensor_bytes=1)
for _ in range(3):
    model(torch.randn(8, 64)).sum().backward()
handle.report(), handle.trace()
completer = rlcompleter.Completer(globals())
found = []
while (name := completer.complete("handle.", len(found))) is not None:
    found.append(name)
print([name.removeprefix("handle.").rstrip("()") for name in found])
print([name for name in vars(type(handle)) | vars(handle) if name[0] != "_"])
"""

DOCUMENTED = {
    "add_optimizer",
    "clip_grad_norm_",
    "device",
    "disable",
    "explain_oom",
    "log_to",
    "plan",
    "postfix",
    "report",
    "step",
    "timeline",
    "trace",
}


def printed(script: str) -> list[list[str]]:
    """The lists that a script prints, in a fresh process."""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    return [ast.literal_eval(line) for line in ran.stdout.splitlines()]


@pytest.mark.long
def test_the_package_completes_to_its_public_names() -> None:
    """Also after its parts were loaded: a module that is imported becomes an attribute of its package."""
    load_parts = "import torch\noffload.enable(torch.nn.Linear(2, 2)).disable()\nimport offload.cli.main\n"
    offered, hidden, public, offered_later, _, public_later = printed(PACKAGE + load_parts + PACKAGE)
    assert set(offered) == set(public)
    assert all(name.startswith("__") and name.endswith("__") for name in hidden), hidden
    assert set(offered_later) == set(public_later) == set(public)


def test_conveniences_are_in_contrib() -> None:
    names = ["GradAccumulator", "LMSCallback", "Prefetcher"]
    script = "import offload\nprint(dir(offload.contrib))\nprint([name for name in dir(offload) if name in {!r}])"
    assert printed(script.format(names)) == [names, []]


@pytest.mark.long
def test_the_handle_completes_to_what_is_documented() -> None:
    offered, named = printed(HANDLE)
    assert set(offered) == DOCUMENTED
    assert set(named) <= DOCUMENTED, "hidden from completion is not private: begin the name with an underscore"
