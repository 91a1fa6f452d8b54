"""What a session answers when it is asked: where memory went, what a step looks like, what a progress bar may show.

On top of the data path; the session inherits it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload import oom
from offload.assessment import Subject, assess, wish
from offload.device_memory import peak_bytes, watch_refusals
from offload.engine import Engine
from offload.hooks import Policy, Round
from offload.options import Options
from offload.planning import ByHand, ByPlan
from offload.report import Counts
from offload.step_recording import StepRecording, WatchedRound
from offload.units import format_bytes, format_seconds
from offload.verdict import Verdict


class Answers:
    """The part of a session that only looks on."""

    options: Options
    engine: Engine
    counts: Counts
    _model: weakref.ref[nn.Module]
    _device: torch.device
    _enabled: bool
    _planning: ByHand | ByPlan
    _problems: list[str]
    _left_to_checkpoint: bool
    _recording: StepRecording | None = None

    def _tier(self) -> str:
        """What is below the device, in words."""
        raise NotImplementedError

    def postfix(self) -> dict[str, str]:
        """What a progress bar may show: peak memory so far, bytes swapped out and seconds stalled since `enable`.

        Examples
        --------
        >>> import torch, offload
        >>> handle = offload.enable(torch.nn.Linear(4, 1))
        >>> sorted(handle.postfix())  # for tqdm: bar.set_postfix(handle.postfix())
        ['peak', 'stalled', 'swapped']
        """
        return {
            "peak": format_bytes(peak_bytes(self._device)),
            "swapped": format_bytes(self.counts.swapped.nbytes),
            "stalled": format_seconds(self.engine.store.stats()["stall_seconds"]),
        }

    @contextmanager
    def explain_oom(self, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
        """Explain what is inside, should it run out of memory: in a note on the exception and on a page.

        `step`, the model's forward, and backward where it brings a tensor back add the note by themselves; this covers
        all of backward and the optimizer too.
        Before Python 3.11, whose exceptions take no notes, the note is logged.

        Parameters
        ----------
        path
            Where to write the page, self-contained HTML. Default: none.

        Examples
        --------
        >>> import torch, offload
        >>> model = torch.nn.Linear(4, 1)
        >>> with offload.enable(model) as handle, handle.explain_oom("oom.html"):
        ...     model(torch.ones(2, 4)).sum().backward()
        """
        watch_refusals()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            self.explain(error, path)
            raise

    def timeline(self, path: str | os.PathLike[str]) -> StepRecording:
        """Record what happens from now on and write it as a timeline: when compute ran and waited, when bytes moved.

        In a `with` block the recording ends with the block, so put one training step inside. Without one it covers the
        next step: it ends when the second forward pass from now on begins, or at `disable`. A recorded step is slower;
        it computes the same.

        Parameters
        ----------
        path
            ``"step.html"``: a self-contained page. ``"step.json"``: trace events for ui.perfetto.dev.

        Returns
        -------
        StepRecording
            A context manager.

        Raises
        ------
        ValueError
            The path ends in something else, or a recording is under way already.
        OSError
            The file cannot be written.

        Examples
        --------
        >>> import pathlib, tempfile, torch, offload
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
        >>> with handle.timeline(pathlib.Path(tempfile.mkdtemp()) / "step.html"):
        ...     model(torch.ones(32, 64)).sum().backward()
        >>> handle.disable()
        """
        model = self._model()
        if not self._enabled or model is None:
            raise ValueError("timeline: offload is disabled on this model; call offload.enable first")
        if self._recording is not None and self._recording.is_on:
            raise ValueError(f"timeline: {self._recording.path} is being recorded already; let that step end first")
        self._recording = StepRecording(model, self.engine, self._device, self._tier(), path)
        return self._recording

    def _verdict(self) -> Verdict:
        """What a planned step needs and takes, as far as it is known by now; `report` begins with it."""
        return assess(
            Subject(
                self._planning,
                self.options,
                self.engine,
                self.counts,
                is_disabled=not self._enabled,
                left_to_checkpoint=self._left_to_checkpoint,
                problems=self._problems,
            )
        )

    def __repr__(self) -> str:
        model = self._model()
        name = type(model).__name__ if model is not None else "a model that is gone"
        state, asked = self._verdict().state(), wish(self.options)
        return f"<offload.Session of {name} on {self._device}{'' if asked in state else f', {asked}'}: {state}>"

    def _make_round(self, policy: Policy) -> Round:
        """A round that notes what it does while a step is recorded, else a plain one."""
        recording = self._recording
        if recording is not None:
            recording.forward_begins()
            if recording.is_on:
                return WatchedRound(policy, recording)
        return Round(policy)

    def explain(self, error: BaseException, path: str | os.PathLike[str] | None = None) -> None:
        """Note on `error`, where it says that memory ran out, why; and write a page of it where `path` is given."""
        swapped, kept = self.counts.in_round()
        subject = oom.Subject(self._model(), self.engine, self.options, swapped, kept)
        oom.tell(error, subject, path)
