import copy

import pytest
import torch
from small import lists
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, linear

from kinfed.core.engine import sample
from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Classification
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedCP
from kinfed.methods.fedcp import Split, discrepancy
from kinfed.models.changes import changes_mlp

float64 = torch.float64
SIZES = (5, 8, 12)


def net(norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        middle = [nn.BatchNorm1d(4)] if norm else []
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 3)).double()


def test_discrepancy_by_hand():
    x, y = torch.tensor([[0.0, 0], [1, 0]], dtype=float64), torch.tensor([[0.0, 0], [3, 0]], dtype=float64)
    assert float(discrepancy(x, y, torch.ones(2, dtype=float64))) == pytest.approx(0.2202345, abs=1e-7)
    assert float(discrepancy(x, x, torch.ones(2, dtype=float64))) == pytest.approx(0.0, abs=1e-14)
    filled = [torch.cat([v, torch.full((1, 2), 7.0 + i, dtype=float64)]) for i, v in enumerate((x, y))]  # at weight 0
    assert float(discrepancy(*filled, torch.tensor([1.0, 1, 0], dtype=float64))) == pytest.approx(0.2202345, abs=1e-7)


def test_shares_of_a_feature_sum_to_one_and_noise_is_for_training():
    split = Split(nn.Linear(4, 3).double())
    z = torch.randn(6, 4, dtype=float64)
    plain = split.generic(z)  # equal heads: whatever the shares, one head's outputs, and the bias twice
    for mode in (split.train(), split.eval()):
        torch.testing.assert_close(mode(z), plain + split.generic.bias)
    with torch.no_grad():
        split.personal_head.weight.zero_()
    assert torch.equal(split.eval()(z), split.eval()(z))
    assert not torch.equal(split.train()(z), split.eval()(z))


def naive(method, cohorts, norm, monkey):
    """Rounds by plain modules and autograd without noise; one batch, 2 epochs."""
    x, y = lists(SIZES)
    shared = monkey(net(norm))
    own = [copy.deepcopy(shared[-1].personal_head.state_dict()) for _ in SIZES]

    def outputs(z, mine, split, v):
        hidden = linear(z * v, split.policy[0].weight, split.policy[0].bias)
        hidden = layer_norm(hidden, (8,), split.policy[1].weight, split.policy[1].bias).relu()
        r = torch.sigmoid(hidden[:, :4] - hidden[:, 4:])
        return mine(r * z) + split.generic((1 - r) * z)

    for cohort in cohorts:
        ends = {}
        for i in cohort:
            net_i, received = copy.deepcopy(shared), copy.deepcopy(shared)
            mine = nn.Linear(4, 3).double()
            mine.load_state_dict(own[i])
            v = mine.weight.detach().sum(0)
            v = v / v.norm()
            learned = [*net_i[:-1].parameters(), *net_i[-1].policy.parameters(), *mine.parameters()]
            for _ in range(2):
                z, old = net_i[:-1](x[i]), received[:-1].eval()(x[i]).detach()
                loss = cross_entropy(outputs(z, mine, net_i[-1], v), y[i])
                loss = loss + method.pull * discrepancy(z, old, torch.ones(len(z), dtype=float64))
                grads = torch.autograd.grad(loss, learned)
                with torch.no_grad():
                    for p, g in zip(learned, grads, strict=True):
                        p -= 0.1 * g
            own[i] = copy.deepcopy(mine.state_dict())
            with torch.no_grad():
                net_i[-1].generic.weight.add_(mine.weight).div_(2)
                net_i[-1].generic.bias.add_(mine.bias).div_(2)
            ends[i] = net_i.state_dict()
        total = sum(SIZES[i] for i in cohort)
        shared.load_state_dict({k: sum(SIZES[i] / total * s[k] for i, s in ends.items()) for k in shared.state_dict()})
    return shared, own


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize(("method", "norm"), [(FedCP(), True), (FedCP(pull=2.0), False)], ids=str)
def test_rounds_are_those_of_the_equations(method, norm, share, examples, executor, monkeypatch):
    monkeypatch.setattr("kinfed.methods.fedcp.uniform", lambda key, like: torch.full_like(like, 0.5))
    x, y = lists(SIZES)
    trial = examples(
        net(norm), x, y, method, training=Training(2, 20, SGD(0.1)), executor=executor, task=Classification(3)
    )
    server = trial.run(3, participation=share)
    found = trial.fleet.model.layout.tensors(trial.method.sharing.compose(server.theta, trial.fleet.state.personal[0]))
    cohorts = [sample(trial.roster.__class__(**{**vars(trial.roster), "round": t}), share).tolist() for t in range(3)]

    def extended(module):
        """The module with the initial numbers of the run."""
        module[-1] = Split(module[-1])
        module.load_state_dict(trial.fleet.model.layout.tensors(trial.fleet.model.theta), strict=False)
        return module.train()

    shared, own = naive(method, cohorts, norm, extended)
    for name, value in shared.state_dict().items():
        if "personal_head" not in name and "context" not in name and "num_batches" not in name:
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    layout = trial.fleet.model.layout
    for i, theta in enumerate(trial.headline):
        tensors, last = layout.tensors(theta), f"{len(shared) - 1}"
        torch.testing.assert_close(tensors[f"{last}.personal_head.weight"], own[i]["weight"], rtol=0, atol=1e-9)
        v = own[i]["weight"].sum(0)
        torch.testing.assert_close(tensors[f"{last}.context"], v / v.norm(), rtol=0, atol=1e-9)


def test_the_pull_has_no_effect_on_the_first_step(examples):
    x, y = lists(SIZES)
    ends = []
    for pull in (0.0, 5.0):
        trial = examples(net(), x, y, FedCP(pull=pull), training=Training(1, 20, SGD(0.1)), task=Classification(3))
        ends.append(trial.run(1).theta)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_the_context_and_the_personal_head_stay_at_home(examples):
    x, y = lists(SIZES)
    trial = examples(net(), x, y, FedCP(), training=Training(1, 4, SGD(0.1)), task=Classification(3))
    assert trial.method.sharing.count("personal") == (3, 3 * 4 + 3 + 4)
    # Beside the model of 31 numbers the policy of 2 f^2 + 6 f travels.
    assert trial.method.sharing.count("shared")[1] == 31 + 2 * 16 + 6 * 4


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(3, 3), "fedcp: the model needs a head after other layers"),
        (nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 1)), "fedcp: the model needs a head after other layers"),
    ],
)
def test_refuses(module, said, examples):
    x, y = lists(SIZES)
    with pytest.raises(UsageError, match=said):
        examples(module.double(), x, y, FedCP(), training=Training(1, 4, SGD(0.1)), task=Classification(3))


def test_a_head_that_does_more_than_a_linear_layer_is_not_split():
    with pytest.raises(UsageError, match=r"must be a plain nn\.Linear, as that of model\.name=mlp is; got a Since"):
        FedCP().extend(changes_mlp((5, 1), 2), "head")
