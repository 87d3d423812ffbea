"""Files written whole or not at all: JSON and tensors; a lock for writers, the cache folder, and provenance.

Every record carries a digest of its content. What cannot be read as it was written is an error in one sentence.
"""

import errno
import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nearkin.errors import NearkinError, first_line

try:
    import fcntl
except ImportError:  # not a Unix: writers are not locked there
    fcntl = None  # type: ignore[assignment]

VERSION = "0.1.0"
"""The version of nearkin, as in pyproject.toml; `nearkin.__version__` is this."""

Json = dict[str, Any]
Needs = Mapping[str, type | UnionType]
"""The entries that a record must have, with their types."""

NOTHING_NEEDED: Needs = {}
LOCK = ".lock"


def cache_dir() -> Path:
    """Return the folder for caches: `$NEARKIN_CACHE`, else `~/.cache/nearkin`. It need not exist yet."""
    chosen = os.environ.get("NEARKIN_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nearkin"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` once it is on disk; an error leaves `path` unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; a library may replace the file by a private one
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            sync_file(file)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_file(file: IO[Any]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to disk, if the system supports it."""
    if os.name == "nt":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # as some network drives answer
            raise


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cannot_write(path: Path, error: OSError) -> NearkinError:
    """The error that says why a file or folder cannot be written, and what to do."""
    what_to_do = "make room, then run the command again" if error.errno in _FULL else "choose another place"
    return NearkinError(f"Cannot write {path} ({error.strerror or error}): {what_to_do}.")


def os_error(error: Exception) -> OSError:
    """The error of the system that another library's error tells of in its text."""
    text = str(error)
    named = re.search(r"os error (\d+)", text)
    number = int(named[1]) if named else next((n for n in _FULL if os.strerror(n) in text), None)
    return OSError(number, os.strerror(number)) if number else OSError(first_line(error))


@contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raise an error that names the process which holds it already."""
    path = folder / LOCK
    try:
        opened = path.open("ab+", buffering=0)
    except OSError as error:
        raise cannot_write(path, error) from None
    with opened as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = os.path.samestat(os.fstat(file.fileno()), path.stat())  # its last holder may have removed it
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                file.seek(0)
                holder = f"Process {pid.decode()}" if (pid := file.read().strip()) else "Another process"
                raise NearkinError(f"{holder} is writing to {folder}: wait until it is done.")
        file.truncate(0)
        with suppress(OSError):  # the number only helps others, and the disk may be full
            file.write(str(os.getpid()).encode())
        _remove_temporaries(folder)
        yield


def _remove_temporaries(folder: Path) -> None:
    """Remove what `atomic_file` left in a folder, or below it, when its process was killed."""
    for path in folder.rglob(".*.*"):
        if (pid := path.suffix[1:]).isdecimal() and not _is_running(int(pid)):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # it is somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Json) -> None:
    """Write a record with its digest as JSON, atomically."""
    write_text(path, json.dumps(seal(content), indent=2) + "\n")


def read_json(path: Path, *, needs: Needs = NOTHING_NEEDED) -> Json:
    """Read a record from a JSON file; check its digest and the entries it `needs`."""
    try:
        return _read_record(path.read_bytes(), needs)
    except FileNotFoundError:
        raise NearkinError(f"There is no {path}: is {path.parent} a run folder made by nearkin train?") from None
    except ValueError as error:
        raise NearkinError(f"{path} is damaged ({error}): restore it, or make it again.") from None


def append_line(path: Path, content: Json, *, sync: bool = True) -> None:
    """Append a record with its digest as a line; cut off an incomplete last line that a killed process left.

    Without `sync` a power failure may lose it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            known = file.read()
            rest = known[known.rfind(b"\n") + 1 :]
            whole = _is_record(rest)
            if not whole:
                file.truncate(len(known) - len(rest))
            file.write(b"\n" * whole + line_of(content).encode())
            if sync:
                sync_file(file)
    except OSError as error:
        raise cannot_write(path, error) from None


def sync_path(path: Path) -> None:
    """Flush a file to disk to which lines were appended."""
    try:
        with path.open("ab") as file:
            sync_file(file)
    except OSError as error:
        raise cannot_write(path, error) from None


def line_of(content: Json) -> str:
    """A record with its digest as one line of JSON."""
    return json.dumps(seal(content)) + "\n"


def read_lines(path: Path, *, needs: Needs, otherwise: str) -> list[Json]:
    """Read a file of records, one per line; an incomplete last line, left by a killed process, is ignored.

    `otherwise` says what to do about a damaged line if the file cannot be restored.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate([*lines, rest] if _is_record(rest) else lines, start=1):
        try:
            found.append(_read_record(line, needs))
        except ValueError as error:
            raise NearkinError(f"{path} is damaged in line {number} ({error}): restore it, or {otherwise}.") from None
    return found


def _read_record(text: bytes, needs: Needs) -> Json:
    """Parse a record; raise ValueError if it is not what was written."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a record")
    content = unseal(content)
    for name, kind in needs.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"its entry {name!r} is missing or of the wrong type")
    return content


def _is_record(text: bytes) -> bool:
    try:
        return bool(_read_record(text, NOTHING_NEEDED))
    except ValueError:
        return False


def seal(content: Json) -> Json:
    """Return a record with a digest of its content, which `unseal` compares."""
    as_read = json.loads(json.dumps(content))  # names are text, and tuples are lists
    return content | {"sha256": hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()}


def unseal(content: Json) -> Json:
    """Return a record without its digest; raise ValueError if they do not match. The first version wrote no digest."""
    bare = {name: value for name, value in content.items() if name != "sha256"}
    if "sha256" in content and seal(bare)["sha256"] != content["sha256"]:
        raise ValueError("its content is not what was written")
    return bare


LONG_LIST = 2**16
"""Entries from which a list in the record of a safetensors file is a tensor: its header has at most 100 MB."""

IN_RECORD = "about."


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Json | None = None) -> None:
    """Write tensors and a JSON record about them, such as the names of classes, as one safetensors file, atomically."""
    content = {k: t.detach().cpu().contiguous() for k, t in tensors.items()}
    record = dict(about or {})
    for name in [n for n, value in record.items() if isinstance(value, list | tuple) and len(value) >= LONG_LIST]:
        listed = bytearray(json.dumps(record.pop(name)).encode())
        content[IN_RECORD + name] = torch.frombuffer(listed, dtype=torch.uint8)
    text = json.dumps(record)
    with atomic_file(path) as temporary:
        try:
            save_file(content, temporary, {"about": text, "sha256": _digest(content, text)})
        except SafetensorError as error:
            raise os_error(error) from None
        _sort_metadata(temporary)


def _sort_metadata(path: Path) -> None:
    """Put the header of a safetensors file into one order, so that the same content is the same bytes."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # both writers leave out what JSON allows to leave out
            file.seek(8)
            file.write(text.ljust(size))


def _digest(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: Path, *, needs: Needs = NOTHING_NEEDED) -> tuple[dict[str, Tensor], Json]:
    """Read the tensors and the record of a file from `write_tensors`; check its digest and what the record `needs`."""
    tensors, about, check = map_tensors(path, needs=needs)
    check()
    return tensors, about


def map_tensors(path: Path, *, needs: Needs = NOTHING_NEEDED) -> tuple[dict[str, Tensor], Json, Callable[[], None]]:
    """As `read_tensors`, but only the record is read and checked; the function checks the digest of the tensors.

    The tensors are mapped: the system reads from the file what is used. No file stays open.
    """
    advice = "restore it, or train again"
    try:
        with _opened(path) as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = file.metadata() or {}
        text = metadata.get("about", "{}")
        about = _read_record(text.encode(), needs)
    except FileNotFoundError:
        raise NearkinError(f"There is no {path}.") from None
    except (SafetensorError, ValueError) as error:
        raise NearkinError(f"{path} is damaged ({error}): {advice}.") from None

    def check() -> None:
        if "sha256" in metadata and metadata["sha256"] != _digest(tensors, text):
            raise NearkinError(f"{path} is damaged (its content has changed since it was written): {advice}.")

    if listed := [name for name in tensors if name.startswith(IN_RECORD)]:
        check()  # it may not be JSON any more
        about |= {name.removeprefix(IN_RECORD): json.loads(tensors[name].numpy().tobytes()) for name in listed}
    return {name: t for name, t in tensors.items() if name not in listed}, about, check


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Its library takes only names in UTF-8; others are opened through the system's own."""
    with suppress(UnicodeEncodeError):
        str(path).encode()
        with safe_open(path, framework="pt") as file:
            yield file
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with safe_open(f"/proc/self/fd/{handle}", framework="pt") as file:
            yield file
    finally:
        os.close(handle)


def content_digest(path: Path) -> str:
    """Return the digest of a file's tensors and record, from its header; files without one are hashed.

    The bytes of the file are no substitute: the order of entries in its header varies.
    """
    try:
        with _opened(path) as file:
            known: str | None = (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise NearkinError(f"{path} is damaged ({error}): restore it, or train again.") from None
    if known is not None:
        return known
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance() -> Json:
    """Return where a result comes from: versions, commit, hardware, date."""
    packages = ("nearkin", "torch", "timm", "numpy", "scikit-learn", "safetensors")
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "commit": _commit(),
        "hardware": _hardware(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # nearkin itself: it runs from a source tree
        return VERSION if package == "nearkin" else "absent"


def _commit() -> str:
    """Return the commit of this source tree, or `$NEARKIN_COMMIT` if the tree was copied without its history."""
    if commit := os.environ.get("NEARKIN_COMMIT"):
        return commit
    here = Path(__file__).parent
    try:
        tracked = _git(here, "ls-files", Path(__file__).name)
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (head + ("+changes" if changed else "")) if tracked else "unknown"


def short_commit(commit: str) -> str:
    """Abbreviate a commit to 12 digits; keep the mark for uncommitted changes."""
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
