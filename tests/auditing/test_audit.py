"""Audits: what is recovered of known batches, and that weaker messages show less."""

import copy
import json

import pytest
import torch
from support import refuses
from torch import nn

import dadplug
from dadplug.data import load_dataset
from dadplug.tools.auditing import ATTACKS, Attack, Budget, Result, register_attack
from dadplug.tools.auditing.attacks import separation
from dadplug.tools.auditing.capture import Batch, capture

CRITERION = nn.CrossEntropyLoss()
FAST = ("rows", "span", "spear", "labels")


@pytest.fixture(scope="module")
def digits():
    data = load_dataset("digits").train
    pairs = [data[index] for index in range(16)]
    return torch.stack([image for image, _ in pairs]), torch.tensor([int(label) for _, label in pairs])


def make(hidden=256, activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), activation(), nn.Linear(hidden, 10))


def audit(batch, mode="rankdad", model=None, attacks=FAST, **options):
    images, labels = batch
    given = {"remedies": False, "progress": False, "seconds": 60.0} | options
    return dadplug.audit(model or make(), CRITERION, images, labels, mode, attacks=attacks, **given)


def of(report, attack, target="data"):
    return next(result for result in report.results if result.attack == attack and result.target == target)


@pytest.mark.parametrize("options", [{}, {"wire": "bf16"}, {"wire": "int8"}, {"fused": True}], ids=str)
@pytest.mark.parametrize("mode", ["dad", "edad"])
def test_dad_and_edad_show_all_data(digits, mode, options):
    report = audit(digits, mode, **options)
    assert report.recovered >= 0.99
    rows = of(report, "rows")
    assert rows.recovered == 1.0
    assert rows.similarity > 0.999
    assert rows.psnr > 35
    assert rows.ssim > 0.99
    assert (rows.pictures - digits[0]).abs().max() < 0.05
    assert of(report, "labels", "labels").similarity == 1.0
    assert "100%" in str(report)
    assert "safe" not in str(report).lower().replace("unsafe", "")


@pytest.mark.parametrize("rank", [16, 20])
def test_rankdad_with_as_many_components_as_rows_shows_all_data(digits, rank):
    report = audit(digits, rank=rank, attacks=("span", "labels"))
    assert report.recovered >= 0.99
    assert of(report, "span").similarity > 0.999


def test_fewer_components_show_less(digits):
    shares = [of(audit(digits, rank=rank, attacks=("span",)), "span").similarity for rank in (16, 8, 4, 1)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.999
    assert 0.6 < shares[2] < 0.95
    assert shares[3] < 0.6
    assert audit(digits, rank=1).recovered == 0.0


@pytest.mark.parametrize(("mode", "options"), [("dsgd", {}), ("rankdad", {"rank": 6, "wire": "fp32"})])
def test_a_relu_gives_the_rows_of_a_formed_gradient(digits, mode, options):
    batch = digits[0][:6], digits[1][:6]
    spear = of(audit(batch, mode, attacks=("spear",), **options), "spear")
    assert spear.recovered == 1.0
    assert spear.similarity > 0.999
    assert (spear.pictures - batch[0]).abs().max() < 1e-2


def test_descent_separates_more_rows_than_draws_can():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    batch = torch.randn(32, 100), torch.randint(0, 10, (32,))
    shown = of(audit(batch, "dsgd", model, attacks=("spear",), seconds=300), "spear")
    assert shown.recovered == 1.0
    assert shown.similarity > 0.9999
    few = of(audit(batch, "rankdad", model, attacks=("spear",), rank=8, seconds=20), "spear")
    assert few.recovered == 0.0


def test_one_sample_is_a_row_of_its_gradient(digits):
    report = audit((digits[0][:1], digits[1][:1]), "dsgd", make(activation=nn.Tanh), attacks=("spear", "labels"))
    assert report.recovered == 1.0
    assert of(report, "labels", "labels").similarity == 1.0


def test_powersgd_topk_and_local_steps(digits):
    assert audit(digits, "powersgd", rank=16, attacks=("span",)).recovered == 1.0
    assert audit(digits, "powersgd", rank=2, attacks=("span",)).recovered == 0.0
    assert audit(digits, "topk", density=0.002, attacks=("span",)).recovered == 0.0
    assert audit(digits, "localsgd", every=1, attacks=("span",)).recovered == 1.0
    assert audit(digits, "localsgd", every=1, rank=2, attacks=("span",)).recovered == 0.0


def test_optimisation_recovers_a_sample(digits):
    report = audit((digits[0][:1], digits[1][:1]), "dsgd", make(64, nn.Tanh), attacks=("inversion",), seconds=30.0)
    found = of(report, "inversion")
    assert found.similarity > 0.9
    assert of(audit((digits[0][:1], digits[1][:1]), "topk", make(64, nn.Tanh), density=0.001, attacks=("inversion",),
                    seconds=1.0), "inversion").similarity < found.similarity  # fmt: skip


def test_activations_of_a_later_layer_are_inverted():
    torch.manual_seed(0)
    inputs, targets = torch.rand(6, 8), torch.randint(0, 10, (6,))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 10))
    report = audit((inputs, targets), "dad", model, attacks=("activations",), share_inputs=False)
    assert report.recovered == 1.0
    assert "activations" in of(report, "activations").attack


def test_membership_is_found_and_strangers_are_chance(digits):
    assert of(audit(digits, "dsgd", attacks=("membership",)), "membership", "membership").similarity > 0.75


def test_the_verdict_names_an_option_that_stops_the_attacks(digits):
    report = audit(digits, "dad", remedies=True, attacks=("rows", "span"))
    assert report.remedy is not None
    assert report.remedy.options["mode"] == "rankdad"
    assert str(report.remedy) in report.verdict
    repaired = audit(digits, attacks=("rows", "span"), rank=report.remedy.options["rank"])
    assert repaired.recovered == 0.0
    assert repaired.bytes_sent == report.remedy.bytes_sent < report.bytes_sent
    assert next(each.recovered for each in report.tried) == 1.0  # share_inputs=False: the gradient has the span


def test_a_hub_reads_what_is_not_sealed(digits):
    seen = audit(digits, "dad", observer="hub", remedies=True)
    assert seen.recovered == 1.0
    assert "sealed = true" in seen.verdict
    hidden = audit(digits, "dad", observer="hub", sealed=True)
    assert hidden.recovered == 0.0
    assert "observer='site'" in hidden.verdict


def test_nothing_of_the_caller_changes(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    audit(digits, "dsgd", model, attacks=None, seconds=3.0)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_reports_are_files(digits, tmp_path):
    report = audit(digits, "dad", remedies=True, attacks=("rows", "labels"))
    report.json(tmp_path / "audit.json")
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["recovered"] == 1.0
    assert found["layers"][0]["exposure"] == "raw inputs"
    assert found["layers"][0]["results"][0]["attack"] == "rows"
    report.picture(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    report.html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "data:image/png;base64," in page
    assert "src='http" not in page
    assert [layer.name for layer in report.layers] == ["1.weight", "3.weight"]
    assert report.layers[0].recovered == 1.0


def test_a_registered_attack_is_tried(digits):
    @register_attack("always")
    class Always(Attack):
        whole = True

        def applies(self, seen, view):
            return ""

        def run(self, seen, view, budget):
            assert isinstance(budget, Budget)
            return Result("always", "", "data", 1.0, "correlation", 0.0, torch.ones(len(seen.batch)))

    try:
        assert audit(digits, rank=1, attacks=("always",)).recovered == 1.0
    finally:
        del ATTACKS["always"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "nope"}, "unknown mode"),
        ({"rank": 0}, "rank must be"),
        ({"wire": "int4"}, "unknown wire"),
        ({"banana": 1}, "unknown option"),
        ({"observer": "moon"}, "observer must be"),
        ({"seconds": 0}, "seconds must be"),
        ({"seconds": "long"}, "seconds must be"),
        ({"attacks": ("nope",)}, "unknown attack"),
        ({"attacks": "span"}, "sequence of names"),
        ({"mode": "localsgd", "every": 0}, "every must be"),
        ({"mode": "localsgd", "every": 64}, "needs a batch"),
        ({"mode": "localsgd", "lr": -1.0}, "lr must be"),
    ],
)
def test_bad_options_are_refused(digits, change, message):
    with pytest.raises(ValueError, match=message):
        audit(digits, **change)


def test_bad_batches_are_refused(digits):
    images, labels = digits
    for inputs, targets, message in (
        (images, labels[:3], "16 samples, targets 3"),
        (images[:0], labels[:0], "no samples"),
        (images * float("nan"), labels, "NaN or Inf"),
        ("text", labels, "inputs must be"),
    ):
        with pytest.raises(ValueError, match=message):
            dadplug.audit(make(), CRITERION, inputs, targets)
    refuses(
        (lambda: dadplug.audit(lambda inputs: inputs, CRITERION, images, labels), "model must be"),
        (lambda: dadplug.audit(make(), "mean", images, labels), "criterion must be"),
        (lambda: dadplug.audit(make().requires_grad_(False), CRITERION, images, labels), "no parameter"),
    )


def test_optimisation_searches_the_span_of_the_first_layer():
    torch.manual_seed(0)
    batch = torch.randn(3, 60), torch.randint(0, 10, (3,))
    model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 10))
    found = of(audit(batch, "dsgd", model, attacks=("inversion",), seconds=20.0), "inversion")
    assert "within the span" in found.note
    assert found.similarity > 0.9


def test_pictures_that_a_convolution_sends():
    torch.manual_seed(0)
    batch = torch.rand(2, 1, 12, 12), torch.randint(0, 10, (2,))
    model = nn.Sequential(nn.Conv2d(1, 64, 9), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    report = audit(batch, "dad", model, attacks=("rows",))
    assert (report.layers[0].path, report.layers[0].exposure) == ("factors", "raw inputs")
    rows = report.layers[0].results[0]
    assert rows.recovered == report.recovered == 1.0
    assert torch.allclose(rows.pictures, batch[0], atol=1e-5)
    assert audit(batch, "dad", model, attacks=("rows",), share_inputs=False).recovered == 0.0


@pytest.mark.parametrize(("mode", "rank"), [("rankdad", 8), ("rankdad", 20), ("dsgd", 8)])
def test_private_gradients_are_at_chance(digits, mode, rank, monkeypatch):
    """Without privacy each of the attacks finds all of the same data in as many rounds."""
    monkeypatch.setattr(separation, "_ROUNDS", 30)
    batch = digits[0][:8], digits[1][:8]
    privacy = dadplug.DifferentialPrivacy(noise_multiplier=1.1, max_grad_norm=1.0, sample_rate=0.01, expected_batch=8)
    report = audit(batch, mode, rank=rank, privacy=privacy, attacks=("rows", "span", "spear", "components"))
    assert report.recovered == 0.0
    assert of(report, "span").similarity < of(report, "span").chance + 0.3
    assert {layer.exposure for layer in report.layers} == {"private"}
    shown = audit(batch, mode, rank=20, attacks=("span", "spear"))
    assert {result.attack: result.recovered for result in shown.results} == {"span": 1.0, "spear": 1.0}
    assert "do not explain" not in of(shown, "spear").note  # it has confirmed what it found


def test_directions_that_explain_nothing_are_stated(digits, monkeypatch):
    monkeypatch.setattr(separation, "_ROUNDS", 0)  # draws alone, too few for sixteen samples
    found = of(audit(digits, rank=20, attacks=("spear",)), "spear")
    assert found.recovered < 0.5
    assert "which do not explain the layer's outputs" in found.note


def test_a_span_that_holds_strangers_confirms_nothing():
    torch.manual_seed(0)
    batch = torch.randn(8, 3) @ torch.randn(3, 60), torch.randint(0, 10, (8,))
    model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 10))
    report = audit(batch, "dsgd", model, attacks=("span",))
    assert report.recovered == 0.0
    assert of(report, "span").chance > 0.99
    assert "unrelated samples" in of(report, "span").note
    assert of(report, "span").pictures is None
    other = torch.randn(8, 60), batch[1]
    assert audit(other, "dsgd", model, attacks=("span",)).recovered == 1.0


# Captures: the messages of an audit are those of the exchange, in the formats of the network

MODES = [
    ("dsgd", {}, 1e-6),
    ("dsgd", {"wire": "bf16"}, 1e-2),
    ("dsgd", {"wire": "int8"}, 0.05),
    ("dad", {}, 1e-6),
    ("dad", {"share_inputs": False}, 1e-6),
    ("dad", {"wire": "int8"}, 0.05),
    ("dad", {"fused": True}, 1e-6),
    ("edad", {}, 1e-6),
    ("rankdad", {"rank": 8}, 1e-5),
    ("rankdad", {"rank": 4}, 0.9),
    ("rankdad", {"rank": 8, "error_feedback": True}, 1e-5),
    ("powersgd", {"rank": 4}, 0.95),
    ("topk", {"density": 0.1}, 0.95),
    ("localsgd", {"every": 1}, 1e-4),
    ("localsgd", {"every": 1, "wire": "int8"}, 0.05),
]


@pytest.fixture
def batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    return Batch(model, nn.CrossEntropyLoss(), torch.randn(8, 20), torch.randint(0, 10, (8,)))


def gradients(batch):
    model = copy.deepcopy(batch.model)
    batch.loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("mode", "options", "tolerance"), MODES, ids=str)
def test_the_gradient_that_is_seen_is_that_of_the_site(batch, mode, options, tolerance):
    own, seen = gradients(batch), capture(batch, mode, **options)
    assert seen.bytes_sent > 0
    assert set(seen.gradients) == set(own)
    errors = [float((view.gradient() - own[view.name]).norm() / own[view.name].norm()) for view in seen.layers]
    assert max(errors) <= tolerance
    if tolerance > 1e-4:
        assert max(errors) > 1e-5  # the formats of the network have taken their part
    for name, gradient in seen.gradients.items():
        assert (gradient - own[name]).norm() <= max(tolerance, 1e-5) * own[name].norm() * 1.01, name


def test_rows_are_seen_where_they_are_sent(batch):
    layers = {view.name: view for view in capture(batch, "dad", share_inputs=False).layers}
    assert layers["0.weight"].inputs is None
    assert layers["0.weight"].fed_by_data
    assert torch.equal(layers["2.weight"].inputs, layers["2.weight"].truth)
    assert layers["2.weight"].sends_rows
    assert not capture(batch, "rankdad", rank=8).layers[0].sends_rows
    assert torch.equal(capture(batch, "dad").layers[0].inputs, batch.inputs)


def test_deltas_that_are_not_sent_are_recomputed(batch):
    exact, chained = capture(batch, "dad"), capture(batch, "edad")
    assert chained.bytes_sent < exact.bytes_sent
    for one, other in zip(exact.layers, chained.layers, strict=True):
        assert torch.allclose(one.deltas, other.deltas, atol=1e-6)


def test_convolutions_and_tables():
    torch.manual_seed(0)
    pictures = nn.Sequential(nn.Conv2d(1, 64, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10))
    seen = capture(Batch(pictures, nn.CrossEntropyLoss(), torch.randn(2, 1, 8, 8), torch.tensor([1, 2])), "dad")
    assert [view.name for view in seen.layers] == ["0.weight", "3.weight"]
    words = nn.Sequential(nn.Embedding(200, 16), nn.Flatten(), nn.Linear(64, 10))
    text = torch.randint(0, 200, (4, 4))
    seen = capture(Batch(words, nn.CrossEntropyLoss(), text, torch.tensor([1, 2, 3, 4])), "rankdad")
    assert sorted(seen.layers[0].inputs[:, 0].tolist()) == sorted(set(text.flatten().tolist()))


def test_the_caller_keeps_model_and_generator(batch):
    before, state = copy.deepcopy(batch.model.state_dict()), torch.get_rng_state()
    capture(batch, "rankdad")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in batch.model.state_dict().items())
