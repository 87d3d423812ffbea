"""The strategies, one paper a file; a new one is a file and a row of this table."""

from nearkin.method import Strategy
from nearkin.strategies.ccp import CCP
from nearkin.strategies.moco import MoCo
from nearkin.strategies.profs import PROFS
from nearkin.strategies.proxy import Proxy
from nearkin.strategies.proxy_isa import ProxyISA
from nearkin.strategies.proxy_updates import ProxyUpdates
from nearkin.strategies.vcpa import VCPA
from nearkin.strategies.xbm import XBM

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
