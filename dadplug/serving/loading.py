"""Loading of models from files, in the models' processes. No file can run code of its own: code comes from builders.

Tables in the files of a sharded checkpoint are mapped: their rows are not loaded. A module can compute batches in
several ways: compiled, by onnxruntime, channels last, with normalisations fused. `dadplug.tune` measures which is
fastest for a model on a machine; models that are served later compute in that way.

`main` is the program that starts the processes of models by fork, with torch already imported, and ends them. It talks
to the server over the socket that is its standard input, one JSON object a line: ``{"start": {...}}`` with the socket
of the new process attached is answered by ``{"pid": n}``; ``{"kill": n}`` by ``{"killed": n}``. The server asks to kill
each process that it has started, also one that has ended: its number is not used again before. When the server ends, so
do the launcher and all processes that it has started.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import inspect
import json
import mmap
import os
import signal
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ..errors import DamagedError, InputError, LoadError, ModelError
from ..models import MODELS
from ..support.files import load_tensors
from ..support.registry import import_named
from ..support.schedules import Serving, current
from .backends import Array, checked_outputs, dtype_of, reader_of, receive, runner_of, send
from .options import Schema

_ONNX_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(bool)": "bool"} | {
    f"tensor({name})": name for name in ("float16", "int64", "int32", "int16", "int8", "uint8")
}
_RESIDENT = 8 << 20  # bytes of a table's files that may become resident before their pages are given back
_AROUND = 2 << 20  # bytes that the kernel maps for one row at most: a huge page


class Loaded(NamedTuple):
    """A model that can compute.

    Attributes:
        run: function of an array of shape (samples, ...) that returns a tensor or an array.
        schema: schema of one input.
    """

    run: Callable[[Array], Any]
    schema: Schema


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


# Builders


def _build(description: Mapping[str, Any], arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
    """Return the model of a builder, or without one a model of dadplug that the state dict fits.

    Raises:
        LoadError: if there is no such model.
    """
    if description["builder"] is None:
        return _known_model(state, description["path"])
    builder = import_named(description["builder"])
    given = description["arguments"]
    try:
        model = builder(**(_accepted(builder, arguments) if given is None else given))
    except TypeError as error:
        hint = "name a function without arguments that builds the model, or give arguments= of dadplug.serving.Model"
        raise LoadError(f"{description['builder']} cannot be called: {error}; {hint}") from error
    if not isinstance(model, nn.Module):
        raise LoadError(f"{description['builder']} returns {type(model).__name__}, not a torch.nn.Module")
    return model


def _accepted(builder: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that a builder takes."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except ValueError:  # a class of an extension module
        return {}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(arguments)
    return {each.name: arguments[each.name] for each in parameters if each.name in arguments}


def _known_model(state: Mapping[str, Tensor], path: str) -> nn.Module:
    for name in MODELS:
        try:
            model = MODELS[name]()
        except TypeError:  # it needs arguments
            continue
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        prefix = _prefix_of(state, shapes)
        if prefix is not None and all(state[prefix + key].shape == shape for key, shape in shapes.items()):
            return model
    raise LoadError(
        f"{path} holds weights and no code: name the class, or a function that builds the model, as builder"
    )


def _load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path, assign: bool = False) -> None:
    """Load a state dict; the model may be a part of the module that was saved.

    Raises:
        LoadError: if the weights do not fit.
    """
    prefix = _prefix_of(state, model.state_dict()) or ""
    part = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    try:
        model.load_state_dict(part, strict=True, assign=assign)
    except RuntimeError as error:
        raise LoadError(f"the weights in {path} do not fit the builder's model: {error}") from None


def _prefix_of(state: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return the prefix under which a state dict has a model's keys; None if there is not exactly one."""
    if set(state) == set(own):
        return ""
    first = next(iter(own), "")
    prefixes = {key[: len(key) - len(first)] for key in state if key.endswith(first)} - {""}
    found = [each for each in prefixes if {key[len(each) :] for key in state if key.startswith(each)} == set(own)]
    return found[0] if len(found) == 1 and first else None


# Weights and a builder


def _weights(path: Path, description: Mapping[str, Any]) -> Loaded:
    content = _read_plain(path)
    if "dadplug_shards" in content:
        folder, (_, arguments) = path.with_name(path.name + ".shards"), _states_of(content, path)
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
    return _module(_read_plain(path), path, description)


def _module(content: Mapping[str, Any], path: Path, description: Mapping[str, Any]) -> nn.Module:
    state, arguments = _states_of(content, path)
    model = _build(description, arguments, state)
    _load_state(model, state, path)
    return model


def _read_plain(path: Path) -> dict[str, Any]:
    """Read a file of tensors and plain values.

    Raises:
        LoadError: if it is damaged, or has other objects, which would run code.
    """
    try:
        content = load_tensors(path, str(path))
    except DamagedError as error:
        raise LoadError(f"{error}; save a state dict by itself, or a program by torch.export") from error
    if not isinstance(content, Mapping):
        raise LoadError(f"{path} holds {type(content).__name__}, not a checkpoint or a state dict")
    return dict(content)


def _states_of(content: Mapping[str, Any], path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
    module, (one, shape) = program.module(), _batch_and_shape(inputs[0].shape, path)

    def run(batch: Array) -> Any:
        with torch.inference_mode():
            whole = torch.from_numpy(batch)
            return torch.cat([module(row) for row in whole.split(1)]) if one else module(whole)

    return Loaded(run, Schema(shape, str(inputs[0].dtype).removeprefix("torch.")))


def _onnx(path: Path, threads: int) -> Loaded:
    try:
        session = onnx_session(str(path), threads)
    except ImportError as error:
        raise LoadError("ONNX files need onnxruntime, which is not installed: pip install 'dadplug[onnx]'") from error
    except Exception as error:
        raise LoadError(f"{path} cannot be loaded by onnxruntime: {error}") from error
    inputs, output = session.get_inputs(), session.get_outputs()[0].name
    if len(inputs) != 1 or len(inputs[0].shape) == 0 or inputs[0].type not in _ONNX_DTYPES:
        raise LoadError(f"{path} has the inputs {[each.name for each in inputs]}; a served model has one, of numbers")
    one, shape = _batch_and_shape(inputs[0].shape, path)

    def run(batch: Array) -> Any:
        rows = np.split(batch, len(batch)) if one else [batch]
        return np.concatenate([session.run([output], {inputs[0].name: row})[0] for row in rows])

    return Loaded(run, Schema(shape, _ONNX_DTYPES[inputs[0].type]))


def _batch_and_shape(sizes: Any, path: Path) -> tuple[bool, tuple[int | None, ...]]:
    """Return whether a program takes one sample at a time, and the shape of a sample.

    Raises:
        LoadError: if it takes batches of one size, other than 1.
    """
    batch, *shape = [size if isinstance(size, int) else None for size in sizes]
    if batch not in (None, 1):
        raise LoadError(
            f"{path} takes batches of exactly {batch} samples: export it with a first dimension that varies"
        )
    return batch == 1, tuple(shape)


# Folders of shards


class MappedTable:
    """Rows of a table in mapped files.

    Args:
        shards: by shard, ``keys`` of shape (n,) and ``values`` of shape (n, columns), both mapped.
        rows: number of rows.
        width: number of weights in a row, the first columns.

    Raises:
        LoadError: if a row is missing or occurs twice.
    """

    def __init__(self, shards: list[dict[str, Tensor]], rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self._values = [shard["values"].numpy() for shard in shards]
        self._starts = np.cumsum([0, *(len(values) for values in self._values)])
        total = int(self._starts[-1])
        self._place = np.full(rows, -1, np.int32 if total < 2**31 else np.int64)
        for shard, start in zip(shards, self._starts, strict=False):
            keys = shard["keys"].numpy()
            self._place[keys] = np.arange(start, start + len(keys), dtype=self._place.dtype)
            _give_back(keys)
        if total != rows or (rows and self._place.min() < 0):
            raise LoadError(f"rows are missing or occur twice: the shards hold {total} of {rows} rows")
        self._touched = 0

    def gather(self, keys: Array) -> Array:
        """Return the rows of keys: shape (n, width) for n keys.

        Raises:
            InputError: if a key is out of range.
        """
        if keys.size and not 0 <= int(keys.min()) <= int(keys.max()) < self.rows:
            raise InputError(f"a key is out of range: {keys.min()} to {keys.max()}, the table has {self.rows} rows")
        places = self._place[keys]
        found = np.empty((len(keys), self.width), np.float32)
        shard = np.searchsorted(self._starts, places, side="right") - 1
        for number, values in enumerate(self._values):
            mine = shard == number
            if mine.any():
                found[mine] = values[places[mine] - self._starts[number], : self.width]
        self._touched += len(keys)
        if self._touched * _AROUND > _RESIDENT:
            self._touched = 0
            for values in self._values:
                _give_back(values)
        return found


def _give_back(array: Array) -> None:
    """Let the kernel take back the pages of a mapped array; they are read from the file when they are needed again."""
    page = mmap.PAGESIZE
    start = -(-array.ctypes.data // page) * page
    length = (array.ctypes.data + array.nbytes - start) // page * page
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


class MappedEmbedding(nn.Module):
    """Embedding layer whose rows are in a `MappedTable`.

    Args:
        layer: the `nn.Embedding` or `nn.EmbeddingBag` that it stands for; its weight is not used.
        table: the rows.
    """

    def __init__(self, layer: nn.Module, table: MappedTable) -> None:
        super().__init__()
        self._layer, self._table = (layer,), table  # in a tuple: its weight is no parameter of the model

    def forward(self, keys: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the rows of keys, or their bags, as the layer does."""
        layer = self._layer[0]
        unique, places = torch.unique(keys, return_inverse=True)
        rows = torch.from_numpy(self._table.gather(unique.numpy()))
        if not isinstance(layer, nn.EmbeddingBag):
            return nn.functional.embedding(places, rows)
        padding = (unique == layer.padding_idx).nonzero() if layer.padding_idx is not None else unique[:0]
        return nn.functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=layer.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=int(padding) if padding.numel() else None,
        )


def load_folder(
    folder: Path, description: Mapping[str, Any], stamp: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Loaded:
    """Load a folder that `dadplug.adapm.save_shards` has written; the digests of all files are compared.

    Args:
        folder: the folder.
        description: result of `Model.description`.
        stamp: stamp of the save; None for the checkpoint of the folder.
        arguments: hyperparameters for the builder.

    Returns:
        The builder's model with mapped tables; without a builder the look-up in the only table.

    Raises:
        LoadError: if the folder is incomplete or damaged, or does not fit the model.
    """
    from ..adapm import shards as shard_files  # it imports numba, which models without tables do not need

    try:
        content, rest = shard_files.read_head(folder, stamp)
        index = shard_files.check_index(content, folder / shard_files.INDEX)
        state = shard_files.parse_rest(rest, folder)["model"]
        shard_files.check_sizes(index, folder)
        shards = [shard_files.read_shard(folder, name, index) for name in index["files"]]
    except (OSError, ValueError) as error:
        raise LoadError(f"{error}") from error
    tables = {
        name: MappedTable([shard[name] for shard in shards], table["rows"], table["width"])
        for name, table in index["tables"].items()
    }
    if description["builder"] is None:
        if len(tables) != 1 or state:
            raise LoadError(f"{folder} holds {len(tables)} tables and other weights: name the model's builder")
        (table,) = tables.values()

        def look_up(keys: Array) -> Array:
            return table.gather(keys.reshape(-1)).reshape(*keys.shape, table.width)

        return Loaded(look_up, Schema(None, "int64"))
    model = _build_without_tables(description, arguments or {}, index, tables, state, folder)
    return Loaded(runner_of(model), Schema())


def _build_without_tables(
    description: Mapping[str, Any],
    arguments: Mapping[str, Any],
    index: Mapping[str, Any],
    tables: Mapping[str, MappedTable],
    state: Mapping[str, Tensor],
    folder: Path,
) -> nn.Module:
    """Build a model; on the meta device if it can be, so that whole tables are never in memory."""
    try:
        with torch.device("meta"):
            model = _build(description, arguments, {})
        map_tables(model, index, tables)
        _load_state(model, state, folder, assign=True)
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            return model
    except (RuntimeError, NotImplementedError):
        pass  # the builder reads values of tensors
    model = _build(description, arguments, {})
    map_tables(model, index, tables)
    _load_state(model, state, folder)
    return model


def map_tables(model: nn.Module, index: Mapping[str, Any], tables: Mapping[str, MappedTable]) -> None:
    """Put mapped tables in the place of a model's embedding layers.

    Args:
        model: the model.
        index: index of the checkpoint.
        tables: the tables by name.

    Raises:
        LoadError: if the model has no such layers, or they cannot be mapped.
    """
    for name, table in index["tables"].items():
        for alias in table["names"]:
            path, _, attribute = alias.rpartition(".")
            try:
                layer = model.get_submodule(path)
            except AttributeError:
                raise LoadError(
                    f"the builder's model has no layer {path!r}, of which the checkpoint has a table"
                ) from None
            if attribute != "weight" or not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
                raise LoadError(f"{alias} is no weight of an Embedding or EmbeddingBag, whose rows can be mapped")
            if layer.max_norm is not None:
                raise LoadError(f"{path} has max_norm, which changes rows when they are looked up")
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, MappedEmbedding(layer, tables[name]))


# Ways to compute

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
        example = example_of(model, tuple(int(part) for part in serving.shape.split(",") if part))
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


# Processes of models

_LONGEST = 1 << 20
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def main() -> None:
    """Serve the socket that is standard input until it is closed."""
    torch.set_num_threads(1)  # threads would not survive a fork
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a model's process must not keep the socket open
    os.close(nothing)
    children: set[int] = set()
    while True:
        content, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 1)
        while content and not content.endswith(b"\n"):
            content += control.recv(_LONGEST)
        if not content:
            break
        request = json.loads(content)
        if "start" in request:
            pid = os.fork()
            if not pid:
                control.close()
                _become_model(descriptors[0], request["start"])
            children.add(pid)
            os.close(descriptors[0])
            answer = {"pid": pid}
        else:
            if request["kill"] in children:
                _kill(request["kill"])
                children.remove(request["kill"])
            answer = {"killed": request["kill"]}
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in children:
        _kill(pid)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become_model(descriptor: int, description: dict[str, Any]) -> None:
    """Serve a model in this process, and end it."""
    status = 1
    try:
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        serve(socket.socket(fileno=descriptor), description)
        status = 0
    except BaseException as error:  # no exit handlers of the launcher's libraries
        print(f"dadplug.serving: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def serve(connection: socket.socket, description: dict[str, Any]) -> None:
    """Load a model, and answer batches until the connection is closed.

    Args:
        connection: connection to the server.
        description: `Model.description`, and the number of ``threads``.
    """
    torch.set_num_threads(description["threads"])
    try:
        loaded = load(description)
    except Exception as error:
        text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        send(connection, {"error": text})
        return
    send(connection, {"input_shape": loaded.schema.shape, "input_dtype": loaded.schema.dtype})
    reader = reader_of(connection)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            _, batch = receive(reader)
            assert batch is not None
            try:
                outputs = checked_outputs(loaded.run, batch)
            except (InputError, ModelError) as error:
                send(connection, {"error": f"{error}"[:2000], "input": isinstance(error, InputError)})
            else:
                send(connection, {}, outputs)
