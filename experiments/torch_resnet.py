"""Images/s of PyTorch on the ResNet and the GPU that `check_gpu.py` measures; prints the number, or why there is none.

As fast as its users run it: channels last, bfloat16, `torch.compile` with CUDA graphs, fused SGD, one batch of uint8
images that lies on the GPU. It mirrors no images and decays all parameters, which takes no measurable time.
"""

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

WARMUP_STEPS = 10  # the first compiles, the next ones record CUDA graphs


def make_step(torch: Any, model: Any, images: Any, labels: Any) -> Callable[[], None]:
    """Returns one update of the model on the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)

    def forward(images: Any, labels: Any) -> Any:
        with torch.autocast(images.device.type, torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(images.float() / 63.75 - 2), labels)

    compiled = torch.compile(forward, mode="reduce-overhead")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(arch: str, size: int, num_classes: int, batch: int, num_steps: int) -> float:
    """Returns images/s; PyTorch is imported by name because it is no dependency of trjax."""
    torch, models = import_module("torch"), import_module("torchvision.models")
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last
    model = getattr(models, arch)(num_classes=num_classes).to("cuda", memory_format=layout).train()
    images = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, device="cuda").contiguous(
        memory_format=layout
    )
    step = make_step(torch, model, images, torch.randint(num_classes, (batch,), device="cuda"))
    for _ in range(WARMUP_STEPS):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    return batch * num_steps / (time.perf_counter() - start)


def main(arguments: Sequence[str]) -> str:
    """Returns what to print for ARCH SIZE CLASSES BATCH STEPS."""
    if find_spec("torch") is None:
        return "PyTorch: not installed here"
    if find_spec("torchvision") is None:
        return "PyTorch: left out, torchvision is not installed here"
    if not import_module("torch").cuda.is_available():
        return "PyTorch: left out, it sees no GPU here"
    arch, *numbers = arguments
    return str(measure(arch, *map(int, numbers)))


if __name__ == "__main__":
    print(main(sys.argv[1:]))
