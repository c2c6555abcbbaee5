"""Places: what a response says, names in one spelling, distances, and what they are worth."""

import math
from typing import Any

import pytest

from megavlm.rewards import geospot
from megavlm.rewards.places import city_name, country_code, great_circle_km, region_name

PARIS = {"country": "FR", "region": "Île-de-France", "city": "Paris", "lat": 48.8566, "lon": 2.3522}
FULL = "Country: France\nRegion: Ile de France\nCity: Paris\nCoordinates: 48.8566, 2.3522"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Côte d'Ivoire", "Ivory Coast"),
        ("USA", "United States"),
        ("the U.S.A.", "US"),
        ("South Korea", "KOR"),
        ("Russia", "Russian Federation"),
        ("Türkiye", "Turkey"),
        ("Bolivia", "BO"),
        ("Vietnam", "Viet Nam"),
        ("Czech Republic", "Czechia"),
        ("DR Congo", "COD"),
        ("bosnia & herzegovina", "BA"),
        ("são tomé and príncipe", "ST"),
        ("Macau", "MO"),
        ("Brunei", "BN"),
        ("Kosovo", "XKX"),
        ("Republic of Korea", "KR"),
        ("Korea, North", "KP"),
        ("St Lucia", "LC"),
        ("St. Kitts and Nevis", "KN"),
        ("St. Vincent & the Grenadines", "VC"),
        ("Holy See", "Vatican City"),
        ("Falkland Islands", "FK"),
        ("Österreich", "Austria"),
        ("Schweiz", "Suisse"),
        ("Ελλάδα", "Greece"),
        ("日本", "Japan"),
        ("US Virgin Islands", "VI"),
        ("U.S. Virgin Islands", "VIR"),
        ("British Virgin Islands", "VG"),
        ("Saint Martin", "MF"),
        ("Sint Maarten", "SX"),
        ("PRC", "China"),
        ("People's Republic of China", "CN"),
        ("Republic of China", "Taiwan"),
        ("Democratic Republic of the Congo", "CD"),
        ("Congo (Kinshasa)", "CD"),
        ("Republic of the Congo", "CG"),
        ("Kingdom of Spain", "ES"),
        ("France (FR)", "FR"),
        ("USA (United States)", "US"),
        ("France 🇫🇷", "FR"),
        ("ST", "São Tomé and Príncipe"),
    ],
)
def test_a_country_has_one_code(left: str, right: str) -> None:
    assert country_code(left) == country_code(right)
    assert len(country_code(left)) == 2


def test_countries_that_sound_alike_are_two() -> None:
    for left, right in (("Niger", "Nigeria"), ("KR", "KP"), ("Congo", "DR Congo"), ("", "France")):
        assert country_code(left) != country_code(right)
    for name in ("Virgin Islands", "Georgia (US)", "France or Spain", "Europe"):
        assert len(country_code(name)) > 2


def test_regions_and_cities() -> None:
    assert region_name("CA", "US") == region_name("US-CA") == region_name("State of California")
    assert region_name("Bavaria") != region_name("Saxony")
    assert region_name("Île-de-France") == region_name("ile de france")
    assert city_name("St. Petersburg") == city_name("Saint Petersburg")
    assert city_name("St Moritz") == city_name("Saint-Moritz") != city_name("Moritz")
    assert city_name("Zürich") == city_name("zurich") and city_name("Mexico City") == "mexico"


def test_great_circle_distance() -> None:
    paris, london = (48.8566, 2.3522), (51.5074, -0.1278)
    assert great_circle_km(paris, london) == pytest.approx(343.6, abs=0.5)
    assert great_circle_km((0, 0), (0, 180)) == pytest.approx(math.pi * 6371.0088)
    assert great_circle_km(paris, paris) == 0


@pytest.mark.parametrize(
    ("response", "point"),
    [
        ("48.8566, 2.3522", (48.8566, 2.3522)),
        ("48.8566° N, 2.3522° W", (48.8566, -2.3522)),
        ("33.9 S 18.4 E", (-33.9, 18.4)),
        ("Latitude: -33.9\nLongitude: 18.4", (-33.9, 18.4)),
        ("\u221233.9, \u201318.4", (-33.9, -18.4)),
        ("Latitude: \u221233.9\nLongitude: .5", (-33.9, 0.5)),
        ("first 1.5, 2.5, then (3.5, 4.5)", (3.5, 4.5)),
        ('{"lat": 1, "lon": 2.5, "country": "X"}', (1.0, 2.5)),
        ("between 3, 4 houses", None),
        ("98.5, 2.5", None),
        ("no idea", None),
    ],
)
def test_reading_coordinates(response: str, point: tuple[float, float] | None) -> None:
    assert geospot.read(response).get("point") == point


def test_reading_names() -> None:
    assert geospot.read("**Country:** France.\n- State: Bavaria") == {
        "country": "France",
        "region": "Bavaria",
    }
    assert geospot.read("Country: Spain\nCountry: France")["country"] == "France"
    assert geospot.read("India.") == {"country": "India"}
    assert geospot.read('so {"Country": "Peru", "City": "Lima"}') == {
        "country": "Peru",
        "city": "Lima",
    }
    assert (
        geospot.read("a long sentence about nothing that names no country in any form at all") == {}
    )


def test_the_whole_answer_is_worth_one_and_each_part_its_weight() -> None:
    assert geospot.score(FULL, PARIS).reward == pytest.approx(1.0)
    assert geospot.score("Country: France", PARIS).reward == pytest.approx(0.3)
    assert geospot.score("Region: ile de france\nCity: paris", PARIS).reward == pytest.approx(0.4)
    london = geospot.score("Coordinates: 51.5074, -0.1278", PARIS, tolerance=343.6)
    assert london.reward == pytest.approx(0.3 / math.e, rel=1e-3) and not london.correct


def test_what_a_row_does_not_know_does_not_count() -> None:
    row = {"answer": "France", "country": "France", "region": None, "lat": None, "lon": None}
    assert geospot.score("France", row).reward == 1.0
    table = {"country": "France", "region": "", "city": "", "lat": "", "lon": ""}
    assert geospot.score("France", table).reward == 1.0
    assert geospot.score("48.9, 2.4", table | {"lat": "48.9", "lon": "2.4"}).reward == 0.5
    assert geospot.score("Spain", row).reward == 0.0


def test_a_stage_weighs_parts() -> None:
    stage = {"country": 0.3, "coordinates": 0.3}
    near = "Country: France\nCoordinates: 48.0, 2.3522"
    km = great_circle_km((48.0, 2.3522), (48.8566, 2.3522))
    found = geospot.score(near, PARIS, weights=stage, tolerance=500.0)
    assert found.reward == pytest.approx((1 + math.exp(-km / 500)) / 2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"weights": {"town": 1.0}}, "no component 'town'"), ({"tolerance": 0.0}, "above 0")],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        geospot.prepare(**options)


def test_hostile_text_is_cheap() -> None:
    for text in (
        "Country:" * 10**5,
        "1.1 " * 10**5,
        "{" * 10**5 + "}",
        "lat 1 " * 10**5,
        "9" * 10**6,
    ):
        assert geospot.score(text, PARIS).reward < 0.01
