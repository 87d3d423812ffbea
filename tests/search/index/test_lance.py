"""What only an index in a Lance table has: commits whose work does not grow, writers at once, merged files."""

import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from nearkin.errors import NearkinError
from nearkin.search.index import create_index, open_index

pytest.importorskip("lance")

from nearkin.search.index import lance as module

DIM = 16


def made(count, first=0):
    x = np.random.default_rng(first).standard_normal((count, DIM)).astype(np.float32)
    return x, [f"{n:06d}" for n in range(first, first + count)]


def add(index, count, first=0):
    x, ids = made(count, first)
    index.add(x, paths=ids, labels=[f"c{n % 50}" for n in range(count)])
    return x, ids


@pytest.fixture
def url(tmp_path):
    return f"lance://{tmp_path}/items"


def written(url, work):
    """Bytes in the files that some work adds."""
    folder = Path(url.removeprefix("lance://"))
    before = set(folder.rglob("*"))
    work()
    return sum(path.stat().st_size for path in set(folder.rglob("*")) - before if path.is_file())


def test_a_commit_and_the_opening_do_not_grow_with_the_table(url, monkeypatch):
    with create_index(url, dim=DIM, space="cosine") as index:
        add(index, 1000)
        small = written(url, lambda: add(index, 100, first=1000))
        add(index, 10_000, first=2000)
        large = written(url, lambda: add(index, 100, first=20_000))
        replaced = written(url, lambda: add(index, 100, first=20_000))
        assert max(large, replaced) < 1.5 * small
        assert len(index) == 1000 + 100 + 10_000 + 100
    monkeypatch.setattr(module.LanceIndex, "_scan", lambda *_, **__: pytest.fail("read items"))
    open_index(url).close()


def test_writers_at_once_lose_and_repeat_nothing(url):
    create_index(url, dim=DIM, space="cosine").close()
    wrong = []

    def write(number):
        try:
            with open_index(url) as index:
                for start in (0, 50, 100, 1000 * number):
                    add(index, 100, first=start)
        except NearkinError as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    expected = {n for start in (0, 50, 100, 1000, 2000, 3000) for n in range(start, start + 100)}
    assert sorted(open_index(url).items().ids) == [f"{n:06d}" for n in sorted(expected)]


def test_small_files_are_merged_and_large_ones_left_alone(url, monkeypatch):
    monkeypatch.setattr(module, "TIDY_EVERY", 8)
    monkeypatch.setattr(module, "FILE", 200)
    with create_index(url, dim=DIM, space="cosine") as index:
        x, ids = add(index, 300, first=5000)
        large = {fragment.fragment_id for fragment in index.table.get_fragments()}
        for number in range(40):
            add(index, 10, first=10 * number)
        rows = [fragment.count_rows() for fragment in index.table.get_fragments()]
        assert len(rows) < 20
        assert max(rows) < 2 * 300
        assert large <= {fragment.fragment_id for fragment in index.table.get_fragments()}
        assert sum(rows) == len(set(index.items().ids)) == 700
        np.testing.assert_allclose(index.embeddings(ids), x / np.linalg.norm(x, axis=1, keepdims=True), atol=1e-6)
        (known,) = index.table.describe_indices()
        assert len(known.segments) > 1
        monkeypatch.setattr(module, "FAN", 1)
        index._cover(module.IDS)
        (known,) = index.table.describe_indices()
        assert known.num_rows_indexed == 700
        assert index.remove(index.items().ids) == 700
        assert len(index) == 0


def test_the_approximate_index_reads_few_lists_and_finds_newer_items(url, monkeypatch):
    with create_index(url, dim=DIM, space="cosine", kind="ivfpq") as index:
        x, ids = add(index, 10_000)
        index.build()
        assert index.meta["recall"]["value"] >= 0.95
        late, new = add(index, 50, first=90_000)
        whole = []
        monkeypatch.setattr(index, "_nearest", lambda *given: whole.append(given))
        assert [hits[0].id for hits in index.search(x[:20], 1)] == ids[:20]
        assert [hits[0].id for hits in index.search(late, 1)] == new
        assert not whole, "these searches read no other vectors"
        monkeypatch.undo()
        rare = [f"c{n}" for n in range(2)]
        found, truth = (index.search(x[:30], 10, labels=rare, exact=exact) for exact in (False, True))
        assert found == truth
        many = [f"c{n}" for n in range(25)]
        found, truth = (index.search(x[:30], 10, labels=many, exact=exact) for exact in (False, True))
        assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, truth, strict=True)]) >= 0.95
        trained = index.table.describe_indices()[-1].num_rows_indexed
        index.build()
        assert index.table.describe_indices()[-1].num_rows_indexed == trained + 50
        assert index.meta["trained"] == 10_000, "the lists are not trained again for so few"


@pytest.mark.parametrize("exact", [False, True])
def test_a_reader_outlives_the_files_it_has_opened(url, monkeypatch, exact):
    monkeypatch.setattr(module, "TIDY_EVERY", 4)
    monkeypatch.setattr(module, "KEEP", timedelta(0))
    with create_index(url, dim=DIM, space="cosine") as index:
        x, ids = add(index, 50)
        with open_index(url) as reader:
            for number in range(1, 9):
                add(index, 10, first=100 * number)
            assert reader.items().ids[:50] == ids if not exact else reader.search(x, 1, exact=True)[49][0].id == ids[49]
