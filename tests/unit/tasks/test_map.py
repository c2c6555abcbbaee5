"""The map of an evaluation's page."""

from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.evaluation.attempts import Attempt, Question
from megavlm.tasks.geospot.map import evaluation_page, spots, world_map
from tests.unit.evaluation.test_page import candidate, page_of, question


def test_map_of_places(tmp_path: Path) -> None:
    place = {"latitude": "29.9", "longitude": "78.1"}
    row = question(0, "x", extra=place).row
    said = Attempt("Country: India\nCoordinates: 28.61, 77.21", 0.5, True, 9, "stop")
    mute = Attempt("India", 0.3, True, 2, "stop")
    unknown = question(1, "x", extra={"lat": None, "lon": None})
    both = [
        candidate("a", [Question(row, (said,)), unknown]),
        candidate("b", [Question(row, (mute,))]),
    ]
    (spot,) = spots(both)
    assert spot.truth == (29.9, 78.1) and spot.answers == [(28.61, 77.21), None]
    found = world_map([spot], ["a", "b"])
    assert found is not None and world_map([], ["a"]) is None
    answer, truth = found.dots
    assert (answer.style, truth.style) == ("c1", "c3") and answer.truth == (truth.x, truth.y)
    assert (truth.x, truth.y) == (pytest.approx((78.1 + 180) * 2, abs=0.1), 120.2)
    named = [replace(c, name=f"<b>{c.name}") for c in both]
    html, tags = page_of(tmp_path, named, [evaluation_page])
    dots = [attributes["class"] for tag, attributes in tags.seen if tag == "circle"]
    assert dots == ["dot c1", "dot c3"] and "&lt;b&gt;" in html
    assert [entry.label for entry in found.legend] == ["true place", "a"], "b named no place"
    assert next(a["style"] for tag, a in tags.seen if tag == "path") == "fill:var(--rule)"
