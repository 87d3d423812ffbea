"""The losses, one paper a file; a new one is a file and a row of this table."""

from nearkin.losses.angular import Angular
from nearkin.losses.arcface import ArcFace
from nearkin.losses.circle import Circle
from nearkin.losses.contrastive import Contrastive
from nearkin.losses.cosface import CosFace
from nearkin.losses.fast_ap import FastAP
from nearkin.losses.lifted import Lifted
from nearkin.losses.margin import Margin
from nearkin.losses.mpa import MPA
from nearkin.losses.mpa_ap import MPAAP
from nearkin.losses.mpa_dw import MPADW
from nearkin.losses.multi_similarity import MultiSimilarity
from nearkin.losses.n_pair import NPair
from nearkin.losses.norm_softmax import NormSoftmax
from nearkin.losses.proxy_anchor import ProxyAnchor
from nearkin.losses.proxy_gml import ProxyGML
from nearkin.losses.proxy_nca import ProxyNCA
from nearkin.losses.proxy_nca_pp import ProxyNCAPP
from nearkin.losses.ranked_list import RankedList
from nearkin.losses.soft_triple import SoftTriple
from nearkin.losses.supcon import SupCon
from nearkin.losses.triplet import Triplet
from nearkin.method import Loss

LOSSES: dict[str, type[Loss]] = {
    "angular": Angular,
    "arcface": ArcFace,
    "circle": Circle,
    "contrastive": Contrastive,
    "cosface": CosFace,
    "fast_ap": FastAP,
    "lifted": Lifted,
    "margin": Margin,
    "mpa": MPA,
    "mpa_ap": MPAAP,
    "mpa_dw": MPADW,
    "multi_similarity": MultiSimilarity,
    "n_pair": NPair,
    "norm_softmax": NormSoftmax,
    "proxy_anchor": ProxyAnchor,
    "proxy_gml": ProxyGML,
    "proxy_nca": ProxyNCA,
    "proxy_nca_pp": ProxyNCAPP,
    "ranked_list": RankedList,
    "soft_triple": SoftTriple,
    "supcon": SupCon,
    "triplet": Triplet,
}
