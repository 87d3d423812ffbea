"""Optimiser, learning-rate schedule, and which parameters train in an epoch."""

import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from nearkin import ranks
from nearkin.methods.base import Method
from nearkin.networks.embedder import Embedder
from nearkin.networks.rank_batch_norm import batch_norms
from nearkin.training.plan import Plan
from nearkin.training.row_adamw import RowAdamW


def lr_factor(plan: Plan, epoch: int, scores: Sequence[float] = ()) -> float:
    """Return the factor of the learning rates in an epoch (0, 1, …), given the scores of the checks so far."""
    return min(1.0, (epoch + 1) / (plan.ramp + 1)) * _scheduled(plan, epoch, scores)


def _scheduled(plan: Plan, epoch: int, scores: Sequence[float]) -> float:
    if plan.schedule == "step":
        steps = sum(at <= epoch for at in plan.decay_epochs) if plan.decay_at else epoch // plan.decay_every
        return plan.decay**steps
    if plan.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / max(plan.epochs, 1)))
    if plan.schedule == "plateau":
        return plan.decay ** _plateaus(scores, plan.decay_every)
    return 1.0


def plateau_epochs(plan: Plan, scores: Sequence[float], *, steps_per_epoch: int, check_every: int) -> list[int]:
    """Return the epochs after which the schedule `plateau` lowered the learning rate, given the scores of checks."""
    seen = [scores[: epoch * steps_per_epoch // check_every] for epoch in range(plan.epochs + 1)]
    drops = [_plateaus(before, plan.decay_every) for before in seen]
    return [epoch for epoch in range(1, len(drops)) for _ in range(drops[epoch] - drops[epoch - 1])]


def _plateaus(scores: Sequence[float], patience: int) -> int:
    best, waited, drops = -math.inf, 0, 0
    for score in scores:
        best, waited = (score, 0) if score > best else (best, waited + 1)
        if waited == patience:
            waited, drops = 0, drops + 1
    return drops


def checks_without_progress(scores: Sequence[float]) -> int:
    """Count the checks since the best score; of equal scores the first counts."""
    return len(scores) - 1 - scores.index(max(scores)) if scores else 0


def parameter_groups(plan: Plan, embedder: Embedder, method: Method) -> list[dict[str, Any]]:
    """Return the parameters of trunk, head and method, each group with its learning rate."""
    trunk = list(embedder.trunk.parameters())
    in_trunk = {id(p) for p in trunk}
    head = [p for p in embedder.parameters() if id(p) not in in_trunk]
    return [
        {"params": trunk, "lr": plan.lr},
        {"params": head, "lr": plan.head_lr or plan.lr},
        *method.groups(plan.lr),
    ]


def make_optimiser(plan: Plan, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the plan's optimiser over parameter groups."""
    fused = plan.device.startswith("cuda")
    graph = plan.uses_graphs
    optimiser: torch.optim.Optimizer
    if plan.optimiser == "adamw":
        kind = RowAdamW if any(group.get("by_row") for group in groups) else torch.optim.AdamW
        optimiser = kind(groups, weight_decay=plan.weight_decay, fused=fused, capturable=graph)
    elif plan.optimiser == "adam":
        optimiser = torch.optim.Adam(groups, weight_decay=plan.weight_decay, fused=fused, capturable=graph)
    elif plan.optimiser == "rmsprop":
        momentum = plan.momentum
        optimiser = torch.optim.RMSprop(
            groups, weight_decay=plan.weight_decay, momentum=momentum, foreach=graph or None, capturable=graph
        )
    else:  # only fused does it read its learning rate on the device
        optimiser = torch.optim.SGD(groups, weight_decay=plan.weight_decay, momentum=plan.momentum, fused=graph or None)
    if graph:
        # Its first steps run outside of a graph, of which it would warn.
        optimiser._warned_capturable_if_run_uncaptured = True
    return optimiser


def clip_norm(parameters: Sequence[torch.Tensor], limit: float, cut: Container[int] = ()) -> None:
    """Clip the norm of all gradients together; those of the parameters with an id in `cut` are parts of one."""
    own = [p.grad for p in parameters if p.grad is not None and id(p) in cut]
    if not own:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    others = [p.grad for p in parameters if p.grad is not None and id(p) not in cut]
    squares = ranks.total(torch.nn.utils.get_total_norm(own).square())
    norm = (torch.nn.utils.get_total_norm(others).square() + squares).sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def rates_on_device(optimiser: torch.optim.Optimizer, device: torch.device) -> None:
    """Make the learning rates tensors, so that steps that were captured as CUDA graphs follow them."""
    for group in optimiser.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)


def set_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each group; those that are tensors change in place."""
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def set_training(model: nn.Module, trunk: nn.Module, plan: Plan, *, warming_up: bool) -> None:
    """Set train mode under the plan's batch-norm policy; freeze the trunk while warming up."""
    model.train()
    for parameter in trunk.parameters():
        parameter.requires_grad_(not warming_up)
    for norm in batch_norms(model):
        if plan.batch_norm != "train":
            norm.eval()
        if plan.batch_norm == "freeze":
            for parameter in norm.parameters(recurse=False):
                parameter.requires_grad_(False)
