"""Runs a script in torchrun's stead and says how many threads of gloo outlive its group: SCRIPT [ARGUMENTS].

One that is at work while the interpreter ends aborts the process. That is seldom; that the thread is there is certain.
"""

import contextlib
import runpy
import sys
from pathlib import Path

sys.argv[:] = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
status = None
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    status = end.code
names = []
for path in Path("/proc/self/task").glob("*/comm"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since the folder was listed
        names.append(path.read_text())
assert names  # at least this thread's
sys.stdout.write(f"gloo's threads left: {sum('gloo' in name for name in names)}\n")  # one write: two ranks, one pipe
sys.exit(status)
