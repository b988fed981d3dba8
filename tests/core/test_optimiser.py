import pytest
import torch
from torch.func import vmap

from kinfed.core.optimiser import SGD, Adam
from kinfed.errors import UsageError

float64 = torch.float64


def start():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=float64) for shape in ((3, 2), (4,), ())]


def slope(values):
    """The gradient of a function that is no quadratic, so that steps differ."""
    return [v.sin() + 0.3 * v**3 for v in values]


def ours(optimiser, steps=6):
    values, trace = start(), []
    memory = optimiser.init(values)
    for _ in range(steps):
        values, memory = optimiser.step(values, slope(values), memory)
        trace.append(values)
    return trace


def torchs(make, steps=6):
    values, trace = [torch.nn.Parameter(v) for v in start()], []
    optimiser = make(values)
    for _ in range(steps):
        for value, gradient in zip(values, slope([v.detach() for v in values]), strict=True):
            value.grad = gradient
        optimiser.step()
        trace.append([v.detach().clone() for v in values])
    return trace


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.01}],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_sgd_is_torchs(settings):
    expected = torchs(lambda values: torch.optim.SGD(values, lr=0.1, **settings))
    torch.testing.assert_close(ours(SGD(0.1, **settings)), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.1}, {"eps": 0.1}, {"beta1": 0.5, "beta2": 0.7}, {"beta1": 0.0, "beta2": 0.0}]
)
def test_adam_is_torchs(settings):
    betas = (settings.get("beta1", 0.9), settings.get("beta2", 0.999))
    rest = {name: value for name, value in settings.items() if not name.startswith("beta")}
    expected = torchs(lambda values: torch.optim.Adam(values, lr=0.1, betas=betas, **rest))
    torch.testing.assert_close(ours(Adam(0.1, **settings)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("optimiser", [SGD(0.1, 0.9, 0.1), Adam(0.1, weight_decay=0.1)])
def test_nothing_changes_in_place(optimiser):
    values = start()
    slopes, memory = slope(values), optimiser.init(values)
    before = [t.clone() for t in (*values, *slopes, *memory.first, *memory.second)]
    again = [optimiser.step(values, slopes, memory) for _ in range(2)]
    for old, now in zip(before, (*values, *slopes, *memory.first, *memory.second), strict=True):
        assert torch.equal(old, now)
    torch.testing.assert_close(again[0], again[1], rtol=0, atol=0)


@pytest.mark.parametrize("optimiser", [SGD(0.1, 0.9), Adam(0.1)])
def test_steps_of_a_batch_are_steps_of_its_members(optimiser):
    values = [torch.stack([v, 2 * v, -v]) for v in start()]

    def steps(values):
        memory = optimiser.init(values)
        for _ in range(3):
            values, memory = optimiser.step(values, slope(values), memory)
        return values

    together = vmap(steps)(values)
    for i in range(3):
        torch.testing.assert_close([t[i] for t in together], steps([v[i] for v in values]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("make", [SGD, Adam])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0.0, "positive; got 0.0"),
        (-0.1, "positive; got -0.1"),
        (float("nan"), "positive; got nan"),
        (float("inf"), "finite; got inf"),
        (10**400, r"at most 3.4e\+38, what single precision can hold; got 10000"),
        (True, "a number; got True"),
    ],
)
def test_refuses_rates(make, wrong, said):
    with pytest.raises(UsageError, match=f"^{make.__name__}.lr must be {said}"):
        make(wrong)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (SGD, {"momentum": -0.1}),
        (SGD, {"weight_decay": -0.1}),
        (Adam, {"eps": -1.0}),
        (Adam, {"weight_decay": float("nan")}),
        (Adam, {"beta1": 1.0}),
        (Adam, {"beta2": -0.1}),
    ],
)
def test_refuses(make, wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        make(**wrong)


@pytest.mark.parametrize("optimiser", [SGD(0.1), SGD(0.1, 0.9, 0.1), Adam(0.1, weight_decay=0.1)])
def test_steps_in_place_are_the_same_steps(optimiser):
    values, memory = start(), optimiser.init(start())
    places = [v.data_ptr() for v in values]
    for expected in ours(optimiser):
        new, memory = optimiser.step(values, slope(values), memory, inplace=True)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-15)
        assert [v.data_ptr() for v in new] == places
