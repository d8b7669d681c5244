"""Ways in which a module can compute batches: compiled, by onnxruntime, channels last, with normalisations fused.

`dadplug.tune` measures which is fastest for a model on a machine; models that are served later compute in that way.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ..schedules import Serving, current
from .backends import Array, runner_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RELATIVE = 1e-3  # error that counts as rounding, relative to the largest output

Run = Callable[[Array], Any]


def key_of(model: nn.Module) -> str:
    """Return the name of a model's architecture in the file of tuned constants: types, shapes and code, not weights."""
    found = hashlib.sha256(repr(model).encode())
    for name, each in model.state_dict().items():
        found.update(f"{name} {tuple(each.shape)} {each.dtype}".encode())
    return found.hexdigest()[:24]


def scheduled(model: nn.Module) -> Run:
    """Return the function that computes batches of a model, in the way that was tuned, or as the module does.

    Args:
        model: the model, with its weights.
    """
    serving = current().served.get(key_of(model))
    if serving is None or serving == Serving(shape=serving.shape):
        return runner_of(model)
    try:
        example = example_of(model, shape_of(serving))
        reference, run = runner_of(model), make_run(model, serving, example)
        check(reference, run, example)
        return run
    except Exception as error:  # of any kind, from compilers
        warnings.warn(
            f"the model is served as it is, since the tuned way ({serving.backend}) fails: {error}", stacklevel=2
        )
        return runner_of(model)


def check(reference: Run, run: Run, example: Array) -> None:
    """Compare the outputs of a way with those of the module.

    Raises:
        ValueError: if they differ by more than rounding.
    """
    expected, found = (np.asarray(each(example)) for each in (reference, run))
    size = float(np.abs(expected).max()) if expected.size else 0.0
    if expected.shape != found.shape or not np.allclose(found, expected, rtol=_RELATIVE, atol=_RELATIVE * size):
        raise ValueError("its outputs differ from those of the model")


def shape_of(serving: Serving) -> tuple[int, ...]:
    """Return the shape of one input."""
    return tuple(int(part) for part in serving.shape.split(",") if part)


def example_of(model: nn.Module, shape: tuple[int, ...], batch: int = 2) -> Array:
    """Return random inputs of a model whose inputs are numbers, of shape (batch, ...)."""
    like = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    found: Array = torch.randn(batch, *shape, generator=generator).to(like.dtype).numpy()
    return found


def make_run(model: nn.Module, serving: Serving, example: Array) -> Run:
    """Return a function that computes batches in a given way; the model itself is not changed.

    Args:
        model: the model.
        serving: the way.
        example: inputs of shape (samples, ...), with which compilers are called once.

    Raises:
        ImportError: if onnxruntime or its exporter is not installed.
    """
    module: Any = copy.deepcopy(model).eval()
    if serving.fused:
        module = fused(module)
    if serving.channels_last:
        module = module.to(memory_format=torch.channels_last)
    if serving.backend == "onnxruntime":
        return _onnx_run(module, example)
    if serving.backend == "compiled":
        module = torch.compile(module, dynamic=True)
    run = runner_of(module, serving.channels_last)
    run(example)
    return run


def _onnx_run(module: nn.Module, example: Array) -> Run:
    """Return a function that computes batches by onnxruntime."""
    batch = torch.export.Dim("batch", max=1 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (torch.from_numpy(example),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
        )
    assert program is not None
    session = onnx_session(program.model_proto.SerializeToString(), torch.get_num_threads())
    name, output = session.get_inputs()[0].name, session.get_outputs()[0].name
    return lambda inputs: session.run([output], {name: inputs})[0]


def onnx_session(source: str | bytes, threads: int) -> Any:
    """Return a session of onnxruntime for an ONNX file, or for the content of one.

    Raises:
        ImportError: if onnxruntime is not installed.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def fused(module: nn.Module) -> nn.Module:
    """Put normalisations by running statistics into the weights of the layers before them.

    Args:
        module: a module in evaluation mode, whose code can be traced.

    Returns:
        The traced module; the module itself if no normalisation follows a convolution or a linear layer.
    """
    traced = fx.symbolic_trace(module)
    layers: dict[str, Any] = dict(traced.named_modules())
    count = 0
    users = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(layers[str(node.target)], NORMS) or len(node.args) != 1:
            continue
        before, norm = node.args[0], layers[str(node.target)]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        layer = layers[str(before.target)]
        if users[str(before.target)] > 1 or users[str(node.target)] > 1 or norm.running_var is None:
            continue
        if isinstance(layer, _CONVOLUTIONS):
            new: nn.Module = fuse_conv_bn_eval(layer, norm)
        elif isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm1d):
            new = fuse_linear_bn_eval(layer, norm)
        else:
            continue
        parent, _, name = str(before.target).rpartition(".")
        setattr(traced.get_submodule(parent), name, new)
        layers[str(before.target)] = new
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)
        count += 1
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced if count else module
