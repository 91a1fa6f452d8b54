"""Calls a function at any one line of the package that a call runs, as Python calls a signal handler."""

import linecache
import random
import sys
from collections import Counter
from pathlib import Path

import offload

PACKAGE = Path(offload.__file__).parent


class AtLine:
    """Counts how often each line of the package runs, and calls `act` at one of these times.

    `place` is a file, a function's name and a line number, `nth` the number of the time, from 1.
    """

    def __init__(self, place=None, nth=0, act=None):
        self.counts = Counter()
        self.acted = False
        self._place, self._nth, self._act = place, nth, act

    def __enter__(self):
        sys.settrace(self._calls)

    def __exit__(self, *_):
        sys.settrace(None)

    def _calls(self, frame, event, _):
        return self._lines if frame.f_code.co_filename.startswith(str(PACKAGE)) else None

    def _lines(self, frame, event, _):
        place = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
        # Python delivers no signal between the end of a `with` block and the call that leaves its context.
        if event == "line" and not linecache.getline(place[0], place[2]).lstrip().startswith("with"):
            self.counts[place] += 1
            if place == self._place and self.counts[place] == self._nth:
                sys.settrace(None)
                self.acted = True
                self._act()
        return self._lines


def times(counts, times_per_line, under="", function=None):
    """Yield for each line some of the times that it ran, chosen at random.

    Of the lines in a file or folder of the package, and of one function if its name is given.
    """
    chosen = random.Random(0)
    for place, count in sorted(counts.items()):
        if place[0].startswith(str(PACKAGE / under)) and function in (None, place[1]):
            for nth in chosen.sample(range(1, count + 1), min(count, times_per_line)):
                yield place, nth
