"""Results files: reading, damaged lines, merging."""

import pytest
from benchmark.tiny_suite import append_all

from nearkin.benchmark.results import merge, read_results
from nearkin.errors import NearkinError
from nearkin.files import append_line


def test_an_incomplete_last_line_is_ignored_and_a_damaged_one_named(tmp_path):
    path = tmp_path / "results.jsonl"
    append_all(path, [run_line("a", 1), run_line("b", 2)])
    with path.open("a") as file:
        file.write('{"id": "c", "v"')
    assert list(read_results(path)) == ["a", "b"]
    append_line(path, run_line("a", 3))
    assert [r["seed"] for r in read_results(path).values()] == [3, 2]
    assert path.read_text().count("\n") == 3
    assert read_results(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize(
    "line", [b"what is this", b'{"id": "abc"}', b'{"id": 1, "seed": 0, "scores": 3}', b"[1]", b"\xff{}"]
)
def test_a_line_that_is_not_a_run_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    append_all(path, [run_line("a")])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(NearkinError, match="damaged in line 2"):
        merge([path], tmp_path / "out.jsonl")


def test_a_run_without_the_last_newline_is_a_run(tmp_path):
    path = tmp_path / "results.jsonl"
    append_all(path, [run_line("a"), run_line("b")])
    path.write_text(path.read_text().rstrip("\n"))
    assert list(read_results(path)) == ["a", "b"]
    append_line(path, run_line("c"))
    assert list(read_results(path)) == ["a", "b", "c"]


def run_line(key, seed=0, *, hardware="CPU", **scores):
    scores = {name.replace("_", "@"): value for name, value in scores.items()}
    return {"id": key, "data": "cub", "method": "proxy_anchor", "seed": seed, "hardware": hardware, "scores": scores}


def test_results_of_two_machines_are_merged(tmp_path):
    append_all(tmp_path / "a" / "results.jsonl", [run_line("x", R_1=60.0), run_line("y", 1, R_1=61.0)])
    append_all(
        tmp_path / "b" / "results.jsonl",
        [run_line("y", 1, R_1=61.0, R_2=70.0), run_line("z", 2, R_1=62.0), run_line("x", hardware="GPU", R_1=59.0)],
    )
    (tmp_path / "b" / "queries").mkdir()
    (tmp_path / "b" / "queries" / "z.safetensors").write_bytes(b"values")
    merged = merge(
        [tmp_path / "a" / "results.jsonl", tmp_path / "b" / "results.jsonl"], tmp_path / "c" / "results.jsonl"
    )
    assert merged.runs == 3
    (sentence,) = merged.conflicts
    assert "proxy_anchor on cub with seed 0: R@1 60.00 (CPU) is kept and 59.00 (GPU)" in sentence
    found = read_results(tmp_path / "c" / "results.jsonl")
    assert found["x"]["scores"] == {"R@1": 60.0}
    assert found["y"]["scores"] == {"R@1": 61.0, "R@2": 70.0}
    assert (tmp_path / "c" / "queries" / "z.safetensors").read_bytes() == b"values"
    again = merge(
        [tmp_path / "c" / "results.jsonl", tmp_path / "a" / "results.jsonl"], tmp_path / "c" / "results.jsonl"
    )
    assert again == (3, ())
    with pytest.raises(NearkinError, match="no results file"):
        merge([tmp_path / "d.jsonl"], tmp_path / "c" / "results.jsonl")


def test_a_changed_number_in_a_results_file_is_found(tmp_path):
    file = tmp_path / "results.jsonl"
    append_line(file, {"id": "a", "seed": 0, "scores": {"R@1": 61.25}})
    append_line(file, {"id": "b", "seed": 0, "scores": {"R@1": 50.0}})
    assert read_results(file)["a"] == {"id": "a", "seed": 0, "scores": {"R@1": 61.25}}
    file.write_text(file.read_text().replace("61.25", "81.25"))
    with pytest.raises(NearkinError, match="damaged in line 1"):
        read_results(file)


def test_lines_of_the_first_version_have_no_digest(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"id": "a", "seed": 0, "scores": {"R@1": 61.25}}\n')
    assert read_results(tmp_path / "results.jsonl")["a"]["scores"] == {"R@1": 61.25}


def test_a_merge_that_fails_leaves_no_half_copied_values(tmp_path, monkeypatch):
    append_all(tmp_path / "a" / "results.jsonl", [run_line("x", R_1=60.0)])
    (tmp_path / "a" / "queries").mkdir()
    (tmp_path / "a" / "queries" / "x.safetensors").write_bytes(b"values")

    def half(source, target):
        target.write_bytes(source.read_bytes()[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nearkin.benchmark.results.shutil.copyfile", half)
        with pytest.raises(NearkinError, match="make room"):
            merge([tmp_path / "a" / "results.jsonl"], tmp_path / "b" / "results.jsonl")
    assert list((tmp_path / "b" / "queries").iterdir()) == []
    merge([tmp_path / "a" / "results.jsonl"], tmp_path / "b" / "results.jsonl")
    assert (tmp_path / "b" / "queries" / "x.safetensors").read_bytes() == b"values"


def test_runs_on_different_images_are_not_merged(tmp_path):
    paths = [tmp_path / name / "results.jsonl" for name in "abc"]
    old, new = {}, {"images": {"digest": "def"}}
    for seed, (path, images) in enumerate(zip(paths, (old, new, new), strict=True)):
        append_line(path, run_line("x", seed) | images)
    with pytest.raises(
        NearkinError, match=r"b.results.jsonl and .*a.results.jsonl have runs made with different images"
    ):
        merge(paths, tmp_path / "out.jsonl")
    assert merge(paths[1:], tmp_path / "out.jsonl").runs == 1
