"""Losses, one file per paper. To add one, write the file and add a row to LOSSES."""

from nearkin.methods.base import Loss
from nearkin.methods.losses.angular import Angular
from nearkin.methods.losses.arcface import ArcFace
from nearkin.methods.losses.circle import Circle
from nearkin.methods.losses.contrastive import Contrastive
from nearkin.methods.losses.cosface import CosFace
from nearkin.methods.losses.fast_ap import FastAP
from nearkin.methods.losses.lifted import Lifted
from nearkin.methods.losses.margin import Margin
from nearkin.methods.losses.mpa import MPA, MPAAP, MPADW
from nearkin.methods.losses.multi_similarity import MultiSimilarity
from nearkin.methods.losses.n_pair import NPair
from nearkin.methods.losses.nca import NCA
from nearkin.methods.losses.norm_softmax import NormSoftmax
from nearkin.methods.losses.nt_xent import NTXent
from nearkin.methods.losses.proxy_anchor import ProxyAnchor
from nearkin.methods.losses.proxy_gml import ProxyGML
from nearkin.methods.losses.proxy_nca import ProxyNCA
from nearkin.methods.losses.proxy_nca_pp import ProxyNCAPP
from nearkin.methods.losses.ranked_list import RankedList
from nearkin.methods.losses.soft_triple import SoftTriple
from nearkin.methods.losses.supcon import SupCon
from nearkin.methods.losses.triplet import Triplet

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
    "nca": NCA,
    "norm_softmax": NormSoftmax,
    "nt_xent": NTXent,
    "proxy_anchor": ProxyAnchor,
    "proxy_gml": ProxyGML,
    "proxy_nca": ProxyNCA,
    "proxy_nca_pp": ProxyNCAPP,
    "ranked_list": RankedList,
    "soft_triple": SoftTriple,
    "supcon": SupCon,
    "triplet": Triplet,
}
