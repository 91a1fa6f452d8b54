"""Settings of torch are read and put back one by one."""

import pytest
import torch

from offload.torch_compat import settings


@pytest.mark.parametrize("number", range(len(settings._SETTINGS)))
def test_a_setting_can_be_written_as_it_was_read(number):
    read, write = settings._SETTINGS[number]
    before = read()
    write(before)
    assert read() == before


def test_warnings_of_deterministic_algorithms_stay():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with settings.restored() as put_in_force:
            torch.use_deterministic_algorithms(False)
            put_in_force(settings.in_force(is_heavy=True))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_those_of_a_time_are_put_in_force_and_undone():
    before = settings.in_force(is_heavy=True)
    with torch.backends.mkldnn.flags(enabled=False):
        wanted = settings.in_force(is_heavy=True)
    assert wanted != before
    with settings.restored() as put_in_force:
        put_in_force(wanted)
        assert not torch.backends.mkldnn.enabled
        assert settings.in_force(is_heavy=False) == wanted[: len(settings._READ_ALL)]
    assert settings.in_force(is_heavy=True) == before
