"""The page of the centralised references: our figures beside the printed ones, read from finished runs."""

import argparse
import importlib
from pathlib import Path

from kinfed_papers.claim_verdicts import of_csv

EVIDENCE = Path(__file__).parents[2] / "evidence"


def test_means_over_sensors_at_the_selected_round_stand_beside_print(tmp_path, monkeypatch, finished):
    monkeypatch.syspath_prepend(str(EVIDENCE))
    program = importlib.import_module("references")
    monkeypatch.setattr(program, "PAGE", tmp_path / "references.md")
    monkeypatch.setattr(program, "TABLE", tmp_path / "tables" / "sfl.table1-references" / "table.csv")
    named = {"datasets": ["pems08_partial=3/2"], "epochs": {"pems08_partial": "3"}, "stride": {"pems08_partial": 2}}
    asked = argparse.Namespace(**named, keep=tmp_path / "runs")
    program.write(asked)
    assert not program.PAGE.exists()
    run = program.folder("stgcn", "pems08_partial", asked)
    finished(run.path, scores={"joint": {"round": 2}}, metric="mae", higher_is_better=False, seconds=61.4)
    scores = {"mae@12": (20.0, 21.5), "mape@12": (30.0, 31.0), "rmse@12": (40.0, 41.0)}
    lines = [
        f"{at},{client},joint,test,{metric},{value + 9 * (at == 1)}\n"
        for at in (1, 2)
        for metric, values in scores.items()
        for client, value in enumerate(values)
    ]
    run.history.write_text("round,client,model,split,metric,value\n" + "".join(lines))
    program.write(asked)
    text = program.PAGE.read_text()
    # No MAPE is printed.
    assert "| pems08_partial | STGCN | 3 of 50 | every 2 steps | 20.75 (18.88) | 30.50 | 40.50 (27.87) | 61 |" in text
    assert "evidence/references.py pems08_partial=3/2`" in text
    mae = of_csv(program.TABLE)[0]
    assert (mae.printed, mae.metric, mae.by_seed) == ("STGCN", "MAE", {0: 20.75})
    assert mae.flags == ("subset", "scaled 0.03")
