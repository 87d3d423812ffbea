"""The names of a run's scores."""

import pytest

from nearkin.training.chosen_view import SquareView
from nearkin.training.run_metric import RunMetric


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("MAP@R", RunMetric("MAP@R")),
        ("MAP@R 512-d", RunMetric("MAP@R", 512)),
        ("R@1 at 288 of 320", RunMetric("R@1", view=SquareView(288, 320))),
        ("R@1 64-d at 36 of 36", RunMetric("R@1", 64, SquareView(36, 36))),
        ("R@1 words", RunMetric("R@1 words")),
    ],
)
def test_names_are_parsed_and_printed(text, metric):
    assert RunMetric.parse(text) == metric
    assert str(metric) == text
