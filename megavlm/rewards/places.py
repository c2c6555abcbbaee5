"""Names of countries, regions and cities in one spelling, and distances between points."""

import math
import re
from functools import lru_cache

import pycountry

from megavlm.rewards.words import plain

EARTH_RADIUS_KM = 6371.0088  # mean radius (IUGG)
# Names in use that ISO 3166 does not list.
_COUNTRIES = {
    "america": "US",
    "bosnia": "BA",
    "brasil": "BR",
    "britain": "GB",
    "burma": "MM",
    "cape verde": "CV",
    "congo kinshasa": "CD",
    "congo brazzaville": "CG",
    "czech republic": "CZ",
    "democratic republic of congo": "CD",
    "deutschland": "DE",
    "dr congo": "CD",
    "drc": "CD",
    "east timor": "TL",
    "england": "GB",
    "espana": "ES",
    "great britain": "GB",
    "holland": "NL",
    "iran": "IR",
    "ivory coast": "CI",
    "korea": "KR",
    "laos": "LA",
    "macedonia": "MK",
    "moldova": "MD",
    "north korea": "KP",
    "northern ireland": "GB",
    "palestine": "PS",
    "republic of congo": "CG",
    "republic of ireland": "IE",
    "russia": "RU",
    "scotland": "GB",
    "south korea": "KR",
    "swaziland": "SZ",
    "syria": "SY",
    "turkey": "TR",
    "uae": "AE",
    "uk": "GB",
    "united states of america": "US",
    "usa": "US",
    "vatican": "VA",
    "vatican city": "VA",
    "wales": "GB",
}
_LEVELS = re.compile(
    r"\b(?:state|province|region|oblast|krai|county|prefecture|district|department|governorate"
    r"|territory|municipality|metropolitan|autonomous|canton|city|town|greater|republic)\b"
)
_SMALL = re.compile(r"\b(?:of|the|de|del|di|da|la|le|el|al|d)\b")


def country_code(name: str) -> str:
    """ISO 3166-1 alpha-2 of a name or code; the plain name where there is none."""
    return _countries().get(_key(name), _key(name))


def region_name(name: str, country: str = "") -> str:
    """Plain name; ISO 3166-2 codes ("US-CA", or "CA" within `country`) become names."""
    code = name.strip().upper()
    for candidate in (code, f"{country_code(country)}-{code}"):
        found = pycountry.subdivisions.get(code=candidate) if len(candidate) <= 8 else None
        if found is not None:
            return _place(found.name)
    return _place(name)


def city_name(name: str) -> str:
    return _place(name)


def great_circle_km(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Between two points (latitude, longitude) in degrees, by the haversine formula."""
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(math.radians, point)) for point in (left, right))
    half = (
        math.sin((lat_b - lat_a) / 2) ** 2
        + math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_b - lon_a) / 2) ** 2
    )
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(half)))


@lru_cache(maxsize=1)
def _countries() -> dict[str, str]:
    """Plain name or code -> alpha-2."""
    known = {}
    for country in pycountry.countries:
        for field in ("name", "official_name", "common_name", "alpha_2", "alpha_3"):
            if value := getattr(country, field, None):
                known[_key(value)] = country.alpha_2
                # "Bolivia, Plurinational State of" is Bolivia; two Koreas are not one.
                short = _key(value.split(",")[0])
                if field == "name" and short != "korea" and not short.startswith("congo"):
                    known.setdefault(short, country.alpha_2)
    return known | _COUNTRIES


def _key(name: str) -> str:
    text = plain(name).replace(".", "").replace("&", " and ")
    words = re.sub(r"[^\w\s]", " ", text).split()
    if words[:1] == ["the"]:
        words = words[1:]
    return " ".join(words)


def _place(name: str) -> str:
    key = _key(re.sub(r"\b(?:st|ste)\b\.?", "saint", plain(name)))
    short = " ".join(_SMALL.sub(" ", _LEVELS.sub(" ", key)).split())
    return short or key
