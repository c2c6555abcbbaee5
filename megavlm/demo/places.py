"""Where the demo's pictures for geospot were taken: a made-up world in which a colour is a country,
and the number of shapes tells its two cities apart. Names and coordinates are real.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """lat, lon: whole degrees, north and east positive."""

    country: str
    region: str
    city: str
    lat: int
    lon: int

    @property
    def text(self) -> str:
        """In the form that the reward geospot reads."""
        north, east = "NS"[self.lat < 0], "EW"[self.lon < 0]
        point = f"{abs(self.lat)} {north}, {abs(self.lon)} {east}"
        return f"Country: {self.country}\nRegion: {self.region}\nCity: {self.city}\n{point}"


# By colour; the first is shown by one shape, the second by three.
PLACES = {
    "red": (
        Place("Japan", "Kanto", "Tokyo", 36, 140),
        Place("Japan", "Kyushu", "Fukuoka", 34, 130),
    ),
    "green": (
        Place("Brazil", "Amazonas", "Manaus", -3, -60),
        Place("Brazil", "Bahia", "Salvador", -13, -39),
    ),
    "blue": (
        Place("Italy", "Lombardy", "Milan", 45, 9),
        Place("Italy", "Campania", "Naples", 41, 14),
    ),
    "yellow": (
        Place("India", "Maharashtra", "Mumbai", 19, 73),
        Place("India", "Bengal", "Kolkata", 23, 88),
    ),
    "black": (
        Place("Norway", "Vestland", "Bergen", 60, 5),
        Place("Norway", "Troms", "Tromso", 70, 19),
    ),
    "purple": (
        Place("Canada", "Ontario", "Toronto", 44, -79),
        Place("Canada", "Alberta", "Calgary", 51, -114),
    ),
}
NUMBERS = (1, 3)  # of shapes, for the first place and the second
ALL = tuple(place for places in PLACES.values() for place in places)
