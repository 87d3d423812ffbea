"""The MPA paper: Table 1 by second derivatives over all pairs at once, its errata, and its closed-form gradients.

∂L/∂S(x, c) depends on S(x', c') just where the second derivative of L by the two is not zero.
"""

import math

import pytest
import torch
from contract.cases import build

from nearkin import method
from nearkin.methods.losses.mpa import mpa, mpa_ap, mpa_dw
from nearkin.methods.losses.proxy_anchor import proxy_anchor
from nearkin.methods.losses.proxy_nca import proxy_nca
from nearkin.methods.losses.soft_triple import soft_triple
from nearkin.methods.relation import References, relate
from nearkin.space import Space

C = 5
TWO_OF_A_CLASS, ALL_DIFFERENT = (0, 0, 1, 2, 3), (0, 1, 2, 3)
SCALE, DELTA = 2.0, 0.1  # a low scale, so that no relation is too small to be seen

LOSSES = {
    "proxy_nca": lambda q: proxy_nca(q, scale=SCALE),
    "proxy_anchor": lambda q: proxy_anchor(q, alpha=SCALE, delta=DELTA),
    "soft_triple": lambda q: soft_triple(q, scale=SCALE, delta=DELTA),
    "mpa": lambda q: mpa(q, alpha=SCALE, delta=DELTA),
    "mpa_dw": lambda q: mpa_dw(q, alpha=SCALE, delta=DELTA),
    "mpa_ap": lambda q: mpa_ap(q, alpha=SCALE, delta=DELTA),
}


def similarities(y):
    return torch.rand(len(y), C, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1


def loss_of(name, y):
    """The loss as a function of the class similarities S [B, C]: samples S against the axes have just these products.

    Distances work, too: what a sample's norm adds is the same for every class, and cancels.
    """
    axes = References(torch.eye(C, dtype=torch.float64), torch.arange(C), None, 1)
    return lambda S: LOSSES[name](relate(S, torch.tensor(y), axes, Space.INNER))


def gradient(name, S):
    S = S.clone().requires_grad_()
    return torch.autograd.grad(loss_of(name, TWO_OF_A_CLASS)(S), S)[0]


def relations(name, y):
    """Which gradient depends on which other similarity [B, C, B, C], and who is positive [B, C]."""
    H = torch.autograd.functional.hessian(loss_of(name, y), similarities(y))
    itself = torch.eye(len(y) * C, dtype=torch.bool).reshape(H.shape)
    return (H.abs() > 1e-9) & ~itself, torch.tensor(y)[:, None] == torch.arange(C)


def depends(name, y, *, first, second):
    """Whether the gradient of a positive (or negative) pair depends on another positive (or negative) one."""
    related, pos = relations(name, y)
    return bool(related[(pos == first)[:, :, None, None] & (pos == second)].any())


def stability(name):
    """A sample's gradients depend on no other sample's similarities."""
    related, _ = relations(name, TWO_OF_A_CLASS)
    other = ~torch.eye(len(TWO_OF_A_CLASS), dtype=torch.bool)
    return not bool(related.any(3).any(1)[other].any())


def manifold(name):
    """As published, a class has several proxies, and a sample pulls the near ones more than the far."""
    torch.manual_seed(0)
    m = method(name, classes=C, dim=8).double()
    K, mine = m.proxies.per_class, 2
    if K == 1:
        return False
    r = relate(torch.randn(1, 8, dtype=torch.float64), torch.tensor([mine]), m.proxies.references(), Space.COSINE)
    s = r.s.detach().requires_grad_()
    own = slice(mine * K, mine * K + K)
    pulls = torch.autograd.grad(m.objective(r._replace(s=s)), s)[0][0, own].abs()
    return bool(pulls[s[0, own].argmax()] > 1.1 * pulls[s[0, own].argmin()])


def similarity(name):
    """Gradients change where all similarities rise by the same."""
    S = similarities(TWO_OF_A_CLASS)
    return bool((gradient(name, S + 0.3) - gradient(name, S)).abs().max() > 1e-9)


def positives(name):
    """Positive pairs among themselves; "(✓)" where that takes two samples of a class in the batch."""
    if not depends(name, TWO_OF_A_CLASS, first=True, second=True):
        return False
    return True if depends(name, ALL_DIFFERENT, first=True, second=True) else "(✓)"


def negatives(name):
    return depends(name, TWO_OF_A_CLASS, first=False, second=False)


def across(name):
    return depends(name, TWO_OF_A_CLASS, first=True, second=False)


COLUMNS = (stability, manifold, similarity, positives, negatives, across)
# As printed: every tick and every blank of it holds by computation. (The text beside it says that "ProxyNCA loss and
# MPA loss can consider relations between positive similarities": that is Proxy-Anchor, as the table has it.)
TABLE_1 = {
    "proxy_nca": (True, False, False, False, True, False),
    "proxy_anchor": (False, False, True, "(✓)", True, False),
    "soft_triple": (True, True, False, False, True, True),
    "mpa": (False, True, True, "(✓)", True, False),
    "mpa_dw": (True, True, True, False, True, False),
    "mpa_ap": (True, True, True, False, True, True),
}


@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=[c.__name__ for c in COLUMNS])
@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name, column):
    assert COLUMNS[column](name) == TABLE_1[name][column]


def eq_5_as_printed(S, i, c):
    own, others = TWO_OF_A_CLASS[i], [k for k in range(C) if k != TWO_OF_A_CLASS[i]]
    if c == own:
        below = sum(math.exp(SCALE * (S[i][own] - S[i][k] - DELTA)) for k in others) + 1
        return SCALE / below / len(S)
    below = sum(math.exp(SCALE * (S[i][c] - S[i][k])) for k in others)
    return -SCALE / (math.exp(SCALE * (S[i][own] - S[i][c] - DELTA)) + below) / len(S)


def eq_14_as_printed(S, i, c):
    if c == TWO_OF_A_CLASS[i]:
        return -SCALE / len(S) / (math.exp(-SCALE * (DELTA - S[i][c])) + 1)
    return SCALE / len(S) / (math.exp(-SCALE * (S[i][c] + DELTA)) + (C - 1))  # S_DR = 0


@pytest.mark.parametrize(("name", "printed"), [("soft_triple", eq_5_as_printed), ("mpa_dw", eq_14_as_printed)])
def test_errata(name, printed):
    """Eq. 5 (here divided by the batch, as the loss is a mean) and Eq. 14 are no gradients as they stand in print."""
    S = similarities(TWO_OF_A_CLASS)
    as_printed = torch.tensor([[printed(S.tolist(), i, c) for c in range(C)] for i in range(len(S))])
    assert (as_printed - gradient(name, S)).abs().max() > 0.01


# Closed forms (Eq. 5, 8, 14, 18, misprints corrected) against autograd.

ALPHA = 4.0
Y = torch.tensor([0, 0, 1, 2, 2])


def random_similarities(seed=0):
    """Any matrix S(x_i, c)."""
    return torch.randn(len(Y), C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.5


def gradient_of(spec, S):
    """∂L/∂S(x_i, c). With one unit vector per class as proxy and inner products, the samples are S themselves."""
    x = S.clone().requires_grad_()
    refs = References(torch.eye(C, dtype=torch.float64), torch.arange(C), None, 1)
    m = build(spec, classes=C, dim=C)
    (grad,) = torch.autograd.grad(m.objective(relate(x, Y, refs, Space.INNER)), x)
    return grad


def eq5(S, i, c):
    """SoftTriple, as it follows from Eq. 2: the paper's print has the sign and the sum wrong."""
    own = int(Y[i])
    z = [ALPHA * (S[i][k] - DELTA * (k == own)) for k in range(C)]
    p = math.exp(z[c]) / sum(map(math.exp, z))
    return ALPHA * (p - (c == own)) / len(Y)


def eq8(S, i, c):
    """MPA."""
    same = int(Y[i]) == c
    sign = -1 if same else 1
    classes = len(set(Y.tolist())) if same else C
    terms = {j: math.exp(sign * ALPHA * (S[j][c] + sign * DELTA)) for j in range(len(Y)) if (int(Y[j]) == c) == same}
    return sign * ALPHA / classes * terms[i] / (1 + sum(terms.values()))


def eq14(S, i, c):
    """MPA-DW, with S_DR = S(x_i, c″) − S(x_i, c) where the paper prints S(x_i, c) − S(x_i, c)."""
    own = int(Y[i])
    if c == own:
        return -ALPHA / len(Y) / (math.exp(-ALPHA * (DELTA - S[i][own])) + 1)
    others = sum(math.exp(ALPHA * (S[i][k] - S[i][c])) for k in range(C) if k != own)
    return ALPHA / len(Y) / (math.exp(-ALPHA * (S[i][c] + DELTA)) + others)


def eq18(S, i, c):
    """MPA-AP, by S′ (Eq. 15); ∂S′/∂S is −1 for the sample's own class."""
    own = int(Y[i])
    shifted = [DELTA - S[i][k] if k == own else S[i][k] + DELTA for k in range(C)]
    below = math.exp(-ALPHA * shifted[c]) + sum(math.exp(ALPHA * (s - shifted[c])) for s in shifted)
    return ALPHA / len(Y) / below * (-1 if c == own else 1)


@pytest.mark.parametrize(
    ("spec", "closed"),
    [
        (f"soft_triple(per_class=1, scale={ALPHA}, delta={DELTA})", eq5),
        (f"mpa(per_class=1, alpha={ALPHA}, delta={DELTA})", eq8),
        (f"mpa_dw(per_class=1, alpha={ALPHA}, delta={DELTA})", eq14),
        (f"mpa_ap(per_class=1, alpha={ALPHA}, delta={DELTA})", eq18),
    ],
    ids=["5", "8", "14", "18"],
)
def test_closed_forms(spec, closed):
    S = random_similarities()
    got = gradient_of(spec, S)
    for i in range(len(Y)):
        for c in range(C):
            assert float(got[i, c]) == pytest.approx(closed(S.tolist(), i, c), rel=1e-9), (i, c)
