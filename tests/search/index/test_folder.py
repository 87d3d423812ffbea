"""The index in a folder: exact search against naive loops, commits, interruptions, approximate search."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from made import make_run

from nearkin.errors import NearkinError
from nearkin.files import write_lock
from nearkin.search.index import Hit, Index, create_index, open_index, segment_files, segments
from nearkin.search.index import exact as exact_search
from nearkin.search.index.base import points
from nearkin.search.query import model_of
from nearkin.space import Space

DIM = 6
FIRST_VERSION = Path(__file__).parents[2] / "fixtures" / "first_version" / "index"


def made(count: int, *, seed: int = 0, dim: int = DIM, classes: int = 5):
    """Clustered embeddings with norms around 1, with paths and labels; every seventh item has no label."""
    rng = np.random.default_rng(seed)
    label = rng.integers(classes, size=count)
    centres = np.random.default_rng(99).normal(size=(classes, dim))
    x = (0.4 * centres[label] + 0.2 * rng.normal(size=(count, dim))).astype(np.float32)
    return x, [f"{seed}/{n}.png" for n in range(count)], [None if n % 7 == 0 else f"c{c}" for n, c in enumerate(label)]


def filled(folder: Path, *, count=200, space="cosine", kind="exact", dim=DIM, commits=4):
    index = create_index(folder, dim=dim, space=space, kind=kind)
    x, paths, labels = made(count, dim=dim)
    for part in np.array_split(np.arange(count), commits):
        chosen = slice(part[0], part[-1] + 1)
        index.add(x[chosen], paths=paths[chosen], labels=labels[chosen])
    return index


def naive(index, queries, k, *, labels=None, exclude=()):
    """The expected hits, in float64, one pair at a time."""
    vectors, known = index.embeddings().astype(np.float64), list(zip(*index.items(), strict=True))
    found = []
    for query in points(queries, dim=index.dim, space=index.space).astype(np.float64):
        hits = []
        for v, (name, path, label) in zip(vectors, known, strict=True):
            if name in exclude or (labels is not None and label not in labels):
                continue
            s = sum(a * b for a, b in zip(query, v, strict=True))
            if index.space in ("ball", "euclidean"):
                s = 1 - sum((a - b) ** 2 for a, b in zip(query, v, strict=True)) / 2
            hits.append(Hit(name, path, label, s))
        found.append(sorted(hits, key=lambda hit: -hit.similarity)[:k])
    return found


def same(found: list[list[Hit]], expected: list[list[Hit]]) -> None:
    assert [[hit[:3] for hit in hits] for hits in found] == [[hit[:3] for hit in hits] for hits in expected]
    values = [[[hit.similarity for hit in hits] for hits in side] for side in (found, expected)]
    np.testing.assert_allclose(*values, atol=1e-6)


# Finding.


@pytest.mark.parametrize("space", Space)
def test_search_matches_naive_loops(tmp_path, space):
    index = filled(tmp_path / "i", space=space)
    queries = made(9, seed=1)[0]
    same(index.search(queries, 7), naive(index, queries, 7))
    same(index.search(queries, 7, labels=["c1", "c3", "none such"]), naive(index, queries, 7, labels=["c1", "c3"]))
    out = index.items().ids[::3]
    same(index.search(queries, 7, exclude=[*out, "?"]), naive(index, queries, 7, exclude=out))
    same(index.search(queries, 500), naive(index, queries, 500))
    index.remove(index.items().ids[50:90])
    index.add(-queries, paths=index.items().ids[:9], labels=["moved"] * 9)
    same(index.search(queries, 7), naive(index, queries, 7))
    both = {"labels": ["c1", "moved"], "exclude": out}
    same(index.search(queries, 7, **both), naive(index, queries, 7, **both))


@pytest.mark.parametrize(("scores", "queries", "spare"), [(64, 4, 8), (2**19, 3, 0), (40, 1, 8), (4, 4, 0)])
def test_results_do_not_depend_on_block_sizes(tmp_path, monkeypatch, scores, queries, spare):
    index = filled(tmp_path / "i")
    asked = made(11, seed=1)[0]
    known = index.search(asked, 5)
    for name, value in (("SCORES", scores), ("QUERIES", queries), ("SPARE", spare)):
        monkeypatch.setattr(exact_search, name, value)
    assert index.search(asked, 5) == known
    assert [index.search(query, 5)[0] for query in asked] == known


def test_items_in_the_worst_order_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(exact_search, "SCORES", 64)
    angle = np.linspace(3, 0, 300)  # every item is nearer than all before it
    index = create_index(tmp_path / "i", dim=2, space="cosine")
    index.add(np.stack([np.cos(angle), np.sin(angle)], 1), paths=[str(n) for n in range(300)], labels=[None] * 300)
    same(index.search([[1.0, 0.0]], 4), naive(index, [[1.0, 0.0]], 4))
    assert [hit.id for hit in index.search([1.0, 0.0], 3)[0]] == ["299", "298", "297"]


def test_ties_are_in_the_order_of_adding(tmp_path):
    index = create_index(tmp_path / "i", dim=3, space="cosine")
    for name in "ab":
        index.add(np.tile([1.0, 2.0, 2.0], (40, 1)), paths=[f"{name}{n:02d}" for n in range(40)], labels=[None] * 40)
    hits = index.search([[1.0, 2.0, 2.0]], 50)[0]
    assert [hit.id for hit in hits] == [f"a{n:02d}" for n in range(40)] + [f"b{n:02d}" for n in range(10)]
    assert {hit.similarity for hit in hits} == {hits[0].similarity}


def test_empty_index_and_empty_query(tmp_path):
    index = create_index(tmp_path / "i", dim=3, space="cosine")
    assert index.search(np.ones((2, 3)), 5) == [[], []]
    assert len(index) == 0
    assert index.embeddings().shape == (0, 3)
    index.add(np.ones((1, 3)), paths=["a"], labels=["x"])
    assert index.search(np.ones((0, 3)), 5) == []
    assert index.search(np.ones((1, 3)), 5, labels=["y"]) == [[]]
    assert index.search(np.ones((1, 3)), 5, labels=[]) == [[]]
    assert index.search(np.ones((1, 3)), 5, exclude=["a"]) == [[]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda i: i.add(np.ones((2, 4)), paths=["a", "b"], labels=["", ""]), r"\[N, 6\]"),
        (lambda i: i.add(np.ones((2, 6)), paths=["a"], labels=["", ""]), "2 paths"),
        (lambda i: i.add(np.ones((2, 6)), paths=["a", "b"], labels=[""]), "2 labels"),
        (lambda i: i.add(np.ones((2, 6)), paths=["a", "a"], labels=["", ""]), "'a' occurs twice"),
        (lambda i: i.add([[1, 2, 3, np.nan, 5, 6]], paths=["a"], labels=[""]), "not finite"),
        (lambda i: i.search(np.ones((1, 5))), r"\[N, 6\]"),
        (lambda i: i.search(np.full((1, 6), np.inf)), "not finite"),
        (lambda i: i.search(np.ones((1, 6)), 0), "at least 1"),
        (lambda i: i.item("gone"), "no item 'gone'"),
        (lambda i: i.embeddings(["gone"]), "no item 'gone'"),
        (lambda i: create_index(i.folder, dim=6, space="cosine"), "already"),
        (lambda i: create_index(i.folder.parent / "x", dim=6, space="cosin"), "Did you mean 'cosine'"),
        (lambda i: create_index(i.folder.parent / "x", dim=6, space="cosine", kind="hnws"), "Did you mean 'hnsw'"),
        (lambda i: create_index(i.folder.parent, dim=6, space="cosine"), "not an index: choose a new folder"),
        (lambda _: create_index("mysql://here", dim=6, space="cosine"), "no store mysql"),
        (lambda i: open_index(i.folder.parent / "x"), "There is no index"),
    ],
)
def test_wrong_calls_are_errors(tmp_path, call, words):
    index = create_index(tmp_path / "i", dim=DIM, space="cosine")
    with pytest.raises(NearkinError, match=words):
        call(index)


# Keeping.


def test_index_reopens_unchanged(tmp_path):
    index = filled(tmp_path / "i", space="ball")
    index.remove(index.items().ids[3:20])
    index.add(np.ones((2, DIM)), paths=["p", "q"], labels=["ü", None], ids=["one", "two"], stamps=["1-2", None])
    index.remember(threshold={"similarity": 0.5})
    again = open_index(tmp_path / "i")
    assert again.items() == index.items()
    assert again.meta == index.meta
    assert (again.dim, again.space, again.kind, again.run) == (DIM, "ball", "exact", None)
    assert np.array_equal(again.embeddings(), index.embeddings())
    assert np.array_equal(again.embeddings(["two", "one"]), index.embeddings()[[-1, -2]])
    assert again.stamps()["one"] == ("ü", "1-2")
    assert again.item("one")[:3] == ("one", "p", "ü")
    assert again.label_names() == ["c0", "c1", "c2", "c3", "c4", "ü"]
    assert len(again) == 200 - 17 + 2


def test_copy_is_complete(tmp_path):
    index = filled(tmp_path / "i", space="ball")
    index.remove(index.items().ids[3:20])
    index.add(np.ones((2, DIM)), paths=["p", "q"], labels=["ü", None], ids=["one", "two"], stamps=["1-2", None])
    index.remember(threshold={"similarity": 0.5}, fingerprint="0123")
    with pytest.raises(NearkinError, match="already"):
        index.save(tmp_path / "i")
    index.save(tmp_path / "copy")
    copy = Index.load(tmp_path / "copy")
    assert copy.items() == index.items()
    assert copy.stamps() == index.stamps()
    assert copy.meta == index.meta
    np.testing.assert_allclose(copy.embeddings(), index.embeddings(), rtol=1e-6)
    copy.remove(["one"])
    assert len(Index.load(tmp_path / "i")) == len(copy) + 1
    assert index.save(tmp_path / "other", kind="hnsw").kind == "hnsw"


def test_same_id_replaces_and_remove_counts_existing_items(tmp_path):
    index = create_index(tmp_path / "i", dim=2, space="inner")
    index.add([[1, 0], [0, 1]], paths=["a", "b"], labels=["x", "y"])
    index.add([[3, 3]], paths=["a"], labels=["z"])
    assert index.items() == (["b", "a"], ["b", "a"], ["y", "z"])
    assert index.remove(["a", "a", "gone"]) == 1
    assert index.remove([]) == index.remove(["a"]) == 0
    assert open_index(tmp_path / "i").items().ids == ["b"]
    assert index.label_names() == ["y"]
    many = filled(tmp_path / "many")
    assert [many.remove(["0/3.png", "0/4.png"]) for _ in range(2)] == [2, 0]
    with pytest.raises(NearkinError, match="no item"):
        many.item("0/3.png")


def test_segments_are_merged_and_removed_items_leave_them(tmp_path):
    index = filled(tmp_path / "i", count=512, commits=64)
    files = list((tmp_path / "i").glob("items-*"))
    assert len(files) <= 10  # 1, 2, 4, … times the size of a commit
    index.remove(index.items().ids[:150])
    left = sum(segment.rows for segment in index.manifest.segments)
    assert left == len(index) == 362
    index.remove(index.items().ids[:50])  # few enough to stay in the files, marked
    assert sum(segment.rows for segment in index.manifest.segments) == 362
    known = {path.name for path in (tmp_path / "i").iterdir()}
    assert known == {"index.json", ".lock", *index.manifest.files}
    index.remove(index.items().ids)
    assert len(open_index(tmp_path / "i")) == 0
    assert not list((tmp_path / "i").glob("*.safetensors"))


def test_a_commit_writes_no_more_rows_in_a_large_index(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LARGE", 64)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    written: list[int] = []
    write = segments.write_segment

    def counted(folder, name, columns):
        written.append(len(columns.ids))
        return write(folder, name, columns)

    monkeypatch.setattr(segments, "write_segment", counted)
    index = create_index(tmp_path / "i", dim=DIM, space="cosine")
    x, paths, labels = made(1024)
    for start in range(0, 1024, 8):
        chosen = slice(start, start + 8)
        index.add(x[chosen], paths=paths[chosen], labels=labels[chosen])
    halves = np.array_split(np.array(written), 2)
    assert halves[0].sum() == halves[1].sum() == 64 * (7 * 8 + 64) / 8  # each row once or twice
    assert max(written) == 64
    written.clear()
    for start in range(0, 1024, 128):  # of few items: they are only marked
        index.remove(paths[start : start + 8])
    assert not written
    known = {path.name for path in (tmp_path / "i").iterdir()}
    assert known == {"index.json", ".lock", *index.manifest.files}
    assert len(index.manifest.segments) == 16
    assert len(index.manifest.removed) == 1  # merged
    again = open_index(tmp_path / "i")
    assert again.items() == index.items() == naive_items(paths, labels)
    same(again.search(x[:3], 5), naive(again, x[:3], 5))


def naive_items(paths, labels):
    left = [n for n in range(1024) if n % 128 >= 8]
    return [paths[n] for n in left], [paths[n] for n in left], [labels[n] for n in left]


def test_opening_reads_no_items_and_keeps_no_file_open(tmp_path, monkeypatch):
    filled(tmp_path / "i")
    checked: list[str] = []
    check = segment_files.SegmentFile.column
    monkeypatch.setattr(segment_files.SegmentFile, "column", lambda s, name: checked.append(name) or check(s, name))
    handles = psutil.Process().num_fds()
    index = open_index(tmp_path / "i")
    assert len(index) == 200
    assert not checked
    assert psutil.Process().num_fds() == handles
    index.item("0/7.png")
    assert "vectors" not in checked


def test_an_index_of_the_first_version_is_rewritten_by_the_next_commit(tmp_path):
    shutil.copytree(FIRST_VERSION, tmp_path / "i")
    old = open_index(tmp_path / "i")
    items, x, stamps = old.items(), old.embeddings(), old.stamps()
    assert all(segment.file.is_old for segment in old.rows.segments)
    old.remember(note=1)  # a manifest of this version with files of the first
    old = open_index(tmp_path / "i")
    assert old.items() == items
    old.add(x[:1], paths=["new"], labels=[None])
    again = open_index(tmp_path / "i")
    assert not any(segment.file.is_old for segment in again.rows.segments)
    assert again.items().ids == [*items.ids, "new"]
    assert again.stamps() == {**stamps, "new": (None, None)}
    np.testing.assert_allclose(again.embeddings(), np.concatenate([x, x[:1]]), rtol=1e-6)


def test_two_writers_in_turn_see_each_other(tmp_path):
    one = filled(tmp_path / "i")
    two = open_index(tmp_path / "i")
    one.add(np.ones((1, DIM)), paths=["one"], labels=["n"])
    two.add(-np.ones((1, DIM)), paths=["two"], labels=["n"])
    one.remove(["two"])
    two.remember(note=1)
    found = open_index(tmp_path / "i")
    assert found.items().ids == two.items().ids == [*made(200)[1], "one"]
    assert found.meta["note"] == 1


def test_a_failed_commit_does_not_hide_the_one_of_another_writer(tmp_path, monkeypatch):
    one = filled(tmp_path / "i")
    two = open_index(tmp_path / "i")

    def fail(*_: object) -> None:
        raise NearkinError("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("nearkin.search.index.folder.write_manifest", fail)
        with pytest.raises(NearkinError, match="full"):
            one.remove(["0/1.png"])
    two.add(np.ones((1, DIM)), paths=["two"], labels=["n"])
    one.add(np.ones((1, DIM)), paths=["one"], labels=["n"])
    assert open_index(tmp_path / "i").items().ids == [*made(200)[1], "two", "one"]


def test_second_writer_at_the_same_time_is_refused(tmp_path):
    index = filled(tmp_path / "i")
    with write_lock(tmp_path / "i"), pytest.raises(NearkinError, match=r"Process \d+ is writing"):
        index.remove(["0/1.png"])
    assert index.remove(["0/1.png"]) == 1


def test_an_edited_manifest_is_refused(tmp_path):
    filled(tmp_path / "i").close()
    file = tmp_path / "i" / "index.json"
    text = file.read_text()
    changed = re.sub(r'"next_key": \d+', '"next_key": 0', text)
    assert changed != text
    file.write_text(changed)
    with pytest.raises(NearkinError, match=r"index\.json is damaged"):
        open_index(tmp_path / "i")
    file.write_text(text)
    open_index(tmp_path / "i").close()


@pytest.mark.parametrize("name", ["items-00000004.safetensors", "removed-00000005.safetensors", "index.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_damaged_file_is_an_error(tmp_path, name, harm):
    filled(tmp_path / "i").remove(["0/3.png"])
    path = tmp_path / "i" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(data[:-9] if harm == "cut" else data))
    with pytest.raises(NearkinError, match=r"damaged|missing|There is no"):
        use_all(tmp_path / "i")


def use_all(folder: Path) -> None:
    """Open an index, and use every array of its files: each is checked on its first use."""
    for segment in open_index(folder).rows.segments:
        for name in segment.file._arrays:
            segment.file.column(name)


def test_an_interrupted_creation_can_be_repeated(tmp_path):
    (tmp_path / "i").mkdir()
    for name in (".lock", ".index.json.4711"):
        (tmp_path / "i" / name).touch()
    assert len(filled(tmp_path / "i")) == 200
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".index.json.txt").touch()
    with pytest.raises(NearkinError, match="is not an index"):
        filled(tmp_path / "other")


@pytest.mark.parametrize("lost", ["meta", "segments", "generation", "graph"])
def test_incomplete_manifest_is_an_error(tmp_path, lost):
    filled(tmp_path / "i")
    path = tmp_path / "i" / "index.json"
    content = json.loads(path.read_text())
    del content[lost]
    path.write_text(json.dumps(content))
    with pytest.raises(NearkinError, match=r"damaged|not an index manifest"):
        open_index(tmp_path / "i")


def test_searches_continue_while_another_thread_writes(tmp_path):
    index = filled(tmp_path / "i")
    x, paths, labels = made(400, seed=5)
    wrong: list[object] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            found = index.search(x[:3], 5, exclude=["0/1.png"])
            wrong.extend(hits for hits in found if len(hits) != 5 or any(hit.id != hit.path for hit in hits))

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for start in range(0, 400, 20):
        index.add(x[start : start + 20], paths=paths[start : start + 20], labels=labels[start : start + 20])
        index.remove(index.items().ids[:15])
    done.set()
    for watcher in watchers:
        watcher.join()
    assert not wrong
    assert len(index) == 200 + 400 - 20 * 15


# Interruptions.

KILLING = """
import os, random, signal, sys, time
import numpy as np
from nearkin.search.index import create_index, folder as folder_index, open_index

folder_index.MIN_ITEMS = 1  # a graph from the first item on
if sys.argv[4] != "exact":
    import faiss  # before the forks, which live shorter than the import takes

folder, log, rounds, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def vector(name, number):
    return np.random.default_rng([number, *name.encode()]).normal(size=4)

def names(number):
    return [f"{number}-{n}" for n in range(5)] + [f"shared-{number % 3}"]

def work(index, number):
    if number % 4 == 3:
        index.remove(names(number - 2)[:4])
    elif number % 10 == 8:
        index.remember(number=number)
        index.build()
    else:
        index.add([vector(n, number) for n in names(number)], paths=names(number), labels=[str(number)] * 6)

def expected(count):
    known = {}
    for number in range(count):
        if number % 4 == 3:
            for name in names(number - 2)[:4]:
                known.pop(name, None)
        elif number % 10 != 8:
            known |= {name: number for name in names(number)}
    return known

create_index(folder, dim=4, space="inner", kind=kind)
open(log, "w").close()
kills, before, longest = 0, 0, 0.08
while kills < rounds or len(open(log).read()) < rounds:
    kills += 1
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        done = len(open(log).read())
        index = open_index(folder)
        count = done
        line = os.open(log, os.O_WRONLY | os.O_APPEND)
        if {name: int(label) for name, _, label in zip(*index.items())} != expected(done):
            os.write(line, b".")  # that commit was made but not logged
            count += 1
        os.write(tell, b".")
        while True:
            work(index, count)
            count += 1
            os.write(line, b".")
    os.read(ready, 1)  # else a busy machine would kill it before it did anything
    time.sleep(random.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(tell)
    done = len(open(log).read())
    before, longest = done, 0.08 if done > before else 1.5 * longest  # progress even on a slow machine
    index = open_index(folder)
    held = {name: int(label) for name, _, label in zip(*index.items())}
    assert held in (expected(done), expected(done + 1)), (done, held)
    for name, v in zip(index.items().ids, index.embeddings()):
        assert np.allclose(v, vector(name, held[name])), name
    assert {hit.id for hit in index.search(np.ones(4), 10_000)[0]} <= set(held)  # also from the graph
    print("left behind:", set(os.listdir(folder)) - {"index.json", ".lock", *index.manifest.files}, file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_kill_at_any_moment_keeps_exactly_what_was_committed(tmp_path, kind):
    if kind != "exact":
        pytest.importorskip("faiss")
    command = [sys.executable, "-c", KILLING, str(tmp_path / "i"), str(tmp_path / "log"), "15", kind]
    one = os.environ | {"OMP_NUM_THREADS": "1"}  # a fork has no other threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=one)
    assert done.returncode == 0, done.stderr


watched: list[Callable[[str, tuple[object, ...]], None]] = []
sys.addaudithook(lambda event, about: watched[-1](event, about) if watched else None)


def test_index_is_consistent_between_any_two_file_operations(tmp_path):
    index = filled(tmp_path / "i")
    before = index.items()
    moments: list[Path] = []

    def look(event: str, about: tuple[object, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove") or str(tmp_path / "i") not in str(about[0]):
            return
        flags = about[2] if event == "open" else 0
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            assert Path(str(about[0])).name.startswith(".")  # files with a final name are never changed
        seeing = watched.pop()
        moments.append(tmp_path / f"moment {len(moments)}")
        shutil.copytree(tmp_path / "i", moments[-1])
        watched.append(seeing)

    watched.append(look)
    try:
        index.add(np.ones((3, DIM)), paths=["0/1.png", "a", "b"], labels=["n"] * 3)
    finally:
        watched.clear()
    seen = [open_index(moment).items() for moment in moments]
    assert len(seen) > 6
    place = seen.index(index.items())
    assert all(items == before for items in seen[:place])
    assert all(items == index.items() for items in seen[place:])


# Approximate search.


def shares(found: list[list[Hit]], expected: list[list[Hit]]) -> float:
    pairs = zip(found, expected, strict=True)
    return float(np.mean([len({h.id for h in a} & {h.id for h in b}) / len(b) for a, b in pairs]))


@pytest.mark.parametrize("kind", ["hnsw", "ivfpq"])
@pytest.mark.parametrize("space", ["cosine", "euclidean", "inner"])
def test_approximate_index_reaches_its_recall(tmp_path, kind, space):
    pytest.importorskip("faiss")
    index = filled(tmp_path / "i", count=1500, space=space, kind=kind, dim=16)
    assert index.search(np.ones((1, 16)), 3) == index.search(np.ones((1, 16)), 3, exact=True)  # not built yet
    index.build()
    assert index.meta["recall"]["value"] >= 0.95
    queries = made(50, seed=3, dim=16)[0]
    truth = index.search(queries, 10, exact=True)
    found = index.search(queries, 10)
    assert shares(found, truth) >= 0.9
    scores = {(n, hit.id): hit.similarity for n, hits in enumerate(truth) for hit in hits}
    alike = [scores.get((n, hit.id), hit.similarity) == hit.similarity for n, hits in enumerate(found) for hit in hits]
    assert all(alike)
    again = open_index(tmp_path / "i")
    assert again.search(queries, 10) == found
    # With a label filter, and with items added and removed after building.
    chosen = ["c0", "c1", "c2"]
    assert shares(index.search(queries, 10, labels=chosen), index.search(queries, 10, labels=chosen, exact=True)) >= 0.9
    x, paths, labels = made(120, seed=4, dim=16)
    again.add(x, paths=paths, labels=labels)
    gone = [hit.id for hits in found for hit in hits[:3]]
    again.remove(gone)
    late = again.search(queries, 10)
    assert shares(late, again.search(queries, 10, exact=True)) >= 0.9
    assert not {hit.id for hits in late for hit in hits} & set(gone)
    assert any(hit.id.startswith("4/") for hits in late for hit in hits)
    out = [hits[0].id for hits in late]
    assert not {hit.id for hits in again.search(queries, 10, exclude=out) for hit in hits} & set(out)


def test_graph_grows_and_is_rebuilt_after_many_removals(tmp_path):
    pytest.importorskip("faiss")
    index = filled(tmp_path / "i", count=1200, kind="hnsw", dim=8)
    index.build()
    assert index.manifest.graph["items"] == 1200
    first = index.manifest.graph["file"]
    index.build()
    assert index.manifest.graph["file"] == first  # nothing new
    x, paths, labels = made(100, seed=4, dim=8)
    index.add(x, paths=paths, labels=labels)
    index.build()
    assert index.manifest.graph["items"] == 1300
    index.remove(paths[:80])
    more, paths, labels = made(60, seed=5, dim=8)
    index.add(more, paths=paths, labels=labels)
    index.build()
    assert index.manifest.graph["items"] == 1360
    assert len(index.rows) == 1280  # the graph still has removed rows
    assert shares(index.search(x, 30), index.search(x, 30, exact=True)) >= 0.9
    assert {len(hits) for hits in index.search(x, 30)} == {30}
    index.remove(index.items().ids[:265])
    index.build()
    assert index.manifest.graph["items"] == len(index) == 1015
    assert len(list((tmp_path / "i").glob("graph-*"))) == 1
    index.remove(index.items().ids[:16])
    index.build()
    assert index.manifest.graph is index.meta["recall"] is None


def test_missing_graph_means_exact_search_and_damaged_graph_is_an_error(tmp_path):
    pytest.importorskip("faiss")
    index = filled(tmp_path / "i", count=1100, kind="hnsw")
    index.build()
    queries = made(5, seed=3)[0]
    truth = index.search(queries, 10, exact=True)
    path = tmp_path / "i" / index.manifest.graph["file"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(NearkinError, match="no item is lost"):
        open_index(tmp_path / "i").search(queries)
    assert open_index(tmp_path / "i").search(queries, 10, exact=True) == truth
    path.unlink()
    again = open_index(tmp_path / "i")
    assert again.search(queries, 10) == truth
    again.build()
    assert open_index(tmp_path / "i").manifest.graph["items"] == 1100


BESIDE_TORCH = """
import json, sys
import faiss
import numpy as np
from nearkin.search.index import create_index, open_index

if sys.argv[2] == "replaced":
    import faiss.contrib.torch_utils  # as pytorch-metric-learning does
assert hasattr(faiss.Index, "search_numpy") == (sys.argv[2] == "replaced")

rng = np.random.default_rng(0)
x, more, queries = rng.normal(size=(1100, 8)), rng.normal(size=(30, 8)), rng.normal(size=(20, 8))
for kind in ("hnsw", "ivfpq"):
    folder = f"{sys.argv[1]}/{kind}"
    index = create_index(folder, dim=8, space="cosine", kind=kind)
    index.add(x, paths=[str(n) for n in range(1100)], labels=[str(n % 3) for n in range(1100)])
    index.build()
    index.add(more, paths=[f"late {n}" for n in range(30)], labels=["0"] * 30)
    index.build()  # grows
    index.remove(["5"])
    index = open_index(folder)
    assert index.manifest.graph["items"] == 1130
    searches = [index.search(queries, 5), index.search(queries, 5, labels=["0", "1"], exclude=["late 3"])]
    print(json.dumps([index.meta["recall"], searches]))
"""


def test_faiss_results_do_not_depend_on_its_torch_patches(tmp_path):
    pytest.importorskip("faiss")
    printed = []
    for state in ("as it is", "replaced"):
        command = [sys.executable, "-c", BESIDE_TORCH, str(tmp_path / state), state]
        one = os.environ | {"OMP_NUM_THREADS": "1"}  # with several threads the graph is not deterministic
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=one)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == 2


def test_too_few_items_are_searched_exactly(tmp_path):
    pytest.importorskip("faiss")
    index = filled(tmp_path / "i", count=50, kind="ivfpq")
    index.build()
    assert index.meta["recall"] is None
    assert index.manifest.graph is None


def test_without_faiss_an_error_says_how_to_install_it(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    index = filled(tmp_path / "i", count=1000, kind="hnsw")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(NearkinError, match=r"pip install 'nearkin\[search\]'"):
        index.build()
    assert len(index.search(made(1)[0], 3)[0]) == 3


# The model of an index.


def test_index_refuses_another_model(tmp_path):
    run = make_run(tmp_path / "run")
    index = create_index(tmp_path / "i", dim=8, space="cosine", run=run)
    assert open_index(tmp_path / "i").run == run
    assert model_of(index).embedder.dim == 8
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(NearkinError, match="There is no run folder"):
        model_of(index)
    assert model_of(index, run=tmp_path / "elsewhere").embedder.dim == 8
    with pytest.raises(NearkinError, match="another model"):
        model_of(index, run=make_run(tmp_path / "other", seed=1))
    with pytest.raises(NearkinError, match="does not say which run"):
        model_of(create_index(tmp_path / "j", dim=8, space="cosine"))
