"""What the files of image sets and of traffic hold, known without reading them."""

from typing import NamedTuple


class Images(NamedTuple):
    """What an image set's file must hold."""

    classes: int
    shape: tuple[int, int, int]  # of one image: channels, height, width

    def summary(self, name: str) -> str:
        return f"Images [n, {', '.join(map(str, self.shape))}] of {self.classes} classes, from {name}.npz."


class Traffic(NamedTuple):
    """What sensors a file of traffic holds."""

    what: str
    missing: float | None = None  # how its file says that a reading is missing

    def summary(self, name: str) -> str:
        return f"{self.what}; from {name}.npz."


IMAGES = {
    "mnist": Images(10, (1, 28, 28)),
    "fashion_mnist": Images(10, (1, 28, 28)),
    "svhn": Images(10, (3, 32, 32)),
    "cifar10": Images(10, (3, 32, 32)),
    "cifar100": Images(100, (3, 32, 32)),
    "cifar100_subset": Images(100, (3, 32, 32)),
    "tiny_imagenet": Images(200, (3, 64, 64)),
    "tiny_imagenet_subset": Images(200, (3, 64, 64)),
}
METR_LA = Traffic("Speeds (mph) at 207 loop detectors in Los Angeles County, March to June 2012", 0.0)
PEMS_BAY = Traffic("Speeds (mph) at 325 sensors in the San Francisco Bay Area, January to June 2017", 0.0)
PEMS04 = Traffic("Flows (vehicles per 5 minutes) at 307 detectors of district 4, January and February 2018")
PEMS08 = Traffic("Flows (vehicles per 5 minutes) at 170 detectors of district 8, July and August 2016")
TRAFFIC = {
    "metr_la": METR_LA,
    "metr_la_subset": METR_LA._replace(what="Part of METR-LA: 29 of its 207 sensors, the whole time"),
    "metr_la_week": METR_LA._replace(what="Part of METR-LA: all sensors, its first week, gaps filled in the source"),
    "pems_bay": PEMS_BAY,
    "pems_bay_subset": PEMS_BAY._replace(what="Part of PEMS-BAY: 67 of its 325 sensors, the whole time"),
    "pems04": PEMS04,
    "pems04_head": PEMS04._replace(what="Part of PEMS04: its first 2.4 days"),
    "pems08": PEMS08,
    "pems08_partial": PEMS08._replace(what="Part of PEMS08: 8,438 of its 17,856 steps, with one long gap"),
}
