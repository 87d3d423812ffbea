"""Every code block of docs/your-own-loop.md runs and learns."""

import re
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning.miners import MultiSimilarityMiner
from torch import nn

import nearkin as nk

PAGE = Path(__file__).parents[2] / "docs" / "your-own-loop.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


class Blobs(torch.utils.data.Dataset):
    """Ten noisy classes in twelve dimensions."""

    def __init__(self, count: int = 400) -> None:
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.arange(count) % 10
        centres = torch.randn(10, 12, generator=generator)
        self.images = centres[self.targets] + 0.8 * torch.randn(count, 12, generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.images[row], int(self.targets[row])


def surroundings() -> dict[str, object]:
    torch.manual_seed(0)
    data = Blobs()
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
    orders = [torch.randperm(len(data)) for _ in range(6)]
    batches = [(data.images[rows], data.targets[rows]) for order in orders for rows in order.split(50)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "dataset": data, "batches": batches, "optimiser": optimiser, "torch": torch, "nk": nk}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # pytorch-metric-learning's own
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs_and_learns(number):
    names = surroundings()
    model, data = names["model"], names["dataset"]
    with torch.no_grad():
        before = nk.evaluate(model(data.images), data.targets, metrics=("P@R",))["P@R"]
    exec(BLOCKS[number], names)
    model.eval()
    with torch.no_grad():
        after = nk.evaluate(model(data.images), data.targets, metrics=("P@R",))["P@R"]
    assert after > before + 5


def test_there_are_six_blocks():
    assert len(BLOCKS) == 6


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("spec", ["proxy_anchor", "vcpa", "proxy_updates", "xbm(contrastive, size=20, start=0)"])
def test_a_trainer_moves_the_state_too(spec):
    names = surroundings()
    block = (
        BLOCKS[5]
        .replace("multi_similarity", spec)
        .replace(
            '"trunk_optimizer"', '"metric_loss_optimizer": torch.optim.AdamW(method.groups(lr=1e-3)), "trunk_optimizer"'
        )
    )
    exec(block.split("trainer.train")[0], names)
    before = {name: t.clone() for name, t in names["method"].state_dict().items() if t.is_floating_point()}
    names["trainer"].train(num_epochs=1)
    after = names["method"].state_dict()
    assert [name for name, t in before.items() if t.equal(after[name])] == []


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_trainer_takes_a_miner():
    names = surroundings()
    miner = MultiSimilarityMiner()
    exec(BLOCKS[5].split("trainer.train")[0].replace('"multi_similarity"', '"multi_similarity(mining=False)"'), names)
    names["trainer"].mining_funcs = {"tuple_miner": miner}
    seen = []
    names["method"].register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    names["trainer"].train(num_epochs=1)
    assert len(seen) == 10
    assert all(len(indices) == 4 for indices in seen)


def test_the_block_on_scores_runs():
    (block,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = surroundings()
    exec(block, names)
    assert names["by_class"]["R@1"] == pytest.approx(names["scores"]["R@1"])  # all classes are of one size
    assert names["by_tag"]["R@1"] > names["scores"]["R@1"]
    assert float(names["values"].mean()) == pytest.approx(names["scores"]["R@1"])
    assert names["found"].queries == 50
