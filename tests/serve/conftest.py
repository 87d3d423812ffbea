"""A small index of real letters with a model behind it, and a live server on the loopback."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import nearkin as nk
from nearkin.search.index import Index, create_index
from nearkin.training.model import Model

collect_ignore_glob = [] if find_spec("fastapi") else ["test_*.py"]  # the extra serve is not installed

DATA = "glyphs(classes=48, samples=6)"
ODD = "<img src=x onerror=\"document.title='broken in'\"> & 'co'"  # a label that would be an attack if it were HTML


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run folder after two epochs."""
    folder = tmp_path_factory.mktemp("serve") / "run"
    nk.train(data=DATA, epochs=2, batch=24, dim=16, device="cpu", out=folder)
    return folder


@pytest.fixture(scope="session")
def model(run) -> Model:
    return nk.load(run, device="cpu")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> list[tuple[Path, str]]:
    """Files and their labels: letters as small PNG files, and one class of photographs."""
    top = tmp_path_factory.mktemp("pictures")
    letters = nk.load_dataset(DATA).test
    found = []
    for row, label in enumerate(letters.labels.tolist()):
        path = top / f"class {label} ü" / f"{row}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(letters.sources[row, 0].numpy()).save(path)
        found.append((path, ODD if label == 0 else letters.names[label]))
    rng = np.random.default_rng(0)
    for number in range(3):
        path = top / f"photo{number}.jpg"
        noise = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((600, 400)).save(path)
        found.append((path, "photograph"))
    return found


@pytest.fixture(scope="session")
def index(tmp_path_factory, run, model, pictures) -> Index:
    paths, labels = [str(path) for path, _ in pictures], [label for _, label in pictures]
    made = create_index(tmp_path_factory.mktemp("index") / "letters", dim=16, space="cosine", run=run)
    made.add(model.embed(paths).numpy(), paths=paths, labels=labels)
    x = made.embeddings()
    made.remember(threshold={"similarity": float(np.median(np.sort(x @ x.T)[:, -8])), "precision": 0.8})
    return made


@pytest.fixture(scope="session")
def shown(index) -> Callable[[str | Path], str]:
    """Paths and ids as answers show them: relative to the index's folder."""
    return lambda path: os.path.relpath(path, index.folder)


@contextmanager
def running(app: object) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    from nearkin.serve.server import listen, make_server

    with listen("127.0.0.1", 0) as listener:
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def live() -> Iterator[Callable[..., str]]:
    """Start a server for an application and return its address; it stops with the test."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(running(app))


@pytest.fixture(scope="session")
def server(index, model) -> Iterator[str]:
    """The address of a server shared by many tests."""
    from nearkin.serve import make_app

    with running(make_app(index, model, name="letters")) as address:
        yield address
