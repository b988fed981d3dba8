"""Clients' models by HTTP, on the loopback interface."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from urllib.parse import unquote

import polars
import pytest
import requests

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.cli.predict import open_predictor
from kinfed.data.tables.open_table import frame_of
from kinfed.serving import service as services
from kinfed.serving.requests import _table
from kinfed.serving.service import Limits, Service, listen

ROW = {"age": 31, "kind": "new", "seen": "2024-03-02"}
JSON = {"Content-Type": "application/json"}


@contextmanager
def serving(folder, token="", limits=None):
    """The address of a service of a run, and the service."""
    service = Service(*open_predictor(folder), token, limits or Limits())
    with listen("127.0.0.1", 0, token) as at:
        port = at.getsockname()[1]  # before the service takes the socket over
        thread = threading.Thread(target=service.run, args=(at,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}", service
        finally:
            service.server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(shops):
    with serving(shops / "run", limits=Limits(megabytes=1)) as (address, _):
        yield address


def test_json_and_csv_get_the_answers_of_the_run(address, shops):
    frame = polars.read_csv(shops / "shops.csv", infer_schema=False)
    expected = kinfed.Run.open(shops / "run").predictor()(frame)
    text = (shops / "shops.csv").read_bytes()
    got = requests.post(f"{address}/predict", data=text, headers={"Content-Type": "text/csv; charset=utf-8"})
    assert (got.status_code, got.headers["content-type"]) == (200, "text/csv; charset=utf-8")
    found = polars.read_csv(BytesIO(got.content))
    assert found["buys"].to_list() == expected["buys"].to_list()
    assert found["P(yes)"].to_list() == pytest.approx(expected["P(yes)"].to_list(), abs=1e-6)
    rows = frame.drop("shop", "buys").to_dicts()[:5]
    told = requests.post(f"{address}/predict/shop 3", json={"rows": rows}).json()["answers"]
    alone = kinfed.Run.open(shops / "run").predictor("shop 3")(polars.DataFrame(rows))
    assert [one["buys"] for one in told] == alone["buys"].to_list()
    assert [one["P(yes)"] for one in told] == pytest.approx(alone["P(yes)"].to_list(), abs=1e-6)
    assert {one["client"] for one in told} == {"shop 3"}
    assert requests.get(f"{address}/clients").json()["clients"] == [f"shop {i}" for i in range(6)]
    assert requests.get(f"{address}/health").json() == {"status": "ok", "method": "knn-per", "clients": 6}


def test_whole_numbers_in_json_are_not_rounded():
    """As names of clients, say: 9007199254740993 is no float64."""
    rows = [{"who": 9007199254740992, "x": 1}, {"who": 9007199254740993, "x": 0.5}]
    assert frame_of(_table(rows))["who"].words().names == ["9007199254740992", "9007199254740993"]
    assert frame_of(_table(rows))["x"].numbers().tolist() == [1.0, 0.5]


def test_columns_that_the_run_does_not_know_are_named_and_ignored(address):
    plain = requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}).json()
    assert list(plain) == ["answers"]
    got = requests.post(f"{address}/predict/shop 1", json={"rows": [ROW | {"agee": 3, "Größe": "x"}]}).json()
    assert got == plain | {"ignored": ["agee", "Größe"]}
    lines = {"plain": "age,kind,seen\n31,new,2024-03-02\n", "more": "age,kind,seen,agee,Größe\n31,new,2024-03-02,3,x\n"}
    kind = {"Content-Type": "text/csv"}
    told = {
        name: requests.post(f"{address}/predict/shop 1", text.encode(), headers=kind) for name, text in lines.items()
    }
    assert told["more"].content == told["plain"].content
    assert told["more"].headers["Kinfed-Ignored"] == "agee, Gr%C3%B6%C3%9Fe"
    assert "Kinfed-Ignored" not in told["plain"].headers


BAD = {  # path, body, type, status, what is told
    "another client": ("/predict/shop3", {"rows": [ROW]}, None, 404, "no client 'shop3'; did you mean 'shop 3'?"),
    "a client in the rows": ("/predict", {"rows": [ROW | {"shop": "shp 1"}]}, None, 422, "did you mean 'shop 1'?"),
    "no client": ("/predict", {"rows": [ROW]}, None, 422, "the request has no column 'shop'"),
    "NaN": ("/predict/shop 1", b'{"rows": [{"age": NaN}]}', None, 400, "NaN is no JSON; write null"),
    "infinity": ("/predict/shop 1", b'{"rows": [{"age": 1e999, "kind": "", "seen": ""}]}', None, 422, "not a finite"),
    "no JSON": ("/predict/shop 1", b"age=3", None, 400, "the request is not JSON"),
    "nested": ("/predict/shop 1", b"[" * 100_000, None, 400, "or lists nested too deeply"),
    "digits": ("/predict/shop 1", b'{"rows": ' + b"9" * 5000 + b"}", None, 400, "a number of thousands of digits"),
    "a list": ("/predict/shop 1", [1], None, 422, "must be a JSON object"),
    "no row": ("/predict/shop 1", {"rows": []}, None, 422, "with one row or more"),
    "a column too few": ("/predict/shop 1", {"rows": [{"age": 3, "kind": "new"}]}, None, 422, "no column 'seen'"),
    "a date written otherwise": (
        "/predict/shop 1",
        {"rows": [ROW | {"seen": "02/03/2024"}]},
        None,
        422,
        "row 1, column",
    ),
    "text and numbers": (
        "/predict/shop 1",
        {"rows": [ROW, ROW | {"age": "1.5"}, ROW | {"age": 1.5}]},
        None,
        422,
        "text",
    ),
    "unlike rows": ("/predict/shop 1", {"rows": [ROW, {"age": 3}]}, None, 422, "row 2 has other columns than row 1"),
    "a list in a cell": ("/predict/shop 1", {"rows": [ROW | {"age": [3]}]}, None, 422, "column 'age' holds a list"),
    "text for a number": ("/predict/shop 1", {"rows": [ROW | {"age": "x"}]}, None, 422, "'x' is not a number"),
    "no date": ("/predict/shop 1", {"rows": [ROW | {"seen": "x"}]}, None, 422, "'x' is not a date"),
    "a number for a date": (
        "/predict/shop 1",
        {"rows": [ROW | {"seen": 20240302}]},
        None,
        422,
        "is not a date such as",
    ),
    "half a character": (
        "/predict/shop 1",
        {"rows": [ROW | {"kind": "\ud800"}]},
        None,
        400,
        "half of a surrogate pair",
    ),
    "a number of 400 digits": ("/predict/shop 1", {"rows": [ROW | {"age": 10**400}]}, None, 422, "too large a number"),
    "CSV with a short line": ("/predict", b"shop,age,kind,seen\nshop 1,3\n", "text/csv", 422, "the request, line 2: 2"),
    "no CSV": ("/predict", b"\xff\xfe\x00", "text/csv", 422, "the request"),
    "another type": ("/predict", b"<a/>", "application/xml", 415, "send application/json or text/csv"),
    "too large": ("/predict", b" " * 1_500_000, None, 413, "a request may have 1 MB"),
    "nothing there": ("/predictions", b"{}", None, 404, "POST /predictions is none of POST /predict/CLIENT"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_one_clear_error_and_the_service_goes_on(case, address):
    path, body, kind, status, why = BAD[case]
    data = body if isinstance(body, bytes) else json.dumps(body)
    got = requests.post(address + path, data=data, headers={"Content-Type": kind or "application/json"})
    assert got.status_code == status, got.text
    assert why in got.json()["error"]
    assert list(got.json()) == ["error"]
    assert requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}).status_code == 200


def test_a_gigabyte_is_refused_before_it_is_sent_or_after_and_never_held(address):
    host = address.removeprefix("http://")
    asked = http.client.HTTPConnection(host, timeout=20)
    asked.putrequest("POST", "/predict")
    for name, value in (JSON | {"Content-Length": "1000000000", "Expect": "100-continue"}).items():
        asked.putheader(name, value)
    asked.endheaders()
    assert asked.getresponse().status == 413
    parts = (b" " * (1 << 20) for _ in range(50))  # of unknown length, chunk by chunk
    got = requests.post(f"{address}/predict", data=parts, headers=JSON)
    assert (got.status_code, "a request may have 1 MB" in got.text) == (413, True)


def test_a_token_is_asked_for_and_other_machines_only_get_one(shops, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KINFED_TOKEN", raising=False)
    with serving(shops / "run", token="s3cret-ü") as (address, _):
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer "}):
            for got in (
                requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}, headers=headers),
                requests.get(f"{address}/clients", headers=headers),
                requests.get(f"{address}/metrics", headers=headers),
            ):
                assert (got.status_code, got.headers["WWW-Authenticate"]) == (401, "Bearer")
        right = {"Authorization": "Bearer s3cret-ü".encode()}
        assert requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}, headers=right).status_code == 200
        assert requests.get(f"{address}/health").status_code == 200
    with pytest.raises(UsageError, match=r"serving on 0\.0\.0\.0, another machine could ask it: set a token"):
        listen("0.0.0.0", 0, "")
    for words, why in (
        (["--host", "0.0.0.0"], "set a token as KINFED_TOKEN"),
        (["--host", "no.such.host.invalid"], "there is no host 'no.such.host.invalid'"),
        (["--port", "99999"], "a port is a number from 0 to 65535; got 99999"),
        (["workers=0"], "workers must be a number above 0; got 0"),
        (["megabytes=inf"], "megabytes must be a number above 0; got inf"),
    ):
        assert main(["serve", str(shops / "run"), *words]) == 2
        err = capsys.readouterr().err
        assert (why in err, err.count("\n")) == (True, 1), err


def test_more_requests_than_may_wait_are_told_to_come_again(shops, monkeypatch):
    go, work = threading.Event(), services._work
    monkeypatch.setattr(services, "_work", lambda *given: (go.wait(20), work(*given))[1])
    with (
        serving(shops / "run", limits=Limits(concurrency=3, workers=1)) as (address, service),
        ThreadPoolExecutor(20) as pool,
    ):
        sent = [pool.submit(requests.post, f"{address}/predict/shop 1", json={"rows": [ROW]}) for _ in range(3)]
        while service.server is None or len(service.server.server_state.tasks) < 3:
            time.sleep(0.01)
        late = list(pool.map(lambda _: requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}), range(20)))
        assert {one.status_code for one in late} == {503}
        go.set()
        assert [one.result().status_code for one in sent] == [200] * 3
        while (got := requests.get(f"{address}/metrics")).status_code == 503:  # until the server has seen them closed
            time.sleep(0.01)
        metrics = got.text
    assert 'kinfed_requests_total{status="200"} 3.0' in metrics
    assert "kinfed_rows_total 3.0" in metrics


def test_connections_that_say_nothing_keep_nobody_out(shops):
    with serving(shops / "run", limits=Limits(concurrency=4)) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(70)]
        assert requests.get(f"{address}/health", timeout=5).status_code == 200
        for line in silent:
            line.close()


def test_a_table_of_a_hundred_thousand_columns_is_refused_before_it_is_read(shops, monkeypatch):
    monkeypatch.setattr("kinfed.serving.requests.open_table", lambda path: pytest.fail("it was read"))
    wide = ",".join(f"c{i}" for i in range(100_000))
    with serving(shops / "run") as (address, _):
        said = requests.post(f"{address}/predict/shop 1", f"{wide}\n", headers={"Content-Type": "text/csv"})
        assert (said.status_code, "100,000 columns" in said.text or "99,999 columns" in said.text) == (422, True)
        said = requests.post(f"{address}/predict/shop 1", json={"rows": [dict.fromkeys(wide.split(","), 1)]})
        assert said.status_code == 422


@contextmanager
def command(folder):
    """The address of `kinfed serve` in a process of its own, and the process."""
    words = [sys.executable, "-m", "kinfed", "serve", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as served:
        try:
            yield json.loads(served.stdout.readline())["address"], served
        finally:
            served.kill()


def test_the_command_serves_until_it_is_stopped_and_finishes_what_it_began(shops):
    with command(shops / "run") as (address, served):
        assert address.startswith("http://127.0.0.1:")
        assert requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}).status_code == 200
        served.send_signal(signal.SIGTERM)
        assert served.wait(20) == 0
        assert served.stderr.read() == "stopped\n"


def test_a_category_that_no_training_row_had_is_told_to_the_sender(shops):
    with command(shops / "run") as (address, _):
        rows = [ROW, ROW | {"kind": "teal"}, ROW | {"kind": "teal"}]
        told = "row 2, column 'kind': 'teal' is in no training row, as in 2 of 3 rows; the model treats it as none"
        for _ in range(2):  # each time, not once in a process
            got = requests.post(f"{address}/predict/shop 1", json={"rows": rows}).json()
            assert [line.partition("the request, ")[2].startswith(told) for line in got["warnings"]] == [True]
        text = b"age,kind,seen\n31,teal,2024-03-02\n"
        found = requests.post(f"{address}/predict/shop 1", text, headers={"Content-Type": "text/csv"})
        said = unquote(found.headers["Kinfed-Warnings"])
        assert said.startswith("the request, line 2, column 'kind': 'teal' is in no training row, as in 1 of 1 rows")
        assert "warnings" not in requests.post(f"{address}/predict/shop 1", json={"rows": [ROW]}).json()
