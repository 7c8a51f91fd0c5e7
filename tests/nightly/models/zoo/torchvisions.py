"""Models of torchvision."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tests.nightly.models.case import Case, Entry, batches
from tests.nightly.models.zoo.media import of_x, other, vectors

VIT: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 24,
"mlp_dim": 40}
SWIN: dict[str, Any] = {"patch_size": [2, 2], "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3],
"window_size": [4, 4]}


def vision(name: str, kind: str, size: int = 32, **options: Any) -> Entry:
    """A model of torchvision with its options."""
    arguments = {"num_classes": 5, **options}
    return other(name, "torchvision", "torchvision.models", kind, vectors(3, size, size), of_x, **arguments)


def resnet() -> Case:
    """Build a ResNet with narrow bottlenecks."""
    module = import_module("torchvision.models.resnet")
    torch.manual_seed(0)
    model = module.ResNet(module.Bottleneck, [1, 1, 1, 1], num_classes=5, groups=2, width_per_group=4)
    return Case(model, of_x, batches(vectors(3, 32, 32)))


def convnext() -> Case:
    """Build a ConvNeXt with two stages."""
    module = import_module("torchvision.models.convnext")
    torch.manual_seed(0)
    model = module.ConvNeXt([module.CNBlockConfig(8, 12, 1), module.CNBlockConfig(12, None, 1)], num_classes=5)
    return Case(model, of_x, batches(vectors(3, 32, 32)))


def vgg() -> Case:
    """Build a small VGG with batch norms."""
    module = import_module("torchvision.models.vgg")
    torch.manual_seed(0)
    model = module.VGG(module.make_layers([8, "M", 512, "M"], batch_norm=True), num_classes=5, dropout=0.0)
    model.classifier = torch.nn.Sequential(*[torch.nn.Linear(512 * 49, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5)])
    return Case(model, of_x, batches(vectors(3, 32, 32)))


MODELS: list[Entry] = [
    Entry("tv_convnext", "torchvision", convnext),
    Entry("tv_resnet", "torchvision", resnet),
    Entry("tv_vgg", "torchvision", vgg),
    vision("tv_mobilenet_v3", "mobilenet_v3_small", width_mult=0.2),
    vision("tv_shufflenet", "ShuffleNetV2", stages_repeats=[1, 1, 1], stages_out_channels=[8, 16, 24, 32, 40]),
    vision("tv_squeezenet", "squeezenet1_1", 64),
    vision("tv_swin", "SwinTransformer", 16, stochastic_depth_prob=0.0, **SWIN),
    vision("tv_vit", "VisionTransformer", 16, **VIT),
]  # fmt: skip
