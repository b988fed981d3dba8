"""The forecaster of networks.py in JAX: a GRU that reads [B, L, 2] of value and time of day and says the next steps."""

import jax
import jax.numpy as jnp

HIDDEN = 100
GRU = {"read": (3 * HIDDEN, 2), "recall": (3 * HIDDEN, HIDDEN), "b": (3 * HIDDEN,), "c": (3 * HIDDEN,)}
SHAPES = {f"{part}/{name}": shape for part in ("encoder", "decoder") for name, shape in GRU.items()}
SHAPES |= {"weight": (1, HIDDEN), "bias": (1,)}


def cell(theta, part, state, x):
    """One step of PyTorch's GRU: x: [B, 2], state: [B, 100]."""
    i = x @ theta[f"{part}/read"].T + theta[f"{part}/b"]
    h = state @ theta[f"{part}/recall"].T + theta[f"{part}/c"]
    ir, iz, n = jnp.split(i, 3, -1)
    hr, hz, q = jnp.split(h, 3, -1)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n = jnp.tanh(n + r * q)
    return n + z * (state - n)


def forecast(theta, x, ahead):
    """[B, ahead] from windows [B, L, 2]; encoder and decoder are scans."""
    state = jnp.zeros((len(x), HIDDEN))
    state, _ = jax.lax.scan(lambda s, at: (cell(theta, "encoder", s, at), None), state, x.swapaxes(0, 1))
    value, clock = x[:, -1, :1], x[:, -1, 1:]
    tick = clock - x[:, -2, 1:]

    def say(carried, _):
        state, value, clock = carried
        state = cell(theta, "decoder", state, jnp.concatenate([value, clock], 1))
        value = state @ theta["weight"].T + theta["bias"]
        return (state, value, (clock + tick) % 1), value[:, 0]

    return jax.lax.scan(say, (state, value, clock), None, length=ahead)[1].T
