"""Kernels that cannot be compiled are not used."""

import pytest
import torch

from nearkin.data.pixels import kernel_check
from nearkin.data.pixels.kernel_check import kernels_run


def test_no_kernels_on_a_cpu() -> None:
    assert not kernels_run(torch.device("cpu"))


def test_a_machine_without_a_compiler_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore of it.")

    monkeypatch.setattr(kernel_check, "HAVE_TRITON", True)
    monkeypatch.setattr(kernel_check, "resize_weights", fail, raising=False)
    kernels_run.cache_clear()
    monkeypatch.setattr(kernel_check.torch, "ones", lambda *_, **__: torch.zeros(1, 2))
    device = torch.device("cuda:7")
    with pytest.warns(UserWarning, match=r"cannot be compiled \(Failed to find C compiler\.\)"):
        assert not kernels_run(device)
    assert not kernels_run(device)
    kernels_run.cache_clear()
