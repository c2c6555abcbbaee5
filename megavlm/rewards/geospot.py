"""Where a picture was taken: country, region, city and coordinates, as far as the row knows them.

    reward = sum of weight x component / sum of the weights of what the row knows

A name's component is 1 where it is right. That of coordinates is exp(-distance / tolerance), the
great-circle distance and the tolerance in km. Correct is the country. A response says
"Country: ...", "Region: ...", "City: ...", "Coordinates: latitude, longitude", each in a line
of its own or behind a comma, or has JSON with these keys; one short line without is a country.
"""

import json
import math
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from megavlm.rewards.base import Score
from megavlm.rewards.options import check_number, check_weights
from megavlm.rewards.places import city_name, country_code, great_circle_km, region_name
from megavlm.rewards.words import MINUS_SIGNS

Point = tuple[float, float]  # latitude, longitude in degrees

WEIGHTS = {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}
MAX_CHARACTERS = 20_000
MAX_OBJECTS = 50  # of JSON in a response that are tried
_LABEL = re.compile(
    r"(?:^|[,;|:.])[^\w\n]{0,20}(country|region|state|province|city|town|coordinates|gps|location"
    r"|lat(?:itude)?|lon(?:g(?:itude)?)?)\b[^\w\n:]{0,8}[:\uff1a]",
    re.I | re.M,
)
_SIGNED = r"(-?(?:\d{1,3}(?:\.\d{1,12})?|\.\d{1,12}))\s{0,3}°?\s{0,3}"
_PAIR = re.compile(_SIGNED + r"([NS])?\s{0,3}[,;/ ]\s{0,3}" + _SIGNED + r"([EW])?", re.I)
_LABELLED = re.compile(
    r"\blat(?:itude)?\b[^\w-]{0,8}?"
    + _SIGNED
    + r"([NS])?\b.{0,40}?\blon(?:g(?:itude)?)?\b[^\w-]{0,8}?"
    rf"{_SIGNED}([EW])?",
    re.I | re.S,
)
_NAMES = {"state": "region", "province": "region", "town": "city"}
_COORDINATES = (("lat", "latitude"), ("lon", "longitude"))
_AROUND = " \t\r\n*_`\"'.,;|{}"  # a value


def prepare(weights: Any = None, tolerance: Any = 25.0) -> None:
    """Raises ValueError for a component that is not known, or a tolerance that is no distance."""
    check_weights("geospot", weights, WEIGHTS)
    check_number("geospot's tolerance in km", tolerance, above=0)


def check_row(row: Mapping[str, Any], **_: Any) -> None:
    """Raises ValueError for a row that knows no place: every response would get 0."""
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
    """`tolerance`: the distance in km at which coordinates are worth 1/e."""
    check_row(row)
    said = read(response[-MAX_CHARACTERS:])
    truth = _truth(row)
    parts: dict[str, float] = {}
    if truth["country"]:
        same = country_code(said.get("country", "")) == country_code(truth["country"])
        parts["country"] = float(same)
    for name, spell in (
        ("region", lambda x: region_name(x, truth["country"])),
        ("city", city_name),
    ):
        if truth[name]:
            known = {
                spell(str(alias)) for alias in [truth[name], *(row.get(f"{name}_aliases") or ())]
            }
            parts[name] = float(
                any(spell(given) in known for given in _spellings(said.get(name, "")))
            )
    if truth["point"] is not None:
        parts["coordinates"] = 0.0
        if said.get("point") is not None:
            distance = great_circle_km(said["point"], truth["point"])
            parts["coordinates"] = math.exp(-distance / tolerance)
    weights = WEIGHTS if weights is None else weights
    total = sum(weights.get(name, 0.0) for name in parts)
    gained = sum(weights.get(name, 0.0) * value for name, value in parts.items())
    return Score(gained / total if total else 0.0, parts.get("country") == 1.0, parts)


def read(response: str) -> dict[str, Any]:
    """What a response says: country, region, city, and `point` (latitude, longitude); the last
    where it says a thing twice.
    """
    response = response.translate(MINUS_SIGNS)
    said = _read_labels(response) | _read_json(response)
    if "point" not in said and (point := _read_point(response)) is not None:
        said["point"] = point
    line = response.strip()
    if not said and line and len(line) <= 60 and "\n" not in line:
        said["country"] = line.rstrip(".")
    return said


def _read_labels(response: str) -> dict[str, Any]:
    """A value ends with its line, or at the next label."""
    said = {}
    labels = list(_LABEL.finditer(response))
    ends = [label.start() for label in labels] + [len(response)]
    for label, end in zip(labels, ends[1:], strict=True):
        name = _NAMES.get(label[1].lower(), label[1].lower())
        value = response[label.end() : end].strip(_AROUND).partition("\n")[0].strip(_AROUND)
        if name in ("country", "region", "city") and value:
            said[name] = value
    return said


def _spellings(value: str) -> set[str]:
    """ "Paris (France)" and "Paris, France" are Paris."""
    return {value, value.partition("(")[0], value.partition(",")[0]} - {""}


def _read_json(response: str) -> dict[str, Any]:
    """Of the objects in the response; what is in an object "coordinates" counts as beside it."""
    said: dict[str, Any] = {}
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
                said[name] = item
        lat, lon = (names.get(short, names.get(long)) for short, long in _COORDINATES)
        if (point := on_earth(lat, lon)) is not None:
            said["point"] = point
    return said


def _read_point(response: str) -> Point | None:
    found = None
    for pattern in (_PAIR, _LABELLED):
        for lat_text, north, lon_text, east in pattern.findall(response):
            lat = float(lat_text) * (-1 if north.upper() == "S" else 1)
            lon = float(lon_text) * (-1 if east.upper() == "W" else 1)
            # Plain whole numbers are counts and house numbers.
            exact = "." in lat_text and "." in lon_text
            if exact or north or pattern is _LABELLED:
                found = on_earth(lat, lon) or found
    return found


def on_earth(lat: object, lon: object) -> Point | None:
    """Two numbers, or texts of such; None where they are none, or not on earth."""
    try:
        found = float(str(lat)), float(str(lon))
    except ValueError:
        return None
    return found if abs(found[0]) <= 90 and abs(found[1]) <= 180 else None


def _truth(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of the row's columns; the answer is the country where no column says it. Coordinates that are
    no numbers or not on earth are not known.
    """
    return {
        "country": _text(row.get("country")) or _text(row.get("answer")),
        "region": _text(row.get("region")),
        "city": _text(row.get("city")),
        "point": on_earth(row.get("lat"), row.get("lon")),
    }


def _text(value: object) -> str:
    """Tables have NaN where a text is missing."""
    return "" if value is None or value != value else str(value).strip()
