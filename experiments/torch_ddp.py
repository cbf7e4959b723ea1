"""One process of PyTorch's DDP over gloo: the same ResNets, float32; started by `benchmark_step.py`.

It is told its place by the variables that `torch.distributed` reads, and what to train by its arguments. It then
answers every line of a number of steps with the seconds that they took.
"""

import sys
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

BLOCKS = {"resnet8": (1, 1, 1), "resnet20": (3, 3, 3), "resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


def make_resnet(torch: Any, arch: str, width: int, cifar: bool, num_classes: int) -> Any:
    """Returns the ResNet of `models.resnet`; three stages: without projections, as He et al. have them for CIFAR."""
    nn, functional = torch.nn, torch.nn.functional
    deep, projects = arch == "resnet50", len(BLOCKS[arch]) > 3

    def layer(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Any:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs))

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self, inputs: int, inside: int, stride: int) -> None:
            super().__init__()
            self.stride, self.outputs = stride, 4 * inside if deep else inside
            sizes = [(inputs, inside, 3, stride), (inside, inside, 3, 1)]
            if deep:
                sizes = [(inputs, inside, 1, 1), (inside, inside, 3, stride), (inside, self.outputs, 1, 1)]
            self.layers = nn.ModuleList(layer(*size) for size in sizes)
            differs = inputs != self.outputs or stride > 1
            self.shortcut = layer(inputs, self.outputs, 1, stride) if differs and projects else None

        def forward(self, x: Any) -> Any:
            y = x
            for index, own in enumerate(self.layers, start=1):
                y = own(y)
                y = y if index == len(self.layers) else functional.relu(y, inplace=True)
            if self.shortcut is not None:
                x = self.shortcut(x)
            elif (missing := self.outputs - x.shape[1]) or self.stride > 1:
                sides = (0, 0, 0, 0, missing // 2, missing - missing // 2)
                x = functional.pad(x[:, :, :: self.stride, :: self.stride], sides)
            return functional.relu(x + y, inplace=True)

    stem = [layer(3, width, *((3, 1) if cifar else (7, 2))), nn.ReLU(inplace=True)]
    layers = stem if cifar else [*stem, nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(BLOCKS[arch]):
        for block in range(count):
            layers.append(Block(channels, width * 2**stage, 2 if stage > 0 and block == 0 else 1))
            channels = layers[-1].outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


@dataclass(frozen=True)
class Job:
    """What one process trains.

    Attributes:
        arch: a name in `BLOCKS`.
        width: channels of the first stage.
        stem: `cifar` or `imagenet`.
        size: of the images, pixels a side.
        num_classes: number of logits.
        batch: images of this process.
        threads: of this process.
    """

    arch: str
    width: int
    stem: str
    size: int
    num_classes: int
    batch: int
    threads: int


def serve(job: Job) -> None:
    """Trains on one batch: reads numbers of steps, one a line, and answers each with the seconds that they took."""
    torch = import_module("torch")
    distributed = import_module("torch.distributed")
    parallel = import_module("torch.nn.parallel")
    torch.set_num_threads(job.threads)
    distributed.init_process_group("gloo")
    model = make_resnet(torch, job.arch, job.width, job.stem == "cifar", job.num_classes)
    model = model.to(memory_format=torch.channels_last).train()
    model = parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, nesterov=True)
    random = np.random.default_rng(distributed.get_rank())
    pixels = random.integers(0, 256, (job.batch, job.size, job.size, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    labels = torch.from_numpy(random.integers(0, job.num_classes, job.batch))
    print(f"torch {torch.__version__}, {sum(leaf.numel() for leaf in model.parameters())} parameters", flush=True)
    for line in sys.stdin:
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(int(line)):
            x = (images.float() / 255 - 0.5) / 0.25
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
        distributed.barrier()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    arch, width, stem, *numbers = sys.argv[1:]
    serve(Job(arch, int(width), stem, *map(int, numbers)))
