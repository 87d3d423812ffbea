"""Every module gets its own mode back, also after an error."""

import pytest
from torch import nn

from nearkin.networks.eval_mode import evaluating


def fail_in_eval_mode(net):
    with evaluating(net):
        assert not any(module.training for module in net.modules())
        raise RuntimeError


def test_modes_are_restored():
    net = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout()).train()
    net[0].eval()
    with pytest.raises(RuntimeError):
        fail_in_eval_mode(net)
    assert [module.training for module in net.modules()] == [True, False, True]
