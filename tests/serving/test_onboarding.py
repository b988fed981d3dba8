"""Newcomers to finished runs: each method's rule, what they are told, what stays as it is, and what is refused."""

import csv
import hashlib

import numpy as np
import polars
import pytest
import torch
from kinds import KINDS

import kinfed
from kinfed.cli import onboard as onboard_command
from kinfed.cli.onboard import sentence
from kinfed.cli.program import execute
from kinfed.core import trees
from kinfed.core.mixins import join, reduce_uploads
from kinfed.core.trees import Axis
from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.runs.config import experiment
from kinfed.runs.launch import launch
from kinfed.runs.run import Run
from kinfed.runs.run_folder import RunFolder
from kinfed.serving import joining_clients
from kinfed.serving.onboarding import ALONE, BEST, SHARED, FrozenServer, onboard
from kinfed.simulation.execution import Execution

NET = ["model=mlp", "model.hidden=[4]", "training.epochs=1", "training.batch=8", "rounds=2"]
SETTINGS = {
    "panacea": ["method.encoder=mlp"],  # the clients have no graph
    "pfedla": ["method.embedding=3", "method.hidden=5"],
    "pfedhn": ["method.hidden=5"],
}


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def table(path, clients, seed=0, rows=40):
    """Clients whose name is in capitals buy small things, the others large ones."""
    rng = np.random.default_rng(seed)
    lines = ["who,size,kind,buys"]
    for client in clients:
        for _ in range(rows):
            size, kind = rng.normal(5, 2), rng.choice(["red", "blue"])
            large = size + (kind == "red") > 5
            lines.append(f"{client},{size:.4f},{kind},{'yes' if large != client.isupper() else 'no'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def trained(tmp_path, name="fedavg", *overrides, beside=()):
    data = {"name": "csv", "path": table(tmp_path / "known.csv", "abcABC"), "client": "who", "target": "buys"}
    settings = [f"federation.dataset.{key}={value}" for key, value in data.items()]
    raw = experiment.read(name, [*settings, *NET, *SETTINGS.get(name, []), *overrides])
    launch(experiment.resolve(raw), tmp_path / "run", Execution("loop", 1), beside=beside)
    return Run.open(tmp_path / "run")


@pytest.mark.parametrize("name", [name for name in (*KINDS, "fedsem") if not getattr(METHODS[name], "refuses", "")])
def test_a_newcomer_joins_methods_that_has_something_to_give(name, tmp_path):
    saved = trained(tmp_path, name, "federation.newcomers=1", "method.neighbours=3" if name == "knn-per" else "seed=0")
    before = hashes(tmp_path / "run")
    (one,) = joining_clients.of_run(saved, None)
    frozen = FrozenServer(saved, one.task, Execution("loop", 1))
    state = {key: t.clone() for key, t in trees.pack(frozen.server).items()}
    few, some = (onboard(frozen, one, count, 2) for count in (0, 20))
    assert {name, ALONE, BEST} <= some.scores.keys()
    assert all(0 <= score <= 1 for score in (*few.scores.values(), *some.scores.values()))
    assert some.existing in saved.names
    assert all(torch.equal(t, state[key]) for key, t in trees.pack(frozen.server).items())
    assert hashes(tmp_path / "run") == before
    only_its_row_changes(frozen, one)


def only_its_row_changes(frozen, one):
    fleet = frozen.fleet(frozen.make_federation(one, 20), frozen.method, frozen.model)
    roster, here = frozen.with_room(one, 20), torch.zeros(1, dtype=torch.int64)
    new = roster.everyone[-1:]
    server = frozen.method.add_clients(roster, frozen.server, new)
    before = {key: t.clone() for key, t in trees.pack(server).items()}
    sent = trees.pick(frozen.method.send(roster, server, roster.everyone), new)
    _, uploads = fleet.train(2, here, sent)
    given = reduce_uploads(frozen.method, roster, new, uploads)
    after = trees.pack(join(frozen.method, roster, server, new, given))
    axes = trees.pack(trees.axes(server))
    for key, old in before.items():
        if axes[key] is Axis.SHARED:
            assert torch.equal(old, after[key]), key
        else:
            rows = (slice(None, -1),) if axes[key] is Axis.PER_CLIENT else (..., slice(None, -1), slice(None))
            assert torch.equal(old[rows], after[key][rows]), key


@pytest.mark.parametrize("name", ["ifca", "fedsem", "fedcedar"])
def test_clusters_put_a_newcomer_where_its_kin_are(name, tmp_path):
    saved = trained(tmp_path, name, "method.clusters=2", "federation.newcomers=['C']", "rounds=8", "training.epochs=3")
    (one,) = joining_clients.of_run(saved, None)
    found = onboard(FrozenServer(saved, one.task, Execution("loop", 1)), one, 12)
    assert saved.experiment.newcomers == ["C"]
    assert found.existing in "AB"
    assert found.scores[name] >= 0.7


def test_local_has_nothing_to_give(tmp_path):
    saved = trained(tmp_path, "local")
    with pytest.raises(UsageError, match="trained by local, which no newcomer can join: every client trains alone"):
        FrozenServer(saved, saved.task)


def test_newcomers_leave_no_trace_in_what_members_are_trained_on(tmp_path):
    """The same run as one on a file without them: in scale, in splits and in models."""
    saved = trained(tmp_path, "fedavg", "federation.newcomers=['b','C']")
    rows = (tmp_path / "known.csv").read_text().splitlines()
    (tmp_path / "two").mkdir()
    path = tmp_path / "two" / "known.csv"
    path.write_text("\n".join(line for line in rows if line[0] not in "bC" or line.startswith("who")) + "\n")
    raw = experiment.override(dict(saved.experiment.table), [f"federation.dataset.path={path}"])
    raw["federation"].pop("newcomers")
    launch(experiment.resolve(raw), tmp_path / "two" / "run", Execution("loop", 1))
    summary = Run.open(tmp_path / "two" / "run").summary
    assert summary.data.columns == saved.summary.data.columns
    assert summary.clients.scores == saved.summary.clients.scores


def test_a_table_of_newcomers_on_the_command_line(tmp_path, capsys):
    trained(tmp_path, "fedaghn", beside=("local", "fedavg"))
    before = hashes(tmp_path / "run")
    rows = table(tmp_path / "new.csv", "xY", seed=4)
    command = ["onboard", str(tmp_path / "run"), "--data", str(rows), "--shots", "0,10,5000,all"]
    assert execute([*command, "--out", str(tmp_path / "joined"), "how.executor=loop"]) == 0
    shown = capsys.readouterr()
    told = " ".join((shown.out + shown.err).split())
    assert "by fedaghn, with so many examples: 10:" in told
    assert "no newcomer has so many examples to learn from: 5000" in told
    assert f"kinfed predict {tmp_path / 'joined'} new.csv --client " in told
    with (tmp_path / "joined" / "onboarding.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["client"] for line in lines} == {"x", "Y"}
    assert {"fedaghn", ALONE, SHARED, BEST} <= {line["model"] for line in lines}
    joined = Run.open(tmp_path / "joined")  # a run's folder, which kinfed predict reads
    assert joined.names == ["x", "Y"]
    assert joined.model("x")(torch.zeros(1, 3)).shape == (1, 2)
    assert hashes(tmp_path / "run") == before


def test_a_newcomer_that_fails_is_named_and_the_others_join(tmp_path, capsys, monkeypatch):
    trained(tmp_path, "fedaghn")
    rows = table(tmp_path / "new.csv", "xYz", seed=4)
    real = onboard_command.onboard
    monkeypatch.setattr(
        onboard_command, "onboard", lambda frozen, one, *rest: {}["Y"] if one.name == "Y" else real(frozen, one, *rest)
    )
    command = ["onboard", str(tmp_path / "run"), "--data", str(rows), "--shots", "10", "how.executor=loop"]
    assert execute([*command, "--out", str(tmp_path / "joined")]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "kinfed: newcomer Y: unexpected KeyError: 'Y'" in err
    assert "1 of 3 newcomers failed" in err
    assert Run.open(tmp_path / "joined").names == ["x", "z"]


def test_a_newcomer_has_its_own_scale_where_members_have_theirs(tmp_path):
    """Half of the sites read in another unit; so does the newcomer."""
    draw = np.random.default_rng(0)
    lines = {name: [] for name in "abcdN"}
    for i, name in enumerate(lines):
        for heat in draw.normal(15, 6, 40):
            lines[name].append(f"{name},{heat if i % 2 else 18 * heat + 3200:.4f},{2 * heat + draw.normal():.4f}")
    head = "site,heat,sold"
    for name, rows in {"all": [row for each in lines.values() for row in each], "new": lines["N"]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    data = {"name": "csv", "path": tmp_path / "all.csv", "client": "site", "target": "sold", "scale": "auto"}
    settings = [f"federation.dataset.{key}={value}" for key, value in data.items()]
    raw = experiment.read("fedavg", [*settings, "federation.newcomers=['N']", *NET])
    launch(experiment.resolve(raw), tmp_path / "run", Execution("loop", 1))
    saved = Run.open(tmp_path / "run")
    assert saved.description.clients.keys() >= set("abcd")
    heat = np.array([float(row.split(",")[1]) for row in lines["N"]])
    for (one,) in (joining_clients.of_run(saved, None), joining_clients.of_table(saved, tmp_path / "new.csv", None)):
        place = one.x[:, 0][-40:]  # it is the last in the run's own data
        rows = (one.rows - (len(one.x) - 40)).numpy()
        expected = (heat - heat[rows].mean()) / heat[rows].std()
        np.testing.assert_allclose(place, expected, atol=1e-5)
    command = ["onboard", str(tmp_path / "run"), "--shots", "all", "how.executor=loop", "--out", str(tmp_path / "N")]
    assert execute([*command, "--data", str(tmp_path / "new.csv")]) == 0
    joined = Run.open(tmp_path / "N")
    assert joined.description.clients == {"N": dict(one.scales)} == {"N": joined.description.clients["N"]}
    answers = joined.predictor()(polars.read_csv(tmp_path / "new.csv"))["sold"].to_numpy()
    truth = np.array([float(row.split(",")[2]) for row in lines["N"]])
    scored = joined.summary.clients.scores[joined.summary.selection.chosen]
    assert np.abs(answers - truth)[one.test].mean() == pytest.approx(scored[0], rel=1e-4)


def test_rows_without_a_target_or_a_client_are_left_out_as_in_training(tmp_path):
    saved = trained(tmp_path)
    whole = table(tmp_path / "new.csv", "xY", seed=4)
    more = tmp_path / "more.csv"
    more.write_text(whole.read_text() + "x,1,red,\n,2,red,yes\n")
    with pytest.warns(UserWarning, match="2 of 82 rows have no buys or no who, left out"):
        found = joining_clients.of_table(saved, more, None)
    for one, other in zip(found, joining_clients.of_table(saved, whole, None), strict=True):
        assert one.name == other.name
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.rows, other.rows)


def readings(path, clients, days=range(1, 29), time="day"):
    """Daily readings that follow the rain, which is known ahead, at a level of each client's own."""
    rng = np.random.default_rng(5)
    lines = [f"gauge,{time},rain,level"]
    for i, client in enumerate(clients):
        rain = rng.normal(size=60).round(3)
        for month in (3, 4):
            for day in days:
                at = 28 * (month - 3) + day
                level = 3 * i + 2 * rain[at] + rain[at - 1]
                lines.append(f"{client},2021-{month:02}-{day:02},{rain[at]},{level:.4f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def series(tmp_path, *overrides):
    """A run of all gauges but the last, which is a newcomer."""
    path = readings(tmp_path / "gauges.csv", "abcdN")
    data = {"name": "csv", "path": path, "client": "gauge", "target": "level", "time": "day", "past": 4, "horizon": 2}
    settings = [f"federation.dataset.{key}={value}" for key, value in data.items()]
    raw = experiment.read("fedavg", [*settings, "federation.newcomers=['N']", "rounds=2", *overrides])
    launch(experiment.resolve(raw), tmp_path / "run", Execution("loop", 1))
    lines = path.read_text().splitlines()
    (tmp_path / "N.csv").write_text("\n".join([lines[0], *(line for line in lines if line.startswith("N,"))]) + "\n")
    return Run.open(tmp_path / "run")


@pytest.mark.parametrize("setting", ["", "future=['rain']", "scale=client"])
def test_a_file_of_a_newcomers_readings_is_cut_and_scaled_as_those_of_training(setting, tmp_path):
    saved = series(tmp_path, *([f"federation.dataset.{setting}"] if setting else []))
    (left_out,) = joining_clients.of_run(saved, None)
    (in_file,) = joining_clients.of_table(saved, tmp_path / "N.csv", None)
    assert in_file.name == left_out.name == "N"
    for rows in ("rows", "test"):
        places, others = getattr(in_file, rows), getattr(left_out, rows)
        assert torch.equal(in_file.x[places], left_out.x[others])
        assert torch.equal(in_file.y[places], left_out.y[others])
    lines = [line.partition(",")[2] for line in (tmp_path / "N.csv").read_text().splitlines()]
    (tmp_path / "N.csv").write_text("\n".join(lines) + "\n")  # a file of one newcomer needs no column of clients
    command = ["onboard", str(tmp_path / "run"), "--data", str(tmp_path / "N.csv"), "--shots", "0,all"]
    assert execute([*command, "how.executor=loop", "--out", str(tmp_path / "out")]) == 0
    assert execute(["predict", str(tmp_path / "out"), str(tmp_path / "gauges.csv"), "--unknown", "skip"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": "a"}, "client 'a' took part in .*; a newcomer needs a name of its own"),
        ({"days": range(1, 29, 2)}, r"new\.csv: the length of a step was 86400.* in training, and is uneven here"),
        ({"time": "date"}, r"new\.csv has no column 'day'"),
        ({"days": range(1, 3)}, r"new\.csv: a window covers 4 \+ 2 steps, but the series have 4; make past or"),
    ],
)
def test_readings_that_do_not_fit_are_refused_in_one_line(change, message, tmp_path):
    saved = series(tmp_path)
    new = readings(tmp_path / "new.csv", **({"clients": "x"} | change))
    with pytest.raises(UsageError, match=message):
        joining_clients.of_table(saved, new, None)


def test_a_run_of_series_without_a_config_is_refused_in_one_line(tmp_path):
    path = readings(tmp_path / "gauges.csv", "abc")
    data = kinfed.from_csv(path, client="gauge", target="level", time="day", past=4, horizon=2)
    kinfed.save(kinfed.fit(kinfed.FedAvg(), data, rounds=1), tmp_path / "saved")
    with pytest.raises(UsageError, match=r"saved has no config\.toml with the architecture"):
        joining_clients.of_table(Run(RunFolder(tmp_path / "saved")), readings(tmp_path / "x.csv", "x"), None)


def test_links_say_who_a_newcomers_neighbours_are(tmp_path):
    links = "from,to\na,b\nb,c\nA,B\nB,C\n"
    (tmp_path / "known-links.csv").write_text(links)
    saved = trained(tmp_path, "sfl", f"federation.dataset.edges={tmp_path / 'known-links.csv'}")
    new, edges = table(tmp_path / "new.csv", "x", seed=4), tmp_path / "links.csv"
    edges.write_text(links + "x,A\nx,B\n")
    (one,) = joining_clients.of_table(saved, new, edges)
    frozen = FrozenServer(saved, one.task, Execution("loop", 1))
    names = frozen.state.names
    weights = frozen.with_room(one, 9).graph.weights
    assert [names[i] for i in weights[-1].nonzero().flatten().tolist()] == ["A", "B"]
    assert torch.equal(weights[:-1, :-1], frozen.roster.graph.weights)
    edges.write_text(links + "x,D\n")
    with pytest.raises(UsageError, match=r"links\.csv has no link between 'x' and a client of "):
        joining_clients.of_table(saved, new, edges)


def test_links_to_a_run_without_a_graph_and_no_examples_for_a_method_of_clusters(tmp_path, capsys):
    trained(tmp_path, "ifca")
    new, edges = table(tmp_path / "new.csv", "x", seed=4), tmp_path / "links.csv"
    edges.write_text("from,to\nx,A\n")
    command = ["onboard", str(tmp_path / "run"), "--data", str(new), "--shots", "0,10", "how.executor=loop"]
    assert execute([*command, "--edges", str(edges)]) == 2
    assert "was trained without a graph, so links say nothing; leave it out" in capsys.readouterr().err
    assert execute(command) == 0
    told = "".join(capsys.readouterr())
    assert "ifca makes a newcomer's model of its examples, so there is none with 0" in told
    assert "so many examples to learn from" not in told


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("who,size,kind\nx,1,red\n", "has no column 'buys', by which models are tuned and scored"),
        ("who,size,buys\nx,1,yes\n", "'kind'"),
        ("who,size,kind,buys\nx,1,red,perhaps\n", "'perhaps' is none of the 2 classes that were trained on"),
        ("who,size,kind,buys\nx,big,red,yes\n", "line 2, column 'size': 'big' is not a number"),
        ("who,size,kind,buys\na,1,red,yes\n", "client 'a' took part in .*; a newcomer needs a name of its own"),
        ("who,size,kind,buys\nx,1,red,yes\n", "too few rows to learn from and to be tested on: x"),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_one_line(rows, message, tmp_path):
    saved = trained(tmp_path)
    (tmp_path / "new.csv").write_text(rows)
    with pytest.raises(UsageError, match=message):
        joining_clients.of_table(saved, tmp_path / "new.csv", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shots", "ten"], "--shots are numbers of examples"),
        ([], "no client of its data was left out"),
        (["--edges", "links.csv"], "--edges goes with --data"),
    ],
)
def test_requests_that_cannot_be_carried_out(options, message, tmp_path, capsys):
    trained(tmp_path)
    assert execute(["onboard", str(tmp_path / "run"), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_closing_sentence_says_why_nothing_could_be_compared():
    alone = {"0": {"fedaghn": 0.5}, "10": {"fedaghn": 0.75, ALONE: 0.5}}
    assert sentence(alone, "fedaghn", True, True).endswith("10: 75.00, ahead of 50.00 alone")
    assert "nobody can learn alone from no examples" in sentence({"0": {"fedaghn": 0.5}}, "fedaghn", True, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("['a','z']", "federation.newcomers: there is no client 'z'"),
        ("6", "federation.newcomers must leave some of 6 clients; got 6"),
        ("true", "federation.newcomers is how many clients, or their names"),
        ("['a','b','c','A','B','C']", "names every client, so nobody is left"),
    ],
)
def test_newcomers_that_a_config_cannot_name(given, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        trained(tmp_path, "fedavg", f"federation.newcomers={given}")
