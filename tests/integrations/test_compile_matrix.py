"""A compiled model is compiled with the engine as without: as many kernels, graph breaks and graphs, the same bits.

Each case is a script of its own in a fresh process, without a warm-up (`compile_worker.py`, which also prints the
table). Some of them run with `--long`, the whole matrix with `--full`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compile_cases import Case, differences, every_case, some_cases

SCRIPT = Path(__file__).with_name("compile_worker.py")


def pytest_generate_tests(metafunc):
    some = some_cases()
    cases = every_case() if metafunc.config.getoption("--full") else some
    marked = [
        pytest.param(case, marks=pytest.mark.long if case in some else pytest.mark.full, id=str(case)) for case in cases
    ]
    metafunc.parametrize("case", marked)


@pytest.fixture(scope="module")
def results():
    """Runs cases, each in a process of its own."""
    command = [sys.executable, str(SCRIPT), "--json"]
    known: dict[Case, dict] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(case):
            if case not in known:
                process.stdin.write(json.dumps(vars(case)) + "\n")
                process.stdin.flush()
                known[case] = json.loads(process.stdout.readline())
            return known[case]

        yield run
        process.stdin.close()


def test_compiled_as_without_the_engine(results, case):
    plain, found = results(case.plain), results(case)
    assert differences(found, plain) == []
    assert plain["kernels"] > 0
    assert any("CompiledFunctionBackward" in nodes for nodes in found["nodes"][:1]), "the profiled step is compiled too"
    assert not any("gave up" in note or "broke its graphs" in note for note in found["notes"])
    if case.mode in ("n_tensors=-1, lb=2", "n_tensors=-1, lb=auto"):
        assert found["swapped"] > 0
