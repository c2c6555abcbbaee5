r"""Reads latitude and longitude as people write them, in degrees, north and east positive:

48.8566, 2.3522    N 48.8566, E 2.3522    48.8566° North, 2.3522° East    48°51'24"N, 2°21'8"E
Latitude: 48.8566, Longitude: 2.3522      48.8566^\circ N and 2.3522^\circ E    48,8566; 2,3522
"""

import re
from collections.abc import Mapping

Point = tuple[float, float]  # latitude, longitude in degrees

_NAMES = (("lat", "latitude"), ("lon", "longitude", "lng"))

# Rewrites to the signs that _ANGLE knows: ° ' " N S E W.
_SPELLED = (
    (re.compile(r"\$?\^?\{?\\circ\}?|[\u00ba\u02da]| ?\bdegrees?\b", re.I), "°"),
    (re.compile(r"''|[\u2033\u201c\u201d]| ?\bseconds?\b", re.I), '"'),
    (re.compile(r"[\u2032\u2019]| ?\bminutes?\b", re.I), "'"),
    (re.compile(r"\b([NSEW])(?:orth|outh|ast|est)\b", re.I), r"\1"),
    (re.compile(r"[*$~]|\\[()]"), ""),
)
# "48,8566; 2,3522" in a text without decimal points
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d{1,3}),(\d{2,20})(?!\d|[.,]\d)")
_NUMBER = r"[+-]?(?:\d{1,3}(?:\.\d{1,20})?|\.\d{1,20})"
_PART = r"(\d{1,2}(?:\.\d{1,20})?)"
# Groups: hemisphere before the angle, degrees, minutes, seconds, hemisphere after it.
_ANGLE = (
    rf"(?:([SIDES])\s?)?({_NUMBER})\s?(?:°\s?(?:{_PART}\s?'\s?(?:{_PART}\s?\"\s?)?)?)?"
    r"(?:([SIDES])(?![A-Za-z]))?"
)
_LAT, _LON = _ANGLE.replace("SIDES", "NS"), _ANGLE.replace("SIDES", "EW") + r"(?!\d|\.\d)"
_PAIR = re.compile(
    rf"(?<![\w.+-]){_LAT}(?:\s?lat(?:itude)?)?\s{{0,3}}(?:[,;/ ]|\band\b)\s{{0,3}}{_LON}", re.I
)
_LABELLED = re.compile(
    rf"\blat(?:itude)?\b[^\w-]{{0,8}}?{_LAT}(?![\d.]).{{0,40}}?"
    rf"\b(?:lon(?:g(?:itude)?)?|lng)\b[^\w-]{{0,8}}?{_LON}",
    re.I | re.S,
)


def read_point(text: str) -> Point | None:
    """Return the last point in a text. Labelled points take precedence."""
    for spelling, sign in _SPELLED:
        text = spelling.sub(sign, text)
    if not re.search(r"\d\.\d", text):
        text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    found = None
    for pattern in (_PAIR, _LABELLED):
        for parts in pattern.findall(text):
            lat, lon = _degrees(*parts[:5]), _degrees(*parts[5:])
            # Plain whole numbers are rather counts or house numbers.
            exact = all("." in "".join(angle) or angle[2] for angle in (parts[:5], parts[5:]))
            sided = all(angle[0] or angle[4] for angle in (parts[:5], parts[5:]))
            if exact or sided or pattern is _LABELLED:
                found = on_earth(lat, lon) or found
    return found


def _degrees(before: str, degrees: str, minutes: str, seconds: str, behind: str) -> float:
    """Return decimal degrees, or NaN if minutes or seconds are sixty or more."""
    parts = [float(part or 0) for part in (minutes, seconds)]
    if max(parts) >= 60:
        return float("nan")
    size = abs(float(degrees)) + parts[0] / 60 + parts[1] / 3600
    side = (before or behind).upper()
    return -size if side in ("S", "W") or degrees.startswith("-") else size


def on_earth(lat: object, lon: object) -> Point | None:
    """Return the point with these coordinates, given as numbers or as text, or None if they are not
    a point on earth.
    """
    try:
        found = float(_decimal(lat)), float(_decimal(lon))
    except ValueError:
        return None
    return found if abs(found[0]) <= 90 and abs(found[1]) <= 180 else None


def _decimal(value: object) -> str:
    return _DECIMAL_COMMA.sub(r"\1.\2", str(value))


def named_point(values: Mapping[str, object]) -> Point | None:
    """Return the point of `lat` or `latitude`, and `lon`, `longitude` or `lng`, if there is one."""
    lat, lon = (next((values[name] for name in names if name in values), None) for names in _NAMES)
    return on_earth(lat, lon)
