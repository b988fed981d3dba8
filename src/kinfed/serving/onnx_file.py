"""ONNX files of clients' models: the architecture is converted once, and each client's numbers are put into it."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data.tables.columns import Category
from ..errors import UsageError
from ..runs.predictor import Predictor
from .pipeline import Columns, Whole, example, onnx_outputs, place_categories

AGREE = 1e-5  # between onnxruntime and PyTorch, relative to the largest answer if that is above 1
ML = "ai.onnx.ml"


def require_packages() -> None:
    """Raise UsageError unless the packages of the extra are there."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as problem:
        raise UsageError(f"ONNX needs the package {problem.name}: pip install 'kinfed[export]'") from None


class _Ordered(nn.Module):
    """A `Whole` that takes columns one after another, so that no name of a column is one of its program."""

    def __init__(self, pipeline: Whole, names: Sequence[str]) -> None:
        super().__init__()
        self.whole, self._names = pipeline, names

    def forward(self, *columns: Tensor) -> Columns:
        return self.whole(dict(zip(self._names, columns, strict=True)) if self._names else columns[0])


class Converted(NamedTuple):
    """An ONNX model whose numbers are one client's."""

    proto: Any
    tensors: dict[str, str]  # which of a module's own tensors some of its constants are: names in its state


def convert(pipeline: Whole, predictor: Predictor) -> Converted:
    """The ONNX model of one client; raises UsageError that names an operator which ONNX cannot hold."""
    given = example(predictor, 4)
    names = list(given) if isinstance(given, dict) else []
    columns = tuple(given.values()) if isinstance(given, dict) else (given,)
    shapes = (({0: torch.export.Dim("rows")},) * len(columns),)
    try:
        with _silence():
            traced = torch.export.export(_Ordered(pipeline, names).eval(), columns, dynamic_shapes=shapes)
    except Exception as problem:  # whatever tracing a user's module ends in
        raise UsageError(f"the model cannot be exported: {_reason(problem)}") from None
    try:
        with _silence():
            made = torch.onnx.export(traced, dynamo=True, optimize=False, verbose=False)
    except Exception as problem:
        raise UsageError(f"ONNX cannot hold the model: {_reason(problem)}") from None
    assert made is not None
    plain = made.model_proto
    with _silence():
        made.optimize()
    proto = made.model_proto
    state_names = {f"whole.{name}": name for name in pipeline.state_dict()}
    if state_names.keys() & _constants(proto) != state_names.keys() & _constants(
        plain
    ):  # folded, so that no other client's fit
        proto = plain
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        del node.metadata_props[:]  # lines of code, ten times as large as a small model
    outputs, tensors = onnx_outputs(predictor), state_names.keys() & _constants(proto)
    called = _rename(proto.graph, names or ["x"], outputs)
    _with_text(proto, predictor, outputs)
    return Converted(proto, {called[name]: state_names[name] for name in tensors})


def _constants(proto: Any) -> set[str]:
    return {tensor.name for tensor in proto.graph.initializer}


def _name_lists(graph: Any) -> list[Any]:
    """Every node's lists of names of inputs and outputs, in graphs within nodes too; writing to one renames there."""
    lists = [names for node in graph.node for names in (node.input, node.output)]
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return lists + [names for subgraph in inner for names in _name_lists(subgraph)]


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Give a graph's inputs and outputs these names, and no other value one of them; the new names by the old."""
    ends = [*graph.input, *graph.output]
    called = {end.name: name for end, name in zip(ends, [*inputs, *outputs], strict=True)} | {"": ""}
    taken = {*inputs, *outputs}
    others = [*graph.initializer, *graph.value_info]
    for name in [*(value.name for value in others), *(name for names in _name_lists(graph) for name in names)]:
        if name not in called:
            called[name] = _free(name.removeprefix("whole."), taken)
    for value in (*ends, *others):
        value.name = called[value.name]
    for names in _name_lists(graph):
        names[:] = [called[name] for name in names]
    return called


def _free(name: str, taken: set[str]) -> str:
    """The name, with underscores while it is taken; then it is."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _with_text(proto: Any, predictor: Predictor, outputs: Sequence[str]) -> None:
    """Let columns of text be text, and classes their names, in the graph itself."""
    import onnx

    graph, nodes = proto.graph, []
    taken = (
        {name for names in _name_lists(graph) for name in names} | {*outputs} | {value.name for value in graph.input}
    )
    columns = predictor.description.inputs if predictor.description is not None else ()
    texts = {column.name: column for column in columns if isinstance(column, Category) and column.parts}
    for given in graph.input:
        if given.name in texts:
            places, other = place_categories(texts[given.name])
            keys: dict[str, Any] = {
                "keys_strings": list(places),
                "values_int64s": list(places.values()),
                "default_int64": other,
            }
            place = _free("place", taken)
            nodes.append(onnx.helper.make_node("LabelEncoder", [given.name], [place], domain=ML, **keys))
            given.type.tensor_type.elem_type = onnx.TensorProto.STRING
            for node in graph.node:
                node.input[:] = [place if name == given.name else name for name in node.input]
    for node in reversed(nodes):
        graph.node.insert(0, node)
    if predictor.answers.classes:
        place = _free("place", taken)
        for node in graph.node:
            node.output[:] = [place if name == outputs[0] else name for name in node.output]
            node.input[:] = [place if name == outputs[0] else name for name in node.input]
        names = list(predictor.answers.classes)
        back: dict[str, Any] = {"keys_int64s": list(range(len(names))), "values_strings": names, "default_string": ""}
        graph.node.append(onnx.helper.make_node("LabelEncoder", [place], [outputs[0]], domain=ML, **back))
        graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.STRING
    if ML not in {opset.domain for opset in proto.opset_import}:
        proto.opset_import.append(onnx.helper.make_opsetid(ML, 3))


def fill_weights(converted: Converted, pipeline: nn.Module, metadata: dict[str, str]) -> Any:
    """A copy of an ONNX model with the numbers of another module of the same architecture."""
    import onnx

    made, values = onnx.ModelProto(), pipeline.state_dict(keep_vars=False)
    made.CopyFrom(converted.proto)
    for tensor in made.graph.initializer:
        if tensor.name in converted.tensors:
            array = values[converted.tensors[tensor.name]].detach().cpu().contiguous().numpy()
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.helper.set_model_props(made, metadata)
    return made


def measure_gap(path: Path, pipeline: Whole, predictor: Predictor) -> float:
    """How far onnxruntime's answers are from PyTorch's, at most; relative to the largest if that is above 1."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = example(predictor, 32, seed=1)
    with torch.inference_mode():
        expected = pipeline(given)
    columns = given if isinstance(given, dict) else {"x": given}
    fed = {name: values.numpy() for name, values in columns.items()}
    inputs = predictor.description.inputs if predictor.description is not None else ()
    for column in inputs:
        if isinstance(column, Category) and column.name in fed:
            places, _ = place_categories(column)
            text = {place: word for word, place in places.items()}
            fed[column.name] = np.array([text.get(int(place), "no category") for place in fed[column.name]], object)
    got = session.run(None, fed)[-1]
    truth = expected["probabilities" if predictor.answers.classes else "prediction"].numpy()
    return float(np.abs(got - truth).max() / max(1.0, np.abs(truth).max()))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without what the exporter prints and logs."""
    before, printed = logging.root.manager.disable, io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _reason(problem: BaseException) -> str:
    """The operator that cannot be converted, or why a module cannot be traced."""
    texts: list[str] = []
    cause: BaseException | None = problem
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    if match := re.search(r"op='([\w.:]+)'", " ".join(texts)):
        operator = match[1].replace(".", "::", 1)
        return f"there is no ONNX operator for {operator}; write the model without it, or use --format safetensors"
    if any("data-dependent" in text for text in texts):
        return "its forward pass branches on the values of its inputs; write it with torch.where"
    lines = [line for line in texts[-1].splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]
