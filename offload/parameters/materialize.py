"""Reads the values of a model on the meta device, tensor by tensor. `offload.materialize` uses it.

A parameter that is to leave memory leaves before the next tensor is read. So memory need not hold all of these
parameters at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.parameters.safetensors_file import Entry, read_entries, read_tensor

__all__ = ["Fill"]

NAMED_MAX = 5  # names of tensors in an error message


@dataclass
class _Wanted:
    """One tensor on the meta device, and the places in the model that refer to it."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Put a tensor in all these places of the model."""
        for module, name in self.places:
            setattr(module, name, tensor)


class Fill:
    """Reads the weights of a model. Files and model are checked before anything is changed.

    Raises
    ------
    ValueError
        A file is wrong, or files and model do not have the same tensors.
    OSError
        A file cannot be read.
    """

    def __init__(
        self, model: nn.Module, weights: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], device: torch.device
    ) -> None:
        self._device = device
        self._rows: list[tuple[_Wanted, Entry]] = []
        entries = read_entries(weights)
        wanted = _wanted(model)
        missing = []
        for each in wanted:
            entry = next((entries[name] for name in each.names if name in entries), None)
            if entry is None:
                missing.append(each.names[0])
            elif entry.shape != tuple(each.tensor.shape):
                raise ValueError(
                    f"{each.names[0]} has the shape {list(each.tensor.shape)} in the model and {list(entry.shape)} in "
                    f"{entry.path}: build the model with the configuration of these weights"
                )
            else:
                self._rows.append((each, entry))
        if missing:
            raise ValueError(
                f"{_named(missing)}: on the meta device, but not in the given files. Give all files. Tensors that the "
                "model computes, such as buffers that are not saved, must be built outside of torch.device('meta')"
            )
        known = {name for name, _ in _named_tensors(model)}
        if unknown := [name for name in entries if name not in known]:
            raise ValueError(
                f"{_named(unknown)}: among the weights, but not in the model; give the model's own weights"
            )

    def run(self, leave: Callable[[nn.Parameter], object] | None) -> None:
        """Read all tensors, one at a time. `leave` is called with each parameter as soon as it has its values.

        Raises
        ------
        OSError
            A tensor cannot be read; the model is unchanged.
        """
        try:
            for wanted, entry in self._rows:
                before = wanted.tensor
                value = read_tensor(entry).to(self._device, before.dtype)
                if isinstance(before, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=before.requires_grad)
                    value.__dict__.update(before.__dict__)
                wanted.put(value)
                if leave is not None and isinstance(value, nn.Parameter):
                    leave(value)
        except BaseException:  # also after an interrupt
            self.undo()
            raise

    def undo(self) -> None:
        """Put the tensors on the meta device back."""
        for wanted, _ in self._rows:
            wanted.put(wanted.tensor)


def _named_tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all of their names."""
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _wanted(model: nn.Module) -> list[_Wanted]:
    """Return the model's tensors on the meta device, each once, in the order of its modules."""
    found: dict[int, _Wanted] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = _named_tensors(module, recurse=False)
        for name, tensor in own:
            if tensor.is_meta:
                row = found.setdefault(id(tensor), _Wanted(tensor))
                row.places.append((module, name))
                row.names.append(f"{prefix}.{name}" if prefix else name)
    return list(found.values())


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
