import pytest
import torch
from hypothesis import given, strategies as st

from kinfed.core.engine import Participation
from kinfed.core.mixins import reduce_uploads
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import Scaffold

float64 = torch.float64

# F_1 = x^2 / 2 and F_2 = (x - 4)^2 from x = 1, rate 0.1, two steps a round.
TABLE = [
    ((0.81, 2.08), (0.95, -5.4), -2.225, 1.445),
    ((1.7737, 1.7933), (1.5315, -4.9165), -1.6925, 1.7835),
    ((2.057195, 2.00112), (1.855525, -4.3121), -1.2282875, 2.0291575),
]


def test_three_rounds_by_hand(bowls, executor):
    trial = bowls(Scaffold(), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2, executor=executor)
    method, everyone = trial.method, trial.roster.everyone
    server = method.start(trial.roster)
    for round, (y, own, shared, x) in enumerate(TABLE):
        _, uploads = trial.fleet.train(round, everyone, method.send(trial.roster, server, everyone))
        given = reduce_uploads(method, trial.roster, everyone, uploads)
        server = method.aggregate(trial.roster, server, everyone, given)
        assert uploads.theta.squeeze(1).tolist() == pytest.approx(y, abs=1e-12)
        assert trial.fleet.state.control.squeeze(1).tolist() == pytest.approx(own, abs=1e-11)
        assert float(server.control) == pytest.approx(shared, abs=1e-11)
        assert float(server.theta) == pytest.approx(x, abs=1e-12)


def test_five_local_steps_reach_the_optimum(bowls, executor):
    trial = bowls(Scaffold(), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=5, executor=executor, every=80)
    server = trial.run(80)
    assert float(server.theta) == pytest.approx(8 / 3, abs=1e-9)
    # There each client's control variate is its own gradient, and they cancel.
    controls = trial.fleet.state.control.squeeze(1).tolist()
    assert controls == pytest.approx([8 / 3, -8 / 3], abs=1e-8)
    assert float(server.control) == pytest.approx(0, abs=1e-8)


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0.1, 2), st.integers(1, 5)), min_size=2, max_size=5),
    st.floats(0.2, 1),
    st.integers(0, 1000),
    st.sampled_from([1, 2]),
)
def test_shared_variate_is_the_mean_at_any_participation(bowls, clients, participation, seed, option):
    b, h, copies = zip(*clients, strict=True)
    trial = bowls(Scaffold(option=option), b, h=h, copies=copies, batch=2, epochs=2, seed=seed, every=100)
    server = trial.run(4, participation=participation)
    torch.testing.assert_close(server.control, trial.fleet.state.control.mean(0), rtol=0, atol=1e-12)


def test_half_a_cohort_moves_half_the_variate(bowls):
    trial = bowls(Scaffold(), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2)
    method, cohort = trial.method, torch.tensor([0])
    server = method.start(trial.roster)
    _, uploads = trial.fleet.train(0, cohort, method.send(trial.roster, server, cohort))
    uploads = reduce_uploads(method, trial.roster, cohort, uploads)
    server = method.aggregate(trial.roster, server, cohort, uploads)
    assert float(server.theta) == pytest.approx(0.81, abs=1e-14)  # the mean over the cohort
    assert float(server.control) == pytest.approx(0.475, abs=1e-13)  # the sum over the cohort, over all clients
    assert trial.fleet.state.control.squeeze(1).tolist() == pytest.approx([0.95, 0], abs=1e-13)


def test_counts_each_clients_own_steps(bowls, executor):
    # Batches of 1: 2 and 3 examples are 2 and 3 steps, so c_1 = (1 - 0.9^2) / 0.2, c_2 = 3 (0.8^3 - 1) / 0.3.
    trial = bowls(Scaffold(), [0.0, 4.0], h=[1.0, 2.0], start=1.0, copies=[2, 3], batch=1, executor=executor)
    server = trial.run(1)
    assert trial.fleet.state.control.squeeze(1).tolist() == pytest.approx([0.95, -4.88], abs=1e-12)
    # Uniform weights, whatever the sizes: (0.81 + 4 - 3 * 0.512) / 2.
    assert float(server.theta) == pytest.approx((0.81 + 2.464) / 2, abs=1e-13)


def test_option_one_is_the_gradient_at_the_shared_model(bowls, executor):
    trial = bowls(Scaffold(option=1), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2, executor=executor)
    server = trial.run(1)
    assert trial.fleet.state.control.squeeze(1).tolist() == pytest.approx([1, -6], abs=1e-12)
    assert float(server.control) == pytest.approx(-2.5, abs=1e-12)


def test_server_rate(bowls):
    trial = bowls(Scaffold(server_lr=0.5), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2)
    assert float(trial.run(1).theta) == pytest.approx(1 + 0.5 * 0.445, abs=1e-13)


def test_running_statistics_have_no_variate(examples, noisy, perceptron):
    x, y = noisy(2, 2)
    trial = examples(perceptron(norm=True), x, y, Scaffold(), training=Training(1, 4, SGD(0.1)))
    server = trial.run(2)
    learned = trial.roster.layout.trainable
    assert (server.theta[~learned] != trial.roster.theta[~learned]).all()
    assert (trial.fleet.state.control[:, ~learned] == 0).all()
    assert (trial.fleet.state.control[:, learned] != 0).any(1).all()


def test_sends_two_vectors_both_ways(bowls):
    trial = bowls(Scaffold(), [[1.0, 2.0], [5.0, 6.0]])
    trial.run(3)
    assert trial.history.cost.bytes_up == trial.history.cost.bytes_down == 3 * 2 * (2 * 2) * 8


@pytest.mark.parametrize("optimiser", [SGD(0.1, momentum=0.9), SGD(0.1, weight_decay=0.1), Adam()])
def test_refuses_other_optimisers(bowls, optimiser):
    with pytest.raises(UsageError, match="plain SGD"):
        bowls(Scaffold(), [1.0, 2.0], optimiser=optimiser).run(1)


def test_shared_variate_is_the_mean_when_clients_have_joined(bowls):
    trial = bowls(Scaffold(), [0.0, 4.0, 1.0, -2.0, 3.0], h=[1.0, 2.0, 0.5, 1.0, 1.5], start=1.0, epochs=2)
    control = trial.run(6, participation=Participation(0.7, late=0.4, joins=3)).control
    assert float(control) == pytest.approx(float(trial.fleet.state.control.mean()), abs=1e-12)
    assert (trial.fleet.state.control != 0).all()
