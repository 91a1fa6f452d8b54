"""A system that refuses the engine's threads: `enable` says so, and works once it may."""

import json
import tempfile
from pathlib import Path

import pytest
from forked_python import run_python

SCRIPT = """
import json, os, resource, sys
import torch
import offload

model = torch.nn.Linear(4, 4)
offload.enable(torch.nn.Linear(2, 2), n_tensors=0).disable()  # imports all modules: another user may not read them
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
if os.getuid() == 0:
    try:
        os.setuid(65534)  # the limit does not apply to root
    except OSError:
        sys.exit("no other user")
resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
try:
    offload.enable(model, spill_dir={folder!r})
    told = ""
except RuntimeError as error:
    told = str(error)
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
with offload.enable(model, n_tensors=-1, min_tensor_bytes=1, spill_dir={folder!r}) as handle:
    model(torch.randn(8, 4)).sum().backward()
    print(json.dumps([told, handle.report().swapped.tensors]))
"""


def test_enable_says_which_limit_refuses_a_thread():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # for the other user
        ran = run_python("-c", SCRIPT.format(folder=folder))
    if "no other user" in ran.stderr:
        pytest.skip("root may not become another user here")
    assert ran.returncode == 0, ran.stderr
    told, swapped = json.loads(ran.stdout)
    assert told.startswith("pthread_create failed with code 11: the engine needs one thread for each copy stream")
    assert "ulimit -u" in told
    assert swapped == 1
