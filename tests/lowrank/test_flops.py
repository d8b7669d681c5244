"""Operations of a training step, by torch's own counter: backward forms no weight gradient that factors stand for."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dadplug
from dadplug.models import ViT
from dadplug.step.reducer.factors import FactorHandler

RANK = 2
ROWS = 6


def mlp():
    layers = (nn.Linear(20, 48, bias=False), nn.ReLU(), nn.Linear(48, 40), nn.BatchNorm1d(40), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(40, 7)), torch.randn(ROWS, 20)


def cnn():
    layers = (nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, groups=2), nn.ReLU())
    wide = nn.Conv2d(48, 96, 3)  # factors of few positions, which dad sends
    return nn.Sequential(*layers, wide, nn.Flatten(), nn.Linear(96, 7)), torch.randn(ROWS, 3, 9, 9)


def vit():
    model = ViT(image_size=16, patch_size=8, classes=7, dim=48, depth=2, heads=4, k=4)
    return model, torch.randn(ROWS, 3, 16, 16)


MODELS = {"mlp": mlp, "cnn": cnn, "vit": vit}


def in_place(sum_shape, left, right, **others):
    """Flops of ``addmm_``, which the counter does not know."""
    return 2 * left[0] * left[1] * right[1]


def flops(run):
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        run()
    return counter.get_total_flops()


def backward_flops(model, inputs, frozen=()):
    """Flops of autograd's backward, with the weights of these names frozen, but through all of the model."""
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
        layer = model.get_submodule(name.rpartition(".")[0])
        layer.register_forward_hook(lambda _, __, output: output if output.requires_grad else output.requires_grad_())
    loss = F.cross_entropy(model(inputs), torch.arange(len(inputs)))
    return flops(loss.backward)


def counts(name, mode):
    """Flops of a settled step: of backward, of what compresses within it, of `synchronize`; and what to expect."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    whole = backward_flops(*MODELS[name]())
    dense = {"dense": "allreduce"} if mode == "rankdad" else {}  # gradients without factors are formed in any case
    reduction = dadplug.GradientReduction(model, mode=mode, rank=RANK, error_feedback=False, **dense)
    encoding, fill = [], FactorHandler.fill

    def counted(*args):
        nbytes = []
        encoding.append(flops(lambda: nbytes.append(fill(*args))))
        return nbytes[0]

    FactorHandler.fill = counted
    try:
        for _ in range(3):
            encoding.clear()
            model.zero_grad()
            loss = F.cross_entropy(model(inputs), torch.arange(ROWS))
            backward = flops(loss.backward)
            decoding = flops(reduction.synchronize)
    finally:
        FactorHandler.fill = fill
        reduction.detach()
    factored = [row for row in reduction.plan if row.path in ("factors", "lowrank") and len(row.shape) > 1]
    model, inputs = MODELS[name]()
    without = backward_flops(model, inputs, [row.parameter for row in factored])
    sites = dist.get_world_size() if dist.is_initialized() else 1
    return backward, sum(encoding), decoding, whole, without, [row.shape for row in factored], sites


def check_dad(name):
    backward, encoding, decoding, whole, without, shapes, sites = counts(name, "dad")
    assert len(shapes) >= 2
    assert encoding == 0
    assert backward == without < whole
    assert decoding == sites * (whole - without)  # the weight gradients, of all sites' rows


def check_rankdad(name):
    backward, encoding, decoding, whole, without, shapes, sites = counts(name, "rankdad")
    assert len(shapes) >= 2
    assert backward - encoding == without < whole
    sizes = [(shape[0], torch.Size(shape[1:]).numel()) for shape in shapes]
    assert encoding < whole - without  # compression is less work than the gradients that it spares
    assert decoding <= sum(2 * sites * RANK * out * width for out, width in sizes)


@pytest.mark.parametrize("name", MODELS)
def test_backward_of_dad_forms_no_weight_gradient(sites, name):
    check_dad(name)
    sites(2).run(check_dad, name)


@pytest.mark.parametrize("name", MODELS)
def test_backward_of_rankdad_forms_no_weight_gradient_but_to_compress(sites, name):
    check_rankdad(name)
    sites(2).run(check_rankdad, name)
