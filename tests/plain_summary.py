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


def nest(facts):
    """The keys of summary.json with what is named, wherever it stands, and something plausible for the rest."""
    count, scores = facts.get("clients", 2), facts["scores"]
    rest = {"method": "m", "rounds": 1, "seeds": [facts.pop("seed", 0)], "clients": count, "parameters": 3}
    rest |= {"metric": "accuracy", "higher_is_better": True, "unit": "" if "metric" in facts else "%"}
    rest |= {"chosen": next(iter(scores)), "selected_by": facts.get("metric", "accuracy")}
    rest |= {"executor": "loop", "seconds": 1.0, "bytes_up": 0, "bytes_down": 0}
    if "seeds" not in facts:
        rest["names"] = [str(i) for i in range(count)]
        rest["clients_scores"] = {name: [score["mean"]] * count for name, score in scores.items()}
    summary = {}
    for name, value in (rest | facts).items():
        if value is not None:
            record, _, key = PLACES.get(name, name).rpartition(".")
            (summary.setdefault(record, {}) if record else summary)[key] = value
    summary["selection"]["higher_is_better"] = (
        summary["metric"]["higher_is_better"] and facts.get("selected_by") != "loss"
    )
    if "sites" in summary:
        summary["sites"] |= {"bytes_by_client": {}, "bounded": {}}
    return summary
