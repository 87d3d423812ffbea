"""The tables of docs/scale.md come from results files and arithmetic; what is not measured is left out."""

from pathlib import Path

from nearkin.files import write_json
from tools.docs import fill
from tools.scale import CLASSES, INDEX, OPEN, accuracy, indexes, opened, paper, scale_page, steps

ROOT = Path(__file__).parents[2]
WHERE = {"hardware": "a GPU", "commit": "0123456789abcdef"}


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "scale.md").read_text()
    assert scale_page(page, ROOT, fill) == page
    assert all(f"<!-- {name} -->" in page for name in ("steps", "accuracy", "open", "indexes", "paper"))


def test_what_was_not_measured_is_left_out(tmp_path):
    assert (steps(tmp_path), accuracy(tmp_path), opened(tmp_path), indexes(tmp_path)) == ("", "", "", "")
    failed = {"spec": "vcpa", "classes": 10**6, "error": "no memory"}
    write_json(tmp_path / CLASSES, {"steps": {**WHERE, "tiny": False, "rows": [failed]}})
    write_json(tmp_path / INDEX, {**WHERE, "small": True, "rows": []})
    assert (steps(tmp_path), accuracy(tmp_path), opened(tmp_path), indexes(tmp_path)) == ("", "", "", "")


def test_results_are_shown(tmp_path):
    row = {"spec": "vcpa", "classes": 10**6, "dim": 512, "batch": 180, "compiled": True, "tf32": False}
    made = [
        {"method": "arcface", "rate": rate, "seed": seed, "scores": {"R@1": 50.0 + seed, "MAP@R": 20.0}}
        for rate in (1.0, 0.1)
        for seed in range(3)
    ]
    found = {"steps": {**WHERE, "tiny": False, "rows": [{**row, "milliseconds": 199.6, "peak_gib": 12.34}]}}
    write_json(tmp_path / CLASSES, {**found, "accuracy_made": {**WHERE, "tiny": False, "rows": made}})
    assert "| `vcpa`, compiled | 1,000,000 × 512 | 200 ms | 12.3 GiB |" in steps(tmp_path)
    assert "| `arcface` | 0.1 | 51.00 ± 1.00 | 20.00 ± 0.00 |" in accuracy(tmp_path)
    assert "over 3 seeds" in accuracy(tmp_path)


def test_the_paper_counts_bytes_and_operations():
    lines = paper().splitlines()
    assert "| 1,000,000 × 512 | 180 | 1 | 1 | 10 GB | 17 ms | 10 ms |" in lines
    assert len(lines) == 7


def test_data_sets_are_listed_with_the_index_they_need(tmp_path):
    row = {"images": 1_000_000, "open_s": 1.81, "open_mb": 167.9, "first_s": 96.7}
    rows = [{**row, "data": "tar", "index_mb": 48.3}, {**row, "data": "csv", "index_mb": 0.0}]
    write_json(tmp_path / OPEN, {"rows": rows, "hardware": "a machine", "commit": "0123456789abcdef"})
    text = opened(tmp_path)
    assert "| `tar:` | 1,000,000 | 1.8 s | 168 MB | 97 s, 48 MB |" in text
    assert "| `csv:` | 1,000,000 | 1.8 s | 168 MB | no index |" in text
