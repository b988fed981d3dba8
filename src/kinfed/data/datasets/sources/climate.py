"""The original of TPT-48: NOAA's monthly mean temperatures of the contiguous states (nClimDiv), a fixed-width table."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import RunError

YEARS = range(2008, 2020)

# The 48 contiguous states in NOAA's order of codes 001 to 048, each with those later in the list that it shares a land
# or river border with: states that meet in a point or on open water only are not neighbours.
BORDERS = {
    "Alabama": "Florida Georgia Mississippi Tennessee",
    "Arizona": "California Nevada New_Mexico Utah",
    "Arkansas": "Louisiana Mississippi Missouri Oklahoma Tennessee Texas",
    "California": "Nevada Oregon",
    "Colorado": "Kansas Nebraska New_Mexico Oklahoma Utah Wyoming",
    "Connecticut": "Massachusetts New_York Rhode_Island",
    "Delaware": "Maryland New_Jersey Pennsylvania",
    "Florida": "Georgia",
    "Georgia": "North_Carolina South_Carolina Tennessee",
    "Idaho": "Montana Nevada Oregon Utah Washington Wyoming",
    "Illinois": "Indiana Iowa Kentucky Missouri Wisconsin",
    "Indiana": "Kentucky Michigan Ohio",
    "Iowa": "Minnesota Missouri Nebraska South_Dakota Wisconsin",
    "Kansas": "Missouri Nebraska Oklahoma",
    "Kentucky": "Missouri Ohio Tennessee Virginia West_Virginia",
    "Louisiana": "Mississippi Texas",
    "Maine": "New_Hampshire",
    "Maryland": "Pennsylvania Virginia West_Virginia",
    "Massachusetts": "New_Hampshire New_York Rhode_Island Vermont",
    "Michigan": "Ohio Wisconsin",
    "Minnesota": "North_Dakota South_Dakota Wisconsin",
    "Mississippi": "Tennessee",
    "Missouri": "Nebraska Oklahoma Tennessee",
    "Montana": "North_Dakota South_Dakota Wyoming",
    "Nebraska": "South_Dakota Wyoming",
    "Nevada": "Oregon Utah",
    "New Hampshire": "Vermont",
    "New Jersey": "New_York Pennsylvania",
    "New Mexico": "Oklahoma Texas",
    "New York": "Pennsylvania Vermont",
    "North Carolina": "South_Carolina Tennessee Virginia",
    "North Dakota": "South_Dakota",
    "Ohio": "Pennsylvania West_Virginia",
    "Oklahoma": "Texas",
    "Oregon": "Washington",
    "Pennsylvania": "West_Virginia",
    "Rhode Island": "",
    "South Carolina": "",
    "South Dakota": "Wyoming",
    "Tennessee": "Virginia",
    "Texas": "",
    "Utah": "Wyoming",
    "Vermont": "",
    "Virginia": "West_Virginia",
    "Washington": "",
    "West Virginia": "",
    "Wisconsin": "",
    "Wyoming": "",
}


def tpt48(files: dict[str, Path]) -> dict[str, NDArray[Any]]:
    """Lines of a state (3 figures), 0, the element 02, a year, and twelve values of 7 characters."""
    (path,) = files.values()
    states = list(BORDERS)
    values = np.full((len(YEARS) * 12, len(states)), np.nan, np.float32)
    for line in path.read_text().splitlines():
        state, element, year = int(line[:3]) - 1, line[4:6], int(line[6:10])
        if element == "02" and state < len(states) and year in YEARS:
            first = 12 * (year - YEARS[0])
            values[first : first + 12, state] = [float(line[10 + 7 * m : 17 + 7 * m]) for m in range(12)]
    lacking = np.argwhere(np.isnan(values.T))
    if len(lacking):
        state, month = lacking[0]
        raise RunError(f"{path} has no line for {states[state]} in {YEARS[month // 12]}; is it complete?")
    values[values < -90] = np.nan  # how the table says that a month is missing
    adjacency = np.zeros((len(states), len(states)), np.float32)
    for name, names in BORDERS.items():
        for other in names.split():
            adjacency[states.index(name), states.index(other.replace("_", " "))] = 1
    return {
        "values": values,
        "sensor_ids": np.array(states),
        "adjacency": adjacency + adjacency.T,
        "months": np.array([f"{year}-{month:02d}" for year in YEARS for month in range(1, 13)]),
    }
