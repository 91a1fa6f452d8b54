"""The networks whose training steps are compared: random weights, sizes by device, blocks that can be checkpointed.

All operators have deterministic GPU kernels, so that gradients can be compared bit for bit: no max pooling, no
interpolation, no loss over images.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from other_networks import ByteGRU, DilatedNet, Encoder, Mixer, ResidualNet
from torch import Tensor, nn
from torch.nn import functional

from offload.demo.model import VOCABULARY, ByteGPT, Shape

# Every figure is that of a first training: what an earlier one has measured does not count (`same_script.py` differs).
os.environ.setdefault("OFFLOAD_SEARCH_ANEW", "1")

CLASSES = 16
Size = dict[str, int]


class Bottleneck(nn.Module):
    """A residual block of 1 × 1, 3 × 3 and 1 × 1 convolutions, as in ResNet-50."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width_in, y, x) → (batch, 4 × width, y / stride, x / stride)."""
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Four stages of bottlenecks; 3, 4, 6 and 3 of them with width 64 make ResNet-50."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size["width"]
        stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 2, 1, bias=False),
        )
        blocks: list[nn.Module] = [stem]
        width_in = width
        for stage in range(4):
            for number in range(size[f"blocks{stage}"]):
                blocks.append(Bottleneck(width_in, width << stage, 2 if stage and not number else 1))
                width_in = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width_in, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, resolution, resolution) → logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def convolutions(width_in: int, width: int) -> nn.Sequential:
    """Two convolutions with their normalisation, as a U-Net has at every level."""
    return nn.Sequential(
        nn.Conv2d(width_in, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """An encoder and a decoder with skips between them; every pixel is classified."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths = [size["width"] << level for level in range(size["levels"])]
        self.down = nn.ModuleList(
            convolutions(before, width) for before, width in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(width, width, 2, 2) for width in widths[:-1])
        pairs = list(zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, width, 2, 2) for width, below in pairs)
        self.up = nn.ModuleList(convolutions(2 * width, width) for width, _ in pairs)
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    @property
    def blocks(self) -> list[nn.Module]:
        """What checkpointing recomputes as one."""
        return [*self.down, *self.up]

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, resolution, resolution) → logits (batch, classes, resolution, resolution)."""
        skips = []
        for down, shrink in zip(self.down, self.shrink, strict=False):
            skips.append(down(x))
            x = shrink(skips[-1])
        x = self.down[-1](x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat((skips.pop(), grow(x)), 1))
        return self.head(x)  # type: ignore[no-any-return]


class RecurrentLayer(nn.Module):
    """One LSTM layer with a residual path; only its sequence goes on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        return x + self.lstm(self.norm(x))[0]  # type: ignore[no-any-return]


class ByteLSTM(nn.Module):
    """Layers of LSTMs over bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size["width"])
        self.blocks = nn.ModuleList(RecurrentLayer(size["width"]) for _ in range(size["layers"]))
        self.head = nn.Linear(size["width"], VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Int64 (batch, length) → logits (…, 256)."""
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer: patches, a learnt position each, encoder blocks, the mean."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, patch = size["width"], size["patch"]
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((size["resolution"] // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, size["heads"], 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(size["layers"])
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, resolution, resolution) → logits."""
        hidden = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


def gpt(size: Size) -> ByteGPT:
    """Make the demonstration's GPT."""
    return ByteGPT(Shape(**{name: size[name] for name in ("layers", "width", "heads", "batch", "length")}))


def text(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bytes, and those that follow each."""
    drawn = torch.randint(VOCABULARY, (size["batch"], size["length"] + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def images(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images with a class each."""
    pixels = torch.randn(size["batch"], 3, size["resolution"], size["resolution"], generator=generator)
    return pixels, torch.randint(CLASSES, (size["batch"],), generator=generator)


def labelled_pixels(size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images with a class for each pixel."""
    resolution = size["resolution"]
    pixels = torch.randn(size["batch"], 3, resolution, resolution, generator=generator)
    return pixels, torch.randint(CLASSES, (size["batch"], resolution, resolution), generator=generator)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy; classes are the last dimension, of images the second."""
    if logits.dim() == 4:
        logits = logits.permute(0, 2, 3, 1)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), target.reshape(-1))


@dataclass(frozen=True)
class Family:
    """One kind of network: how to make it, what it learns from, and its sizes by purpose.

    `quick` takes a quarter of a second a step on two cores, `full` about a second; what they save is at least ten times
    their parameters.
    """

    make: Callable[[Size], nn.Module]
    draw: Callable[[Size, torch.Generator], tuple[Tensor, Tensor]]
    tiny: Size
    quick: Size
    full: Size


DEMO: Size = {"layers": 8, "width": 320, "heads": 5, "batch": 20, "length": 256}  # the GPT of `offload demo`
FAMILIES = {
    "gpt": Family(
        gpt,
        text,
        tiny={"layers": 2, "width": 32, "heads": 2, "batch": 2, "length": 32},
        quick={"layers": 4, "width": 256, "heads": 4, "batch": 8, "length": 256},
        full={"layers": 6, "width": 320, "heads": 5, "batch": 10, "length": 256},
    ),
    "resnet": Family(
        ResNet,
        images,
        tiny={"width": 8, "blocks0": 1, "blocks1": 1, "blocks2": 1, "blocks3": 1, "resolution": 32, "batch": 2},
        quick={"width": 24, "blocks0": 2, "blocks1": 2, "blocks2": 2, "blocks3": 1, "resolution": 128, "batch": 12},
        full={"width": 32, "blocks0": 3, "blocks1": 4, "blocks2": 6, "blocks3": 3, "resolution": 128, "batch": 24},
    ),
    "unet": Family(
        UNet,
        labelled_pixels,
        tiny={"width": 8, "levels": 3, "resolution": 16, "batch": 2},
        quick={"width": 32, "levels": 4, "resolution": 96, "batch": 4},
        full={"width": 40, "levels": 4, "resolution": 160, "batch": 6},
    ),
    "lstm": Family(
        ByteLSTM,
        text,
        tiny={"layers": 2, "width": 32, "batch": 2, "length": 16},
        quick={"layers": 4, "width": 320, "batch": 16, "length": 96},
        full={"layers": 4, "width": 448, "batch": 24, "length": 128},
    ),
    "vit": Family(
        ViT,
        images,
        tiny={"layers": 2, "width": 32, "heads": 2, "resolution": 32, "patch": 8, "batch": 2},
        quick={"layers": 4, "width": 192, "heads": 3, "resolution": 128, "patch": 8, "batch": 8},
        full={"layers": 6, "width": 320, "heads": 5, "resolution": 128, "patch": 8, "batch": 10},
    ),
}


# Those that no test of the engine trains. `quick` takes between 40 and 250 ms a step on two cores.
OTHERS = {
    "residual": Family(
        lambda size: ResidualNet(size, CLASSES),
        images,
        tiny={"width": 16, "layers": 2, "resolution": 16, "batch": 2},
        quick={"width": 32, "layers": 6, "resolution": 128, "batch": 4},
        full={"width": 64, "layers": 10, "resolution": 256, "batch": 8},
    ),
    "mixer": Family(
        lambda size: Mixer(size, CLASSES),
        images,
        tiny={"width": 16, "layers": 2, "resolution": 16, "patch": 4, "batch": 2},
        quick={"width": 128, "layers": 6, "resolution": 128, "patch": 8, "batch": 4},
        full={"width": 256, "layers": 8, "resolution": 128, "patch": 8, "batch": 16},
    ),
    "encoder": Family(
        lambda size: Encoder(size, VOCABULARY),
        text,
        tiny={"width": 32, "layers": 2, "heads": 2, "batch": 2, "length": 16},
        quick={"width": 256, "layers": 4, "heads": 4, "batch": 4, "length": 192},
        full={"width": 320, "layers": 6, "heads": 5, "batch": 10, "length": 256},
    ),
    "gru": Family(
        lambda size: ByteGRU(size, VOCABULARY),
        text,
        tiny={"width": 32, "layers": 2, "batch": 2, "length": 16},
        quick={"width": 192, "layers": 3, "batch": 12, "length": 64},
        full={"width": 448, "layers": 4, "batch": 24, "length": 128},
    ),
    "dilated": Family(
        lambda size: DilatedNet(size, VOCABULARY),
        text,
        tiny={"width": 16, "layers": 3, "batch": 2, "length": 32},
        quick={"width": 96, "layers": 8, "batch": 6, "length": 512},
        full={"width": 192, "layers": 12, "batch": 12, "length": 1024},
    ),
}


def family_of(name: str) -> Family:
    """A family by its name."""
    return FAMILIES[name] if name in FAMILIES else OTHERS[name]


def build(family: str, size: Size, *, seed: int, device: str, dtype: torch.dtype) -> nn.Module:
    """Make a network with the weights that the seed decides, in training mode."""
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return family_of(family).make(size).train()
    finally:
        torch.set_default_dtype(torch.float32)


def batch_of(
    family: str, size: Size, *, seed: int, step: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Draw a step's input and target, the same for every contestant."""
    x, y = family_of(family).draw(size, torch.Generator().manual_seed(1000 * seed + step))
    x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
    return x, y.to(device)
