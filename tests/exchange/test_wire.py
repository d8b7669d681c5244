"""Wire formats: what is encoded is decoded with the error that the format has, and by the type of the tensors."""

from __future__ import annotations

import math

import pytest
import torch

from dadplug.exchange.wire import FORMATS, wire_format

ROUNDING = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.51 / 127}


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoded_rows_are_as_near_as_the_format_allows(name, dtype):
    wire, rows = wire_format(name, dtype), random(3, 50, dtype=dtype)
    payload = wire.encode(rows)
    assert payload.shape == (3, wire.row_size(50))
    assert payload.dtype == wire.dtype
    largest = rows.abs().amax(1, keepdim=True)
    assert ((wire.decode(payload) - rows).abs() <= ROUNDING[name] * largest).all()


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_round_trip_gives_what_is_decoded_in_the_type_of_the_rows(name, dtype):
    wire, rows = wire_format(name, dtype), random(4, 33).to(dtype)
    back = wire.round_trip(rows)
    assert back.dtype == dtype
    assert torch.equal(back, wire.decode(wire.encode(rows)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("name", ROUNDING)
def test_tensors_of_16_bits_or_integers_are_sent_as_they_are(name, dtype):
    assert wire_format(name, dtype).dtype == dtype
    assert not wire_format(name, dtype).quantised


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 1300])
def test_flat_tensors_are_encoded_by_blocks_of_512(name, count):
    wire, values = wire_format(name), random(count)
    payload = wire.encode_flat(values)
    assert payload.shape == (wire.flat_size(count),)
    assert payload.dtype == wire.dtype
    found = wire.decode_flat(payload, count)
    expected = [wire.decode(wire.encode(block[None]))[0] for block in values.split(512)]
    assert torch.equal(found, torch.cat(expected))


def test_a_quantised_row_with_nan_is_decoded_as_nan():
    rows = random(2, 8)
    rows[1, 3] = math.inf
    wire = wire_format("int8")
    back = wire.decode(wire.encode(rows))
    assert back[1].isnan().all()
    assert back[0].isfinite().all()


def test_rows_without_elements_need_no_scale():
    wire = wire_format("int8")
    assert wire.row_size(0) == 0
    assert wire.decode(wire.encode(torch.empty(3, 0))).shape == (3, 0)


def test_formats_are_those_of_the_option():
    assert list(FORMATS) == list(ROUNDING)
    with pytest.raises(ValueError, match=r"unknown wire format 'fp8'; valid ones are fp32, bf16, int8"):
        wire_format("fp8")
