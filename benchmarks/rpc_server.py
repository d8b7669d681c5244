"""Parameter server by torch.distributed.rpc and distributed autograd, as a peer for benchmarks/parameter_server.py.

A process beside site 0 has the model and its optimizer. A site sends the inputs of a batch; the server computes the
outputs, the site the loss, and both the backward pass. Sites do not wait for each other, and change one model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from dadplug.processes import free_port

SERVER = "server"
_TIMEOUT = 300.0


class Served:
    """Model at the server, which the sites call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def parameters(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


_served: list[Served] = []
_processes: list[subprocess.Popen] = []  # the server's, at site 0, once it has been started


def _serve(model: nn.Module) -> None:
    _served[:] = [Served(model)]


def _reference() -> Any:
    return rpc.RRef(_served[0])


def _join(name: str, rank: int, port: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    # by default messages between processes of one machine would not cross the link
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}",
        rpc_timeout=_TIMEOUT,
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)


def join() -> None:
    """Start the server, and connect this site with it; all sites must call it together, once.

    A process cannot join twice: torch numbers the calls of `init_rpc` of each process, and the server, a new process,
    would wait for another number for ever.
    """
    rank = dist.get_rank()
    port: list[Any] = [free_port() if rank == 0 else None]
    dist.broadcast_object_list(port)
    if rank == 0:
        _processes.append(subprocess.Popen([sys.executable, __file__, str(port[0])]))
    _join(f"site{rank}", 1 + rank, str(port[0]))


def leave() -> None:
    """End the server; all sites must call it together."""
    rpc.shutdown()
    for process in _processes:
        process.wait()


class RpcTrainer:
    """A site's side: trains the server's model. All sites must make theirs together, after `join`.

    Args:
        model: the model, whose values at site 0 are the initial ones; `fetch` writes those of the server to it.
        optimizer: class of the optimizer.
        settings: arguments of the optimizer.

    Attributes:
        failed: number of batches that autograd has refused, since the other site changed the model meanwhile.
    """

    def __init__(self, model: nn.Module, optimizer: Any, **settings: float) -> None:
        self.model, self.failed = model, 0
        dist.barrier()  # the other site trains no earlier model any more
        if dist.get_rank() == 0:
            rpc.rpc_sync(SERVER, _serve, (model,))
        dist.barrier()
        self._served = rpc.rpc_sync(SERVER, _reference)
        self._optimizer = DistributedOptimizer(optimizer, self._served.rpc_sync().parameters(), **settings)

    def train(self, inputs: Tensor, labels: Tensor) -> None:
        """Make the step of a batch."""
        try:
            with dist_autograd.context() as context:
                loss = nn.functional.cross_entropy(self._served.rpc_sync().forward(inputs), labels)
                dist_autograd.backward(context, [loss])
                self._optimizer.step(context)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            self.failed += 1

    def fetch(self) -> None:
        """Write the values of the server's model to this site's."""
        self.model.load_state_dict(self._served.rpc_sync().state())


if __name__ == "__main__":
    torch.set_num_threads(1)
    import rpc_server  # what other processes name in their calls

    rpc_server._join(SERVER, 0, sys.argv[1])
    rpc.shutdown()
