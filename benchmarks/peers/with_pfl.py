"""FedAvg in pfl (simulated backend, PyTorch model), evaluating on everyone's test examples at once."""

import sys
import time

import numpy as np
import torch
from networks import build, loss, score
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from workload import read, ready, round_half, took, wait

arrays, w = read(sys.argv[1])
tensors = {name: torch.from_numpy(a) for name, a in arrays.items()}
torch.manual_seed(0)
np.random.seed(0)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = build(w["model"], w["shape"])

    def loss(self, x, y):
        self.train()
        return loss(w["model"])(self.inner(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        self.eval()
        return {"score": Weighted(score(w["model"], self.inner(x), y) * len(y), len(y))}


class Turn(TrainingProcessCallback):
    """Score the shared model, report the round, wait for the next turn."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        metrics = model.evaluate(test, eval_params=NNEvalHyperParams(local_batch_size=500))
        took(time.perf_counter() - self.begun, next(value.overall_value for _, value in metrics))
        wait()
        self.begun = time.perf_counter()
        return False, Metrics()


network = Network()
sgd = torch.optim.SGD(network.parameters(), lr=1.0)
model = PyTorchModel(network, torch.optim.SGD, sgd)
test = PyTorchTensorDataset((tensors["x_test"].flatten(0, 1), tensors["y_test"].flatten(0, 1)))
users = {str(i): (tensors["x_train"][i], tensors["y_train"][i]) for i in range(w["clients"])}
sampler = get_user_sampler("random", list(users))
data = FederatedDataset(lambda user: PyTorchTensorDataset(users[user], user_id=user), sampler)
backend = SimulatedBackend(training_data=data, val_data=data)
turn = Turn()
ready()
wait()
turn.begun = time.perf_counter()
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=1000,
        evaluation_frequency=10**9,
        train_cohort_size=round_half(w["join"] * w["clients"]),
        val_cohort_size=0,
    ),
    backend=backend,
    model=model,
    model_train_params=NNTrainHyperParams(
        local_learning_rate=w["lr"], local_num_epochs=w["epochs"], local_batch_size=w["batch"]
    ),
    callbacks=[turn],
)
