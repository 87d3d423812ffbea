"""FastAP. Cakir, He, Xia, Kulis, Sclaroff: Deep Metric Learning to Rank. CVPR 2019.

Average precision of each sample as a query, made differentiable by soft histograms of its distances.

    L = mean_i (1 − AP_i),   AP_i = 1/V_i Σ_{l=0…L} H⁺_il h⁺_il / H_il                                            (1)
    h⁺_il = Σ_{j∈P_i} δ_l(d²_ij),   h_il = Σ_{j∈P_i∪N_i} δ_l(d²_ij),   δ_l(z) = (1 − |z − lΔ|/Δ)_+,   Δ = 4/L     (2)
    H⁺_il = Σ_{q≤l} h⁺_iq,   H_il = Σ_{q≤l} h_iq                                                                  (3)

Symbols
    P_i, N_i references of the class of sample i and of other classes; d² squared Euclidean distance, at most 4 (larger
    values are clamped); L bins (`bins`), that is L + 1 centres from 0 to 4; V_i = |P_i|;
    a term with H_il = 0 is 0; the mean is over samples with a positive, or 0 if there is none.
    Weights ω_ij multiply the vote δ_l(d²_ij) of a pair in every histogram, and V_i = Σ_{j∈P_i} ω_ij; a row where
    that is 0 is left out, as is one without a positive.

Settings
    L = 10, on the unit sphere. The authors' code: batch 256, 512-d, Adam 1e-5, head 10 times that.

Departures
    None in the value. The authors' code computes the gradient by hand, and for a batch of B it is B/2 times that of
    Eq. 1, which is the one here: under SGD their learning rate corresponds to B/2 times that rate. Adam cancels it.
    The cumulative histograms are summed directly, as Σ_j (l + 1 − d²_ij/Δ) clamped to 0 … 1, and the histograms
    are their differences: the same numbers with half the work.

Relations
    The only loss here that is a ranking metric (compare MAP); `ranked_list` weights what is ranked wrong.
"""

import torch
from torch import Tensor

from nearkin.errors import NearkinError
from nearkin.methods.base import Loss
from nearkin.methods.relation import Relation, mean_terms, squared_distance, weighted
from nearkin.space import full_precision


def cumulative(z: Tensor, counted: Tensor, bins: int) -> Tensor:
    """H [B, M, L + 1]: the weight of pairs up to each centre; z is the squared distance in bins, counted [B, M, R]."""
    l = torch.arange(bins + 1, device=z.device)[:, None]  # noqa: E741
    votes = (l + 1 - z[:, None]).clamp(0, 1)  # Eq. 2, summed as in Eq. 3
    with full_precision(z):
        return counted @ votes.mT


def fast_ap(r: Relation, *, bins: int, weights: Tensor | None = None) -> Tensor:
    """Eq. 1."""
    z = squared_distance(r).clamp_max(4) * (bins / 4)
    counted = weighted(
        torch.stack([r.pos, r.pos | r.neg], dim=1).to(z.dtype), None if weights is None else weights[:, None]
    )
    H_pos, H = cumulative(z, counted, bins).unbind(1)  # Eq. 3
    h_pos = H_pos.diff(dim=1, prepend=torch.zeros_like(H_pos[:, :1]))
    V = H_pos[:, -1]
    AP = (H_pos * h_pos / torch.where(H > 0, H, 1)).sum(1) / torch.where(V > 0, V, 1)
    return mean_terms(r, 1 - AP, V > 0)  # Eq. 1


class FastAP(Loss):
    """FastAP with `bins` bins of squared distance."""

    images_per_class = 4

    def __init__(self, *, bins: int = 10) -> None:
        super().__init__()
        if bins < 1:
            raise NearkinError(f"fast_ap needs at least one bin, not {bins}.")
        self.bins = bins

    def objective(self, r: Relation, weights: Tensor | None = None) -> Tensor:
        return fast_ap(r, bins=self.bins, weights=weights)
