"""A weights file that several tests of networks read."""

from pathlib import Path

import pytest
import torch

from nearkin.networks.inception import BNInception


@pytest.fixture(scope="session")
def bn_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file laid out as the public one: not a zip, no counters, batch norms' vectors as [1, C], a classifier."""
    torch.manual_seed(0)
    state = {key: v for key, v in BNInception().state_dict().items() if "num_batches" not in key}
    state = {key: v[None] if "_bn." in key else v for key, v in state.items()}
    state |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    path = tmp_path_factory.mktemp("weights") / "bn_inception.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path
