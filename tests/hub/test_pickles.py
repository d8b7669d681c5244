"""A hub and a member that lie: they send pickles that run a program, and policies keep numbers at their site."""

import importlib.util
import os
import pickle

import hub_kits
import pytest
import support
import torch
import torch.distributed as dist
from dadplug.runners.patches import metrics_of_present_sites
from running_hub import running_hub
from torch import nn
from torch.distributed import _functional_collectives as functional

from dadplug import Accumulator, GradientReduction, LocalSGD, ParameterServer
from dadplug.adapm import ParameterManager
from dadplug.errors import PolicyError
from dadplug.exchange import Traffic, gather_objects, open_transport
from dadplug.exchange.restrictions import METRICS, OBJECTS, declared
from dadplug.hub.server.relay import Relay

MARK = "to be replaced by the hub " + 400 * "x"


class Program:
    """Object whose pickle creates a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def found_error(function, *args):
    """Return the class of the error that a function raises, and its message; None where it returns."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.fixture
def lying_hub(tmp_path, monkeypatch):
    """Path of a file that is created where something unpickles what the hub makes of a payload with the mark."""
    pickled, take = pickle.dumps(Program(str(tmp_path / "executed"))), Relay._take_training

    def lie(relay, session, frame, now):
        head, body, packed = frame
        if MARK.encode() in bytes(body):
            start = len(packed) - len(body)
            packed = bytes(packed[:start]) + pickled + bytes(packed[start + len(pickled) :])
        take(relay, session, (head, body, packed), now)

    monkeypatch.setattr(Relay, "_take_training", lie)
    return tmp_path / "executed"


def kits_of(folder, *policies):
    address = f"127.0.0.1:{support.free_port()}"
    policy = dict(zip("ab", policies, strict=True))
    return hub_kits.make(folder / "kits", hub=address, hub_names=[], policy=policy)


def connected(kits, function, *args):
    """Run a function at two sites; return their results."""
    with running_hub(kits), support.Sites(2, kits=[kits / name for name in "ab"]) as sites:
        return sites.run(function, *args)


def all_objects():
    return found_error(dist.all_gather_object, [None, None], MARK)


def objects_in_every_way():
    """Return the errors of all functions that unpickle, called by the name under which a program imported them."""
    from accelerate.utils import operations as of_accelerate
    from catalyst.utils.distributed import all_gather as of_catalyst
    from torch.distributed.optim import zero_redundancy_optimizer as zero

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)  # Catalyst's takes GPUs
        patch.setattr(torch, "tensor", lambda data, **_: torch.as_tensor(data))
        found = [found_error(of_catalyst, MARK)]
    calls = [
        (dist.all_gather_object, [None, None], MARK),
        (dist.broadcast_object_list, [MARK], 0),
        (dist.gather_object, MARK, [None, None] if dist.get_rank() == 0 else None),
        (dist.scatter_object_list, [None], [MARK, MARK] if dist.get_rank() == 0 else [None, None]),
        (zero._broadcast_object, MARK, 1, dist.group.WORLD),
        (dist.all_gather_object, [None, None], MARK, dist.new_group([0, 1])),
    ]
    if hasattr(of_accelerate, "_neuron_gather_object"):  # not in earlier releases
        of_accelerate.PartialState(cpu=True)
        calls += [(of_accelerate._neuron_gather_object, MARK), (of_accelerate._neuron_broadcast_object_list, [MARK])]
    return found + [found_error(*call) for call in calls]


def test_functions_that_unpickle_are_refused_at_all_sites(tmp_path, lying_hub):
    for found in connected(kits_of(tmp_path, {}, {}), objects_in_every_way):
        assert {kind for kind, _ in found} == {"PolicyError"}, found
        assert all("allow_pickle = false" in text and "nothing has been sent" in text for _, text in found)
    assert not lying_hub.exists()


def test_a_policy_may_allow_pickles(tmp_path, lying_hub):
    kits = kits_of(tmp_path, {"allow_pickle": True}, {"allow_pickle": True})
    assert connected(kits, all_objects) == [None, None]
    assert lying_hub.exists()  # else the attack of these tests is none


def pretend(path):
    """Send a pickle by plain collectives where the other site calls `all_gather_object`."""
    if dist.get_rank() == 0:
        return found_error(dist.all_gather_object, [None, None], "honest")
    own = torch.frombuffer(bytearray(pickle.dumps(Program(path))), dtype=torch.uint8)
    works = [dist.all_gather([torch.zeros(1, dtype=torch.int64)] * 2, torch.tensor([len(own)]), async_op=True)]
    works.append(dist.all_gather([torch.empty_like(own)] * 2, own, async_op=True))
    return None


def test_a_member_that_pretends_plain_tensors_runs_nothing(tmp_path):
    (kind, text), _ = connected(kits_of(tmp_path, {}, {"allow_pickle": True}), pretend, str(tmp_path / "executed"))
    assert (kind, "all_gather_object unpickles" in text) == ("PolicyError", True)
    assert not (tmp_path / "executed").exists()


def of_ignite(path, own):
    """Receive what another site describes by an expression of Python, where ignite evaluates that; return the results.

    Args:
        path: file that the expression creates.
        own: whether ignite uses the exchanges of `dadplug.monai`.
    """
    import ignite.distributed as idist
    from ignite.distributed.comp_models.base import ComputationModel
    from ignite.metrics import RocCurve

    if own:
        import dadplug.monai  # noqa: F401 (replaces ignite's)
    idist.sync()
    sends = dist.get_rank() == 1
    if sends:
        text = f"__import__('os').system('touch {path}') or torch.float32"
        crafted = [0, 1, 3, len(text), *text.encode()]
        ComputationModel._encode_input_data = staticmethod(lambda *_: crafted + [-1] * (512 - len(crafted)))
    metric = RocCurve()
    metric.update((torch.tensor([0.2, 0.8]), torch.tensor([0, 1])))

    def received():
        every = [idist.broadcast(item if sends else None, 1, safe_mode=True) for item in (torch.ones(2), 0.5, "text")]
        return every, idist.broadcast("four" if sends else "3", 1), idist.all_gather("ab" * (1 + sends))

    return [found_error(metric.compute), found_error(received)] if not own else [metric.compute(), received()]


def test_expressions_that_ignite_evaluates_are_refused_or_not_used(tmp_path):
    pytest.importorskip("ignite", reason="needs pytorch-ignite: pip install 'dadplug[monai]'")
    path = tmp_path / "executed"
    for found in connected(kits_of(tmp_path / "stock", {}, {}), of_ignite, str(path), False):
        assert {kind for kind, _ in found} == {"PolicyError"}, found
        assert all("allow_pickle = false" in text for _, text in found)
    for curve, (every, text, texts) in connected(kits_of(tmp_path / "own", {}, {}), of_ignite, str(path), True):
        assert [each.tolist() for each in curve[:2]] == [[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
        assert torch.equal(every[0], torch.ones(2))
        assert (*every[1:], text, texts) == (0.5, "text", "four", ["ab", "abab"])
    assert not path.exists()


def broadcast_in_lightning():
    import pytorch_lightning as lightning
    from dadplug.runners.pytorch_lightning import DADStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def training_step(self, batch):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_start(self):
            assert self.trainer.strategy.broadcast({"path": "checkpoint", "step": 3}, 1) == {
                "path": "checkpoint",
                "step": 3,
            }
            self.trainer.strategy.broadcast(MARK)

    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    sites = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "strategy": DADStrategy(timeout=20)}
    trainer = lightning.Trainer(max_steps=1, **sites, **silent)
    return found_error(trainer.fit, Module(), torch.utils.data.DataLoader(torch.ones(4, 3)))


def test_a_broadcast_of_lightning_is_no_pickle(tmp_path, lying_hub):
    found = connected(kits_of(tmp_path, {}, {}), broadcast_in_lightning)
    assert found[1] is not None
    assert not lying_hub.exists()


# Policies: what leaves a site


def data_parallel():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()


def adapm():
    """Make a parameter manager, where the policy allows it; it takes no large objects."""
    manager = ParameterManager()
    with pytest.raises(PolicyError, match="bytes are allowed"):
        manager.gather_objects(torch.ones(OBJECTS))


def accumulated():
    sums = Accumulator()
    sums["x"] += torch.ones(OBJECTS)
    with sums.synchronized():
        pass


def broadcast_in_ignite():
    import ignite.distributed as idist

    from dadplug import monai  # noqa: F401 (replaces ignite's exchanges)

    with metrics_of_present_sites(open_transport(None, Traffic(), torch.device("cpu"), 20.0), []):
        idist.sync()
        idist.broadcast(torch.ones(METRICS), 0)


def metrics_of_catalyst():
    from dadplug.runners._catalyst.engine import SiteEngine

    engine = object.__new__(SiteEngine)
    engine.transport, engine.own_metrics = open_transport(None, Traffic(), torch.device("cpu"), 20.0), {}
    engine.loader_samples = 1
    engine.mean_reduce_ddp_metrics(dict.fromkeys(map(str, range(METRICS)), 0.5))


def raw():
    ones, rooms = torch.ones(2), [torch.ones(2), torch.ones(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(ones),
        "all_gather": lambda: dist.all_gather(rooms, ones),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), ones),
        "functional": lambda: functional.all_gather_tensor(ones, 0, dist.group.WORLD),
        "broadcast": lambda: dist.broadcast(ones, 0),
        "reduce": lambda: dist.reduce(ones, 0),
        "gather": lambda: dist.gather(ones, rooms if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(ones, rooms if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(ones, rooms),
        "all_to_all": lambda: dist.all_to_all(rooms, [torch.ones(2), torch.ones(2)]),
        "a group": lambda: dist.all_reduce(ones, group=dist.new_group([0, 1])),
        "objects": lambda: dist.all_gather_object([None, None], ones),
        "DDP": data_parallel,
        "LocalSGD": lambda: LocalSGD(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.1)),
        "AdaPM": adapm,
        "an Accumulator": accumulated,
        **({"ignite": broadcast_in_ignite} if importlib.util.find_spec("ignite") else {}),
        "Catalyst": metrics_of_catalyst,
        "large objects": lambda: gather_objects(torch.ones(OBJECTS)),
        "the store": lambda: (
            dist.group.WORLD and dist.distributed_c10d._get_default_store().set("x", bytes(2 * OBJECTS))
        ),
    }
    return {name: found_error(call) or ("", "") for name, call in calls.items()}


POLICIES = [
    ({"require_privacy": True}, "require_privacy = true"),
    ({"modes": ["dsgd"]}, 'modes = ["dsgd"]'),
    ({"share_inputs": False}, "share_inputs = false"),
    ({"max_rank_share": 0.5}, "max_rank_share = 0.5"),
]


@pytest.mark.parametrize(("policy", "line"), POLICIES, ids=str)
def test_a_policy_refuses_what_no_method_sends(tmp_path, policy, line):
    kits = kits_of(tmp_path, policy | {"allow_pickle": True}, policy | {"allow_pickle": True})
    for found in connected(kits, raw):
        way = {name: found.pop(name)[0] for name in ("LocalSGD", "AdaPM")}  # of whole sums
        assert set(way.values()) == ({"PolicyError"} if {"modes", "require_privacy"} & policy.keys() else {""})
        assert {kind for kind, _ in found.values()} == {"PolicyError"}, found
        assert all(line in text and "nothing has been sent" in text for _, text in found.values())


def allowed():
    """What a policy does not refuse: barriers, steps of a reduction, small objects."""
    dist.barrier()
    rank = dist.get_rank()
    assert gather_objects(rank) == [0, 1]
    reduction = GradientReduction(model := nn.Linear(30, 20), mode="dsgd", share_inputs=False)
    model(torch.full((2, 30), 1.0 + rank)).sum().backward()
    reduction.synchronize()
    assert torch.equal(model.weight.grad, torch.full((20, 30), 3.0))
    assert reduction.gather_objects(torch.full((20, 30), rank))[1].all()
    with pytest.raises(PolicyError, match=f"{OBJECTS} bytes are allowed"):
        reduction.gather_objects(torch.ones(OBJECTS))
    optimizer = torch.optim.SGD((model := nn.Linear(30, 20)).parameters(), 0.1)
    server = ParameterServer(model, optimizer, mode="dsgd", share_inputs=False)
    model(torch.ones(2, 30)).sum().backward()
    server.step()
    with declared(METRICS):
        assert server.gather_present(rank) == {0: 0, 1: 1}
        with pytest.raises(PolicyError, match=f"{METRICS} bytes are allowed"):
            server.gather_present(torch.ones(METRICS))
    server.finish()


def test_a_policy_allows_what_methods_need(tmp_path):
    policy = {"modes": ["dsgd"], "share_inputs": False, "max_rank_share": 0.5}
    connected(kits_of(tmp_path, policy, policy), allowed)


def metrics_of_accelerate():
    from dadplug.accelerate import Accelerator

    accelerator = Accelerator(mode="dsgd", share_inputs=False, cpu=True)
    own = torch.tensor([1.0 + accelerator.process_index])
    found = accelerator.gather(own).tolist(), accelerator.reduce(own.clone()).tolist()
    return found, found_error(accelerator.gather, torch.ones(METRICS))[0]


def test_metrics_of_trainers_are_bounded(tmp_path):
    support.need("accelerate", 1)
    policy = {"modes": ["dsgd"]}
    assert (
        connected(kits_of(tmp_path, policy, policy), metrics_of_accelerate)
        == [(([1.0, 2.0], [3.0]), "PolicyError")] * 2
    )
