"""Tables and series at real sites on one machine, SuperNodes over TLS, end with the models of sites in one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.torch import load_file

import kinfed
from kinfed.data.tables.schema import Description
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading

pytestmark = pytest.mark.slow

KINFED = str(Path(sys.executable).parent / "kinfed")
PLAN = {
    "rounds": 2,
    "seed": 5,
    "training": {"epochs": 1, "batch": 8, "optimiser": {"name": "sgd", "lr": 0.05}},
    "federation": {"split": {"test": 0.2, "validation": 0.1}},
}


def run(folder, *arguments):
    """What a command prints."""
    environment = {**os.environ, "KINFED_FLOWER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    how = {"env": environment, "cwd": folder, "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run([KINFED, *map(str, arguments)], **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def sites(folder, port, nodes):
    """Real nodes, by site the options that each is started with; ended afterwards."""
    environment = {**os.environ, "KINFED_FLOWER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    how = {"env": environment, "cwd": folder, "stderr": subprocess.DEVNULL}
    run(folder, "flower", "keys", "keys", *nodes)
    run(folder, "flower", "up", "--keys", "keys", "--port", port)
    (folder / "any.toml").write_text('runs = "any"')
    started = []
    try:
        for name, options in nodes.items():
            asked = ["node", name, "--server", f"127.0.0.1:{port}", "--device", "cpu", "--keys", f"keys/sites/{name}"]
            asked += ["--state", "states", "--policy", "any.toml", *options]
            started.append(subprocess.Popen([KINFED, "flower", *asked], **how))
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(timeout=60)
        run(folder, "flower", "down")


def compare(folder, summary, readings):
    """How far models and scores over TLS are from those of the same sites in one process, at most.

    That these are those of a simulation, apart from the rounding of sums, test_site_tables.py shows.
    """
    found = [
        Site(name, file, folder / "here", "cpu", reading, policy=Policy(runs="any"))
        for name, (file, reading) in readings.items()
    ]
    table = tomllib.loads((folder / "plan.toml").read_text())
    table["flower"] |= {"beside": []}
    here = serve(plan.resolve(table), Here(found), folder / "in-one", lambda line: None, 0.0)
    here = json.loads(json.dumps(here.to_dict()))
    assert summary["by_client"]["names"] == here["by_client"]["names"]
    assert summary["selection"]["chosen"] == here["selection"]["chosen"]
    assert summary["data"].get("columns") == here["data"].get("columns")  # series have none
    apart = 0.0
    for name in summary["by_client"]["names"]:
        mine = load_file(folder / "states" / name / summary["sites"]["experiment"] / "model.safetensors")
        wanted = load_file(folder / "here" / name / here["sites"]["experiment"] / "model.safetensors")
        assert mine.keys() == wanted.keys()
        apart = max(apart, *(float((mine[key] - value).abs().max()) for key, value in wanted.items()))
    scores = 0.0
    for key, each in summary["by_client"]["scores"].items():
        scores = max(scores, *(abs(a / b - 1) for a, b in zip(each, here["by_client"]["scores"][key], strict=True)))
    print(f"the models differ by at most {apart:.1e}, scores by a share of at most {scores:.1e}")
    assert apart <= 1e-5
    assert scores <= 1e-5


@pytest.mark.parametrize(
    ("names", "model"),
    [(["ann", "bob", "cem", "dora", "eve"], "mlp"), (["ann", "bob", "cem"], "embedded")],
    ids=["five", "embedded"],
)
def test_sites_with_mixed_tables_over_tls(tmp_path, free_port, names, model):
    """Shops with text, holes and dates: another order of columns, other names, Parquet; then a newcomer and new rows.

    Each number is in five rows or more of a site, so that medians, which stand for holes, are exact.
    """
    import polars

    draw, lines, nodes = np.random.default_rng(3), [], {}
    heading = ["shop", "price", "category", "opened", "visitors", "sold"]
    for i, name in enumerate(names):
        rows = []
        for k in range(150 + 20 * i):
            price, visitors = 2.5 * draw.integers(1, 8), 10 * int(draw.integers(1, 9))
            category = draw.choice(["fruit", "bread", "milk"], p=[0.5, 0.3, 0.2])
            when = str(np.datetime64("2024-01-01") + draw.integers(0, 700))
            sold = visitors * (0.5 if category == "fruit" else 0.2) - (1 if i % 2 else -1) * price + draw.normal()
            row = [name, f"{price}", category, when, f"{visitors}", f"{sold:.3f}"]
            row[k % 5 or 1] = "" if k % 17 == 3 else row[k % 5 or 1]
            rows.append(row)
        lines += rows
        own, order = heading[1:], list(range(1, 6))
        options = ["--target", "sold"]
        if i % 2:
            order = [5, 3, 1, 4, 2]
            own = ["Umsatz", "opened", "Preis", "visitors", "category"]
            options += ["--column", "Umsatz=sold", "--column", "Preis=price"]
        path = tmp_path / f"{name}.{'parquet' if i == 2 else 'csv'}"
        if i == 2:
            columns = {title: [row[at] or None for row in rows] for title, at in zip(own, order, strict=True)}
            polars.DataFrame(columns).write_parquet(path)
        else:
            path.write_text("\n".join([",".join(own), *(",".join(row[at] for at in order) for row in rows)]) + "\n")
        nodes[name] = ["--data", path.name, *options]
    (tmp_path / "all.csv").write_text("\n".join([",".join(heading), *map(",".join, lines)]) + "\n")
    common = PLAN | {"method": "fedaghn", "model": {"name": model, "hidden": [8]}}
    flower = {"clients": len(names), "beside": ["local", "fedavg"]}
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(common | {"flower": flower}))
    with sites(tmp_path, free_port(), nodes):
        summary = json.loads(run(tmp_path, "flower", "run", "plan.toml", "--out", "sites", "--json"))
    whole = kinfed.from_csv(tmp_path / "all.csv", client="shop", target="sold", seed=PLAN["seed"])
    assert Description.from_dict(summary["data"]["columns"]).names == whole.columns.names
    columns = {"Umsatz": "sold", "Preis": "price"}
    compare(
        tmp_path,
        summary,
        {
            name: (tmp_path / options[1], Reading("sold", columns if "--column" in options else {}))
            for name, options in nodes.items()
        },
    )
    assert not (tmp_path / "sites" / "state.safetensors").exists()  # it would hold sites' models
    shutil.copy(tmp_path / "ann.csv", tmp_path / "ulm.csv")  # a newcomer to FedAvg, trained beside
    told = json.loads(
        run(
            tmp_path, "onboard", "sites/beside/fedavg", "--data", "ulm.csv", "--shots", "0,20", "--out", "ulm", "--json"
        )
    )
    assert [one["examples"] for one in told] == [0, 20]
    assert run(tmp_path, "predict", "ulm", "ulm.csv").splitlines()[1].startswith("ulm,fedavg,")
    assert run(tmp_path, "predict", "states/ann", "ann.csv").splitlines()[1].startswith("ann,fedaghn,")


def test_six_detectors_of_metr_la_over_tls(tmp_path, free_port):
    """Speeds with missing readings at six sites, and distances on a map, as `kinfed run` of one file has them.

    Nearly all of the time goes into starting programs: Flower starts one for each message to a site, which imports
    PyTorch. So there are few rounds, and nothing is compared beside them.
    """
    path = Path(os.environ.get("KINFED_DATA", "")) / "metr_la_subset.npz"
    if not path.exists():
        pytest.skip("KINFED_DATA has no metr_la_subset.npz")
    with np.load(path) as held:
        values, names, places = held["values"], held["sensor_ids"], held["lat_lon"]
    steps, chosen, nodes = 1000, [0, 3, 7, 11, 16, 22], {}
    times = np.datetime_as_string(np.datetime64("2012-03-01T00:00") + np.arange(steps) * np.timedelta64(5, "m"))
    for i in chosen:
        rows = [
            f"{t.replace('T', ' ')},{v:.4f}" if v else f"{t.replace('T', ' ')},"
            for t, v in zip(times, values[:steps, i], strict=True)
        ]
        (tmp_path / f"{names[i]}.csv").write_text("\n".join(["when,speed", *rows]) + "\n")
        options = [
            "--data",
            f"{names[i]}.csv",
            "--target",
            "speed",
            "--time",
            "when",
            "past=12",
            "horizon=12",
        ]
        nodes[str(names[i])] = options
    links = [(a, b, 111 * float(np.linalg.norm(places[a] - places[b]))) for a in chosen for b in chosen if a < b]
    (tmp_path / "map.csv").write_text(
        "from,to,km\n" + "".join(f"{names[a]},{names[b]},{far:.4f}\n" for a, b, far in links)
    )
    common = PLAN | {"method": "sfl", "model": {"name": "gru", "hidden": 8}}
    common |= {"training": PLAN["training"] | {"batch": 128, "epochs": 1}}
    graph = {"path": str(tmp_path / "map.csv"), "distances": "km"}
    flower = {"clients": 6, "graph": graph, "beside": [], "horizons": [3, 12]}
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(common | {"flower": flower}))
    with sites(tmp_path, free_port(), nodes):
        summary = json.loads(run(tmp_path, "flower", "run", "plan.toml", "--out", "sites", "--json"))
    assert summary["metric"]["name"] == "mae"
    reading = Reading("speed", time="when", past=12, horizon=12)
    compare(tmp_path, summary, {name: (tmp_path / options[1], reading) for name, options in nodes.items()})
