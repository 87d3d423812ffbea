"""Every method learns a toy set: blobs in four dimensions under noise in twelve."""

import pytest
from contract.cases import RUN_SPECS, Run


@pytest.mark.parametrize("spec", RUN_SPECS)
def test_neighbours_become_positives(spec):
    run = Run(spec)
    before = run.neighbours()
    run.steps(50)
    after = run.neighbours()
    assert before < 60
    assert after > before + 20, f"{before:.0f} → {after:.0f} % of nearest neighbours are of the same class"
