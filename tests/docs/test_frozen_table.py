"""The table of frozen trunks is made from results files alone."""

from pathlib import Path

from nearkin.files import append_line, write_json
from tools.frozen_table import frozen_table

RESULTS = Path("benchmarks/results")
WHERE = {"hardware": "a machine", "commit": "0123456789abcdef"}


def test_without_results_there_is_no_table(tmp_path):
    assert frozen_table(tmp_path) == ""


def test_the_table_shows_times_and_scores(tmp_path):
    before = {"R@1": 40.0, "MAP@R": 10.0}
    runs = [
        {"views": 4, "seed": seed, "seconds": seconds, "scores": {"R@1": r, "MAP@R": 15.0}, "before": before}
        for seed, seconds, r in ((0, 300.4, 50.0), (1, 20.0, 52.0), (2, 22.0, 54.0))
    ]
    write_json(tmp_path / RESULTS / "frozen_trunk.json", {"settings": {"backbone": "lite0"}, "runs": runs, **WHERE})
    text = frozen_table(tmp_path)
    assert "| not trained | – | – | 40.0 | 10.0 |" in text
    assert "| frozen, 4 views | 300 s | 21 s | 52.0 ± 2.0 | 15.0 ± 0.0 |" in text
    assert "all trained" not in text
    full = {
        "id": "a",
        "method": "proxy_anchor(alpha=32)",
        "settings": {"epochs": 20},
        "scores": {"R@1": 64, "MAP@R": 24},
    }
    append_line(tmp_path / RESULTS / "cub_lite0" / "results.jsonl", {**full, **WHERE, "data": "cub", "seed": 0})
    assert "| all trained, 20 epochs | – | – | 64.0 | 24.0 |" in frozen_table(tmp_path)
