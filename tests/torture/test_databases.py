"""PostgreSQL (a real server), Qdrant (local mode, a stand-in for a server), Lance under kills, restarts, attacks."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from torture.campaign import FULL, Attack, check_sentence

from nearkin.errors import NearkinError
from nearkin.search.index import Index, create_index, open_index

pytest.importorskip("psycopg")
pytest.importorskip("qdrant_client")

DIM, COUNT = 4, 30
PATHS = [f"{n}.png" for n in range(COUNT)]

WRITER = """
import sys
import numpy as np
from nearkin.search.index import open_index

with open_index(sys.argv[1]) as index:
    print("ready", flush=True)
    for number in range(int(sys.argv[2]), 10**9):
        names = [f"{n}.png" for n in range(30)]
        names = names if number % 2 else names[::-1]
        index.add(np.full((30, 4), number), paths=names, labels=[str(number)] * 30)
        print(number, flush=True)
"""


def writer(url: str, first: int) -> subprocess.Popen[str]:
    """A process that writes whole states of the same items, one after the other."""
    command = [sys.executable, "-c", WRITER, url, str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def state(index: Index) -> set[int]:
    """The states that the items are in; one, if no add was torn."""
    labels = index.label_names()
    ids, _, column = index.items()
    assert set(ids) <= set(PATHS)
    assert len(ids) == len(set(ids))
    for name, vector in zip(ids, index.embeddings(ids), strict=True):
        assert (vector == int(column[ids.index(name)] or 0)).all(), name
    return {int(label) for label in labels}


def stop(process: subprocess.Popen[str]) -> list[int]:
    """Kill a writer, and return the states that it said it had written."""
    process.send_signal(signal.SIGKILL)
    assert process.stdout is not None
    with process.stdout as pipe:
        said = pipe.read().splitlines()
    process.wait()
    return [int(line) for line in said if line.isdigit()]


QUICK_KILLS = {"postgresql": 1, "qdrant": 0, "lance": 0}  # each starts a process


@pytest.mark.parametrize("engine", [engine for engine, quick in QUICK_KILLS.items() if FULL or quick])
def test_killed_writers(database, tmp_path, attack: Attack, engine):
    """Kill a process that writes to PostgreSQL, to Qdrant's local mode or to Lance, again and again"""
    url = f"{database.url}&nearkin=killed" if engine == "postgresql" else f"{engine}://{tmp_path}/q/killed"
    whole = engine != "qdrant"  # one transaction per add; the local mode of Qdrant commits each item
    create_index(url, dim=DIM, space="inner").close()
    first = 1
    for rng in attack.cases(QUICK_KILLS[engine], 30):
        process = writer(url, first)
        time.sleep(rng.uniform(0, 0.4))
        told = stop(process)
        with open_index(url) as index:
            found = state(index)
            if whole:
                assert len(found) <= 1
                assert len(index) in (0, COUNT)
            for number in told[-1:]:
                assert found <= {number, number + 1}, "an add that returned was lost"
            index.add(np.full((COUNT, DIM), first), paths=PATHS, labels=[str(first)] * COUNT)
            assert state(index) == {first}
        first = max([first, *told]) + 2
        attack.saw("every add whole" if whole else "every item whole, none lost")


def test_two_writers(database, attack: Attack):
    """Let two writers change the same items in PostgreSQL in opposite orders, while a third connection searches"""
    url = f"{database.url}&nearkin=both"
    create_index(url, dim=DIM, space="inner").close()
    with open_index(url) as index, open_index(url) as one, open_index(url) as other:
        many = [f"{n}.png" for n in range(10 * COUNT)]  # so that two transactions overlap
        index.add(np.zeros((len(many), DIM)), paths=many, labels=["0"] * len(many))
        for _ in attack.cases(1, 12):
            done, wrong, seen = threading.Event(), list[NearkinError](), set[str | None]()
            work = (one, many, done, wrong), (other, many[::-1], done, wrong)
            threads = [threading.Thread(target=write_until, args=each) for each in work]
            for thread in threads:
                thread.start()
            end = time.monotonic() + (2.0 if FULL else 0.6)
            while time.monotonic() < end:
                (label,) = {hit.label for hit in index.search(np.ones(DIM), len(many))[0]}
                seen.add(label)
            done.set()
            for thread in threads:
                thread.join()
            assert not wrong
            assert len(index.label_names()) == 1
            attack.outcomes["searches that saw another whole state"] += len(seen)


def write_until(index: Index, paths: list[str], done: threading.Event, wrong: list[NearkinError]) -> None:
    """Write whole states until the end."""
    number = 0
    while not done.is_set():
        number += 1
        try:
            index.add(np.full((len(paths), DIM), number), paths=paths, labels=[str(number)] * len(paths))
        except NearkinError as error:
            wrong.append(error)


def test_restarted_server(database, attack: Attack):
    """Restart PostgreSQL at once, or cut its connections, while threads search and one adds"""
    url = f"{database.url}&nearkin=restarted"
    index = create_index(url, dim=DIM, space="inner")
    index.add(np.zeros((COUNT, DIM)), paths=PATHS, labels=["0"] * COUNT)
    for rng in attack.cases(2, 24):
        done, wrong = threading.Event(), list[object]()
        told = [min(state(index))]

        def search(done: threading.Event = done, wrong: list[object] = wrong) -> None:
            while not done.is_set():
                try:
                    hits = index.search(np.ones(DIM), COUNT)[0]
                    if len({hit.label for hit in hits}) != 1 or len(hits) != COUNT:
                        wrong.append(hits)
                except NearkinError as error:
                    check_sentence(str(error))

        def add(done: threading.Event = done, told: list[int] = told) -> None:
            while not done.is_set():
                number = told[-1] + 1
                try:
                    index.add(np.full((COUNT, DIM), number), paths=PATHS, labels=[str(number)] * COUNT)
                    told.append(number)
                except NearkinError as error:
                    check_sentence(str(error))

        threads = [threading.Thread(target=work) for work in (search, search, add)]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.05, 0.3))
        if attack.case % 4 == 1:
            database.control("restart", "-m", "immediate")
            attack.saw("restarted: every answer whole, an error in a sentence, then as before")
        else:
            text = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            with index._connection() as connection:
                connection.execute(text + " AND datname = current_database()")
            attack.saw("connections cut: every answer whole, an error in a sentence, then as before")
        time.sleep(0.2)
        done.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert index.search(np.ones(DIM), 1)[0]  # at once, over new connections
        (last,) = state(index)
        assert last in (told[-1], told[-1] + 1), "an add that returned was lost"
    index.close()


def test_wrong_password(database, attack: Attack):
    """Connect to PostgreSQL with a wrong password, as an unknown user, to an unknown database"""
    rules = database.folder / "pg_hba.conf"
    known = rules.read_text()
    with (made := create_index(f"{database.url}&nearkin=guarded", dim=DIM, space="inner"))._connection() as connection:
        connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO guarded")
    made.close()
    rules.write_text("local all guarded scram-sha-256\n" + known)
    try:
        database.control("reload")
        time.sleep(0.3)
        base = f"{database.url}&nearkin=guarded"
        open_index(base.replace("://postgres:@", "://guarded:right@")).close()
        for who in ("guarded:hunter2", "nobody_here:hunter2"):
            with pytest.raises(NearkinError, match="Cannot connect to PostgreSQL") as said:
                open_index(base.replace("://postgres:@", f"://{who}@"))
            check_sentence(str(said.value))
            assert "hunter2" not in str(said.value)
            attack.saw("refused in a sentence without the password")
        with pytest.raises(NearkinError, match="Cannot connect to PostgreSQL"):
            open_index(base.replace("/postgres?", "/not_there?"))
        attack.saw("refused in a sentence without the password")
    finally:
        rules.write_text(known)
        database.control("reload")


class StandIn(BaseHTTPRequestHandler):
    """Answers like a Qdrant server that is out of order."""

    answer: tuple[int | None, bytes] = (500, b"")

    def reply(self) -> None:
        code, body = self.answer
        if code is None:  # hang up in the middle
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{" + body)
            self.close_connection = True
            return
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = reply  # noqa: N815 (names of the library)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def stand_in() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


ANSWERS: list[tuple[int | None, bytes]] = [
    (401, b'{"status":{"error":"Must provide an API key or an Authorization bearer token"}}'),
    (403, b"Invalid API key or JWT"),
    (404, b""),
    (500, b'{"status":{"error":"Service internal error"}}'),
    (503, b"<html>gateway</html>"),
    (200, b"not json"),
    (200, b"{}"),
    (200, b'{"result": null, "status": "ok", "time": 0}'),
    (200, b"[" * 100_000),
    (None, b""),
]


def test_qdrant_out_of_order(stand_in, attack: Attack):
    """Open and create an index on a stand-in for Qdrant that refuses the key, hangs up, or answers nonsense"""
    url = f"qdrant://127.0.0.1:{stand_in.server_port}/things"
    for rng in attack.cases(len(ANSWERS), 4 * len(ANSWERS)):
        StandIn.answer = ANSWERS[attack.case % len(ANSWERS)]
        act = rng.choice([open_index, lambda url: create_index(url, dim=2, space="inner")])
        with pytest.raises(NearkinError) as said:
            act(url)
        check_sentence(str(said.value))
        attack.saw("refused in a sentence")


def cut_after(calls: list[int], act: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails after this many calls."""

    def limited(*arguments: Any, **more: Any) -> Any:
        if calls[0] == 0:
            raise ConnectionError("cut")
        calls[0] -= 1
        return act(*arguments, **more)

    return limited


def test_interrupted_creation_in_qdrant(tmp_path, attack: Attack, monkeypatch):
    """Kill the creation of an index in Qdrant between any two requests; create it again"""
    from qdrant_client import QdrantClient

    names = ("create_collection", "upsert", "create_payload_index")
    for _ in attack.cases(4, 4):
        url, calls = f"qdrant://{tmp_path}/{attack.case}/things", [attack.case]
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(QdrantClient, name, cut_after(calls, getattr(QdrantClient, name)))
            with pytest.raises(NearkinError, match="Qdrant failed: cut"):
                create_index(url, dim=2, space="inner")
        try:
            index = open_index(url)
        except NearkinError:
            index = create_index(url, dim=2, space="inner")
        with index:
            index.add(np.ones((1, 2)), paths=["a"], labels=["x"])
            assert index.search(np.ones(2), 1)[0][0].id == "a"
        attack.saw("created again, or complete")


pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL.")
