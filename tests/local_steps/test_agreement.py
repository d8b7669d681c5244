"""Payloads of deltas: what is decoded is what was sent, and error feedback loses nothing over rounds."""

from __future__ import annotations

import pytest
import torch

from dadplug.local_steps.agreement import DeltaFormat, outer_step

FORMATS = [("fp32", None), ("bf16", None), ("int8", None), ("fp32", 2), ("bf16", 2), ("int8", 2)]


def some_deltas(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (30, 20), "filter": (8, 4, 3, 3), "bias": (700,), "scale": (), "none": (0, 4), "thin": (9, 1)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def payloads(form: DeltaFormat, like: dict[str, torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: torch.zeros(size, dtype=dtype) for dtype, size in form.layout(like).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("wire", "rank"), FORMATS)
def test_what_is_not_sent_is_in_the_error_memory(wire, rank, dtype):
    form = DeltaFormat(wire, rank, error_feedback=True)
    total = {name: torch.zeros_like(delta) for name, delta in some_deltas(0, dtype).items()}
    arrived = {name: torch.zeros_like(delta) for name, delta in total.items()}
    room = payloads(form, total)
    for seed in range(4):
        deltas = some_deltas(seed, dtype)
        for name, delta in deltas.items():
            total[name] += delta
        form.encode(deltas, room)
        sent = form.decode({dtype: [payload, payload] for dtype, payload in room.items()}, [0.25, 0.75])
        for name in total:
            arrived[name] += sent[name]
    errors = form.state_dict()["errors"]
    for name in total:
        left = total[name] - arrived[name]
        assert torch.allclose(errors.get(name, torch.zeros_like(left)), left, atol=1e-5), name
    compressed = {"weight", "filter"} if rank else set()
    rounded = set() if wire == "fp32" and dtype == torch.float32 else {"weight", "filter", "bias", "scale", "thin"}
    assert set(errors) == compressed | (rounded if wire != "fp32" else set())


@pytest.mark.parametrize(("wire", "rank"), FORMATS[1:])
def test_a_steady_delta_arrives_in_full_over_rounds(wire, rank):
    delta = some_deltas(1)["weight"]
    with_memory, without = DeltaFormat(wire, rank, True), DeltaFormat(wire, rank, False)
    errors = []
    for form in (with_memory, without):
        room, arrived = payloads(form, {"weight": delta}), torch.zeros_like(delta)
        for _ in range(40):
            form.encode({"weight": delta.clone()}, room)
            arrived += form.decode({dtype: [payload] for dtype, payload in room.items()}, [1.0])["weight"]
        errors.append(float((arrived / 40 - delta).norm() / delta.norm()))
    assert errors[0] < 0.5 * errors[1]
    assert errors[0] < 0.3


def test_factors_are_smaller_and_small_tensors_are_sent_whole():
    like = some_deltas(0)
    whole, factors = (sum(DeltaFormat("fp32", rank, True).layout(like).values()) for rank in (None, 2))
    assert whole == sum(delta.numel() for delta in like.values())
    assert factors == whole - 600 - 288 + 2 * (30 + 20) + 2 * (8 + 36)


def test_the_mean_is_weighted_and_leaves_out_sites_without_weight():
    form = DeltaFormat("fp32", None, True)
    parts = [some_deltas(seed, torch.float64) for seed in range(3)]
    rooms = []
    for part in parts:
        rooms.append(payloads(form, part))
        form.encode(part, rooms[-1])
    rooms[1][torch.float64].fill_(float("nan"))
    mean = form.decode({torch.float64: [room[torch.float64] for room in rooms]}, [0.25, 0.0, 0.75])
    for name in mean:
        assert torch.allclose(mean[name], 0.25 * parts[0][name] + 0.75 * parts[2][name])


def test_the_outer_step_is_that_of_sgd_with_nesterov_momentum():
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    value, momentum = parameter.detach().clone(), torch.zeros(5, dtype=torch.float64)
    for seed in range(4):
        delta = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        parameter.grad = -delta
        optimizer.step()
        outer_step(value, delta, momentum, 0.7, 0.9)
        assert torch.allclose(value, parameter.detach(), rtol=1e-12)
