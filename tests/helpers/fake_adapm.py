"""A stand-in for AdaPM's Python bindings: their classes, signatures and hazards, several nodes in one process.

Each node's module is `Cluster.module(rank)`; a node's barrier waits for threads of the others. Keys begin at node
``key % nodes``. Like the library it believes what it is given: of other types it takes the bytes, negative keys pass.
A wait for another process holds the GIL for ever, as there, with `Cluster(nodes, alone=True)`.
"""

import ctypes
import threading
from types import ModuleType

import torch


def as_type(tensor, dtype, count):
    """The first numbers of a type in a tensor's memory, whatever its own type is."""
    assert tensor.is_contiguous()
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return raw[tensor.storage_offset() * tensor.element_size() :][: count * dtype.itemsize].view(dtype)


class Cluster:
    """Shared state of the nodes: the owners' values, who holds which replica, and requests under way.

    Args:
        nodes: how many there are.
        alone: whether this process has one of them only, so that answers of the others never come.
    """

    def __init__(self, nodes=1, alone=False):
        self.nodes, self.alone = nodes, alone
        self.lock = threading.RLock()
        self.gate = threading.Barrier(1 if alone else nodes)
        self.values, self.owner, self.late = {}, {}, 0
        self.workers = []
        self.calls = []

    def module(self, rank):
        cluster, module = self, ModuleType("adapm")

        class Server:
            def __init__(self, value_lengths):
                assert module.num_keys == len(value_lengths)
                self.lengths = value_lengths.to(torch.int64).tolist()
                with cluster.lock:
                    for key, length in enumerate(self.lengths):
                        cluster.values.setdefault(key, torch.zeros(length))
                        cluster.owner.setdefault(key, key % cluster.nodes)

            def barrier(self):
                cluster.gate.wait(200)

            def shutdown(self):
                cluster.calls.append((rank, "shutdown"))

            def my_rank(self):
                return rank

        class Worker(FakeWorker):
            def __init__(self, customer_id, server):
                super().__init__(cluster, rank, server)

        def setup(num_keys, num_threads, use_techniques="", num_channels=-1):
            module.num_keys = num_keys
            cluster.calls.append((rank, "setup", num_keys, num_threads, use_techniques))

        module.Server, module.Worker, module.setup = Server, Worker, setup
        module.scheduler = lambda num_keys, num_threads: None
        return module


class FakeWorker:
    def __init__(self, cluster, rank, server):
        self.cluster, self.rank, self.server = cluster, rank, server
        self.clock = 0
        self.intents, self.pending, self.replicas, self.deltas = [], {}, {}, {}
        cluster.workers.append(self)

    @property
    def num_keys(self):
        return len(self.server.lengths)

    def get_key_size(self, key_id=0):
        return self.server.lengths[key_id]

    def _arguments(self, keys, vals):
        keys = as_type(keys, torch.int64, keys.size(0)).tolist()
        needed = sum(self.server.lengths[key] for key in keys)  # before the range check, as there
        if needed != vals.numel():
            raise ValueError("The provided value array does not match the size specified in the parameter server")
        if any(key >= self.num_keys for key in keys):
            raise ValueError("At least one of the provided keys is outside the key range")
        return keys, as_type(vals, torch.float32, needed).split([self.server.lengths[key] for key in keys])

    def _local(self, key):
        return self.cluster.owner[key] == self.rank or key in self.replicas

    def _begin(self, work, asynchronous):
        with self.cluster.lock:
            self.cluster.late += 1
            timestamp = self.cluster.late
            self.pending[timestamp] = work
        if not asynchronous:
            self.wait(timestamp)
        return timestamp

    def wait(self, timestamp):
        if self.cluster.alone:
            while True:
                ctypes.PyDLL(None).pause()  # unlike CDLL, without letting the GIL go
        with self.cluster.lock:
            for each in sorted(self.pending):  # in their order
                if each <= timestamp:
                    self.pending.pop(each)()

    def waitall(self):
        for timestamp in sorted(self.pending):
            self.wait(timestamp)

    def pull(self, keys, vals, asynchronous=False):
        keys, parts = self._arguments(keys, vals)

        def copy(remote):
            for key, part in zip(keys, parts):
                if self._local(key) is not remote:
                    part.copy_(self.replicas.get(key, self.cluster.values[key]))

        with self.cluster.lock:
            copy(False)
            if all(map(self._local, keys)):
                return -1
        return self._begin(lambda: copy(True) or copy(False), asynchronous)

    def push(self, keys, vals, asynchronous=False, put=False):
        keys, parts = self._arguments(keys, vals)
        parts = [part.clone() for part in parts]
        with self.cluster.lock:
            rest = []
            for key, part in zip(keys, parts):
                if key in self.replicas:
                    change = part - self.replicas[key] if put else part  # a set becomes a delta
                    self.replicas[key] += change
                    self.deltas[key] = self.deltas.get(key, 0) + change
                elif self.cluster.owner[key] == self.rank:
                    self._apply(key, part, put)
                else:
                    rest.append((key, part))
            if not rest:
                return -1
        return self._begin(lambda: [self._apply(key, part, put) for key, part in rest], asynchronous)

    def set(self, keys, vals, asynchronous=False):
        self.cluster.calls.append((self.rank, "set"))
        return self.push(keys, vals, asynchronous, put=True)

    def _apply(self, key, part, put):
        if put:
            self.cluster.values[key].copy_(part)
        else:
            self.cluster.values[key] += part

    def intent(self, keys, start, end=0):
        self.intents.append((as_type(keys, torch.int64, keys.size(0)).tolist(), start, end or start + 1))
        return -1

    def advance_clock(self):
        self.clock += 1

    def current_clock(self):
        return self.clock

    def wait_sync(self):
        with self.cluster.lock:
            for key, delta in self.deltas.items():
                self.cluster.values[key] += delta
            self.deltas = {}
            wanted = {key for keys, _, end in self.intents if end > self.clock for key in keys}
            self.replicas = {
                key: self.cluster.values[key].clone() for key in wanted if self.cluster.owner[key] != self.rank
            }

    def barrier(self):
        self.cluster.gate.wait(200)

    begin_setup = end_setup = barrier

    def finalize(self):
        self.waitall()
        self.wait_sync()
        self.barrier()
