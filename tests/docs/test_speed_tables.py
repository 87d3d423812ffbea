"""The measured speeds in README.md and docs/runs.md come from results files; what is not measured is not mentioned."""

from pathlib import Path

from nearkin.files import write_json
from tools.docs import readme, runs_page
from tools.speed import CPU, GPU, cpu_speed, first_result, gpu_speed

ROOT = Path(__file__).parents[2]
WHERE = {"hardware": "a GPU", "commit": "0123456789abcdef"}


def test_the_pages_are_up_to_date():
    page, start = (ROOT / "docs" / "runs.md").read_text(), (ROOT / "README.md").read_text()
    assert runs_page(page, ROOT) == page
    assert readme(start, ROOT) == start
    assert "<!-- speed -->" in start
    assert all(f"<!-- {name} speed -->" in page for name in ("gpu", "cpu"))


def test_what_was_not_measured_is_not_mentioned(tmp_path):
    assert (first_result(tmp_path), gpu_speed(tmp_path), cpu_speed(tmp_path)) == ("", "", "")
    failed = {"error": "RuntimeError: no"}
    write_json(tmp_path / GPU, {**WHERE, "cold": failed, "batches": {"32, graph": failed}, "methods": failed})
    assert first_result(tmp_path) == ""
    assert "no" not in gpu_speed(tmp_path).replace("32", "").split()


def test_a_gpu_is_described_by_its_results(tmp_path):
    whole = {"seconds": 51.4, "images_per_second": 12345.6, "scores": {"R@1": 64.25, "MAP@R": 24.5}}
    steps = {"ms": 14.2, "ratio": 1.0, "passes": 1, "operations": 3900}
    methods = {
        "proxy_anchor": steps,
        "contrastive": {**steps, "ratio": 1.04},
        "moco": {**steps, "ratio": 1.41, "passes": 2},
        "mpa": {"error": "RuntimeError: no"},
    }
    found = {**WHERE, "settings": {"backbone": "lite0", "epochs": 60}, "cold": whole, "batches": {"32, graph": whole}}
    write_json(tmp_path / GPU, {**found, "methods": methods})
    assert "takes 51 s from the start of the process" in first_result(tmp_path)
    text = gpu_speed(tmp_path)
    assert "| 32 | 12,346 | – |" in text
    assert "1 of the 2 other methods take at most 1.05 times as long; `mpa` could not be timed" in text
    assert "| `moco` | 1.41 | 2 | 3,900 | embeds each batch a second time" in text
    assert "`contrastive`" not in text


def test_a_cpu_is_compared_with_the_other_ways(tmp_path):
    rows = {"nearkin": {"images_per_second": 20.0, "ratio": 1.0}, "timm": {"images_per_second": 16.0, "ratio": 1.25}}
    write_json(tmp_path / CPU, {**WHERE, "backbone": "lite0", "size": 224, "batch": 16, "training": {"rows": rows}})
    assert "| timm | 16.0 | 1.25 |" in cpu_speed(tmp_path)
