"""Places of the demo's images for geospot: a made-up world in which each colour is a place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPlace:
    """lat, lon: whole degrees, north and east positive."""

    country: str
    city: str
    lat: int
    lon: int

    @property
    def text(self) -> str:
        """Return the place in the form that the reward geospot reads."""
        north, east = "NS"[self.lat < 0], "EW"[self.lon < 0]
        point = f"{abs(self.lat)} {north}, {abs(self.lon)} {east}"
        return f"Country: {self.country}\nCity: {self.city}\n{point}"


PLACES = {
    "red": DemoPlace("Japan", "Tokyo", 36, 140),
    "green": DemoPlace("Brazil", "Manaus", -3, -60),
    "blue": DemoPlace("Italy", "Milan", 45, 9),
    "yellow": DemoPlace("India", "Mumbai", 19, 73),
    "black": DemoPlace("Norway", "Bergen", 60, 5),
    "purple": DemoPlace("Canada", "Calgary", 51, -114),
}
