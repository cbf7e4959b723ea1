"""Recipes by name, and from a command line to a configuration.

Sources: He et al., 2016 (CIFAR ResNets: batch 128, rate 0.1 divided by 10 at 32k and 48k of 64k iterations,
decay 1e-4); Goyal et al., 2017 (ImageNet: rate 0.1 x batch / 256, 5 epochs of warm-up, /10 at 30, 60 and 80 of
90 epochs); common practice for ResNet-18 on CIFAR-10 (rate 0.1, cosine, 200 epochs, decay 5e-4; TrivialAugment as its
authors use it); Leclerc et al., "FFCV", 2023 (ImageNet in 16 to 88 epochs: rate 1.7 for 1024, growing images, BlurPool,
smoothing, mirrored test images); You et al., 2017 (LARS at 32k: 90 epochs, 5 of warm-up, a quadratic decay).
"""

from dataclasses import dataclass, replace

from trjax.config.run import Config, DataConfig, ModelConfig, OptimConfig


@dataclass(frozen=True)
class Preset:
    """A configuration, with what to expect of it."""

    config: Config
    expected: str


_CIFAR10 = DataConfig(source="cifar10", crop_padding=4, flip=True)
_HE = OptimConfig(schedule="step", milestones=(82, 123), nesterov=False)


def _imagenet_growing(epochs: int, ends: tuple[int, int], expected: str) -> Preset:
    """Images of 160 pixels, then 192, in the end their own."""
    config = Config(
        global_batch=1024,
        epochs=epochs,
        precision="bfloat16",
        data=DataConfig(source="imagenet", flip=True, flip_test=True, sizes=(160, 192), size_epochs=ends),
        model=ModelConfig(arch="resnet50", blur_pool=True),
        optim=OptimConfig(
            learning_rate=1.7, scale_from_batch=1024, schedule="linear", warmup_epochs=2, label_smoothing=0.1
        ),
    )
    return Preset(config, f"{expected} (FFCV's recipe in steps; not run here)")


def _cifar_he(arch: str, expected: str) -> Preset:
    config = Config(global_batch=128, epochs=164, data=_CIFAR10, model=ModelConfig(arch=arch), optim=_HE)  # type: ignore[arg-type]
    return Preset(config, f"{expected} (He et al.; not run here)")


_PRESETS = {
    "digits": Preset(
        Config(
            global_batch=96,
            epochs=40,
            data=DataConfig(source="digits", crop_padding=1),
            model=ModelConfig(arch="resnet8"),
            optim=OptimConfig(warmup_epochs=2, weight_decay=5e-4),
        ),
        "at least 98.5 % test top-1 in about a minute on two CPU cores",
    ),
    "cifar10-resnet20": _cifar_he("resnet20", "91.25 % test top-1; minutes on one GPU"),
    "cifar10-resnet56": _cifar_he("resnet56", "93.03 % test top-1; under an hour on one GPU"),
    "cifar10-resnet18": Preset(
        Config(
            global_batch=128,
            epochs=200,
            precision="bfloat16",
            data=_CIFAR10,
            model=ModelConfig(arch="resnet18", stem="cifar"),
            optim=OptimConfig(weight_decay=5e-4),
        ),
        "95.4 % test top-1; about an hour on one GPU (public recipes; not run here)",
    ),
    "cifar10-resnet18-modern": Preset(
        Config(
            global_batch=128,
            epochs=200,
            precision="bfloat16",
            data=replace(_CIFAR10, trivial_augment=True, cutmix=1.0, flip_test=True),
            model=ModelConfig(arch="resnet18", stem="cifar"),
            optim=OptimConfig(weight_decay=5e-4, warmup_epochs=1, label_smoothing=0.1, ema_decay=0.999),
        ),
        "above cifar10-resnet18's 95.4 % test top-1 (96 to 97 % in public recipes; not run here)",
    ),
    "imagenet-resnet50": Preset(
        Config(
            global_batch=2048,
            epochs=90,
            precision="bfloat16",
            data=DataConfig(source="imagenet", flip=True),
            model=ModelConfig(arch="resnet50"),
            optim=OptimConfig(
                scale_from_batch=256,
                schedule="step",
                milestones=(30, 60, 80),
                warmup_epochs=5,
                nesterov=False,
            ),
        ),
        "76.3 % validation top-1; 8 or more GPUs (Goyal et al.; not run here, see README for its data)",
    ),
    "imagenet-resnet50-16": _imagenet_growing(16, (11, 13), "71 % validation top-1"),
    "imagenet-resnet50-32": _imagenet_growing(32, (23, 27), "75 % validation top-1"),
    "imagenet-resnet50-88": _imagenet_growing(88, (65, 76), "78 % validation top-1"),
    "imagenet-resnet50-lars": Preset(
        Config(
            global_batch=32768,
            epochs=90,
            accumulate=2,
            precision="bfloat16",
            bn="local",
            data=DataConfig(source="imagenet", flip=True),
            model=ModelConfig(arch="resnet50"),
            optim=OptimConfig(
                kind="lars",
                learning_rate=29.0,
                scale_from_batch=32768,
                schedule="quadratic",
                warmup_epochs=5,
                weight_decay=5e-5,
                nesterov=False,
                label_smoothing=0.1,
            ),
        ),
        "75 % validation top-1 with a batch of 32,768; 64 or more GPUs (You et al.; not run here)",
    ),
}
PRESETS = {name: replace(preset, config=replace(preset.config, preset=name)) for name, preset in _PRESETS.items()}
"""All presets by name."""


def preset_config(name: str) -> Config:
    """Returns a preset's configuration.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; known: {', '.join(PRESETS)}")
    return PRESETS[name].config
