"""The page of the centralised references: our figures beside the printed ones, read from finished runs."""

import argparse
import importlib
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_means_over_sensors_at_the_selected_round_stand_beside_print(tmp_path, monkeypatch, finished):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("references")
    monkeypatch.setattr(program, "PAGE", tmp_path / "references.md")
    asked = argparse.Namespace(datasets=["pems08_partial"], epochs=3, share=0.5, keep=tmp_path / "runs")
    assert program.part(asked) == ""
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
    assert "| pems08_partial | STGCN | 20.75 (18.88) | 30.50 | 40.50 (27.87) | 61 |" in text  # no MAPE is printed
    assert "papers/sfl/table1/DATASET reference.epochs=3 federation.split.share=0.5`" in text
    assert "<!-- short -->" in text
