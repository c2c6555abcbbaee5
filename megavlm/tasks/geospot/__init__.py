"""GeoSpot: the place where a photo was taken."""
