"""Models that other people wrote, in every mode, compared as the zoo is, see `zoo_training`.

Weights are random and of 64 bits; nothing is loaded from a hub.
"""

from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from zoo_training import is_refused, trains

from dadplug.step.methods import METHODS, method_names

pytestmark = pytest.mark.slow

WORDS, LENGTH, CLASSES = 48, 6, 4
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def in_64_bits(model: nn.Module) -> nn.Module:
    """Replace norms that compute in 32 bits whatever the type of their input."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                setattr(parent, name, nn.RMSNorm(len(child.weight), child.variance_epsilon))
    return model


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

    return in_64_bits(LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SIZES, **ENDS)))


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
    return in_64_bits(T5ForConditionalGeneration(config))


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

    def forward(self, x: Tensor) -> Tensor:
        """The nodes form a ring."""
        ring = torch.eye(len(x), dtype=x.dtype) / 2 + torch.eye(len(x), dtype=x.dtype).roll(1, 0) / 2
        return torch.sparse.mm(ring.to_sparse(), self.lin(x)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConvolution(20, 16), GraphConvolution(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x).relu())


Inputs = dict[str, Tensor]


def texts(count: int, generator: torch.Generator) -> Inputs:
    """Texts, of which some are padded."""
    words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    mask = torch.ones_like(words)
    mask[::2, -2:] = 0
    return {"input_ids": words, "attention_mask": mask}


def translations(count: int, generator: torch.Generator) -> Inputs:
    words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
    return {"input_ids": words.flip(1), "decoder_input_ids": words}


def numbers(name: str, *shape: int) -> Callable[[int, torch.Generator], Inputs]:
    return lambda count, generator: {name: torch.randn(count, *shape, generator=generator, dtype=torch.float64)}


OTHERS = {
    "bert": (bert, texts),
    "gpt2": (gpt2, texts),
    "llama": (llama, texts),
    "vit": (vit, numbers("pixel_values", 3, 8, 8)),
    "t5": (t5, translations),
    "gpt2 with lora": (gpt2_with_lora, texts),
    "bert with lora": (bert_with_lora, texts),
    "resnet": (ResNet, numbers("x", 3, 16, 16)),
    "mobilenet": (mobilenet, numbers("input", 3, 8, 8)),
    "gcn": (GCN, numbers("x", 20)),
}
CHAINS = ("bert", "t5", "gpt2 with lora", "bert with lora")  # models in which edad finds a chain of layers


@pytest.mark.parametrize("name", OTHERS)
@support.at_sites(2)
def test_models_of_others_train_in_every_mode(name: str) -> None:
    zoo.ZOO.update(OTHERS)
    for mode in method_names():
        if METHODS[mode].traits.recomputes_deltas and name not in CHAINS:
            is_refused(name, mode)
        else:
            paths = trains(name, mode, 4)
            assert (mode == "edad") == ("activations" in paths.values())
        if mode == "rankdad":  # most of what is trained is sent as factors
            trained = {each: p.numel() for each, p in zoo.build(name).named_parameters() if p.dim() > 1}
            trained = {each: size for each, size in trained.items() if paths[each] != "frozen"}
            factored = sum(size for each, size in trained.items() if paths[each] in ("factors", "lowrank"))
            assert factored >= 0.8 * sum(trained.values())


@support.at_sites(2)
def test_models_of_others_train_on_narrow_wires() -> None:
    zoo.ZOO.update(OTHERS)
    for wire in ("bf16", "int8"):
        trains("gpt2", "dad", 3, {"wire": wire})
