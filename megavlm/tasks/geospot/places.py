"""Normalised names of countries, regions and cities, and distances between points."""

import gettext
import math
import re
from collections import defaultdict
from functools import lru_cache

import pycountry

from megavlm.rewards.words import plain

EARTH_RADIUS_KM = 6371.0088  # mean radius (IUGG)
# Common names that ISO 3166 does not list, in any of LANGUAGES.
_NAMES = """
AE emirates, uae. AG antigua. AX aland. BA bosnia. BF burkina. BL saint barts. BN brunei.
BQ bonaire. BS bahamas the. CD congo drc, congo kinshasa, democratic republic of congo,
democratic republic of the congo, dr congo, drc. CG congo brazzaville, republic of congo.
CI ivory coast. CN mainland china, pr china, prc. CV cape verde. CZ czech republic. FO faeroe
islands. GB britain, england, great britain, northern ireland, scotland, uk, wales. HK hong kong
china, hong kong sar, hong kong sar china. GM gambia the. IE eire, republic of ireland. KP dprk,
korea north, north korea. KR korea, korea south, rok, south korea. LA lao pdr, laos. MK macedonia.
MM burma. MO macao sar, macau, macau sar. NL holland. NZ aotearoa, aotearoa new zealand. PS
palestine, palestinian territories. RU russia. SJ svalbard. SY syria. SZ swaziland. TL east timor.
TR turkey. TT trinidad. TW republic of china. US america, united states of america, usa. VA vatican,
vatican city. VC saint vincent. VG bvi. VI united states virgin islands, us virgin islands, usvi. XK
kosovo, xk, xkx.
"""
# Languages whose translations in pycountry are used.
LANGUAGES = (
    "ar cs da de el es fi fr hr hu id it ja ko nb nl pl pt ro ru sk sl sv tr uk zh_CN".split()
)
# "The photo was probably taken in", "Based on the signs, this is"
_LEAD = re.compile(
    r"(?P<lead>(?:[^\n.!?;]{0,120}\b(?:is|it's|appears to be|in)\b )?"
    r"(?:(?:most |very )?(?:likely|probably) )?(?:in )?)(?P<place>[^\n!?;]{1,60})",
    re.I,
)
_BREAK = re.compile(r",|\b(?:is|it|it's|in|likely|probably)\b", re.I)
_SHORT = ("US", "UK", "USA", "UAE")
_UNSURE = re.compile(r"\b(?:not|nor|or|and|no|but|either|near)\b|n't\b", re.I)
_BRACKETS = re.compile(r"([^()\[\]]+)[(\[]([^()\[\]]*)[)\]]\W*")
_STATE_OF = re.compile(r"(?:republic|kingdom|state|commonwealth) of (?:the )?")
_LEVELS = re.compile(
    r"\b(?:state|province|region|oblast|krai|county|prefecture|district|department|governorate"
    r"|territory|municipality|metropolitan|autonomous|canton|city|town|greater|republic)\b"
)
_SMALL = re.compile(r"\b(?:of|the|de|del|di|da|la|le|el|al|d)\b")


def country_code(name: str) -> str:
    """Return the ISO 3166-1 alpha-2 code of a name or code (XK is Kosovo), or the normalised name
    if it is unknown. "France (FR)" is a country, "Georgia (US)" is not.
    """
    known, key = _countries(), _key(name)
    if key in known:
        return known[key]
    parts = [_STATE_OF.sub("", key, count=1)]
    if match := _BRACKETS.fullmatch(name):
        parts += map(_key, match.groups())
    codes = {known[part] for part in parts if part in known}
    return codes.pop() if len(codes) == 1 else key


def country_said(line: str) -> str:
    """Return the country in a short line: alone, in a sentence or after its city, as in "This is
    likely Lisbon, Portugal". If there is none, return the line if it has at most 60 characters,
    otherwise "".
    """
    line = line.strip().rstrip(".")
    match = _LEAD.fullmatch(line) if len(line) <= 200 else None
    if match and len(country_code(line)) > 2:
        *fronts, name = (part.strip() for part in match["place"].split(","))
        others = fronts + [part for part in _BREAK.split(match["lead"]) if len(part.strip()) > 3]
        codes = {code for other in others if len(code := country_code(other)) == 2}
        # "it" is not Italy; Los Angeles, CA is not in Canada, nor is Atlanta, Georgia in Georgia.
        short = len(name) <= 3 and not (name.isupper() and (not fronts or name in _SHORT))
        if not (short or (fronts and name == "Georgia") or _UNSURE.search(line[: -len(name)])):
            code = country_code(name)
            if len(code) == 2 and codes <= {code}:
                return name
    return line if len(line) <= 60 and "\n" not in line else ""


def region_name(name: str, country: str = "") -> str:
    """Normalise the name of a region. ISO 3166-2 codes ("US-CA", or "CA" within `country`) are
    replaced by names.
    """
    code = name.strip().upper()
    for candidate in (code, f"{country_code(country)}-{code}"):
        found = pycountry.subdivisions.get(code=candidate) if len(candidate) <= 8 else None
        if found is not None:
            return _place(found.name)
    return _place(name)


def city_name(name: str) -> str:
    return _place(name)


def great_circle_km(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Return the haversine distance of two points (latitude, longitude) in degrees."""
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(math.radians, point)) for point in (left, right))
    half = (
        math.sin((lat_b - lat_a) / 2) ** 2
        + math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_b - lon_a) / 2) ** 2
    )
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(half)))


@lru_cache(maxsize=1)
def _countries() -> dict[str, str]:
    """Return the alpha-2 code by plain name or code.

    In order of precedence: ISO 3166, common names, names without their ending ("Bolivia,
    Plurinational State of"), and names in other languages. Names of the last two kinds are left out
    if they are ambiguous (there are two Virgin Islands).
    """
    known: dict[str, str] = {}
    for country in pycountry.countries:
        for field in ("name", "official_name", "common_name", "alpha_2", "alpha_3"):
            if value := getattr(country, field, None):
                known[_key(value)] = country.alpha_2
    for code, names in re.findall(r"([A-Z]{2})\s([^.]+)\.", _NAMES):
        known |= {" ".join(name.split()): code for name in names.split(",")}
    short, foreign = defaultdict(set), defaultdict(set)
    for country in pycountry.countries:
        short[_key(re.split(r"[,(]", country.name)[0])].add(country.alpha_2)
    for language in LANGUAGES:
        translated = gettext.translation("iso3166-1", pycountry.LOCALES_DIR, [language]).gettext
        for country in pycountry.countries:
            for name in (country.name, getattr(country, "common_name", country.name)):
                foreign[_key(translated(name))].add(country.alpha_2)
    for found in (short, foreign):
        for key, codes in found.items():
            if len(codes) == 1:
                known.setdefault(key, *codes)
    return known


def _key(name: str) -> str:
    text = plain(name).replace(".", "").replace("&", " and ")
    words = re.sub(r"[^\w\s]", " ", text).split()
    if words[:1] == ["the"]:
        words = words[1:]
    return re.sub(r"\bste?\b(?= )", "saint", " ".join(words))


def _place(name: str) -> str:
    key = _key(name)
    short = " ".join(_SMALL.sub(" ", _LEVELS.sub(" ", key)).split())
    return short or key
