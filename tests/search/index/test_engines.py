"""The engine table; PostgreSQL (a real server), Qdrant (local mode) and Lance against the index in a folder."""

import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from made import make_images, make_run

from nearkin.cli.search import index as index_command
from nearkin.data.image_files import list_images
from nearkin.errors import NearkinError
from nearkin.search.build import index_images
from nearkin.search.index import ENGINES, KINDS, Index, create_index, open_index
from nearkin.search.index.base import NoIndex
from nearkin.search.index.engines import engine_of, store_addresses, without_password
from nearkin.search.query import model_of, search_images
from nearkin.space import Space

pytest.importorskip("psycopg")
pytest.importorskip("qdrant_client")
pytest.importorskip("lance")

DIM = 12
COUNT = 45


@pytest.fixture(params=["postgresql", "qdrant", "lance"])
def place(request, tmp_path):
    """A function that returns the URL of an index by its name."""
    if request.param == "qdrant":
        return lambda name: f"qdrant://{tmp_path}/qdrant/{name}"
    if request.param == "lance":
        return lambda name: f"lance://{tmp_path}/lance/{name}"
    tag = f"t{abs(hash(request.node.name)) % 10**9}"
    url = request.getfixturevalue("database").url
    return lambda name: f"{url}&nearkin={tag}_{name}"


def made(count: int = COUNT, seed: int = 0):
    rng = np.random.default_rng(seed)
    label = rng.integers(6, size=count)
    x = np.random.default_rng(9).normal(size=(6, DIM))[label] + 0.6 * rng.normal(size=(count, DIM))
    labels = [None if n % 9 == 0 else f"c{c}" for n, c in enumerate(label)]
    return (0.3 * x).astype(np.float32), [f"{seed}/ü '{n}\".png" for n in range(count)], labels


def both(place, tmp_path, *, space="cosine", kind="exact", count=COUNT):
    """An index in the store and one in a folder, with the same items."""
    x, paths, labels = made(count)
    made_here = []
    for where in (place("one"), tmp_path / "folder"):
        index = create_index(where, dim=DIM, space=space, kind=kind if where == place("one") else "exact")
        index.add(x, paths=paths, labels=labels, stamps=["s"] * count)
        made_here.append(index)
    return made_here


def same(found, expected) -> None:
    assert [[hit[:3] for hit in hits] for hits in found] == [[hit[:3] for hit in hits] for hits in expected]
    sides = [[[hit.similarity for hit in hits] for hits in side] for side in (found, expected)]
    np.testing.assert_allclose(*sides, atol=2e-6)


@pytest.mark.parametrize("space", Space)
def test_store_and_folder_find_the_same(place, tmp_path, space):
    store, folder = both(place, tmp_path, space=space)
    queries = made(8, seed=1)[0]
    out = folder.items().ids[::4]
    filters = [{}, {"labels": ["c1", "c4", "?"]}, {"labels": []}, {"exclude": out}, {"labels": ["c2"], "exclude": out}]
    for given in filters:
        same(store.search(queries, 9, **given), folder.search(queries, 9, **given))
    same(store.search(queries, 500), folder.search(queries, 500))
    store.close()


def test_items_are_added_removed_and_replaced(place, tmp_path):
    store, folder = both(place, tmp_path)
    x, paths, labels = made(5, seed=2)
    ids = ["new", *folder.items().ids[:4]]
    for index in (store, folder):
        index.add(x, paths=[f"moved{n}" for n in range(5)], labels=["z", *labels[1:]], ids=ids)
        assert index.remove([paths[0], *made()[1][20:30], made()[1][20]]) == 10
        index.remember(threshold={"similarity": 0.25})
    assert len(store) == len(folder) == COUNT + 1 - 10
    store.close()
    store = open_index(place("one"))
    assert store.meta["threshold"] == {"similarity": 0.25}
    assert sorted(zip(*store.items(), strict=True)) == sorted(zip(*folder.items(), strict=True))
    assert store.stamps() == folder.stamps()
    assert store.label_names() == folder.label_names()
    assert store.item("new") == folder.item("new")
    some = [*made()[1][30:40], "new"]
    np.testing.assert_allclose(store.embeddings(some), folder.embeddings(some), atol=1e-7)
    np.testing.assert_allclose(store.embeddings(), store.embeddings(store.items().ids))
    same(store.search(x, 6), folder.search(x, 6))
    with pytest.raises(NearkinError, match="no item 'gone'"):
        store.item("gone")
    store.close()


HOSTILE = (
    "'; DROP TABLE items; --", "%s %(id)s {}", '"quoted"', "\\xe9 \\x5c", "a\tb\nc", "", " ", "\u202eetalp", "😀" * 40,
    "caf\udce9", "\ud800", "null", "NaN", "../../etc/passwd", "<script>alert(1)</script>", "x" * 2000,
)  # fmt: skip


def test_hostile_and_undecodable_names_come_back_exactly(place, tmp_path):
    x = made(len(HOSTILE))[0]
    hits = []
    for where in (place("one"), tmp_path / "folder"):
        index = create_index(where, dim=DIM, space="cosine", run=None)
        index.add(x, paths=HOSTILE, labels=HOSTILE, stamps=["1-2"] * len(x))
        index.remember(run="/runs/caf\udce9", threshold={"similarity": 0.5, "on": "folder:/caf\udce9"})
        index.close()
        with open_index(where) as again:
            assert sorted(zip(*again.items(), strict=True)) == sorted(zip(HOSTILE, HOSTILE, HOSTILE, strict=True))
            assert again.stamps() == {name: (name, "1-2") for name in HOSTILE}
            assert again.label_names() == sorted(HOSTILE)
            assert (str(again.run), again.meta["threshold"]["on"]) == ("/runs/caf\udce9", "folder:/caf\udce9")
            for row, name in enumerate(HOSTILE):
                assert again.item(name).label == name
                np.testing.assert_allclose(again.embeddings([name])[0], again.embeddings(HOSTILE)[row], atol=1e-7)
                assert [hit.id for hit in again.search(x[row], 3, labels=[name])[0]] == [name]
            hits.append(again.search(x, 4, exclude=HOSTILE[::3]))
            assert again.remove(HOSTILE[:5]) == 5
            assert len(again) == len(HOSTILE) - 5
    same(*hits)


def test_two_processes_keep_each_others_notes(place, tmp_path):
    for where in (tmp_path / "folder", place("one")):
        index = create_index(where, dim=DIM, space="cosine")
        if not isinstance(where, Path) and where.startswith("qdrant"):
            index.close()  # one process at a time
            with open_index(where) as one:
                one.meta = {**one.meta, "threshold": "stale"}
                one.remember(recall=None)
                assert one.meta["threshold"] is None
            continue
        with open_index(where) as other:
            index.remember(threshold={"similarity": 0.5})
            other.remember(effort=128)
            assert other.meta["threshold"] == {"similarity": 0.5}
        index.close()
        with open_index(where) as again:
            assert (again.meta["threshold"], again.meta["effort"]) == ({"similarity": 0.5}, 128)


def approximate(url):
    return next(kind for kind in engine_of(url).kinds if kind != "exact")


def test_approximate_store_measures_its_recall(place, tmp_path):
    kind = approximate(place("one"))
    store, folder = both(place, tmp_path, kind=kind, count=120 if kind == "hnsw" else 1200)
    store.build()
    assert store.meta["recall"]["value"] >= 0.95
    queries = made(30, seed=1)[0]
    for given in ({}, {"labels": ["c1"]}):
        found, truth = store.search(queries, 10, **given), folder.search(queries, 10, **given)
        share = np.mean([len({h.id for h in a} & {h.id for h in b}) / 10 for a, b in zip(found, truth, strict=True)])
        assert share >= 0.95
        same(store.search(queries, 10, exact=True, **given), truth)
    store.close()
    again = open_index(place("one"))
    assert again.meta["recall"] == store.meta["recall"]
    assert (again.kind, again.dim, again.space) == (kind, DIM, "cosine")
    again.close()


def test_many_threads_can_search(place, tmp_path):
    store, folder = both(place, tmp_path)
    queries = made(12, seed=1)[0]
    truth = folder.search(queries, 5)
    found: dict[int, object] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: store.search(queries[n], 5)})) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([found[n][0] for n in range(12)], truth)
    store.close()


def test_store_errors_are_sentences(place):
    with pytest.raises(NoIndex, match="no index"):
        open_index(place("none"))
    (other,) = {*KINDS} - {*engine_of(place("x")).kinds}
    with pytest.raises(NearkinError, match=f"cannot be {other}: choose exact or {approximate(place('x'))}"):
        create_index(place("x"), dim=DIM, space="cosine", kind=other)
    create_index(place("one"), dim=DIM, space="cosine").close()
    with pytest.raises(NearkinError, match="already"):
        create_index(place("one"), dim=DIM, space="cosine")


def test_folder_can_point_to_a_store(place, tmp_path):
    where = tmp_path / "pointer"
    with create_index(where, dim=DIM, space="cosine", store=place("one")) as index:
        index.add(np.ones((1, DIM)), paths=["a"], labels=["x"])
    with open_index(where) as index:
        assert index.items().ids == ["a"]
    open_index(where, store=place("one")).close()
    with pytest.raises(NearkinError, match="leave --store out"):
        open_index(where, store=place("two"))
    with pytest.raises(NearkinError, match="already"):
        create_index(where, dim=DIM, space="cosine", store=place("two"))
    create_index(tmp_path / "own", dim=DIM, space="cosine")
    with pytest.raises(NearkinError, match="leave --store out"):
        open_index(tmp_path / "own", store=place("two"))


def test_new_folder_can_point_to_an_existing_store(place, tmp_path):
    create_index(place("one"), dim=DIM, space="ball").close()
    with pytest.raises(NoIndex):
        open_index(tmp_path / "new", store=place("none"))
    assert not (tmp_path / "new").exists()
    open_index(tmp_path / "new", store=place("one")).close()
    with open_index(tmp_path / "new") as index:
        assert index.space == "ball"


def test_copy_into_a_store_and_back(place, tmp_path):
    x, paths, labels = made()
    folder = create_index(tmp_path / "folder", dim=DIM, space="euclidean")
    folder.add(x, paths=paths, labels=labels, ids=[f"id {n}" for n in range(COUNT)], stamps=["s"] * COUNT)
    folder.remember(threshold={"similarity": 0.5})
    kind = approximate(place("one"))
    with folder.save(place("one"), kind=kind) as store:
        assert store.kind == kind
        back = store.save(tmp_path / "back", kind="exact")
    assert sorted(zip(*back.items(), strict=True)) == sorted(zip(*folder.items(), strict=True))
    assert back.stamps() == folder.stamps()
    assert back.meta == folder.meta
    same(back.search(x[:5], 6), folder.search(x[:5], 6))


def test_images_are_indexed_in_a_store_as_in_a_folder(place, tmp_path):
    run, pictures = (
        make_run(tmp_path / "run", seed=7),
        tmp_path / "pictures",
    )  # of this network no two similarities are equal
    make_images(pictures)
    images = list_images([pictures])
    found = []
    for where, store in ((tmp_path / "pointer", place("one")), (tmp_path / "folder", None)):
        assert index_images(run, images, where, store=store).filled.added == 12
        assert index_images(run, images, where, store=store).filled.kept == 12
        with open_index(where) as index:
            answers, _ = search_images(index, model_of(index), images, k=5)
        found.append([answer.hits for answer in answers])
    same(*found)
    with pytest.raises(NearkinError, match="another model"):
        index_images(make_run(tmp_path / "other", seed=1), images, place("one"))
    with pytest.raises(NearkinError, match="is exact, not"):
        index_images(run, images, place("one"), kind=approximate(place("one")))
    open_index(place("one")).close()  # no connection was left open


def test_password_is_not_stored():
    assert without_password("postgresql://me:secret@host:5432/db?x=1") == "postgresql://me@host:5432/db?x=1"
    assert without_password("postgresql:///db?password=secret&host=/tmp") == "postgresql:///db?host=/tmp"
    assert without_password("postgresql:///db?host=/tmp&password=secret") == "postgresql:///db?host=/tmp"
    assert without_password("postgresql://me:s@e:cret@host/db") == "postgresql://me@host/db"
    assert without_password("postgresql://host:5432/db?user=a@b") == "postgresql://host:5432/db?user=a@b"
    assert without_password("postgresql:///db?sslpassword=secret") == "postgresql:///db"
    assert without_password("qdrant://host:6333/things") == "qdrant://host:6333/things"


# PostgreSQL alone.


def test_graph_is_used_unless_the_search_is_exact(database, tmp_path):
    url = f"{database.url}&nearkin=plans"
    x, paths, labels = made(3000)
    labels[:2] = ["rare", "rare"]
    indexes = [
        create_index(where, dim=DIM, space="ball", kind=kind)
        for where, kind in ((url, "hnsw"), (tmp_path / "f", "exact"))
    ]
    for each in indexes:
        each.add(x, paths=paths, labels=labels)
        each.build()
    index, folder = indexes
    text = "SELECT indexrelname, idx_scan FROM pg_stat_user_indexes WHERE relname = 'plans_items'"

    def scans() -> dict[str, int]:
        index.close()  # a connection reports its statistics when it closes
        with index._connection() as connection:
            connection.execute("SELECT pg_stat_clear_snapshot()")
            return dict(connection.execute(text).fetchall())

    before = scans()["plans_graph"]
    index.search(x[:4], 5, exact=True)
    assert scans()["plans_graph"] == before
    index.search(x[:30], 5)
    index.search(x[:30], 5, exact=True)  # over the same connection
    assert scans()["plans_graph"] == before + 30
    # The graph against the exact search of the folder, also among some labels.
    queries = made(40, seed=1)[0]
    for given in ({}, {"labels": [f"c{n}" for n in range(6)]}):
        start = scans()["plans_graph"]
        found, truth = index.search(queries, 10, **given), folder.search(queries, 10, **given)
        assert scans()["plans_graph"] == start + 40
        share = np.mean([len({h.id for h in a} & {h.id for h in b}) / 10 for a, b in zip(found, truth, strict=True)])
        assert share >= min(0.95, index.meta["recall"]["value"])
    # A rare label is found through the label index, not through the graph.
    before = scans()
    same(index.search(queries[:3], 10, labels=["rare"]), folder.search(queries[:3], 10, labels=["rare"]))
    after = scans()
    assert after["plans_graph"] == before["plans_graph"]
    assert after["plans_items_label_idx"] == before["plans_items_label_idx"] + 3
    index.close()


def test_two_writers_of_the_same_items_end_in_no_deadlock(database):
    url = f"{database.url}&nearkin=writers"
    with create_index(url, dim=DIM, space="inner") as index, open_index(url) as one, open_index(url) as other:
        x, paths, labels = made(20)
        index.add(x, paths=paths, labels=labels)
        wrong: list[NearkinError] = []

        def add(writer: Index, order: int) -> None:
            try:
                writer.add(x[::order], paths=paths[::order], labels=labels[::order])
            except NearkinError as error:
                wrong.append(error)

        threads = [threading.Thread(target=add, args=each) for each in ((one, 1), (other, -1))]
        with index._connection() as blocker:  # holds an item in the middle until both writers wait
            blocker.execute("SELECT id FROM writers_items WHERE id = %s FOR UPDATE", [paths[10]])
            for thread in threads:
                thread.start()
            with index._connection() as watcher:
                waiting, end = 0, time.monotonic() + 20
                while waiting < 2 and time.monotonic() < end:
                    text = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    watcher.execute("SELECT pg_stat_clear_snapshot()")
                    (waiting,) = watcher.execute(text).fetchone()
        for thread in threads:
            thread.join()
        assert waiting == 2
        assert not wrong
        assert sorted(index.items().ids) == sorted(paths)


def test_connections_that_the_server_has_closed_are_replaced(database):
    index = create_index(f"{database.url}&nearkin=cut", dim=DIM, space="inner")
    x, paths, labels = made(10)
    index.add(x, paths=paths, labels=labels)
    with index._connection(), index._connection():
        pass  # two idle connections from now on
    with open_index(f"{database.url}&nearkin=cut")._connection() as other:
        cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        (count,) = other.execute(cut + "AND usename IS NOT NULL AND backend_type = 'client backend'").fetchone()
        assert count >= 2
    assert len(index.search(x[:1], 3)[0]) == 3
    assert index.idle.qsize() == 1
    index.close()
    other.close()


def test_failed_add_changes_nothing(database):
    index = create_index(f"{database.url}&nearkin=whole", dim=DIM, space="inner")
    x, paths, labels = made(10)
    index.add(x, paths=paths, labels=labels)
    with pytest.raises(NearkinError, match="PostgreSQL failed"):
        index.add(x, paths=[*paths[:9], "zero \0 byte"], labels=["changed"] * 10)
    assert index.items() == (paths, paths, labels)
    index.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://nobody@127.0.0.1:1/none", "Cannot connect to PostgreSQL on 127.0.0.1"),
        ("postgresql:///db?nearkin=Robert'); DROP TABLE", "small letters"),
        ("qdrant://127.0.0.1:1/things", "Qdrant failed"),
        ("qdrant://host", "qdrant://host:port/collection"),
        ("qdrant://host:many/things", "qdrant://host:port/collection"),
        ("qdrant://", "qdrant://host:port/collection"),
        ("lance://folder", "with an absolute path"),
        ("lance:///", "with an absolute path"),
    ],
)
def test_unreachable_store_is_an_error(url, words):
    with pytest.raises(NearkinError, match=words):
        open_index(url)


# The table.


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_an_index_class_and_kinds(name):
    engine = ENGINES[name]
    assert issubclass(engine.load(), Index)
    assert set(engine.kinds) <= set(KINDS)
    assert all(engine_of(f"{scheme}://x/y") is engine for scheme in engine.schemes)


def test_help_names_every_store_and_kind():
    help_texts = [option.help for option in get_type_hints(index_command, include_extras=True)["store"].__metadata__]
    assert store_addresses() in help_texts[0]
    kinds = get_args(get_args(get_type_hints(index_command)["kind"])[0])
    assert kinds == KINDS == ENGINES["folder"].kinds


def test_extras_are_declared():
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert {engine.extra for engine in ENGINES.values() if engine.extra} <= set(declared["optional-dependencies"])


@pytest.mark.parametrize(
    ("url", "package"), [("postgresql:///db", "psycopg"), ("qdrant://h:1/c", "qdrant_client"), ("lance:///x", "lance")]
)
def test_without_the_client_an_error_says_how_to_install_it(monkeypatch, url, package):
    engine = engine_of(url)
    monkeypatch.delitem(sys.modules, f"nearkin.search.index.{engine.module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NearkinError, match=rf"pip install 'nearkin\[{engine.extra}\]'"):
        open_index(url)
