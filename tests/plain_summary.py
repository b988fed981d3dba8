"""The keys of a summary.json as no run wrote them, for tests of what reads them."""

import dataclasses

from kinfed.core.summary import DataFacts, RunCost

PLACES = {
    **{f.name: f"data.{f.name}" for f in dataclasses.fields(DataFacts)},
    **{f.name: f"cost.{f.name}" for f in dataclasses.fields(RunCost)},
    "metric": "metric.name",
    "higher_is_better": "metric.higher_is_better",
    "unit": "metric.unit",
    "chosen": "selection.chosen",
    "selected_by": "selection.by",
    "caution": "selection.caution",
    "names": "by_client.names",
    "clients_scores": "by_client.scores",
    "clients_selected": "by_client.selecting",
    "origin": "provenance.former",
    "experiment": "sites.experiment",
}


def nested(known):
    """The keys of summary.json with what is named, wherever it stands, and something plausible for the rest."""
    count, scores = known.get("clients", 2), known["scores"]
    rest = {"method": "m", "rounds": 1, "seeds": [known.pop("seed", 0)], "clients": count, "parameters": 3}
    rest |= {"metric": "accuracy", "higher_is_better": True, "unit": "%" * ("metric" not in known)}
    rest |= {"chosen": next(iter(scores)), "selected_by": known.get("metric", "accuracy")}
    rest |= {"executor": "loop", "seconds": 1.0, "bytes_up": 0, "bytes_down": 0}
    if "seeds" not in known:
        rest["names"] = [str(i) for i in range(count)]
        rest["clients_scores"] = {name: [score["mean"]] * count for name, score in scores.items()}
    found = {}
    for name, value in (rest | known).items():
        if value is not None:
            record, _, key = PLACES.get(name, name).rpartition(".")
            (found.setdefault(record, {}) if record else found)[key] = value
    found["selection"]["higher_is_better"] = found["metric"]["higher_is_better"] and known.get("selected_by") != "loss"
    if "sites" in found:
        found["sites"] |= {"bytes_by_client": {}, "bounded": {}}
    return found
