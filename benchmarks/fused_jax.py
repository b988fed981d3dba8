"""The GRU workload of fused.py in JAX, as a yardstick: python fused_jax.py CLIENTS STEPS, then a line per turn.

Encoder and decoder are scans, clients run under vmap, four at a time, and one jit holds all steps of these.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

CLIENTS, STEPS = (int(argument) for argument in sys.argv[1:])
BATCH, LENGTH, FEATURES, OUTPUTS, HIDDEN, LR, CHUNK = 64, 12, 2, 12, 100, 0.01, 4


def cell(weights, state, x):
    read, recall, b, c = weights
    i, h = x @ read.T + b, state @ recall.T + c
    ir, iz, n = jnp.split(i, 3, -1)
    hr, hz, q = jnp.split(h, 3, -1)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n = jnp.tanh(n + r * q)
    return n + z * (state - n)


def loss(theta, x, y):
    encoder, decoder, (weight, bias) = theta
    state = jnp.zeros((BATCH, HIDDEN))
    state, _ = jax.lax.scan(lambda s, at: (cell(encoder, s, at), None), state, x.swapaxes(0, 1))
    value, clock = x[:, -1, :1], x[:, -1, 1:]
    tick = clock - x[:, -2, 1:]

    def say(carried, _):
        state, value, clock = carried
        state = cell(decoder, state, jnp.concatenate([value, clock], 1))
        value = state @ weight.T + bias
        return (state, value, (clock + tick) % 1), value

    _, said = jax.lax.scan(say, (state, value, clock), None, length=OUTPUTS)
    return jnp.mean((said[..., 0].T - y) ** 2)


def client(theta, x, y):
    def step(theta, at):
        slope = jax.grad(loss)(theta, *at)
        return jax.tree.map(lambda t, s: t - LR * s, theta, slope), None

    return jax.lax.scan(step, theta, (x, y))[0]


def main():
    draw = np.random.default_rng(0)

    def uniform(*shape):
        return jnp.asarray(draw.uniform(-0.1, 0.1, shape), jnp.float32)

    def gru():
        return tuple(uniform(3 * HIDDEN, *rest) for rest in ((FEATURES,), (HIDDEN,), (), ()))

    theta = (gru(), gru(), (uniform(1, HIDDEN), uniform(1)))
    x = jnp.asarray(draw.random((CLIENTS, STEPS, BATCH, LENGTH, FEATURES)), jnp.float32)
    y = jnp.asarray(draw.standard_normal((CLIENTS, STEPS, BATCH, OUTPUTS)), jnp.float32)
    train = jax.jit(jax.vmap(client, (None, 0, 0)))
    for _ in sys.stdin:
        for start in range(0, CLIENTS, CHUNK):
            jax.block_until_ready(train(theta, x[start : start + CHUNK], y[start : start + CHUNK]))
        print("done", flush=True)


if __name__ == "__main__":
    main()
