"""Where nearkin keeps what it can make again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder for caches: `$NEARKIN_CACHE`, else `~/.cache/nearkin`. It need not exist yet."""
    chosen = os.environ.get("NEARKIN_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nearkin"
