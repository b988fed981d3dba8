"""Messages that are changed somewhere: a number, a list, a name or an array is another one, or is not there."""

import copy
import json

import torch

from kinfed_flower.programs.site_check import Here
from kinfed_flower.wire.messages import Message

WRONG = [
    *(None, "", "x" * 300, "../x", "\x1b[2J", "\n", "1e400", "west", True, False),
    *(0, 1, -1, 0.5, 2**31, 2**63, 10**400, -1e300, float("inf"), float("nan")),
    *([], {}, [[]], [None], [-1], [1, 2], ["a"] * 9, [float("nan")], [1e308] * 3, [["a", "number"]], {"name": "x"}),
]
ARRAYS = {
    "NaN": lambda t: t * float("nan"),
    "infinite": lambda t: t * float("inf"),
    "huge": lambda t: t * 1e30,
    "double": lambda t: t.double(),
    "whole": lambda t: t.long(),
    "one": lambda t: t.flatten()[:1],
    "none": lambda t: t.flatten()[:0],
    "twice": lambda t: torch.cat([t.flatten()] * 2),
    "deeper": lambda t: t[None, None],
    "a number": lambda t: torch.tensor(1.0),
}


class Noting(Here):
    """Sites in this process, and all that they were asked and replied."""

    def __init__(self, sites):
        super().__init__(sites)
        self.seen = []

    def push(self, number, kind, message, seconds):
        id = super().push(number, kind, message, seconds)
        self.seen.append((self.sites[number].name, kind, copy.deepcopy(message), self._arrived[id]))
        return id

    def sent_to(self, name):
        """The messages to a site, by kind."""
        return {kind: [m for n, k, m, _ in self.seen if (n, k) == (name, kind)] for _, kind, _, _ in self.seen}


def find_places(value, before=()):
    """The way to each part of fields, by keys and places."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*before, key)
        yield from find_places(part, (*before, key))


def alter(draw, message, changes=1):
    """A message with so many changes, as it arrives over the wire, and what was changed."""
    altered, done = Message(json.loads(json.dumps(message.fields)), dict(message.arrays)), []
    for _ in range(changes):
        places = [*find_places(altered.fields)]
        if altered.arrays and (not places or draw.random() < 0.2):
            name = draw.choice([*altered.arrays])
            how = draw.choice([*ARRAYS, "lost", "renamed"])
            t = altered.arrays.pop(name)
            if how in ARRAYS:
                altered.arrays[name] = ARRAYS[how](t)
            elif how == "renamed":
                altered.arrays[draw.choice(["../x", "\x1b[2J", f"{name}2"])] = t
            done.append((name, how))
        elif places:
            *way, last = draw.choice(places)
            part = altered.fields
            for key in way:
                part = part[key]
            how = draw.choice(["lost", "again", "scaled", "another", "another", "another", "another"])
            if how == "lost":
                del part[last]
            elif how == "again" and isinstance(part[last], list):
                part[last] += copy.deepcopy(part[last][:1])
            elif how == "scaled" and type(part[last]) in (int, float):
                part[last] *= draw.choice([1000, 0.001, -1, 1e15])
            else:
                part[last] = draw.choice(WRONG)
            done.append(((*way, last), how, part.get(last) if isinstance(part, dict) else part))
    return altered, done


def refusals(reply):
    """Why a site, or each client of a gateway, refuses."""
    bundle = reply.fields.get("bundle")
    parts = [reply.fields, *(bundle.values() if isinstance(bundle, dict) else ())]
    return [part["refused"] for part in parts if "refused" in part]
