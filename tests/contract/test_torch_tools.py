"""Methods under torch's own tools: autocast, function transforms, compilation, averaging, optimisers."""

import pytest
import torch
from contract.cases import DIM, STRATEGY_SPECS, batch, build, gradients, step_of
from torch.optim.swa_utils import AveragedModel

from nearkin.methods.catalogue import METHODS
from nearkin.methods.losses import LOSSES

OPTIMISERS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.SGD]


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("spec", [*LOSSES, *STRATEGY_SPECS])
def test_float16_autocast_with_a_gradient_scaler(spec, backward_inside):
    """The usual recipe: the value is that of float32 on the same embeddings, and the step moves all parameters."""
    m = build(spec)
    torch.manual_seed(0)
    network = torch.nn.Linear(DIM, DIM)
    groups = [{"params": network.parameters()}, *m.groups(0.1)]
    optimiser, scaler = torch.optim.SGD(groups, lr=0.1), torch.amp.GradScaler("cpu", init_scale=128.0)
    points, y = batch(12, dtype=torch.float32)
    before = [p.detach().clone() for group in optimiser.param_groups for p in group["params"]]
    state = {k: v.clone() for k, v in m.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.float16):
        x = network(points)
        step = step_of(x, y)
        torch.manual_seed(1)
        loss = m.loss(step)
        if backward_inside:
            scaler.scale(loss).backward()
    if not backward_inside:
        scaler.scale(loss).backward()
    assert (x.dtype, loss.dtype) == (torch.float16, torch.float32)
    scaler.step(optimiser)
    scaler.update()
    m.after_step(step)
    after = [p for group in optimiser.param_groups for p in group["params"]]
    assert all(not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, after, strict=True))
    other = build(spec)
    other.load_state_dict(state)
    torch.manual_seed(1)
    assert torch.equal(loss, other.loss(step_of(x.detach(), y))), "no product was rounded to float16"


@pytest.mark.parametrize("name", LOSSES)
def test_function_transforms_give_the_same_gradient(name):
    m = build(name)
    x, y = batch(dtype=torch.float32)
    _, expected, _ = gradients(m, x, y)
    torch.testing.assert_close(torch.func.grad(lambda x: m(x, y))(x), expected)


# Values decide the shape of something: the number of triplets, the order of a row, whether a norm is too large.
NOT_VECTORISED = ("angular", "lifted", "n_pair", "proxy_gml")


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in NOT_VECTORISED])
def test_vectorised_over_embeddings(name):
    """As many losses and gradients as there are batches of embeddings with the same labels."""
    m = build(name)
    _, y = batch(dtype=torch.float32)
    several = torch.stack([batch(seed=seed, dtype=torch.float32)[0] for seed in (1, 2)])
    found = torch.vmap(torch.func.grad_and_value(lambda x: m(x, y)))(several)
    for k, x in enumerate(several):
        value, gradient, _ = gradients(m, x, y)
        torch.testing.assert_close((found[0][k], found[1][k].detach()), (gradient, value))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_compiles_without_graph_breaks(name):
    torch.compiler.reset()
    m, (x, y) = build(name), batch(dtype=torch.float32)
    compiled = torch.compile(m, fullgraph=True, backend="eager")
    for found, expected in zip(gradients(compiled, x, y)[:2], gradients(m, x, y)[:2], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", METHODS)
def test_optimisers_take_the_groups_of_any_method(name):
    """Also those of a method without parameters, alone or beside a network's."""
    m, network = build(name), torch.nn.Linear(2, 2)
    x, y = batch(dtype=torch.float32)
    for kind in OPTIMISERS:
        for groups in (m.groups(0.1), [{"params": network.parameters()}, *m.groups(0.1)]):
            optimiser = kind(groups, lr=0.1, foreach=True)
            m(x.requires_grad_(), y).backward()
            optimiser.step()
            optimiser.load_state_dict(optimiser.state_dict())
    torch.optim.AdamW(m.groups(0.1), fused=True).step()


@pytest.mark.parametrize("name", METHODS)
def test_an_average_of_network_and_method(name):
    """An average of a module without any parameter fails inside torch; with its network it works."""
    both = torch.nn.ModuleDict({"network": torch.nn.Linear(DIM, DIM), "method": build(name)})
    for use_buffers in (False, True):
        average = AveragedModel(both, use_buffers=use_buffers)
        for _ in range(2):
            average.update_parameters(both)
    for a, b in zip(average.module.parameters(), both.parameters(), strict=True):
        torch.testing.assert_close(a, b)
