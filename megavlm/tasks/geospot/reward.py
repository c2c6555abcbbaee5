"""Reward for naming where an image was taken: country, region, city and coordinates.

    reward = sum of weight x component / sum of the weights of the components that the row has

The component of a name is 1 if the name is right. The component of coordinates is
exp(-distance / tolerance) with the great-circle distance and the tolerance in km. A response counts
as correct if its country is right. A response has "Country: ...", "Region: ...", "City: ...",
"Coordinates: latitude, longitude", each on its own line or after a comma, or JSON with these keys.
A single short line without them is read as a country, alone or as in "This is Lisbon, Portugal".
"""

import json
import math
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from megavlm.rewards import boxed
from megavlm.rewards.base import Score
from megavlm.rewards.options import check_number, check_weights
from megavlm.rewards.words import ASCII_SIGNS, text_of
from megavlm.tasks.geospot.coordinates import Point, named_point, read_point
from megavlm.tasks.geospot.places import (
    city_name,
    country_code,
    country_said,
    great_circle_km,
    region_name,
)

WEIGHTS = {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}
MAX_CHARACTERS = 20_000
MAX_OBJECTS = 50  # most JSON objects in a response that are tried
_LABEL = re.compile(
    r"(?:^|[,;|:.])[^\w\n]{0,20}(country|region|state|province|city|town|coordinates|gps|location"
    r"|lat(?:itude)?|lon(?:g(?:itude)?)?|lng)\b[^\w\n:=]{0,8}(?:[:=\uff1a]|(?<= )-(?= ))",
    re.I | re.M,
)
_NAMES = {"state": "region", "province": "region", "town": "city"}
_MARKS = re.compile(r"\\(?:boxed|text(?:bf)?)\s?\{|\\[()\[\]]|\*\*|\$")
_AROUND = " \t\r\n*_`\"'.,;|{}"  # characters stripped around a value


def check_options(weights: Any = None, tolerance: Any = 25.0) -> None:
    """Check the options. Raises ValueError for an unknown component, or a tolerance that is not a
    distance.
    """
    check_weights("geospot", weights, WEIGHTS)
    check_number("geospot's tolerance in km", tolerance, above=0)


def check_row(row: Mapping[str, Any], **_: Any) -> None:
    """Check that the row has a place. Raises ValueError if not: every response would get 0."""
    if not any(_truth(row).values()):
        raise ValueError(
            "geospot knows neither country, region, city nor coordinates (lat, lon) of the row: "
            "name the columns that it has in data.extra_keys"
        )


def score(
    response: str,
    row: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    tolerance: float = 25.0,
) -> Score:
    """Return the weighted share of correct components. tolerance: distance in km at which
    coordinates are worth 1/e.
    """
    check_row(row)
    claim = read(response[-MAX_CHARACTERS:])
    truth = _truth(row)
    parts: dict[str, float] = {}
    if truth["country"]:
        same = country_code(claim.get("country", "")) == country_code(truth["country"])
        parts["country"] = float(same)
    for name, spell in (
        ("region", lambda x: region_name(x, truth["country"])),
        ("city", city_name),
    ):
        if truth[name]:
            known = {
                spell(text_of(alias))
                for alias in [truth[name], *(row.get(f"{name}_aliases") or ())]
            }
            parts[name] = float(
                any(spell(given) in known for given in _spellings(claim.get(name, "")))
            )
    if truth["point"] is not None:
        parts["coordinates"] = 0.0
        point: Point | None = claim.get("point")
        if point is not None:
            distance = great_circle_km(point, truth["point"])
            parts["coordinates"] = math.exp(-distance / tolerance)
    weights = WEIGHTS if weights is None else weights
    total = sum(weights.get(name, 0.0) for name in parts)
    gained = sum(weights.get(name, 0.0) * value for name, value in parts.items())
    return Score(gained / total if total else 0.0, parts.get("country") == 1.0, parts)


def read(response: str) -> dict[str, Any]:
    """Return the place that a response names: country, region, city, and `point` (latitude,
    longitude), the last one of each. Thoughts are ignored; if there is an <answer>, only the last
    one is read.
    """
    response = boxed.after_thinking(response)
    tagged = boxed.last_tagged(response)
    final = response if tagged is None else tagged
    final = final.translate(ASCII_SIGNS)
    plain = _MARKS.sub("", final)
    claim = _read_labels(plain) | _read_json(final)
    if "point" not in claim and (point := read_point(final)) is not None:
        claim["point"] = point
    if not claim:
        answer = boxed.last_boxed(final) or boxed.after_answer(final) or plain
        if country := country_said(_MARKS.sub("", boxed.unwrapped(answer)).strip(_AROUND)):
            claim["country"] = country
    return claim


def _read_labels(response: str) -> dict[str, Any]:
    """Return labelled values. A value ends with its line, or at the next label."""
    claim = {}
    labels = list(_LABEL.finditer(response))
    ends = [label.start() for label in labels] + [len(response)]
    for label, end in zip(labels, ends[1:], strict=True):
        name = _NAMES.get(label[1].lower(), label[1].lower())
        value = response[label.end() : end].strip(_AROUND).partition("\n")[0].strip(_AROUND)
        if name in ("country", "region", "city") and value:
            claim[name] = value
    return claim


def _spellings(value: str) -> set[str]:
    """Return spellings of a name: "Paris (France)" and "Paris, France" are also Paris."""
    return {value, value.partition("(")[0], value.partition(",")[0]} - {""}


def _read_json(response: str) -> dict[str, Any]:
    """Return values from JSON objects in the response, including an inner "coordinates" or
    "location" object.
    """
    claim: dict[str, Any] = {}
    decoder, end = json.JSONDecoder(), 0
    for start in (match.start() for match in islice(re.finditer(r"\{", response), MAX_OBJECTS)):
        if start < end:
            continue
        try:
            value, end = decoder.raw_decode(response, start)
        except (ValueError, RecursionError):
            continue
        names = {str(name).lower(): item for name, item in value.items()}
        for inner in (names.get("coordinates"), names.get("location")):
            if isinstance(inner, dict):
                names |= {str(name).lower(): item for name, item in inner.items()}
        for label, item in names.items():
            name = _NAMES.get(label, label)
            if name in ("country", "region", "city") and isinstance(item, str) and item:
                claim[name] = item
        if (point := named_point(names)) is not None:
            claim["point"] = point
    return claim


def _truth(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the place of a row. The answer is the country if no column holds it. Coordinates that
    are not a point on earth count as unknown.
    """
    return {
        "country": _text(row.get("country")) or _text(row.get("answer")),
        "region": _text(row.get("region")),
        "city": _text(row.get("city")),
        "point": named_point(row),
    }


def _text(value: object) -> str:
    """Return the value as text, "" if it is missing: tables have NaN then."""
    return "" if value is None or value != value else text_of(value).strip()
