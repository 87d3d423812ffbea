"""What tests of networks share."""

import torch
from torch import Tensor, nn


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def maps(net: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = net.eval()(x)
    return out


def same(net: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, state[key]) for key, v in net.state_dict().items() if "num_batches" not in key)


def unfolded(net: nn.Module) -> nn.Module:
    """The network with every batch norm computed by itself again, as the others' networks do."""
    for module in net.modules():
        if type(module).__name__.startswith("Folded"):
            module.__class__ = type(module).__bases__[0]
    return net
