"""Strategies, one file per paper. To add one, write the file and add a row to STRATEGIES."""

from nearkin.methods.base import Strategy
from nearkin.methods.strategies.ccp import CCP
from nearkin.methods.strategies.moco import MoCo
from nearkin.methods.strategies.profs import PROFS
from nearkin.methods.strategies.proxy import Proxy
from nearkin.methods.strategies.proxy_isa import ProxyISA
from nearkin.methods.strategies.proxy_updates import ProxyUpdates
from nearkin.methods.strategies.vcpa import VCPA
from nearkin.methods.strategies.xbm import XBM

STRATEGIES: dict[str, type[Strategy]] = {
    "ccp": CCP,
    "moco": MoCo,
    "profs": PROFS,
    "proxy": Proxy,
    "proxy_isa": ProxyISA,
    "proxy_updates": ProxyUpdates,
    "vcpa": VCPA,
    "xbm": XBM,
}
