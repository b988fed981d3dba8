"""A run whose model starts from a file of tensors."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kinfed.errors import UsageError
from kinfed.runs.config.experiment import load_weights, read, resolve
from kinfed_flower import plan


def network(classes=3, width=4):
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))


@pytest.fixture
def file(tmp_path):
    """The tensors of a network with three classes, and one that no other has."""

    def make(**how):
        path = tmp_path / "weights.safetensors"
        save_file(network(**how).state_dict() | {"more": torch.ones(1)}, path)
        return path

    return make


def test_all_but_another_head_starts_as_in_the_file(file):
    for classes in (3, 5):
        module, path = network(classes), file()
        before = module[3].weight.clone()
        load_weights(module, path)
        other = network()
        other.load_state_dict({k: v for k, v in load_file(path).items() if k != "more"})
        assert torch.equal(module[0].weight, other[0].weight)
        assert torch.equal(module[1].running_var, other[1].running_var)
        assert torch.equal(module[3].weight, other[3].weight if classes == 3 else before)


def test_a_file_of_another_shape_is_refused_in_one_line(file, tmp_path):
    with pytest.raises(UsageError, match=r"has \[5, 2\] for the model's '0.weight', which is \[4, 2\]") as caught:
        load_weights(network(), file(width=5))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="there is no such file"):
        load_weights(network(), tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_text("words")
    with pytest.raises(UsageError, match=r"it is not a .safetensors file"):
        load_weights(network(), tmp_path / "bad.safetensors")


def test_a_run_starts_from_it_and_a_plan_refuses_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["federation.clients=4", "model.name=mlp"]
    plain = resolve(read("fedavg", small))
    federation = plain.federation(None, 0)
    first = plain.module(federation, 0).state_dict()
    save_file({name: torch.full_like(t, 0.5) for name, t in first.items()}, tmp_path / "half.safetensors")
    from_file = resolve(read("fedavg", [*small, "model.weights=half.safetensors"]))
    assert from_file.table["model"]["weights"] == str(tmp_path / "half.safetensors")
    assert all((t == 0.5).all() for t in from_file.module(federation, 0).state_dict().values())
    with pytest.raises(UsageError, match=r"model\.weights names a file of this machine"):
        plan.resolve(
            {"method": "fedavg", "model": {"name": "mlp", "weights": "half.safetensors"}, "flower": {"clients": 2}}
        )
