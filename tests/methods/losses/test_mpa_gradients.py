"""The gradients of the MPA paper in closed form (Eq. 5, 8, 14, 18, the misprints corrected) against autograd."""

import math

import pytest
import torch
from contract.cases import build

from nearkin.methods.relation import References, relate
from nearkin.space import Space

C, ALPHA, DELTA = 5, 4.0, 0.1
Y = torch.tensor([0, 0, 1, 2, 2])


def similarities(seed=0):
    """Any matrix S(x_i, c)."""
    return torch.randn(len(Y), C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.5


def gradient(spec, S):
    """∂L/∂S(x_i, c). With one unit vector a class as proxies and inner products, the samples are S themselves."""
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
    kin = int(Y[i]) == c
    sign = -1 if kin else 1
    classes = len(set(Y.tolist())) if kin else C
    terms = {j: math.exp(sign * ALPHA * (S[j][c] + sign * DELTA)) for j in range(len(Y)) if (int(Y[j]) == c) == kin}
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
    S = similarities()
    got = gradient(spec, S)
    for i in range(len(Y)):
        for c in range(C):
            assert float(got[i, c]) == pytest.approx(closed(S.tolist(), i, c), rel=1e-9), (i, c)
