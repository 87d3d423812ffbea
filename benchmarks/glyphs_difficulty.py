"""How hard is `glyphs`? Retrieval on held-out TRAINING classes, so that no test class has a say in the answer.

    python benchmarks/glyphs_difficulty.py --spec "glyphs(noise=0.2)" --epochs 45

Raw pixels and an untrained network are scored on all training classes (as many as there are test classes) and on the
held-out quarter; a network trained on the other three quarters is scored on the held-out quarter. The training is
written out here, proxy-anchor with nothing of the library's loop, so that the data is judged apart from it.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin.data import Images, held_out, load_dataset


def recall_at_1(embeddings: Tensor, labels: Tensor) -> float:
    """Percent of the images whose nearest other image is of their class."""
    unit = F.normalize(embeddings)
    similarity = (unit @ unit.T).fill_diagonal_(-2)
    return 100 * (labels[similarity.argmax(1)] == labels).float().mean().item()


def pixels(images: Images) -> Tensor:
    assert isinstance(images.sources, Tensor)
    return images.sources.float() / 255 - 0.2


def network(dim: int = 128) -> nn.Sequential:
    widths = (1, 32, 64, 64, 64)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(2), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 4, dim))


def moved(images: Tensor) -> Tensor:
    """Each image turned, scaled and shifted a little: without it the network learns the samples by heart."""
    angle, grow = (torch.rand(2, len(images)) * 2 - 1) * torch.tensor([[0.25], [0.15]])
    shift = (torch.rand(len(images), 2) * 2 - 1) * 0.15
    c, s = (1 + grow) * angle.cos(), (1 + grow) * angle.sin()
    theta = torch.stack([torch.stack([c, -s, shift[:, 0]], 1), torch.stack([s, c, shift[:, 1]], 1)], 1)
    return F.grid_sample(images, F.affine_grid(theta, list(images.shape), False), align_corners=False)


def proxy_anchor(x: Tensor, y: Tensor, proxies: Tensor, *, alpha: float = 32, delta: float = 0.1) -> Tensor:
    s = F.normalize(x) @ F.normalize(proxies).T
    own = F.one_hot(y, len(proxies)).bool()
    zero = torch.zeros(1, len(proxies))
    pull = torch.logsumexp(torch.cat([zero, (-alpha * (s - delta)).masked_fill(~own, -torch.inf)]), 0)
    push = torch.logsumexp(torch.cat([zero, (alpha * (s + delta)).masked_fill(own, -torch.inf)]), 0)
    return pull.sum() / own.any(0).sum() + push.sum() / len(proxies)


@torch.no_grad()
def embed(net: nn.Module, images: Images) -> Tensor:
    net.eval()
    return torch.cat([net(batch) for batch in pixels(images).split(500)])


def train(net: nn.Module, images: Images, *, epochs: int, batch: int = 128) -> None:
    x, y = pixels(images).contiguous(memory_format=torch.channels_last), images.labels
    proxies = nn.Parameter(torch.randn(images.classes, 128) * 0.1)
    groups = [{"params": net.parameters()}, {"params": [proxies], "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=1e-4)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y))[: len(y) // batch * batch].view(-1, batch):
            loss = proxy_anchor(net(moved(x[rows])), y[rows], proxies)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="glyphs", help="the data set (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=45, help="of training, 0 for none (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the network (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    everything = load_dataset(options.spec).train
    part, validation = held_out(everything, fraction=0.25)
    net = network().to(memory_format=torch.channels_last)
    print(f"{options.spec}: R@1 on training classes only")
    for name, images in (
        (f"all {everything.classes} classes", everything),
        (f"held-out {validation.classes}", validation),
    ):
        raw = recall_at_1(images.sources.flatten(1).float(), images.labels)
        print(
            f"  {name:16}  raw pixels {raw:5.1f}   untrained net {recall_at_1(embed(net, images), images.labels):5.1f}"
        )
    if options.epochs:
        start = time.perf_counter()
        train(net, part, epochs=options.epochs)
        seconds = time.perf_counter() - start
        score = recall_at_1(embed(net, validation), validation.labels)
        work = f"{options.epochs} epochs on {part.classes} classes, {seconds:.0f} s"
        print(f"  held-out {validation.classes}      trained {score:5.1f}   ({work})")


if __name__ == "__main__":
    main()
