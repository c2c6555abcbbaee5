"""GeoSpot: the place where a photo was taken."""

from megavlm.task import PublishedData, Task

TASK = Task(
    reward="megavlm.tasks.geospot.reward:score",
    check_options="megavlm.tasks.geospot.reward:check_options",
    check_row="megavlm.tasks.geospot.reward:check_row",
    evaluation_page="megavlm.tasks.geospot.map:evaluation_page",
    published=PublishedData(
        "streetview",
        "stochastic/random_streetview_images_pano_v0.0.2",
        # There is only one split: the last of its six files is used for testing.
        "data/train-0000[0-4]-of-00006-*.parquet",
        "data/train-00005-of-00006-*.parquet",
        keys={
            "image_keys": ("image",),
            "prompt_key": None,
            "question": (
                "Where was this panorama taken? End with two lines: Country: ..., "
                "Coordinates: LATITUDE, LONGITUDE"
            ),
            "answer_key": "country_iso_alpha2",
            "category_key": None,
            "extra_keys": ("latitude", "longitude"),
        },
    ),
    demo=("place",),
)
