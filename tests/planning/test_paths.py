"""Which path a layer takes between sites, what is sent on it, what comes out, and chains of layers."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from chained_models import chained, mlp
from comparison import Beside
from dadplug.hooks import Elementwise, register_elementwise
from dadplug.hooks.factor import _KINDS
from dadplug.methods import make_method
from torch import nn

import dadplug
from dadplug.exchange.factor_buckets import FactorBucket, FactorPayload, IndexSlot, Slot
from dadplug.exchange.factory import open_transport
from dadplug.exchange.traffic import Traffic
from dadplug.exchange.wire import QuantisedFormat, WireFormat
from dadplug.options import Options


def settled(name: str, mode: str, **options) -> tuple[dict, dict, tuple[int, int]]:
    """Take three steps; return paths and reasons by parameter, and the bytes sent beside those of the plan."""
    torch.manual_seed(0)
    model = zoo.build(name)
    reduction = dadplug.GradientReduction(model, mode=mode, rank=2, **{"weighting": "samples"} | options)
    for step in range(3):
        model.zero_grad()
        zoo.loss(model, *zoo.batch(name, 6 + dist.get_rank(), seed=step)).backward()
        reduction.synchronize()
    paths = {row.parameter: row.path for row in reduction.plan}
    reasons = {row.parameter: row.reason for row in reduction.plan if row.reason}
    sent = reduction.traffic.bytes_sent, reduction.plan.bytes
    reduction.detach()
    return paths, reasons, sent


@support.at_sites(2)
def test_layers_take_their_paths() -> None:
    paths, _, (sent, planned) = settled("conv1d", "dad")
    assert set(paths.values()) == {"factors"}
    assert planned <= sent <= 1.1 * planned + 800
    assert set(settled("conv1d", "rankdad")[0].values()) == {"lowrank"}
    paths, _, (sent, planned) = settled("transposed", "rankdad")
    assert paths["convolutions.0.bias"] == "lowrank"
    assert planned <= sent <= 1.1 * planned + 800
    paths, reasons, _ = settled("conv2d", "dad")
    assert paths["convolutions.0.weight"] == paths["convolutions.0.bias"] == "factors"
    assert paths["convolutions.5.weight"] == paths["convolutions.5.bias"] == "allreduce"
    assert reasons["convolutions.5.weight"].endswith("times the bytes")
    for mode in ("dad", "rankdad"):
        paths, reasons, _ = settled("words", mode)
        assert paths["table.weight"] == "factors"
        assert paths["small.weight"] == "allreduce"
        assert reasons["small.weight"].endswith("times the bytes")
        paths, reasons, _ = settled("bags", mode)
        assert paths["mean.weight"] == paths["sum.weight"] == paths["rare.weight"] == "factors"
        assert reasons["max.weight"] == "mode max has no factors"
        assert paths["max.weight"] == ("allreduce" if mode == "dad" else "lowrank")
        tied = "shared by layers that do not go together" if mode == "dad" else "shared by a table and a layer"
        assert settled("language", mode)[1]["table.weight"].startswith(tied)
        assert settled("waves", mode)[0]["turn"] == "allreduce"
    assert settled("language", "rankdad", dense="allreduce")[0]["table.weight"] == "allreduce"
    paths, reasons, _ = settled("sparse", "dsgd")
    assert paths["table.weight"] == "factors"
    assert set(paths.values()) == {"factors", "allreduce"}
    assert reasons == {"table.weight": "sparse=True: its gradient is sent as the rows that it has"}


@support.at_sites(2)
def test_row_numbers_stay_home_if_asked() -> None:
    for name in ("words", "sparse"):
        paths, reasons, _ = settled(name, "dad", share_inputs=False)
        assert paths["table.weight"] == "allreduce"
        assert "fed by data" in reasons["table.weight"]


@support.at_sites(2)
def test_a_convolution_whose_size_differs_between_sites_goes_dense() -> None:
    model = nn.Conv1d(2, 200, 1).double()
    reduction = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(1, 2, 1 + dist.get_rank(), dtype=torch.float64)).square().mean().backward()
        reduction.synchronize()
    (row, _) = reduction.plan
    assert f"{row.path}: {row.reason}" == "allreduce: inputs of several sizes"


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@support.at_sites(2)
def test_rows_of_tables_are_exact_and_their_numbers_travel_to_the_bit(mode: str, wire: str) -> None:
    """Rows are exact in every mode; on a coarser wire, only their deltas are rounded."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Embedding(100_000, 5)
    reduction = dadplug.GradientReduction(model, mode=mode, rank=1, wire=wire, weighting="samples")
    picked = [torch.tensor([0, 99_999, 65_537, 65_537]), torch.tensor([99_999, 70_001, 3, 256, 257])]
    for step in range(3):
        model.zero_grad()
        model(picked[rank][: 5 - step]).sum().backward()
        reduction.synchronize()
        expected = torch.zeros(100_000, 5)
        used = [each[: 5 - step] for each in picked]
        for numbers in used:
            expected.index_add_(0, numbers, torch.full((len(numbers), 5), 1 / sum(map(len, used)) * len(numbers)))
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-6 if wire == "fp32" else 1e-2, atol=0)
    assert reduction.traffic.bytes_sent < 1000


def test_row_numbers_lie_in_a_payload_of_any_type():
    transport = open_transport(None, Traffic(), torch.device("cpu"), 60)
    numbers = torch.tensor([[0], [2**31 - 1], [2**40 + 3]])
    types = torch.float64, torch.float32, torch.bfloat16, torch.float16
    for wire in (*map(WireFormat, types), QuantisedFormat()):
        for table in (2**31 - 1, 2**41):
            bucket = FactorBucket([IndexSlot(2, table, wire, 1)], transport, torch.float32, wire)
            given = FactorPayload(torch.ones(3, 2), numbers % table)
            bucket.fill(0, given)
            bucket.launch(3)
            bucket.receive()
            bucket.end_step([[3]])
            bucket.fill(0, given)
            bucket.launch(3)
            _, ((payload,),) = bucket.receive()
            assert payload.right.tolist() == given.right.tolist()
            assert payload.left.tolist() == given.left.tolist()
            assert payload.left.dtype == torch.float32


def test_a_table_keeps_room_for_a_few_more_rows():
    slot = IndexSlot(2, 1000, WireFormat(torch.float32), 2)
    assert slot.learn([160, 8])
    assert slot.capacity == [170, 8]
    assert not slot.learn([159, 8])
    assert slot.learn([161, 8])


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
@pytest.mark.parametrize("rows", [4, 50])
@support.at_sites(2)
def test_sparse_gradients_come_out_sparse(mode: str, rows: int) -> None:
    """A gradient that torch gives as sparse comes out as sparse, over steps without zero_grad too."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    reference = nn.EmbeddingBag(rows, 3, sparse=True, mode="sum").double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
    optimizers = [torch.optim.SparseAdam(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(6):
        numbers = torch.randint(0, rows, (5, 2), generator=torch.Generator().manual_seed(step))
        if step % 2 == 0:
            model.zero_grad(), reference.zero_grad()
        if step != 4 or rank == 0:  # site 1 has nothing in the fifth step
            mine = numbers if step == 4 else numbers[:2] if rank == 0 else numbers[2:]
            model(mine).square().mean().backward()
            reduction.synchronize()
        else:
            reduction.idle()
        reference(numbers).square().mean().backward()
        assert model.weight.grad.is_sparse
        torch.testing.assert_close(model.weight.grad.to_dense(), reference.weight.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.weight, reference.weight)
    assert reduction.first_difference() is None


def piles_up(mode: str) -> int:
    """Micro-batches of a convolution whose factors grow beyond its gradient before they may leave."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)).double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode=mode, rank=16, weighting="samples")
    most = 0
    for step in range(3):
        model.zero_grad(), reference.zero_grad()
        groups = 1 if step == 0 else 6
        for group in range(groups):
            batch = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + group)).double()
            with reduction.no_sync():
                model(batch[rank : rank + 1]).square().mean().backward()
            reference(batch).square().mean().backward()
            most = max(most, *(sum(factor.numel for factor in unit._peek()) for unit in factor_units(reduction)), 0)
        reduction.synchronize()
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-13), (step, name)
    return most


def factor_units(reduction):
    return [unit for unit in reduction._planner.units if hasattr(unit, "_peek")] or []


def test_held_factors_of_convolutions_stay_as_small_as_gradients(sites):
    whole = 16 * 144
    assert max(sites(2).run(piles_up, "dad")) < 2 * whole
    assert max(sites(2).run(piles_up, "rankdad")) < 2 * whole


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
@support.at_sites(2)
def test_nan_in_any_kind_of_layer_is_reported_by_all_sites(mode: str) -> None:
    for name in ("conv1d", "transposed", "words", "bags", "sparse"):
        model = zoo.build(name)
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2, weighting="samples")
        for step in range(3):
            model.zero_grad()
            value = zoo.loss(model, *zoo.batch(name, 6, seed=step))
            (value * (float("nan") if step == 2 and dist.get_rank() == 1 else 1.0)).backward()
            if step < 2:
                reduction.synchronize()
        with pytest.raises(dadplug.NonFiniteError, match=r"^step 2: NaN or Inf at site 1"):
            reduction.synchronize()
        reduction.detach()


@support.at_sites(2)
def test_gradients_without_factors_can_be_compressed() -> None:
    """An LSTM, a packed attention, and a table tied to an output layer; two rows a site, so that rank 2 is exact."""
    rank = dist.get_rank()
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(30, 12)
            self.recur = nn.LSTM(12, 12, batch_first=True)
            self.attend = nn.MultiheadAttention(12, 2, batch_first=True)
            self.out = nn.Linear(12, 30, bias=False)
            self.out.weight = self.table.weight

        def forward(self, tokens):
            x = self.recur(self.table(tokens))[0]
            return self.out(self.attend(x, x, x, need_weights=False)[0])

    reference = Net().double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=4, weighting="samples")
    (tied,) = (unit for unit in reduction._planner.units if unit.name == "table.weight")
    assert {layer.name for layer in tied.layers} == {"table", "out"}
    for step in range(4):
        if step != 2:  # what has been agreed on stays where `.grad` is not reset
            model.zero_grad(), reference.zero_grad()
        tokens = torch.randint(0, 30, (4, 1), generator=torch.Generator().manual_seed(step))
        for group in range(1 + step % 2):
            with reduction.no_sync() if group else nullcontext():
                model(tokens[2 * rank : 2 * rank + 2]).square().mean().backward()
        reduction.synchronize()
        (reference(tokens).square().mean() * (1 + step % 2)).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-9), (step, name)
    rows = {row.parameter: row for row in reduction.plan}
    for name, reason in {
        "table.weight": "shared by a table and a layer: compressed together",
        "recur.weight_hh_l0": "its layer (LSTM) sends no factors",
        "attend.in_proj_weight": "its layer (MultiheadAttention) sends no factors",
    }.items():
        assert (rows[name].path, rows[name].reason) == ("lowrank", reason)
    assert rows["recur.bias_ih_l0"].path == "allreduce"
    assert reduction.quality["attend.in_proj_weight"].effective_rank <= 4
    assert reduction.first_difference() is None
    reduction.detach()
    model(tokens).sum().backward()
    assert reduction._planner.units[0].rows == 0


@support.at_sites(2)
def test_compressed_gradients_survive_a_new_plan() -> None:
    """A compressed gradient arrives, and then other parameters are freed before it has been sent."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.LSTM(12, 12, batch_first=True), zoo.Last(), nn.Linear(12, 12)).double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=4, weighting="samples")
    for step in range(3):
        for net in (model, reference):
            net[2].requires_grad_(step != 1)
            net.zero_grad()
        inputs = torch.randn(4, 1, 12, generator=torch.Generator().manual_seed(step)).double()
        model(inputs[2 * rank : 2 * rank + 2]).square().mean().backward()
        for net in (model, reference):
            net[2].requires_grad_(step == 0)
        reference(inputs).square().mean().backward()
        reduction.synchronize()
        for p, q in zip(model[0].parameters(), reference[0].parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-9), step


@pytest.mark.parametrize("rows", [-1, 1 << 40])
def test_a_second_round_is_not_allocated_by_what_a_site_announces(rows):
    transport = open_transport(None, Traffic(), torch.device("cpu"), 60)
    wire = WireFormat(torch.float32)
    bucket = FactorBucket([Slot(2, 3, 0, 1, wire)], transport, torch.float32, wire)
    with pytest.raises(dadplug.MismatchError, match=r"site 0 .* more values than its payload had room for"):
        bucket.second_round([[rows]])


# Chains of layers: which there are, what breaks them, and what the plan says of them


def thaws() -> list[list[str]]:
    """Layers are frozen and freed in mid-training: chains are found anew, and a warning says so where none is left."""
    mine, found = (slice(0, 3), slice(3, 8))[dist.get_rank()], []
    with Beside(lambda: zoo.build("chain"), mode="edad") as both:
        for step in range(8):
            for net in (both.model, both.reference):
                net[4].requires_grad_(step not in (2, 3, 5))
                net[0].requires_grad_(step not in (4, 5))
                net[2].requires_grad_(step != 5)
            both.zero_grad()
            with pytest.warns(UserWarning, match="follows another") if step == 5 else warnings.catch_warnings():
                if step != 5:
                    warnings.simplefilter("error")
                both.step(*zoo.batch("chain", 8, step), mine, step)
            found.append([name for name in chained(both.reduction) if name.endswith("weight")])
            reasons = {row.parameter: row.reason for row in both.reduction.plan}
            assert step != 2 or reasons["2.weight"] == "ends a chain: 4 (Linear) is frozen"
    return found


def test_chains_are_found_anew_when_layers_are_frozen_or_freed(sites):
    full = ["0.weight", "2.weight", "4.weight"]
    expected = [full, full, ["0.weight"], ["0.weight"], ["2.weight", "4.weight"], [], full, full]
    assert sites(2).run(thaws) == [expected] * 2


BREAKERS = {
    "1 (BatchNorm1d) mixes rows": lambda: [nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU()],
    "2 (Dropout) draws its own numbers": lambda: [nn.ReLU(), nn.Dropout(), nn.LayerNorm(6)],
    "1 (LayerNorm) mixes the numbers of a row": lambda: [nn.LayerNorm(6)],
    "1 (GELU) has a derivative that its output does not tell": lambda: [nn.GELU()],
    "1 (PReLU) has a slope that is trained": lambda: [nn.PReLU()],
    "1 (Tanh) is followed by another function": lambda: [nn.Tanh(), nn.Sigmoid()],
    "1 (LeakyReLU) is no function that chains go through": lambda: [nn.LeakyReLU(-0.1)],
    "1 (Linear) is frozen": lambda: [nn.Linear(6, 6).requires_grad_(False)],
}


def refuses(breaker: str, idle: bool) -> str:
    layers = BREAKERS[breaker]() if breaker else []
    model = nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 4)) if breaker else nn.Linear(6, 4)
    reduction = dadplug.GradientReduction(model.double(), mode="edad", weighting="samples")
    try:
        if not (idle and dist.get_rank() == 0):
            zoo.loss(model, *zoo.batch("chain", 4, 1)).backward()
        with pytest.raises(ValueError, match="mode 'edad'") as error:
            reduction.synchronize()
    finally:
        reduction.detach()
    return str(error.value)


@pytest.mark.parametrize("breaker", [*BREAKERS, ""])
def test_a_model_without_a_chain_is_refused_on_all_sites_by_the_module_that_breaks_it(sites, breaker):
    for message in [*sites(2).run(refuses, breaker, False), *sites(2).run(refuses, breaker, True)]:
        assert (breaker or "no fully connected layer in it follows another") in message
        assert "Use mode='dad'" in message


FUNCTIONS = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, inplace=True), nn.ELU(0.5), nn.SELU()),
    *(nn.ELU(inplace=True), nn.Tanh(), nn.Sigmoid()),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_tell_the_derivatives(function, dtype):
    inputs = (3 * torch.randn(50, 7)).to(dtype).requires_grad_()
    outputs, gradient = function(inputs * 1), torch.randn(50, 7).to(dtype)
    (expected,) = torch.autograd.grad(outputs, inputs, gradient, retain_graph=True)
    elementwise = Elementwise.of(outputs.grad_fn)
    torch.testing.assert_close(elementwise.backward(gradient, outputs.detach()), expected)


def test_functions_can_be_registered():
    def backward(gradient, output, beta, threshold):
        return gradient * -torch.expm1(-beta * output)

    register_elementwise(["SoftplusBackward0"], backward, ["beta", "threshold"], rounds=True)
    try:
        with Beside(lambda: mlp(6, 5, 4, phi=nn.Softplus).double(), mode="edad") as both:
            both.step(*zoo.batch("chain", 5, 0), slice(None), "softplus", rtol=1e-12)
            assert len(chained(both.reduction)) == 2
    finally:
        del _KINDS["SoftplusBackward0"]


def test_copies_made_while_chains_are_traced_are_plain():
    model = zoo.build("chain")
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="samples")
    inputs, targets = zoo.batch("chain", 4, 0)
    value = zoo.loss(model, inputs, targets)
    copied = copy.deepcopy(model)
    value.backward()
    assert torch.equal(copied(inputs), model(inputs))
    reduction.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_compiled_code_between_layers_is_refused_with_its_name():
    torch._dynamo.reset()
    model = zoo.build("chain")
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="samples")
    for activation in model[1::2]:  # of a whole model, versions of torch compile different parts
        activation.forward = torch.compile(activation.forward, backend="aot_eager")
    zoo.loss(model, *zoo.batch("chain", 4, 0)).backward()
    with pytest.raises(ValueError, match=r"torch.compile's code before 2 \(Linear\) cannot be looked into"):
        reduction.synchronize()
    reduction.detach()


# What the plan says


class Various(nn.Module):
    """Parameters of all kinds: wide and narrow layers, norms, recurrent layers, attention, and bare ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
        self.wide, self.tiny = nn.Linear(32, 64), nn.Linear(64, 2)
        self.norm, self.recurrent = nn.LayerNorm(64), nn.GRU(64, 64)
        self.attention, self.bare = nn.MultiheadAttention(64, 2), nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.narrow(self.first(x)).mean((2, 3)))
        x = self.recurrent(self.norm(x)[None])[0] @ self.bare
        return self.tiny(self.attention(x, x, x)[0])


@support.at_sites(2)
def test_all_that_is_all_reduced_has_a_reason() -> None:
    for mode in ("dad", "rankdad", "powersgd", "topk", "auto"):
        model = Various()
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="uniform")
        for _ in range(2):
            rows = {row.parameter: row for row in reduction.plan}
            assert all(row.reason for row in rows.values() if row.path == "allreduce"), mode
            model(torch.randn(4, 3, 6, 6)).square().sum().backward()
            reduction.synchronize()
        reduction.detach()
        if mode == "rankdad":
            assert rows["narrow.weight"].path == rows["wide.weight"].path == "lowrank"
            assert "save few bytes" in rows["tiny.weight"].reason
            for name, layer in {"recurrent.weight_ih_l0": "GRU", "attention.in_proj_weight": "MultiheadAtt"}.items():
                assert rows[name].path == "lowrank"
                assert layer in rows[name].reason
    assert not any(row.reason for row in dadplug.GradientReduction(Various(), mode="dsgd").plan)


@support.at_sites(2)
def test_narrow_layers_are_compressed_where_that_saves_bytes() -> None:
    for dtype, wire, path in (
        (torch.float32, "auto", "lowrank"),
        (torch.float64, "auto", "lowrank"),
        (torch.bfloat16, "auto", "allreduce"),  # sent as it is
        (torch.float32, "bf16", "allreduce"),
    ):
        model = nn.Conv2d(16, 16, 3, dtype=dtype)
        reduction = dadplug.GradientReduction(
            model, mode="rankdad", wire=wire, rank=32 if path == "allreduce" else "auto"
        )
        assert reduction.plan[0].path == path, (dtype, wire)
        for _ in range(2):
            model(torch.randn(4, 16, 6, 6, dtype=dtype)).square().sum().backward()
            reduction.synchronize()
        planned = reduction.plan
        assert planned.bytes <= reduction.traffic.bytes_sent <= 1.1 * planned.bytes + 800
        assert planned[0].bytes < planned[0].dense_bytes or path == "allreduce"
        reduction.detach()


def test_ranks_of_narrow_layers_count_bytes():
    method = make_method(Options(mode="rankdad"))
    ranks = {(16, 27): 8, (8, 216): 2, (16, 432): 4, (10, 128): 8, (16, 4096): 4, (6, 4096): 1}
    ranks |= {(32, 864): 4, (64, 1728): 4, (128, 3456): 4, (384, 1728): 8, (256, 6912): 8}  # a hundredth of the bytes
    ranks |= {(64, 576): 8, (128, 512): 8, (256, 256): 8}  # it would save less than three kilobytes
    assert {shape: method.rank_of(8, *shape) for shape in ranks} == ranks
    assert {method.rank_of(4, *shape) for shape in ranks} == {1, 2, 4}  # never more than with a larger rank
    assert make_method(Options(mode="rankdad", rank=8)).rank_of(8, 8, 216) == 8


@support.at_sites(2)
def test_the_plan_says_that_it_assumes_one_row() -> None:
    model = nn.Linear(64, 64)
    for mode, options in (("dad", {}), ("rankdad", {"rank": 8}), ("dsgd", {})):
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="uniform", **options)
        before = reduction.plan
        assert ("one row" in str(before)) == (mode == "dad")
        model(torch.randn(20, 64)).square().sum().backward()
        reduction.synchronize()
        assert "one row" not in str(reduction.plan)
        assert mode == "dad" or reduction.plan.bytes <= before.bytes
        reduction.detach()
