"""A table of the parameter manager: values of one width by key."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import kernels
from .backends import Backend, TableSpec
from .interfaces import Call, Completion
from .pending import Pending
from .rows import Block, Keys
from .sampling import Sampler

_UNBOUNDED = np.iinfo(np.int64).max


class Table:
    """Values of one width by key, spread over the sites; created by `ParameterManager.table`.

    Keys are int64 CPU tensors of any shape; values are float32 CPU tensors of shape (*keys.shape, width). A call may
    have duplicate keys. Calls whose keys are all local return at once; other calls wait for the owners of the keys.

    Args:
        backend: backend of the manager.
        number: number of the table.
        spec: arguments of `ParameterManager.table`.

    Attributes:
        name: name of the table, for messages.
        width: number of values per key.
        rows: upper bound of keys, exclusive; None for any key of at least 0.
        rank: number of this site.
        world_size: number of sites; the home of key k, its first owner, is site ``k % world_size``.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager
        >>> with ParameterManager() as manager:
        ...     words = manager.table("words", width=2, rows=10)
        ...     words.push(torch.tensor([1, 1]), torch.ones(2, 2))
        ...     words.set(torch.tensor([2]), torch.zeros(1, 2))
        ...     words.pull(torch.tensor([[1], [2]]))
        tensor([[[2., 2.]],
        <BLANKLINE>
                [[0., 0.]]])
    """

    def __init__(self, backend: Backend, number: int, spec: TableSpec) -> None:
        self.name, self.width, self.rows = spec.name, spec.width, spec.rows
        self.rank, self.world_size = backend.rank, backend.world_size
        self._backend, self._engine, self._number = backend, backend.engine, number
        self._limit = _UNBOUNDED if spec.rows is None else spec.rows

    def pull(self, keys: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Copy the values of keys.

        Args:
            keys: int64, of any shape.
            out: contiguous float32 tensor of shape (*keys.shape, width) for the result; None for a new one.

        Returns:
            The values, of shape (*keys.shape, width). They include all pushes of this site, and pushes of other sites
            until about one round ago.

        Raises:
            ValueError: if a type or shape does not fit.
            IndexError: if a key is out of range.
            SiteError: if a site exits or does not answer.
        """
        out, done = self._pull(keys, out)
        if done is not None:
            self._backend.wait_for(done)
        return out

    def pull_async(self, keys: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        """Begin a `pull`, with the same arguments and errors.

        Returns:
            The call; its ``wait()`` returns the values.
        """
        out, done = self._pull(keys, out)
        return Pending(self._backend, done, out)

    def _pull(self, keys: Tensor, out: Tensor | None) -> tuple[Tensor, Completion | None]:
        self._backend.check()
        flat = self._flat(keys)
        shape = (*keys.shape, self.width)
        if out is None:
            out = torch.empty(shape)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous() or out.is_cuda:
            raise ValueError(
                f"out of table {self.name!r} must be a contiguous float32 CPU tensor of shape {shape}, got {out.dtype} "
                f"of shape {tuple(out.shape)} on {out.device}"
            )
        block = out.detach() if out.requires_grad else out
        call = self._engine.pull(self._number, flat, block.numpy().reshape(-1, self.width))
        if isinstance(call, int):
            self._refuse(flat, call)
        return out, None if call is None else call.done

    def push(self, keys: Tensor, deltas: Tensor) -> None:
        """Add deltas to the values of keys. This site reads them at once, other sites about one round later.

        Args:
            keys: int64, of any shape.
            deltas: float32, of shape (*keys.shape, width); deltas of equal keys are added up.

        Raises:
            ValueError: if a type or shape does not fit.
            IndexError: if a key is out of range.
            FloatingPointError: if the deltas hold NaN or Inf. Nothing has been pushed.
            SiteError: if a site exits or does not answer.
        """
        call = self._push(keys, deltas)
        if call is not None:
            self._backend.wait_for(call.done)

    def push_async(self, keys: Tensor, deltas: Tensor) -> Pending[None]:
        """Begin a `push`, with the same arguments and errors.

        The deltas may be changed at once, and a later `pull` of this site includes them.
        """
        call = self._push(keys, deltas)
        return Pending(self._backend, None if call is None else call.done, None)

    def _push(self, keys: Tensor, deltas: Tensor) -> Call | None:
        self._backend.check()
        flat = self._flat(keys)
        block = self._block("deltas", keys, deltas)
        if (position := kernels.first_bad_key(flat, self._limit)) >= 0:
            self._refuse(flat, position)
        return self._engine.push(self._number, flat, block)

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Set the values of keys, after all earlier pushes of this site.

        The order relative to pushes of other sites at the same time is that of their arrival at the owner.

        Args:
            keys: int64, of any shape, distinct.
            values: float32, of shape (*keys.shape, width).

        Raises:
            ValueError: if a type or shape does not fit, or a key occurs twice.
            IndexError: if a key is out of range.
            FloatingPointError: if the values hold NaN or Inf.
            SiteError: if a site exits or does not answer.
        """
        self.set_async(keys, values).wait()

    def set_async(self, keys: Tensor, values: Tensor) -> Pending[None]:
        """Begin a `set`, with the same arguments and errors; waits until this site's pushes have been delivered."""
        self._backend.check()
        flat = self._flat(keys)
        block = self._block("values", keys, values)
        if (position := kernels.first_bad_key(flat, self._limit)) >= 0:
            self._refuse(flat, position)
        if torch.unique(keys).numel() != keys.numel():
            raise ValueError(f"a key occurs twice in a set of table {self.name!r}: which value should it have?")
        while True:
            self._backend.flush()
            begun, call = self._engine.set(self._number, flat, block)
            if begun:
                return Pending(self._backend, None if call is None else call.done, None)

    def intent(self, keys: Tensor, start: int, end: int = 0) -> None:
        """Signal that this site will use keys; returns at once.

        Args:
            keys: int64, of any shape.
            start: clock at which the use begins.
            end: clock at which the use ends, exclusive; 0 for ``start + 1``.

        Raises:
            ValueError: if a type or shape does not fit, or `end` is not greater than `start`.
            IndexError: if a key is out of range.
        """
        self._backend.check()
        end = end or start + 1
        if end <= start:
            raise ValueError(f"an intent must end after it starts, got start {start} and end {end}")
        flat = self._flat(keys)
        if (position := kernels.first_bad_key(flat, self._limit)) >= 0:
            self._refuse(flat, position)
        if end > self._backend.clock:
            self._backend.intend(self._number, flat.copy(), start, end)

    def sampler(self, weights: Tensor | None = None, **options: Any) -> Sampler:
        """Create a sampler of keys, such as negative examples.

        Args:
            weights: of shape (rows,), see `Sampler`.
            options: options of `Sampler`.

        Raises:
            ValueError: if an option is out of range, or the backend does not support it.
        """
        if options.get("scheme") == "local" and not self._engine.locates_keys:
            raise ValueError('backend="adapm" does not tell which keys are at a site: no scheme="local"')
        return Sampler(self, weights, **options)

    def here(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each key, in range, whether this site can read it without asking another.

        Args:
            keys: int64 array of shape (n,).

        Returns:
            A Boolean array of shape (n,).

        Raises:
            RuntimeError: if the backend does not support it.
        """
        return self._engine.here(self._number, keys)

    def owned(self) -> tuple[Tensor, Tensor]:
        """Return copies of the keys that this site owns, in ascending order, and of their values.

        After `ParameterManager.wait_sync(everywhere=True)`, and while no site pushes, those of all sites are the whole
        table. Keys that no site has used are owned by none. With ``backend="adapm"``, the keys whose home is this site.

        Returns:
            Keys, int64 of shape (n,), and values, float32 of shape (n, width).
        """
        keys, values = self._backend.owned(self._number)
        return torch.from_numpy(keys), torch.from_numpy(values)

    def states(self, keys: Tensor) -> Tensor:
        """Return the states of keys at this site, without asking another.

        Args:
            keys: int64, of any shape.

        Returns:
            int8 tensor of the keys' shape: `dadplug.adapm.states.KeyState`, -1 for absent keys.

        Raises:
            RuntimeError: if the backend does not support it.
        """
        return torch.from_numpy(self._engine.states(self._number, self._flat(keys))).view(keys.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this site has reserved for the table; 0 if unknown."""
        return self._engine.nbytes(self._number)

    def _flat(self, keys: Tensor) -> Keys:
        if keys.dtype != torch.int64 or keys.is_cuda:
            raise ValueError(
                f"keys of table {self.name!r} must be int64 on the CPU, got {keys.dtype} on {keys.device}: "
                "use keys.long().cpu()"
            )
        flat: Keys = keys.numpy()
        return flat if flat.ndim == 1 and flat.flags.c_contiguous else np.ascontiguousarray(flat).reshape(-1)

    def _block(self, name: str, keys: Tensor, values: Tensor) -> Block:
        if values.dtype != torch.float32 or values.is_cuda:
            raise ValueError(
                f"{name} of table {self.name!r} must be float32 on the CPU, got {values.dtype} on {values.device}: "
                f"use {name}.float().cpu()"
            )
        if values.shape != (*keys.shape, self.width):
            raise ValueError(
                f"{name} of table {self.name!r} must be of shape {(*keys.shape, self.width)}, a row for each key, got "
                f"{tuple(values.shape)}"
            )
        block: Block = values.detach().contiguous().numpy().reshape(-1, self.width)
        if (row := kernels.first_not_finite(block)) >= 0:
            key = int(keys.reshape(-1)[row])
            raise FloatingPointError(f"the {name} of key {key} (position {row}) of table {self.name!r} hold NaN or Inf")
        return block

    def _refuse(self, flat: Keys, position: int) -> NoReturn:
        most = "" if self.rows is None else f" to {self.rows - 1}"
        raise IndexError(
            f"key {int(flat[position])} (position {position}) is out of range: table {self.name!r} has keys 0{most}"
        )
