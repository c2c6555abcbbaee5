"""Places: what a response says, names in one spelling, distances, and what they are worth."""

import math

import pytest

from megavlm.tasks.geospot import reward as geospot
from megavlm.tasks.geospot.places import city_name, country_code, great_circle_km, region_name
from tests.unit.rewards.hostile import assert_cheap

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
        ("P.R. China", "CN"),
        ("PR China", "CN"),
        ("Commonwealth of Australia", "AU"),
        ("Éire", "IE"),
        ("Eire", "Republic of Ireland"),
        ("Hong Kong, China", "HK"),
        ("Gambia, The", "GM"),
        ("Palestinian Territories", "PS"),
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
        ("48.8566, +2.3522", (48.8566, 2.3522)),
        ("+48.8566, -2.3522", (48.8566, -2.3522)),
        ("N 48.8566, E 2.3522", (48.8566, 2.3522)),
        ("S33.9 W18.4", (-33.9, -18.4)),
        ("48.8566° North, 2.3522° East", (48.8566, 2.3522)),
        ("33.9 degrees south and 18.4 degrees west", (-33.9, -18.4)),
        ("-33.9° S, 18.4° E", (-33.9, 18.4)),
        (r"\(33.9^\circ\) S, $18.4^{\circ}$ W", (-33.9, -18.4)),
        ("**48.8566**, **2.3522**", (48.8566, 2.3522)),
        ("33.9° S latitude, 18.4\u00ba W longitude", (-33.9, -18.4)),
        ('{"lat": 1, "lng": 2.5}', (1.0, 2.5)),
        ("lat: 1.5 lng: 2.5", (1.5, 2.5)),
        ("48°30'36\"N, 2°15'0\"E", (48.51, 2.25)),
        ("48°30\u203236\u2033S, 2°15\u20320\u2033W", (-48.51, -2.25)),
        ("48°30\u201936\u201d South, 2°15\u20190\u201d West", (-48.51, -2.25)),
        ("N 48° 30' 36\", W 2° 15.0'", (48.51, -2.25)),
        ("Latitude: 48°30'36\"N\nLongitude: 2°15'0\"E", (48.51, 2.25)),
        ("48°60'0\"N, 2°0'0\"E", None),
        ("48,8566; 2,3522", (48.8566, 2.3522)),
        ("48,8566, -2,3522", (48.8566, -2.3522)),
        ("Lat 48,8566 Lon 2,3522", (48.8566, 2.3522)),
        ('{"lat": "48,8566", "lon": "2,3522"}', (48.8566, 2.3522)),
        ("48.8566,2.3522", (48.8566, 2.3522)),
        ("48,8566,2,3522", None),
        ("\uff14\uff18\uff0e\uff15\uff0c\uff12\uff0e\uff13", (48.5, 2.3)),
        ("48.8566\u00b0N\u30012.3522\u00b0E", (48.8566, 2.3522)),
        ("1048.5, 2.5", None),
        ("2.5 South Street, 3.5 East Street", None),
        ("+3, +4", None),
        ("between 3, 4 houses", None),
        ("98.5, 2.5", None),
        ("no idea", None),
    ],
)
def test_reading_coordinates(response: str, point: tuple[float, float] | None) -> None:
    assert geospot.read(response).get("point") == (point and pytest.approx(point))


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


@pytest.mark.parametrize(
    "response",
    [
        FULL,
        FULL.replace("\n", ", "),
        FULL.replace("\n", " | "),
        FULL.replace(": ", ":** ").replace("\n", "\n- **"),
        "1. Country: France\n2. Region: Ile de France\n3. City: Paris.\n4. GPS: 48.8566, 2.3522",
        "Country: France (FR). State: Ile de France (Paris region); City: Paris, France\n"
        "Lat: 48.8566, Long: 2.3522",
        "Country:\nFrance\nRegion:\n\nÎle-de-France\nCity:\nParis\n48.8566\u00b0 N, 2.3522\u00b0 E",
        '{"country": "France", "region": "Ile de France", "city": "Paris",'
        ' "lat": 48.8566, "lon": 2.3522}',
        '```json\n{"country": "FR",\n "state": "Ile de France",\n "city": "Paris",\n'
        ' "coordinates": {"latitude": "48.8566", "longitude": "2.3522"}}\n``` so {that} is it',
        '{"country": "France", "region": "Ile de France", "city": "Paris",'
        ' "coordinates": [48.8566, 2.3522]}',
        'Country: Spain. No: {"country": "France", "region": "Ile de France", "city": "Paris",'
        ' "location": "48.8566, 2.3522"}',
    ],
)
def test_forms_of_a_whole_answer(response: str) -> None:
    assert geospot.score(response, PARIS).reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        ("Country: France or Spain", {"country": 0}),
        ("Country: Spain (not France)", {"country": 0}),
        ("France (FR)", {"country": 1}),
        ('{"country": "Spain"} although Country: France', {"country": 0}),
        ('{"country": null}\nCountry: France', {"country": 1}),
        ("Country: , City: Paris", {"country": 0, "city": 1}),
        ("City: London, Paris", {"city": 0}),
        ("the country: France is nice", {"country": 0}),
        ('{"lat": 148.8566, "lon": 2.3522}', {"coordinates": 0}),
        ('{"lat": NaN, "lon": 2.3522}', {"coordinates": 0}),
    ],
)
def test_what_is_said_counts_as_far_as_it_goes(response: str, parts: dict[str, float]) -> None:
    found = geospot.score(response, PARIS).parts
    assert {name: found[name] for name in parts} == parts


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("<answer>Country: France, City: Paris</answer>", True),
        ("<answer>Country: France</answer>", True),
        ("<think>Spain?</think><answer>\nFrance\n</answer>", True),
        ("<think>Looks like Spain</think>\nFrance", True),
        ("<think>Country: France</think>\nSpain", False),
        ("<think><answer>France</answer></think>\nSpain", False),
        ("<answer>France <not Spain></answer>", False),
        ("<answer>France</answer><answer>Spain</answer>", False),
        ("The country is **France**.", True),
        ("It\u2019s France.", True),
        ("**Answer:** France", True),
        (r"\(\boxed{\text{France}}\)", True),
        (r"Country: \boxed{France}", True),
        ("Country - France", True),
        ('{"answer": "France"}', True),
        ("Paris, France", True),
        ("Based on the signs, this is most likely Paris, France.", True),
        ("This street-level photo was taken in France.", True),
        ("The country in which this street-level photo was taken is France.", True),
        ("France or Spain", False),
        ("Spain, France", False),
        ("Spain, not France", False),
        ("This is Spain, near France", False),
        ("The country is not France.", False),
        ("This is Spain or in France", False),
        ("It is Spain, it is France", False),
        ("It is Spain. It is France", False),
        ("It is Spain; it is France", False),
        ("New France", False),
    ],
)
def test_a_country_alone_in_tags_or_in_a_sentence(response: str, correct: bool) -> None:
    assert geospot.score(response, {"answer": "France"}).correct is correct


@pytest.mark.parametrize(
    ("response", "country"),
    [
        ("The city is Los Angeles, CA", "Canada"),
        ("Atlanta, Georgia", "Georgia"),
        ("I cannot say what it is in it", "Italy"),
        ("The place is in no", "Norway"),
        ("US, Canada", "Canada"),
    ],
)
def test_words_and_states_are_no_countries(response: str, country: str) -> None:
    assert not geospot.score(response, {"answer": country}).correct


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
    named = {"answer": "FR", "latitude": "48.9", "longitude": "2.4"}
    assert geospot.score("48.9, 2.4", named).reward == 0.5
    assert geospot.score("Spain", row).reward == 0.0
    nan = float("nan")
    for lat, lon in ((nan, nan), ("NaN", "NaN"), (91.0, 0.0), ("0", "-181"), ("?", "?"), (1.0, "")):
        assert geospot.score("France", row | {"lat": lat, "lon": lon}).reward == 1.0
    assert geospot.score("France", row | {"region": nan, "city": nan}).reward == 1.0


def test_a_row_that_knows_no_place_is_an_error() -> None:
    for row in ({}, {"answer": ""}, {"answer": "", "country": None, "lat": "NaN", "lon": "0"}):
        with pytest.raises(ValueError, match=r"data\.extra_keys"):
            geospot.score("France", row)
    assert geospot.score("1.5, 2.5", {"answer": "", "lat": 1.5, "lon": 2.5}).reward == 1.0


def test_a_stage_weighs_parts() -> None:
    stage = {"country": 0.3, "coordinates": 0.3}
    near = "Country: France\nCoordinates: 48.0, 2.3522"
    km = great_circle_km((48.0, 2.3522), (48.8566, 2.3522))
    found = geospot.score(near, PARIS, weights=stage, tolerance=500.0)
    assert found.reward == pytest.approx((1 + math.exp(-km / 500)) / 2)


HOSTILE = {
    "labels": "'Country:' * 10**5",
    "labels in a line": "'country: ,' * 10**5",
    "numbers": "'1.1 ' * 10**5",
    "objects": "'{' * 10**5 + '}'",
    "nested objects": "'{\"a\":' * 10**5",
    "latitudes": "'lat 1 ' * 10**5",
    "digits": "'9' * 10**6",
    "newlines": "'\\n' * 20_000",
    "spaces": "'Country' + ' ' * 20_000",
    "commas": "',' * 20_000",
    "degrees": "'1°1\\'1\"N ' * 10**5",
    "tags": "'<answer>' * 10**5",
    "sentence": "'it is in ' * 10**5",
    "labelled spaces": "'lat' + ' ' * 20_000 + '1'",
}


def test_hostile_text_is_cheap() -> None:
    imports = "from megavlm.tasks.geospot import reward as geospot"
    assert_cheap(HOSTILE, 10, imports, f"geospot.score(response, {PARIS!r}).reward < 0.01")
