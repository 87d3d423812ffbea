"""Where nearkin keeps what it can make again."""
# MERGED: A run folder: everything about one training, written so that a kill at any moment leaves a run that can go on.

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nearkin.errors import NearkinError


def cache_dir() -> Path:
    """The folder for caches: `$NEARKIN_CACHE`, else `~/.cache/nearkin`. It need not exist yet."""
    chosen = os.environ.get("NEARKIN_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nearkin"


try:
    import fcntl
except ImportError:  # not a Unix: nothing keeps two writers apart there
    fcntl = None  # type: ignore[assignment]

Json = dict[str, Any]
LOCK = ".lock"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when all is written and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Be the one process that writes; another one at the same time is a sentence."""
    with (folder / LOCK).open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NearkinError(f"Another process is writing to {folder}: wait until it is done.") from None
        yield


def write_json(path: Path, content: Json) -> None:
    """Write a JSON file whole."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Json:
    """Read a JSON file, or say what is wrong with it."""
    try:
        content: Json = json.loads(path.read_text())
    except FileNotFoundError:
        raise NearkinError(f"There is no {path}: is {path.parent} a run folder made by nearkin train?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NearkinError(f"{path} is damaged ({error}): restore it, or train anew.") from None
    if not isinstance(content, dict):
        raise NearkinError(f"{path} is damaged (it holds no record): restore it, or train anew.")
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Json | None = None) -> None:
    """Write tensors and a small JSON record about them as one safetensors file, whole."""
    held = {k: t.detach().cpu().contiguous() for k, t in tensors.items()}
    text = json.dumps(about or {})
    with whole_file(path) as temporary:
        save_file(held, temporary, {"about": text, "sha256": _digest(held, text)})


def _digest(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Json]:
    """Read such a file; one that is truncated or tampered with is a sentence, not a stack trace."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = file.metadata() or {}
        text = metadata.get("about", "{}")
        about: Json = json.loads(text)
        if metadata.get("sha256", known := _digest(tensors, text)) != known:
            raise ValueError("its content is not what was written")
    except FileNotFoundError:
        raise NearkinError(f"There is no {path}.") from None
    except (SafetensorError, json.JSONDecodeError, ValueError) as error:
        raise NearkinError(f"{path} is damaged ({error}): restore it, or train anew.") from None
    return tensors, about


def content_digest(path: Path) -> str:
    """Digits that stand for the tensors and the record of such a file, as its header gives them; reading checks them.

    The bytes of the file would not do: the order in its header is not always the same.
    """
    try:
        with safe_open(path, framework="pt") as file:
            known: str | None = (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise NearkinError(f"{path} is damaged ({error}): restore it, or train anew.") from None
    if known is not None:
        return known
    with path.open("rb") as bytes_of_it:
        return hashlib.file_digest(bytes_of_it, "sha256").hexdigest()


def provenance() -> Json:
    """Where a result comes from: versions, commit, hardware, date."""
    packages = ("nearkin", "torch", "timm", "numpy", "scikit-learn", "safetensors")
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "commit": _commit(),
        "hardware": _hardware(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        from nearkin import __version__

        return __version__ if package == "nearkin" else "absent"


def _commit() -> str:
    """The commit of the source tree this runs from; NEARKIN_COMMIT where the tree travels without its history."""
    if given := os.environ.get("NEARKIN_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        tracked = _git(here, "ls-files", Path(__file__).name)
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (head + ("+changes" if changed else "")) if tracked else "unknown"


def short_commit(commit: str) -> str:
    """Twelve letters of a commit, with what says that files had changed since."""
    head, plus, changes = commit.partition("+")
    return head[:12] + plus + changes


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _hardware() -> str:
    cpu = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        return f"CPU ({cpu})"
    return f"{torch.cuda.get_device_name()} ({cpu})"
