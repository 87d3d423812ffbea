"""The search page: a small web server for one index, with a JSON API. Everything it shows is local."""

from nearkin.serve.app import make_app
from nearkin.serve.guard import Limits
from nearkin.serve.server import serve

__all__ = ["Limits", "make_app", "serve"]
