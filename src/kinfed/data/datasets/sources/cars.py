"""CompCars: photographs of cars by viewpoint and year, from the folder in which its keepers hand it out."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import RunError

SIZE = 64  # pixels a side; the originals are larger, and 24,151 of 224 by 224 would need 14 GB
TYPES = ("MPV", "SUV", "sedan", "hatchback")  # the first four of its twelve, numbered from 1
VIEWS = {1: "front", 4: "front-side", 3: "side", 5: "rear-side", 2: "rear"}  # its numbers, in order around the car
YEARS = range(2009, 2015)


def compcars(files: dict[str, Path]) -> dict[str, NDArray[Any]]:
    """Images of four types of cars, 30 clients: five viewpoints times six years, joined where one of them is near.

    The folder (or its `data`) holds image/MAKE/MODEL/YEAR/NAME.jpg, label/MAKE/MODEL/YEAR/NAME.txt with the viewpoint
    and the car's box, and misc/attributes.txt with every model's type. Cars are cut out along their boxes.
    """
    from PIL import Image

    root = next((r for r in (files["folder"], files["folder"] / "data") if (r / "image").is_dir()), None)
    if root is None or not (root / "misc" / "attributes.txt").is_file():
        raise RunError(f"{files['folder']} is not CompCars: it must hold image/, label/ and misc/attributes.txt")
    kinds = {}
    for row in (root / "misc" / "attributes.txt").read_text().splitlines()[1:]:
        if row.split():
            kinds[row.split()[0]] = int(row.split()[-1])
    views = list(VIEWS)
    pixels, labels, clients = [], [], []
    for path in sorted((root / "image").rglob("*.jpg")):
        _, model, year, _ = path.relative_to(root / "image").parts
        note = root / "label" / path.relative_to(root / "image").with_suffix(".txt")
        if not year.isdigit() or int(year) not in YEARS or not 1 <= kinds.get(model, 0) <= len(TYPES):
            continue
        if not note.is_file():
            raise RunError(f"{path} has no label {note}; is the folder complete?")
        try:
            view, _, box = note.read_text().splitlines()[:3]
            left, top, right, bottom = map(int, box.split())
            if int(view) not in VIEWS:
                continue
        except ValueError:
            raise RunError(f"{note} is not a label: it must hold the viewpoint, a line, and the car's box") from None
        with Image.open(path) as image:
            cut = image.convert("RGB").crop((left, top, right, bottom)).resize((SIZE, SIZE))
        pixels.append(np.asarray(cut).transpose(2, 0, 1))
        labels.append(kinds[model] - 1)
        clients.append(views.index(int(view)) * len(YEARS) + int(year) - YEARS[0])
    if not pixels:
        raise RunError(f"{root} has no image of {', '.join(TYPES)} from {YEARS[0]} to {YEARS[-1]}")
    place = np.array([(v, y) for v in range(len(VIEWS)) for y in YEARS])  # [N, 2]
    near = (np.abs(place[:, None] - place) <= 1).any(-1)
    np.fill_diagonal(near, False)
    return {
        "x": np.stack(pixels),
        "y": np.array(labels),
        "client": np.array(clients),
        "owners": np.array([f"{name} {year}" for name in VIEWS.values() for year in YEARS]),
        "class_names": np.array(TYPES),
        "adjacency": near.astype(np.float32),
    }
