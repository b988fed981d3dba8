"""FedAvg in FedJAX (its own for_each_client, jit over a client's steps); images are [height, width, channel] in JAX."""

import sys

import jax
import numpy as np
from workload import AHEAD, cohort, read, serve

jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls it by the name that JAX has dropped
import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from gru_jax import SHAPES, forecast  # noqa: E402

arrays, w = read(sys.argv[1])
series = w["model"] == "gru"


def network(batch):
    h = batch["x"]
    if series:
        begin = hk.initializers.RandomUniform(-0.1, 0.1)
        theta = {name: hk.get_parameter(name.replace("/", "_"), shape, init=begin) for name, shape in SHAPES.items()}
        return forecast(theta, h, AHEAD)
    if w["model"] == "mlp":
        return hk.nets.MLP([200, 200, 10])(h.reshape(len(h), -1))
    for width in (32, 64):
        h = hk.max_pool(jax.nn.relu(hk.Conv2D(width, 5, padding="VALID")(h)), (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return hk.Linear(10)(jax.nn.relu(hk.Linear(512)(h.reshape(len(h), -1))))


def data(split):
    x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
    if not series:
        x, y = np.moveaxis(x, 2, -1), y.astype(np.int32)
    return [fedjax.ClientDataset({"x": a, "y": b}) for a, b in zip(x, y, strict=True)]


train, test = data("train"), data("test")
net = hk.transform(network)
sample = {name: a[:1] for name, a in train[0].all_examples().items()}


class Error(fedjax.metrics.Metric):
    """The mean squared error."""

    def zero(self):
        return fedjax.metrics.MeanStat.new(0.0, 0.0)

    def evaluate_example(self, example, prediction):
        return fedjax.metrics.MeanStat.new(jnp.mean((prediction - example["y"]) ** 2), 1.0)


def loss(batch, outputs):
    if series:
        return jnp.mean((outputs - batch["y"]) ** 2, -1)
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["y"][:, None], 1)[:, 0]


metric = Error() if series else fedjax.metrics.Accuracy()
model = fedjax.create_model_from_haiku(net, sample, loss, {"score": metric})
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(w["lr"]),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=w["batch"], num_epochs=w["epochs"], drop_remainder=False),
)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))
pooled = fedjax.padded_batch_client_datasets(test, batch_size=500)
batches = list(pooled)  # a shared model is scored on everyone's test examples at once, as FedJAX advises


def round(i):
    global state
    chosen = [(str(c).encode(), train[c], jax.random.PRNGKey(1000 * i + int(c))) for c in cohort(w, i)]
    state, _ = algorithm.apply(state, chosen)
    return float(fedjax.evaluate_model(model, state.params, batches)["score"])


serve(round)
