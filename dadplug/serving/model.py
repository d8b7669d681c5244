"""Descriptions of models in files: what a model's process needs to load it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LoadError


@dataclass(frozen=True)
class Model:
    """A model in a file, for `Predictor`.

    Files are read without running code from them: weights as tensors and plain values, programs by
    `torch.export.load` or onnxruntime. Code comes from `builder` only.

    Attributes:
        path: a Lightning checkpoint, a Catalyst checkpoint, a state dict, a file of ``torch.export`` (``.pt2``), an
            ONNX file (``.onnx``), or a folder written by `dadplug.adapm.save_shards`.
        builder: class or function that returns the model into which weights are loaded: the object, or its name as
            ``"FILE.py:NAME"`` or ``"MODULE:NAME"``. Not needed for ``.pt2`` and ``.onnx`` files, nor for a folder with
            one table, whose rows are then the outputs.
        arguments: keyword arguments of the builder; None for the hyperparameters of a Lightning checkpoint.
        input_shape: shape of one input, None for a size that varies; None to have it from the file.
        dtype: dtype of the inputs; None to have it from the file.

    Example:
        >>> from dadplug.serving import Model
        >>> Model("best.ckpt", builder="train.py:Classifier", input_shape=(1, 28, 28)).path
        'best.ckpt'
    """

    path: str | Path
    builder: Callable[..., Any] | str | None = None
    arguments: dict[str, Any] | None = field(default=None, hash=False)
    input_shape: tuple[int | None, ...] | None = None
    dtype: str | None = None

    def description(self) -> dict[str, Any]:
        """Return the values for the model's process, which JSON can hold.

        Raises:
            LoadError: if the path does not exist, or the builder cannot be found by its name.
        """
        path = Path(self.path).absolute()
        if not path.exists():
            raise LoadError(f"there is no file or folder {self.path}")
        return {
            "path": str(path),
            "builder": None if self.builder is None else builder_name(self.builder),
            "arguments": self.arguments,
            "shape": self.input_shape,
            "dtype": self.dtype,
        }


def builder_name(builder: Callable[..., Any] | str) -> str:
    """Return the name by which another process imports a class or function.

    Raises:
        LoadError: if it has no such name.
    """
    if isinstance(builder, str):
        place, separator, name = builder.rpartition(":")
        if not separator or not place or not name:
            raise LoadError(f"{builder!r} does not read like FILE.py:NAME or MODULE:NAME")
        return f"{Path(place).absolute()}:{name}" if place.endswith(".py") else builder
    name, module = getattr(builder, "__qualname__", ""), getattr(builder, "__module__", None)
    file = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    if not name or module is None or "<" in name or (module == "__main__" and file is None):
        raise LoadError(f"{builder!r} cannot be imported by another process: give a class or function of a module")
    return f"{Path(file).absolute()}:{name}" if file else f"{module}:{name}"
