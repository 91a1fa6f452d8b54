"""One swap store per process and device: sessions share a spill file, and do not disturb each other."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import offload


def spill_files(directory: Path) -> int:
    """Unlinked files of a folder that this process holds open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the folder's own descriptor
            continue
        count += target.startswith(str(directory)) and target.endswith("(deleted)")
    return count


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))


def gradients(net: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def losses(*nets: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(96, 64)
    return [net(x).square().mean() for net in nets]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_models_share_one_spill_file(tmp_path):
    nets = [model(1), model(2)]
    expected = [gradients(net, loss) for net, loss in zip(nets, losses(*nets), strict=True)]
    assert spill_files(tmp_path) == 0
    first, second = (offload.enable(net, n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) for net in nets)
    assert spill_files(tmp_path) == 1
    assert first._engine is not second._engine
    for _ in range(3):
        both = losses(*nets)  # both graphs are out at once
        assert same(gradients(nets[0], both[0]), expected[0])
        assert same(gradients(nets[1], both[1]), expected[1])
    both = losses(*nets)
    first.disable()  # while both graphs are alive
    assert same(gradients(nets[1], both[1]), expected[1])
    assert same(gradients(nets[0], both[0]), expected[0])
    assert same(gradients(nets[1], losses(nets[1])[0]), expected[1])
    assert second._engine.store.stats()["spill_file_bytes"] > 0
    second.disable()
    assert second._engine.store.stats()["spill_file_bytes"] == 0
    assert second._engine.store.stats()["live_tickets"] == 0
    del first, second, both
    assert spill_files(tmp_path) == 0


def test_other_wishes_other_stores(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    nets = [model(1), model(2)]
    handles = [offload.enable(net, spill_dir=folder) for net, folder in zip(nets, folders, strict=True)]
    assert [spill_files(folder) for folder in folders] == [1, 1]
    for handle in handles:
        handle.disable()


def test_a_report_counts_from_enable(tmp_path):
    nets = [model(1), model(2)]
    with offload.enable(nets[0], n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) as first:
        loss = losses(nets[0])[0]
        first._engine.drain()  # backward takes back at once what has not left
        gradients(nets[0], loss)
        first._engine.store.quiesce()  # a copy nobody waits for any more is counted when it ends
        moved = first.report().to_dict()["copy_in"]
        assert moved["copies"] > 0
        with offload.enable(nets[1], n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) as second:
            report = second.report().to_dict()
            assert report["copy_out"]["bytes"] == report["copy_in"]["bytes"] == report["spilled_bytes"] == 0
            assert report["cancelled"] == report["failed"] == report["stall_seconds"] == 0
        assert first.report().to_dict()["copy_in"] == moved


def test_disabling_one_does_not_take_the_others_copies_back(tmp_path):
    nets = [model(1), model(2)]
    first, second = (offload.enable(net, n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) for net in nets)
    kept = losses(nets[1])[0]
    first.disable()
    assert second._engine.store.stats()["cancelled"] == 0
    assert gradients(nets[1], kept)
    second.disable()


def test_a_forked_child_makes_a_store_of_its_own(tmp_path):
    with offload.enable(model(1), spill_dir=tmp_path) as handle:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                handle._engine.store.stats()
            except RuntimeError as error:
                with offload.enable(model(2), spill_dir=tmp_path) as other:
                    code = 0 if "fork" in str(error) and other._engine.store is not handle._engine.store else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
