"""Trial: a few passes of a module before it trains, which show on what its outputs and gradients depend.

Executors, evaluation and export are the same function only for modules whose outputs depend on an example, on the
tensors that are passed in and, in training, on a key: not on other examples, earlier passes or tensors elsewhere.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from ..errors import UsageError
from .copies import duplicate
from .model import Model, failed_in_training

ROWS = 3  # examples whose outputs are looked at
LARGE = 1 << 24  # numbers of a module, beyond which there is no copy of it in double precision
BREAKS = 8  # in a pass, for that of a copy in between
T = TypeVar("T")


def run_trial(model: Model, x: Tensor, check: Callable[["Trial"], T]) -> T:
    """What a check of `Trial` finds; what it refuses only because of rounding passes in double precision."""
    try:
        return check(Trial(model, x))
    except UsageError:
        if sum(t.numel() for t in model.module.parameters()) <= LARGE:
            with suppress(Exception):
                return check(Trial(model, x, torch.float64))
        raise


def differ(first: Tensor, second: Tensor, rounded: bool = True) -> bool:
    """Whether two results differ by more than rounding; not `rounded`: of the very same products."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return True
    if not first.is_floating_point():
        return not torch.equal(first, second)
    eps, finite = torch.finfo(first.dtype).eps, first.isfinite() & second.isfinite()
    scale = (
        torch.maximum(first[finite].abs().amax(), second[finite].abs().amax()) if finite.any() else first.new_zeros(())
    )
    bound = float(scale) * (10 * eps**0.5 if rounded else 100 * eps)
    return not torch.isclose(first, second, rtol=0, atol=bound, equal_nan=True).all()


class _Between(TorchFunctionMode):
    """Within this context something is done between PyTorch's operations, after those with the numbers `at`."""

    def __init__(self, act: Callable[[], Any], at: Collection[int] = ()) -> None:
        super().__init__()
        self._act, self._at, self.count = act, at, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if self.count in self._at:
            self._act()
        self.count += 1
        return result


class Habits(NamedTuple):
    """What a module does beside giving outputs."""

    draws: bool  # PyTorch's random numbers, in training
    writes: bool  # to its inputs, or in evaluation to its parameters or buffers
    shares: bool  # something with its copies, which therefore cannot work at the same time


class Trial:
    """Passes of a copy of a model over some of the examples x: [n, ...], on the model's device."""

    def __init__(self, model: Model, x: Tensor, kind: torch.dtype | None = None) -> None:
        """`kind` replaces the type of all numbers."""
        self.model = model.twin() if kind is None else model.convert(kind)
        self.model.bf16 = False
        at = torch.linspace(0, len(x) - 1, 2 * ROWS, device=x.device).long()
        rows = x[at].to(self.model.theta)
        self.rows, self.others = rows.split(ROWS)  # [ROWS, ...] each; few examples come repeatedly
        self._changes_inputs = False

    def check_predictions(self) -> list[int]:
        """The shape of an example's outputs.

        Raises UsageError unless outputs in evaluation mode are a function of one example and of theta, which is also
        that of the export with the same parameters.
        """
        model, theta, x = self.model, self.model.theta.clone(), self.rows
        with torch.no_grad(), self._isolate_random_numbers():
            self._check_form(self._predict(theta, x[:1]), 1)
            alone = self._predict(theta, x)
            self._check_form(alone, len(x))
            self._predict(theta, self.others)
            if differ(alone, self._predict(theta, x), rounded=False):
                raise UsageError(
                    "the model gives other outputs when the same examples are asked again in evaluation mode, so that "
                    "nobody could repeat a prediction; random numbers and memory belong behind `if self.training:`"
                )
            crowd, copies = (
                self._predict(theta, torch.cat([fill, x, fill]))[len(x) : -len(x)] for fill in (self.others, x)
            )
            if differ(crowd, copies, rounded=False) or differ(alone, crowd):
                raise UsageError(
                    "the model's outputs for an example change with the other examples of its batch, in evaluation "
                    "mode too; let it reduce over the axes of an example alone, the first one being that of the batch "
                    "(recurrent and attention layers: batch_first=True)"
                )
            moved = self._perturb()
            mine, plain = self._predict(moved, x), self._export(moved)(x.clone())
            if differ(mine, plain):
                raise UsageError(
                    f"the model's outputs with other parameters differ by up to {float((mine - plain).abs().max()):.2g}"
                    " from those of a copy that holds these parameters; its forward pass must read them from its "
                    "layers, not from a list or from what was computed before"
                )
        leaves = self._leaves()
        with self._isolate_random_numbers(), model.bound(leaves, training=False):
            check_sources(model.module(x.clone()), leaves)
        return list(alone.shape[1:])

    def check_training(self) -> Habits:
        """What a pass of the module does beside giving outputs.

        Raises UsageError unless a training pass is a function of a batch, of theta, and of a key if it draws numbers.
        """
        model, x, theta = self.model, self.rows, self.model.theta.clone()
        with self._isolate_random_numbers():
            before, state = self._predict(theta, x), self._state()
            self.pass_over(x)
            model.draws = any(not torch.equal(a, b) for a, b in zip(state, self._state(), strict=True))
            before_others = self.pass_over(x)
            self.pass_over(self.others)
            after_others = self.pass_over(x)
            after = self._predict(theta, x)
            try:
                shares = differ(after, self._call_disturbed(theta, x))
            except UsageError:  # what the copy left there did not fit
                shares = True
        if any(
            differ(a, b, rounded=False) for a, b in zip([*before_others, before], [*after_others, after], strict=True)
        ):
            raise UsageError(
                "the model remembers something from one pass to the next, as the same batch and parameters give other "
                "results in a second training pass; keep it as a buffer (self.register_buffer), of which every client "
                "has its own, and draw random numbers with torch"
            )
        return Habits(model.draws, self._changes_inputs or not torch.equal(theta, model.theta), shares)

    def check_filling(self) -> None:
        """Raise UsageError if rows that only fill a batch up change outputs, gradients or buffers of training."""
        x, leaves = self.rows, self._leaves()
        weight = torch.cat([x.new_ones(len(x)), x.new_zeros(len(x))])
        with self._isolate_random_numbers():
            alone = self.pass_over(x, leaves=leaves)
            filled_with_others, filled_with_itself = (
                self.pass_over(torch.cat([x, fill]), weight) for fill in (self.others, x)
            )
        if any(
            differ(a, b) or differ(b, c, rounded=False)
            for a, b, c in zip(alone, filled_with_others, filled_with_itself, strict=True)
        ):
            raise UsageError("its training pass mixes the examples of a batch, and those that only fill one up")
        before = self.model.layout.tensors(self.model.theta)
        if any(not torch.equal(leaves[e.name], before[e.name]) for e in self.model.layout.entries if e.trainable):
            raise UsageError("its training pass changes parameters by itself")

    def check_single_rows(self) -> None:
        """Raise UsageError unless a training pass treats each row by itself, so that rows have gradients of their own.

        A model that draws PyTorch's random numbers, or whose buffers change in training, is refused as well.
        """
        model, x, leaves = self.model, self.rows, self._leaves()
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        with self._isolate_random_numbers(), torch.no_grad():
            try:
                first, second = (model.run(leaves, torch.cat([x, fill]), None, key) for fill in (self.others, x))
            except Exception as problem:
                raise failed_in_training(problem, 2 * len(x)) from problem
            if any(differ(leaves[name], t) for name, t in first.buffers.items()):
                raise UsageError(
                    "the model keeps statistics of its rows, as BatchNorm does, which have no price under privacy; use "
                    "layers that normalise each row by itself, such as GroupNorm or LayerNorm"
                )
            if model.draws or differ(first.outputs[: len(x)], second.outputs[: len(x)]):
                raise UsageError(
                    "the model's training pass mixes the rows of a batch, or draws random numbers of its own, and "
                    "privacy needs the gradient of each row; use layers that treat each row by itself, and nn.Dropout"
                )

    def pass_over(
        self, x: Tensor, weight: Tensor | None = None, leaves: dict[str, Tensor] | None = None
    ) -> list[Tensor]:
        """A training pass: outputs of the first examples, a gradient of them for all parameters, and buffers."""
        model, leaves = self.model, leaves or self._leaves()
        moving = [leaves[e.name] for e in model.layout.entries if e.trainable]
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        given = x.clone()
        try:
            outputs, buffers = model.run(leaves, given, weight, key)
            self._changes_inputs |= not torch.equal(given, x)
            self._check_form(outputs, len(x))
            check_sources(outputs, leaves)
            outputs = outputs[: len(self.rows)]
            if not outputs.requires_grad:
                raise UsageError(
                    "no trainable parameter has a gradient in the model's forward pass, so there is nothing to learn; "
                    "it may run under torch.no_grad, detach its outputs or take them from elsewhere"
                )
            along = torch.arange(outputs.numel(), device=x.device).cos().view_as(outputs).to(outputs.dtype)
            slopes = torch.autograd.grad((outputs * along).sum(), moving, allow_unused=True)
        except Exception as problem:
            raise failed_in_training(problem, len(x)) from problem
        grads = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(moving, slopes, strict=True)]
        return [t.detach() for t in (outputs, _concatenate(grads), *buffers.values())]

    def check_batched(self, slow: bool, gradients: bool) -> None:
        """Raise UsageError if passes of two clients at once, under `torch.func.vmap`, differ from their own.

        Raises what PyTorch raises where it cannot, and if `slow` where it would process them one by one. Without
        `gradients` models only answer, which spares the two seconds in which `torch.func.grad` imports a compiler.
        """
        model, x = self.model, torch.stack([self.rows, self.others])
        layout, key = model.layout, torch.zeros((), dtype=torch.int64, device=x.device)
        thetas = torch.stack([model.theta, self._perturb()])
        moving = [e.name for e in layout.entries if e.trainable]

        def passes(theta: Tensor, x: Tensor, weight: Tensor | None) -> list[Tensor]:
            if not gradients:
                return [model(theta, x)[: ROWS - 1]]
            tensors = model.tensors(theta)

            def value(params: list[Tensor]) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
                outputs, buffers = model.run(tensors | dict(zip(moving, params, strict=True)), x, weight, key)
                values = outputs.flatten(1).cos().sum(1)
                return values.sum() if weight is None else (values * weight).sum(), (outputs, buffers)

            grads, (outputs, buffers) = grad(value, has_aux=True)([tensors[name] for name in moving])
            return [outputs[: ROWS - 1], _concatenate(grads), model(theta, x)[: ROWS - 1], *buffers.values()]

        weight = x.new_ones(2, ROWS)
        weight[1, -1] = 0  # the second client has fewer examples
        one_by_one: Any = torch._C._functorch._set_vmap_fallback_enabled  # type: ignore[attr-defined]
        with self._isolate_random_numbers():
            one_by_one(not slow)
            try:
                together = vmap(passes)(thetas, x, weight)
                shared = vmap(model, in_dims=(None, 0))(thetas[0], x)
            finally:
                one_by_one(True)
            alone = passes(thetas[0], x[0], None), passes(thetas[1], x[1, :-1], None)
        pairs = [(t[i], a) for i in (0, 1) for t, a in zip(together, alone[i], strict=True)]
        if any(differ(*pair) for pair in (*pairs, (shared[1], model(thetas[0], x[1])))):
            raise UsageError("with several clients at once it gives other results")

    def _predict(self, theta: Tensor, x: Tensor) -> Any:
        try:
            with torch.no_grad():
                return self.model(theta, x.clone())  # which a layer in place would change
        except UsageError:
            raise
        except Exception as problem:
            try:
                self._export(theta)(x.clone())
            except Exception:
                raise UsageError(
                    f"the model cannot take an example, which is {list(x.shape[1:])}: {problem}{_advise(problem)}"
                ) from problem
            where = "lie in another order in memory" if "view" in str(problem) else "are parts of one vector"
            fix = "; call .reshape instead of .view on them" if "view" in str(problem) else ""
            raise UsageError(f"the model fails where its weights {where} ({problem}){fix}") from problem

    def _call_disturbed(self, theta: Tensor, x: Tensor) -> Any:
        """Outputs while, between some of its operations, a copy of the module answers to other examples."""
        other = self.model.twin()
        with _Between(lambda: None) as quiet:
            self._predict(theta, x)
        steps = {round(i * quiet.count / BREAKS) for i in range(BREAKS)}
        with _Between(lambda: other(theta, self.others.clone()), steps):
            return self._predict(theta, x)

    def _export(self, theta: Tensor) -> Any:
        module = self.model.export(theta)
        return module if theta.device.type == "cpu" else duplicate(module).to(theta.device)  # it shares what is frozen

    def _perturb(self) -> Tensor:
        """[d] other parameters: each off by about a tenth of itself, and of the mean size of all."""
        theta = self.model.theta
        draw = torch.Generator().manual_seed(0)
        noise = torch.randn(len(theta), generator=draw).to(theta)
        moved = theta + 0.1 * noise * (theta.abs() + theta.abs().mean())
        return torch.where(self.model.layout.trainable_on(theta.device), moved, theta)

    def _leaves(self) -> dict[str, Tensor]:
        """Copies of the model's tensors; those that are trained need a gradient."""
        trained = {e.name for e in self.model.layout.entries if e.trainable}
        tensors = self.model.tensors(self.model.theta)
        return {name: t.detach().clone().requires_grad_(name in trained) for name, t in tensors.items()}

    def _check_form(self, outputs: Any, count: int) -> None:
        """Raise UsageError unless these are outputs for so many examples."""
        if not isinstance(outputs, Tensor):
            keys = f" with {', '.join(map(repr, list(outputs)[:4]))}" if isinstance(outputs, dict) else ""
            size = f" of {len(outputs)}" if isinstance(outputs, list | tuple) else ""
            raise UsageError(
                f"the model returns a {type(outputs).__name__}{size}{keys}, and must return one tensor, [B, ...]; wrap "
                "it in a module whose forward pass picks the outputs from that"
            )
        if not outputs.is_floating_point() or not outputs.ndim or len(outputs) != count:
            raise UsageError(
                f"the model must return a row of numbers for each example; for {count} it returns "
                f"{str(outputs.dtype).removeprefix('torch.')} {list(outputs.shape)}"
            )

    @contextmanager
    def _isolate_random_numbers(self) -> Iterator[None]:
        """Within this context the random numbers of the caller are not used up."""
        device = self.model.theta.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield

    def _state(self) -> list[Tensor]:
        """Where PyTorch's random numbers are."""
        device = self.model.theta.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _advise(problem: Exception) -> str:
    """What to do about whole numbers that examples hold as floats."""
    return "; if these are numbers of tokens, let forward call x.long()" if "Float" in str(problem) else ""


def _concatenate(grads: list[Tensor]) -> Tensor:
    """One vector, whose size says what rounding is: a gradient of a single tensor may be zero apart from that."""
    return torch.cat([g.reshape(-1) for g in grads])


def check_sources(outputs: Any, leaves: dict[str, Tensor]) -> None:
    """Raise UsageError if outputs have a gradient for a tensor that is none of these: no client would train it."""
    ids = {id(t) for t in leaves.values()}
    todo = [outputs.grad_fn] if isinstance(outputs, Tensor) and outputs.grad_fn is not None else []
    seen = set(todo)
    while todo:
        node = todo.pop()
        source = getattr(node, "variable", None)
        if source is not None and id(source) not in ids:
            raise UsageError(
                f"the model computes with a parameter {list(source.shape)} that is none of its own, or not where its "
                "layers hold it, so that it would not be trained; keep layers in nn.ModuleList, not in a list, and let "
                "forward passes and hooks read a parameter from its layer"
            )
        after = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= after
        todo.extend(after)
