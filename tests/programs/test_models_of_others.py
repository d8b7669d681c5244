"""Models that other people wrote, in every mode: two sites with unequal rows against one process in 64 bits.

Exact modes have the gradients of one process. A lossy mode is compared with what it should make of the sites' own
gradients at the same parameters: rankdad with the best approximations of its rank, topk and powersgd with their own
arithmetic in one process, what has not been sent yet included.

Weights are random and of 64 bits; nothing is loaded from a hub.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import support
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dadplug

WORDS, LENGTH, CLASSES = 48, 6, 4
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert() -> nn.Module:
    from transformers.models.bert import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **ENDS,
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SIZES, **ENDS))


def vit() -> nn.Module:
    from transformers.models.vit import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **SIZES))


def t5() -> nn.Module:
    from transformers.models.t5 import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def with_lora(model: nn.Module, layers: list[str], **options: Any) -> nn.Module:
    """Wrap the named layers in peft's LoRA; all else is frozen, unless peft has to save it."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules=layers, **options))


def gpt2_with_lora() -> nn.Module:
    return with_lora(gpt2(), ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)


def bert_with_lora() -> nn.Module:
    return with_lora(bert(), ["query", "value"], modules_to_save=["classifier"])


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + identity)


class ResNet(nn.Module):
    """A ResNet-18 of narrow layers, for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        blocks, width = [], 4
        for out, stride in ((4, 1), (8, 2), (12, 2), (16, 2)):
            blocks += [Residual(width, out, stride), Residual(out, out, 1)]
            width = out
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(self.layers(x).mean((2, 3)))


class Inverted(nn.Module):
    """An inverted residual of a MobileNet: a depthwise convolution between two of one position."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        inner = 3 * width
        self.residual = stride == 1 and width == out
        self.conv = nn.Sequential(
            *(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True)),
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


def mobilenet() -> nn.Module:
    """A MobileNet of three blocks, whose batch norms are frozen as in fine-tuning."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
        *(Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(12, CLASSES)),
    )
    return model.eval()


class GraphLinear(nn.Module):
    """torch_geometric's linear layer, by name and by what it computes."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


GraphLinear.__module__, GraphLinear.__qualname__ = "torch_geometric.nn.dense.linear", "Linear"


class GraphConvolution(nn.Module):
    """A linear layer, and the mean over neighbours by a sparse product."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.lin = GraphLinear(width, out)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, self.lin(x)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConvolution(20, 16), GraphConvolution(16, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, adjacency).relu(), adjacency)


Batch = dict[str, Tensor]


def texts(count: int, generator: torch.Generator) -> Batch:
    """Texts with their classes, of which some are padded."""
    words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    mask = torch.ones_like(words)
    mask[::2, -2:] = 0
    return {"input_ids": words, "attention_mask": mask, "targets": words[:, 0] % CLASSES}


def sentences(count: int, generator: torch.Generator) -> Batch:
    """Texts whose words are predicted from those before."""
    words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    return {"input_ids": words[:, :-1], "targets": words[:, 1:]}


def translations(count: int, generator: torch.Generator) -> Batch:
    words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    shifted = F.pad(words[:, :-1], (1, 0))
    return {"input_ids": words.flip(1), "decoder_input_ids": shifted, "targets": words}


def images(size: int, name: str) -> Callable[[int, torch.Generator], Batch]:
    def batch(count: int, generator: torch.Generator) -> Batch:
        pixels = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)
        return {name: pixels, "targets": (pixels.mean((1, 2, 3)) > 0).long()}

    return batch


def graphs(count: int, generator: torch.Generator) -> Batch:
    """A ring of nodes with their classes."""
    features = torch.randn(count, 20, generator=generator, dtype=torch.float64)
    adjacency = torch.eye(count, dtype=torch.float64) + torch.eye(count, dtype=torch.float64).roll(1, 0)
    targets = (features[:, 0] > 0).long()
    return {"x": features, "adjacency": (adjacency / adjacency.sum(1, True)).to_sparse(), "targets": targets}


class Subject(NamedTuple):
    """A model that is tried.

    Attributes:
        build: makes it.
        batch: makes a batch of so many samples.
        factored: least share of the elements of its trained matrices that rankdad sends as factors.
        chains: whether edad finds a chain of layers in it.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    factored: float
    chains: bool = False


SUBJECTS = {
    "bert": Subject(bert, texts, 0.8, chains=True),
    "gpt2": Subject(gpt2, sentences, 0.8),
    "llama": Subject(llama, sentences, 0.8),
    "vit": Subject(vit, images(8, "pixel_values"), 0.8),
    "t5": Subject(t5, translations, 0.8, chains=True),
    "gpt2 with lora": Subject(gpt2_with_lora, sentences, 0.8, chains=True),
    "bert with lora": Subject(bert_with_lora, texts, 0.8, chains=True),
    "resnet": Subject(ResNet, images(16, "x"), 0.8),
    "mobilenet": Subject(mobilenet, images(8, "input"), 0.8),
    "gcn": Subject(GCN, graphs, 0.8),
}


def in_64_bits(model: nn.Module) -> nn.Module:
    """Replace norms that compute in 32 bits whatever the type of their input."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                setattr(parent, name, nn.RMSNorm(len(child.weight), child.variance_epsilon))
    return model.double()


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = in_64_bits(SUBJECTS[name].build())
    return model if name == "mobilenet" else model.train()


def batch(name: str, counts: list[int], step: int) -> list[Batch]:
    """The sites' batches of a step."""
    return [
        SUBJECTS[name].batch(count, torch.Generator().manual_seed(100 * step + site))
        for site, count in enumerate(counts)
    ]


def loss(model: nn.Module, given: Batch) -> Tensor:
    outputs = model(**{name: value for name, value in given.items() if name != "targets"})
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, -2), given["targets"].flatten())


def union(pieces: list[Batch]) -> Batch:
    """One batch of all sites' samples."""

    def joined(values: list[Tensor]) -> Tensor:
        if values[0].is_sparse:
            return torch.block_diag(*(value.to_dense() for value in values)).to_sparse()
        return torch.cat(values)

    return {name: joined([piece[name] for piece in pieces]) for name in pieces[0]}


# Models that other people wrote, in every mode: two sites with unequal rows against one process in 64 bits


pytestmark = pytest.mark.slow

COUNTS = [3, 2]
STEPS = 5
RANK, DENSITY = 2, 0.25
EXACT = ("dsgd", "dad", "auto", "edad")
Gradients = dict[str, Tensor]
Paths = dict[str, str]


def gradients(model: nn.Module, batch: Batch, share: float = 1.0) -> Gradients:
    """Return autograd's own gradients of a batch's loss, by name."""
    model.zero_grad()
    (share * loss(model, batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def progress(name: str, model: nn.Module) -> float:
    """Return how far the loss of the first batch has come from the start."""
    first = union(batch(name, COUNTS, 0))
    with torch.no_grad():
        return float(loss(build(name).eval(), first) - loss(copy.deepcopy(model).eval(), first))


def one_process(name: str) -> tuple[list[Gradients], float]:
    """Train in one process with all rows; return each step's gradients, and how far the loss has come."""
    model, found = build(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        found.append(gradients(model, union(batch(name, COUNTS, step))))
        optimizer.step()
    return found, progress(name, model)


class Check:
    """A check of each step's agreed gradients.

    Attributes:
        progress: how far the loss has come in training.
    """

    progress = 0.0

    def __call__(self, step: int, model: nn.Module, pieces: list[Batch], paths: Paths) -> None:
        raise NotImplementedError


class Exact(Check):
    """A check that gradients are those of one process."""

    def __init__(self, expected: list[Gradients]) -> None:
        self.expected = expected

    def __call__(self, step: int, model: nn.Module, pieces: list[Batch], paths: Paths) -> None:
        whole = norm(self.expected[step].values())
        for parameter, p in model.named_parameters():
            assert (p.grad is None) == (parameter not in self.expected[step]), f"step {step}: {parameter}"
            if p.grad is not None:
                q = self.expected[step][parameter]
                error = norm([p.grad - q])
                assert error <= 1e-9 * norm([q]) + 1e-13 * whole, f"step {step}: {parameter} is off by {error:.1e}"


class Lossy(Check):
    """A check of each step's gradients against what a mode should make of the sites' own at the same parameters.

    Args:
        name: the model.
        rounding: relative error of numbers on the wire.
    """

    def __init__(self, name: str, rounding: float = 0.0) -> None:
        self.model = build(name).eval()
        self.rounding = rounding

    def __call__(self, step: int, model: nn.Module, pieces: list[Batch], paths: Paths) -> None:
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), model.parameters()):
                p.copy_(q)
        sites = [gradients(self.model, piece, count / sum(COUNTS)) for piece, count in zip(pieces, COUNTS)]
        whole, limits = norm(sum(each[name] for each in sites) for name in sites[0]), []
        for parameter, p in model.named_parameters():
            assert (p.grad is None) == (parameter not in sites[0]), f"step {step}: {parameter}"
            if p.grad is None:
                continue
            own = [each[parameter].reshape(len(p), -1) for each in sites]
            found, expected, limit = p.grad.reshape(len(p), -1), sum(own), 0.0
            if paths[parameter] not in ("allreduce", "factors") and p.dim() > 1:
                expected, limit = self.expect(parameter, found, own)
            error = norm([found - expected])
            allowed = limit + 1e-9 * norm(own) + 1e-13 * whole + self.rounding * (norm(own) + 0.03 * whole)
            assert error <= allowed, f"step {step}: {parameter} is off by {error:.1e}, and may be by {allowed:.1e}"
            limits.append(limit)
        assert math.hypot(*limits) < 0.9 * whole, "the limits would let a gradient of zeros pass"

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        """Return the gradient that is expected of the sites' own, as matrices, and how far the agreed one may be."""
        return sum(own), 0.0


class BestOfRank(Lossy):
    """rankdad: as near as the best approximations of the sites' gradients."""

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        return sum(own), 1.05 * sum(norm([torch.linalg.svdvals(each)[RANK:]]) for each in own)


class Projection(Lossy):
    """powersgd: all of the gradient, and of what has not been sent, in as many columns as the rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unsent: Gradients = {}

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        whole = sum(own) + self.unsent.get(parameter, 0.0)
        columns = torch.linalg.svd(found)[0][:, :RANK]
        sent = columns @ (columns.T @ whole)
        self.unsent[parameter] = whole - sent
        return sent, 0.0


class Largest(Lossy):
    """topk: each site's largest elements, those that have not been sent included."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unsent: dict[str, list[Tensor]] = {}

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        whole = [each + left for each, left in zip(own, self.unsent.get(parameter, [0.0, 0.0]))]
        sent = []
        for each in whole:
            places = each.abs().flatten().topk(math.ceil(DENSITY * each.numel())).indices
            sent.append(torch.zeros_like(each).flatten().index_put((places,), each.flatten()[places]).view_as(each))
        self.unsent[parameter] = [each - part for each, part in zip(whole, sent)]
        return sum(sent), 0.0


def trains(name: str, check: Check, steps: int = STEPS, *, spoil: float | None = None, **options: Any) -> Paths:
    """Train on this site.

    Args:
        name: the model.
        check: is given each step's agreed gradients.
        steps: number of steps.
        spoil: factor of the agreed gradients that are compressed.
        options: the reduction's options.

    Returns:
        The path of each parameter.
    """
    model = build(name)
    if options["mode"] not in EXACT:
        model.eval()  # statistics of a batch would be those of one site
    reduction = dadplug.GradientReduction(model, **{"weighting": "samples"} | options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        pieces = batch(name, COUNTS, step)
        loss(model, pieces[dist.get_rank()]).backward()
        reduction.synchronize()
        paths = {row.parameter: str(row.path) for row in reduction.plan}
        if spoil is not None:
            for parameter, p in model.named_parameters():
                if p.grad is not None and (
                    options["mode"] in EXACT or paths[parameter] not in ("allreduce", "factors")
                ):
                    p.grad.mul_(spoil)
        check(step, model, pieces, paths)
        optimizer.step()
    assert reduction.first_difference() is None
    reduction.detach()
    check.progress = progress(name, model)
    return paths


RANKDAD: dict[str, Any] = {
    "mode": "rankdad",
    "rank": RANK,
    "warm_start": False,
    "tolerance": 0.0,
    "error_feedback": False,
}
LOSSY: list[tuple[type[Lossy], dict[str, Any]]] = [
    (BestOfRank, RANKDAD),
    (Projection, {"mode": "powersgd", "rank": RANK}),
    (Largest, {"mode": "topk", "density": DENSITY}),
]


@pytest.mark.parametrize("name", SUBJECTS)
@support.at_sites(2)
def test_models_of_others_train_in_every_mode(name: str) -> None:
    subject = SUBJECTS[name]
    expected, of_one = one_process(name)
    options = {"sync_batchnorm": True} if name == "resnet" else {}
    for mode in EXACT:
        if mode != "edad" or subject.chains:
            paths = trains(name, Exact(expected), mode=mode, **options)
            assert (mode == "edad") == ("activations" in paths.values())
        else:
            with pytest.raises(ValueError, match="Use mode='dad'"):
                trains(name, Exact(expected), mode=mode)
    for kind, options in LOSSY:
        paths = trains(name, check := kind(name), **options)
        assert check.progress > 0.5 * of_one
        if options["mode"] == "rankdad":
            sizes = {parameter: p.numel() for parameter, p in check.model.named_parameters() if p.dim() > 1}
            trained = {parameter: size for parameter, size in sizes.items() if paths[parameter] != "frozen"}
            factored = sum(size for parameter, size in trained.items() if paths[parameter] in ("factors", "lowrank"))
            assert factored >= subject.factored * sum(trained.values())


@support.at_sites(2)
def test_models_of_others_train_on_narrow_wires() -> None:
    for kind, options in LOSSY[:1]:
        for wire, rounding in (("bf16", 0.02), ("int8", 0.1)):
            trains("gpt2", kind("gpt2", rounding), wire=wire, **options)
    for wire, rounding in (("bf16", 0.02), ("int8", 0.1)):
        trains("gpt2", Lossy("gpt2", rounding), mode="dad", wire=wire)


@support.at_sites(2)
def test_the_checks_find_gradients_of_zeros_and_doubled_ones() -> None:
    checks = [(lambda: Exact(one_process("gpt2")[0]), {"mode": mode}) for mode in EXACT[:3]]
    checks += [(lambda kind=kind: kind("gpt2"), options) for kind, options in LOSSY]
    for make, options in checks:
        for factor in (0.0, 2.0):
            with pytest.raises(AssertionError, match="is off by"):
                trains("gpt2", make(), 1, spoil=factor, **options)
