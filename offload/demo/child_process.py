"""A child process that ends with its parent: killed when the parent is told to end, or raises.

`offload demo` trains in such processes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any


@contextlib.contextmanager
def child_process(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a process, whose standard output is a pipe of text, and kill it if the block raises.

    In the block, and only there, SIGTERM raises SystemExit. While the process is being started, this waits: nothing
    could kill a process that `Popen` has not returned.

    Raises
    ------
    OSError
        The process could not be started.
    """
    starting, told_to_end = True, False

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        nonlocal told_to_end
        told_to_end = True
        if not starting:
            sys.exit(128 + signal.SIGTERM)

    before: Any = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr) as child:
            try:
                starting = False
                if told_to_end:
                    sys.exit(128 + signal.SIGTERM)
                yield child
            except BaseException:
                child.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if starting and told_to_end:  # the process could not be started either
            sys.exit(128 + signal.SIGTERM)
