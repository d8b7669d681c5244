"""Loading of models from files, in the models' processes. No file can run code of its own: code comes from builders."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import LoadError
from .backends import Array, dtype_of
from .building import Loaded, build, load_state
from .schedule import scheduled
from .schema import Schema
from .shards import load_folder

_ONNX_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int16)": "int16",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


def load(description: Mapping[str, Any]) -> Loaded:
    """Load a model.

    Args:
        description: result of `Model.description`.

    Raises:
        LoadError: if the file is damaged, of an unknown kind, or does not fit the builder's model.
    """
    path = Path(description["path"])
    if path.is_dir():
        loaded = load_folder(path, description)
    elif path.suffix == ".onnx":
        loaded = _onnx(path, description["threads"])
    elif path.suffix == ".pt2":
        loaded = _exported(path)
    else:
        loaded = _weights(path, description)
    found, given = loaded.schema, description["shape"]
    shape = found.shape if given is None else tuple(given)
    return Loaded(loaded.run, Schema(shape, description["dtype"] or found.dtype))


# Weights and a builder


def _weights(path: Path, description: Mapping[str, Any]) -> Loaded:
    content = read_plain(path)
    if "dadplug_shards" in content:
        folder, (_, arguments) = path.with_name(path.name + ".shards"), states_of(content, path)
        return load_folder(folder, description, content["dadplug_shards"], arguments)
    model = _module(content, path, description)
    return Loaded(scheduled(model), Schema(None, dtype_of(model)))


def load_module(description: Mapping[str, Any]) -> nn.Module:
    """Return the module of a file of weights.

    Args:
        description: result of `Model.description`.

    Raises:
        LoadError: if the file is damaged, of another kind, or does not fit the builder's model.
    """
    path = Path(description["path"])
    if path.is_dir() or path.suffix in (".onnx", ".pt2"):
        raise LoadError(f"{path} has no module of torch: only files of weights can be tuned")
    return _module(read_plain(path), path, description)


def _module(content: Mapping[str, Any], path: Path, description: Mapping[str, Any]) -> nn.Module:
    state, arguments = states_of(content, path)
    model = build(description, arguments, state)
    load_state(model, state, path)
    return model


def read_plain(path: Path) -> dict[str, Any]:
    """Read a file of tensors and plain values.

    Raises:
        LoadError: if it is damaged, or has other objects, which would run code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{path} has objects besides tensors and plain values, which are not loaded since they can run code; save "
            f"its state dict by itself, or its program by torch.export. {str(error).splitlines()[0]}"
        ) from None
    except Exception as error:  # of any kind: the file may have any content
        raise LoadError(f"{path} is no file of torch.save, or damaged: {type(error).__name__}: {error}") from error
    if not isinstance(content, Mapping):
        raise LoadError(f"{path} holds {type(content).__name__}, not a checkpoint or a state dict")
    return dict(content)


def states_of(content: Mapping[str, Any], path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict of a checkpoint of Lightning or Catalyst, or of a state dict, and the hyperparameters.

    Raises:
        LoadError: if there is none.
    """
    arguments: dict[str, Any] = {}
    if "state_dict" in content:  # Lightning
        state = content["state_dict"]
        hyper = content.get("hyper_parameters", {})
        arguments = {str(name): value for name, value in hyper.items() if not str(name).startswith("_")}
    else:
        state = content.get("model_state_dict", content)  # Catalyst, or a state dict
    if not isinstance(state, Mapping) or not all(isinstance(each, Tensor) for each in state.values()):
        raise LoadError(f"{path} has no state dict: neither 'state_dict' nor 'model_state_dict', nor only tensors")
    return dict(state), arguments


# Programs


def _exported(path: Path) -> Loaded:
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise LoadError(
            f"{path} is no file of torch.export.save, or damaged: {type(error).__name__}: {error}"
        ) from error
    names = program.graph_signature.user_inputs
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() == 0:
        raise LoadError(f"{path} has the inputs {names}; a served program has one tensor with a row for each sample")
    sizes = [size if isinstance(size, int) else None for size in inputs[0].shape]
    module, one = program.module(), _one_by_one(sizes[0], path)

    def run(batch: Array) -> Any:
        with torch.inference_mode():
            whole = torch.from_numpy(batch)
            return torch.cat([module(row) for row in whole.split(1)]) if one else module(whole)

    return Loaded(run, Schema(tuple(sizes[1:]), str(inputs[0].dtype).removeprefix("torch.")))


def _onnx(path: Path, threads: int) -> Loaded:
    try:
        import onnxruntime
    except ImportError as error:
        raise LoadError("ONNX files need onnxruntime, which is not installed: pip install 'dadplug[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise LoadError(f"{path} cannot be loaded by onnxruntime: {error}") from error
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(inputs[0].shape) == 0 or inputs[0].type not in _ONNX_DTYPES:
        raise LoadError(f"{path} has the inputs {[each.name for each in inputs]}; a served model has one, of numbers")
    sizes = [size if isinstance(size, int) else None for size in inputs[0].shape]
    name, output, one = inputs[0].name, outputs[0].name, _one_by_one(sizes[0], path)

    def run(batch: Array) -> Any:
        rows = np.split(batch, len(batch)) if one else [batch]
        return np.concatenate([session.run([output], {name: row})[0] for row in rows])

    return Loaded(run, Schema(tuple(sizes[1:]), _ONNX_DTYPES[inputs[0].type]))


def _one_by_one(batch: int | None, path: Path) -> bool:
    """Return whether a program takes one sample at a time.

    Raises:
        LoadError: if it takes batches of one size, other than 1.
    """
    if batch is not None and batch != 1:
        raise LoadError(
            f"{path} takes batches of exactly {batch} samples: export it with a first dimension that varies"
        )
    return batch == 1
