"""Jobs that are killed while they write, again and again, end as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torture.campaign import FULL, Attack, number_of_cases

HERE = Path(__file__).parent
CHAINS = {"train": (0, 36), "cv": (0, 6), "bench": (0, 6), "embed": (0, 16), "index": (1, 30)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="There is no fork here.")
@pytest.mark.parametrize("job", [job for job, (quick, _) in CHAINS.items() if FULL or quick])
def test_killed_jobs_end_like_undisturbed_ones(tmp_path, attack: Attack, job):
    """Kill a job before, after or within fsync, rename, saving; repeat it, and compare what it wrote"""
    command = [sys.executable, str(HERE / "kills.py"), job, str(number_of_cases(*CHAINS[job])), str(tmp_path)]
    one = os.environ | {"OMP_NUM_THREADS": "1"}  # a fork has no other threads
    path = os.pathsep.join(entry for entry in (str(HERE.parent), os.environ.get("PYTHONPATH", "")) if entry)
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=one | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    attack.variant = f" ({job})"
    attack.outcomes["killed"] += found["kills"]
    attack.outcomes["ended identical"] += found["chains"]
