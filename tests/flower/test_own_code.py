"""Methods and models from files that the operators of sites have named themselves."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kinfed import load_model
from kinfed.errors import RunError
from kinfed_flower import plan
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site


@pytest.fixture
def mine(tmp_path, own_code):
    """The server's file."""
    path = tmp_path / "server" / "mine.py"
    path.parent.mkdir()
    path.write_text(own_code)
    return path


def give(trial, text, name="mine.py", without=1):
    """Have all sites but the last `without` started with a file of their own."""
    copy = trial.folder / name
    copy.write_text(text)
    for config in list(trial.grid.sites.values())[: len(trial.grid.sites) - without]:
        config["code"] = str(copy)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_sites_with_the_file_end_with_the_models_of_a_simulation(trial, mine, own_code):
    """Its states and uploads are of types that the file defines; the model is made by a function of the file."""
    trial = trial(f"{mine}:Between", clients=5, linked=False, method={"share": 0.25})
    trial.planned = plan.resolve(trial.planned.table | {"model": {"name": f"{mine}:net", "width": 4}})
    give(trial, own_code)
    summary = trial.serve().to_dict()
    assert summary["method"] == "Between"
    assert summary["by_client"]["names"] == list("abcde")
    expected = trial.simulate(names=list("abcde"))
    trial.compare(expected, "abcde")
    assert summary["by_client"]["scores"]["own"] == pytest.approx(expected.history.test("own").tolist(), abs=1e-5)
    for _, _, message in trial.grid.sent:  # a name and a hash: neither a folder nor code
        words = json.dumps(message.fields)
        assert str(mine.parent) not in words
        assert "lerp" not in words
    (invitation,) = [message for client, kind, message in trial.grid.sent if (client, kind) == ("a", "join")]
    assert invitation.fields["table"]["method"] == trial.planned.table["method"] | {"name": "mine.py:Between"}
    assert invitation.fields["table"]["code"] == {"mine.py": digest(own_code)}
    why = (
        f"SHA-256 {digest(own_code)}, this site's is none: it has no such file; if you trust the server's, get the same"
    )
    lines = [line for line in trial.lines if "left client f out" in line]
    assert lines
    assert all(why in line for line in lines)


COUNTING = """
import torch
from torch import nn


class Counting(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.head = nn.Linear(shape[0], outputs)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.head(x) * (1 + self.steps / 100)
"""


def test_sites_count_their_own_steps_as_clients_of_a_simulation_do(trial, tmp_path):
    (path := tmp_path / "server" / "counting.py").parent.mkdir()
    path.write_text(COUNTING)
    trial = trial("fedavg", linked=False)
    trial.planned = plan.resolve(trial.planned.table | {"model": {"name": f"{path}:Counting"}})
    give(trial, COUNTING, "counting.py", without=0)
    summary, expected = trial.serve().to_dict(), trial.simulate()
    for i, site in enumerate(trial.examples):
        (saved,) = (trial.folder / "sites" / site / site).glob("*/model.safetensors")
        found, wanted = load_file(saved), expected.layout.tensors(expected.history.models["theta"][i])
        assert found.keys() == wanted.keys() == {"head.weight", "head.bias", "steps"}
        assert int(found["steps"]) == int(wanted["steps"]) > 0
        torch.testing.assert_close(found["head.weight"], wanted["head.weight"], rtol=1e-5, atol=1e-5)
        assert torch.equal(load_model(saved.parent).steps, found["steps"])
    assert summary["by_client"]["scores"]["shared"] == pytest.approx(expected.history.test("shared").tolist(), abs=1e-5)


def test_a_site_whose_file_differs_refuses_and_names_both_hashes(trial, mine, own_code):
    trial = trial(f"{mine}:Between", clients=5, linked=False)
    other = own_code.replace("0.5", "0.75") + f"\nPath({str(mine.parent / 'ran')!r}).touch()\n"
    give(trial, other)
    with pytest.raises(RunError, match="only 0 of 6 clients gave a usable reply"):
        trial.serve()
    hashes = f"SHA-256 {digest(own_code)}, this site's is {digest(other)}"
    for name in "abcde":
        (line,) = [line for line in trial.lines if f"left client {name} out" in line]
        assert line.endswith(
            f"the server uses the file 'mine.py' with {hashes}; if you trust the server's, get the same file and "
            "restart the node with --code and its path"
        )
    assert not (mine.parent / "ran").exists()  # it was compared before it was executed


@pytest.mark.parametrize(
    ("part", "named", "why"),
    [
        ("method", "kinfed.cli:main", "a server cannot choose the module 'kinfed.cli' of a site"),
        ("method", "os:system", "a server cannot choose the module 'os' of a site"),
        ("model", "mine.py:Path", "at a site 'Path' must be a class that mine.py itself defines"),
        ("model", "kinfed_papers.published_table:Path", "at a site 'Path' must be a class that"),
        ("model", "mine.py:torch", "at a site 'torch' must be a class that mine.py itself defines"),
    ],
)
def test_a_server_cannot_name_other_code_of_a_site(trial, mine, own_code, part, named, why):
    trial = trial(f"{mine}:Between", clients=5, linked=False)
    give(trial, own_code)
    trial.serve()  # a good run, whose invitation is then changed
    (invitation,) = [message for client, kind, message in trial.grid.sent if (client, kind) == ("a", "join")]
    invitation.fields["table"][part] = {"name": named}
    config = next(iter(trial.grid.sites.values()))
    site = Site(
        "a", Path(config["data"]), Path(config["state-dir"]), code=[Path(config["code"])], policy=Policy(runs="any")
    )
    assert why in site.reply("join", invitation).fields["refused"]


def test_a_fresh_process_knows_the_types_of_its_state(trial, mine, own_code):
    """Every message is answered by a new process at a site: here, what was loaded is forgotten between two rounds."""
    trial = trial(f"{mine}:Between", clients=5, linked=False)
    give(trial, own_code)

    def forget(reply):
        for name in [name for name in sys.modules if name.startswith("mine_")]:
            del sys.modules[name]
        return reply

    trial.grid.faults["e", 1] = trial.grid.faults["e", 2] = forget
    assert trial.serve().to_dict()["rounds"] == 3
    assert not any("left client e out" in line for line in trial.lines)
