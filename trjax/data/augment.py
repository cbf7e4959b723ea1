"""From uint8 pixels to the network's input, on the device; augmentation keyed by example.

TrivialAugment does to every image one operation of fourteen, at one strength of 31, both drawn evenly. An image passes
three stages, each of which leaves it as it is unless its operation is drawn: pixels move, pixels are blended with a
plainer image, values are looked up in a table. So all images of a batch do the same, and none waits for fourteen
operations of which one is kept.

Source: Müller and Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation", 2021 (the wide ranges).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from trjax.config.run import DataConfig
from trjax.data.batches import Batch, Inputs
from trjax.data.mixing import mix
from trjax.data.spec import DataSpec
from trjax.keys import Stream, example_keys, stream_key

OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
STRENGTHS = 31
_SIGNED = OPERATIONS[1:10]
_SHEAR, _TRANSLATE, _ROTATE, _BLEND = 0.99, 32.0, 135.0, 0.99
"""The strongest: of a side; pixels, at most a side; degrees; away from a factor of 1."""
_LUMA = (0.299, 0.587, 0.114)
Preprocess = Callable[[Batch, jax.Array], Inputs]
"""Maps a block and the epoch (int32 scalar) to what the network gets and is to say."""


class ImageOperation(NamedTuple):
    """An operation of TrivialAugment.

    Attributes:
        which: its place in `OPERATIONS`, int32.
        strength: in [-1, 1], negative only where the operation has two directions.
    """

    which: jax.Array
    strength: jax.Array

    def at(self, name: str) -> jax.Array:
        """Returns the strength if this is the operation, else 0."""
        return jnp.where(self.which == OPERATIONS.index(name), self.strength, 0.0)

    def any_of(self, *names: str) -> jax.Array:
        """Returns whether this is one of the operations."""
        return jnp.isin(self.which, jnp.array([OPERATIONS.index(name) for name in names]))


def draw_operation(key: jax.Array) -> ImageOperation:
    """Returns an operation and its strength, each as likely as any other."""
    which, strength, sign = jax.random.split(key, 3)
    drawn = jax.random.randint(strength, (), 0, STRENGTHS) / (STRENGTHS - 1)
    operation = ImageOperation(jax.random.randint(which, (), 0, len(OPERATIONS)), drawn)
    negative = operation.any_of(*_SIGNED) & jax.random.bernoulli(sign)
    return operation._replace(strength=drawn * jnp.where(negative, -1, 1))


def _move(operation: ImageOperation, image: jax.Array) -> jax.Array:
    """Shears, shifts or turns about the centre, to the nearest pixel; what comes from outside is black."""
    height, width, _ = image.shape
    angle = jnp.deg2rad(_ROTATE) * operation.at("rotate")
    rows, columns = jnp.mgrid[:height, :width].astype(jnp.float32)
    y, x = rows - (height - 1) / 2, columns - (width - 1) / 2
    from_x = jnp.cos(angle) * x + (jnp.sin(angle) + _SHEAR * operation.at("shear_x")) * y
    from_y = jnp.cos(angle) * y + (_SHEAR * operation.at("shear_y") - jnp.sin(angle)) * x
    from_x += min(_TRANSLATE, width) * operation.at("translate_x") + (width - 1) / 2
    from_y += min(_TRANSLATE, height) * operation.at("translate_y") + (height - 1) / 2
    row, column = (jnp.floor(position + 0.5).astype(jnp.int32) for position in (from_y, from_x))
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    moved = image[row.clip(0, height - 1), column.clip(0, width - 1)]
    return jnp.where(inside[..., None], moved, 0)


def _gray(image: jax.Array) -> jax.Array:
    if image.shape[-1] != len(_LUMA):
        return image.mean(-1, keepdims=True)
    return jnp.round((image * jnp.array(_LUMA, ndmin=3)).sum(-1, keepdims=True))


def _smooth(image: jax.Array) -> jax.Array:
    """Averages 3x3 pixels, of which the middle one counts five times; the edge stays."""
    height, width, _ = image.shape
    around = sum(image[y : height - 2 + y, x : width - 2 + x] for y in range(3) for x in range(3))
    return image.at[1:-1, 1:-1].set(jnp.round((around + 4 * image[1:-1, 1:-1]) / 13))


def _blend(operation: ImageOperation, image: jax.Array) -> jax.Array:
    """Moves away from, or beyond, a black image, a gray one, an even one, or a smooth one."""
    gray = _gray(image)
    plainer = jnp.where(operation.any_of("color"), gray, 0.0)
    plainer = jnp.where(operation.any_of("contrast"), jnp.round(gray.mean()), plainer)
    plainer = jnp.where(operation.any_of("sharpness"), _smooth(image), plainer)
    strength = sum(operation.at(name) for name in ("brightness", "color", "contrast", "sharpness"))
    factor = 1 + _BLEND * strength
    return jnp.round(factor * image + (1 - factor) * plainer).clip(0, 255)


def _equalize(values: jax.Array) -> jax.Array:
    """Returns the table that makes all values of a channel about equally frequent, shape (256,)."""
    counts = jnp.zeros(256, jnp.int32).at[values].add(1)
    last = jnp.max(jnp.where(counts > 0, jnp.arange(256), 0))
    step = (values.size - counts[last]) // 255
    below = jnp.cumsum(counts) - counts
    return jnp.where(step > 0, ((below + step // 2) // jnp.maximum(step, 1)).clip(0, 255), jnp.arange(256))


def _look_up(operation: ImageOperation, values: jax.Array) -> jax.Array:
    """Maps every value of one channel, int32, shape (height, width), by a table."""
    table = jnp.arange(256)
    bits = 8 - jnp.round(6 * operation.at("posterize")).astype(jnp.int32)
    kept = (table >> (8 - bits)) << (8 - bits)  # all of them unless it is drawn
    bright = operation.any_of("solarize") & (table >= 255 * (1 - operation.at("solarize")))
    inverted = jnp.where(bright, 255 - kept, kept)
    low, high = values.min(), values.max()
    stretched = jnp.floor((table - low) * (255 / jnp.maximum(high - low, 1))).astype(jnp.int32).clip(0, 255)
    table = jnp.where(operation.any_of("autocontrast") & (high > low), stretched, inverted)
    return jnp.where(operation.any_of("equalize"), _equalize(values), table)[values]


def apply_operation(operation: ImageOperation, image: jax.Array) -> jax.Array:
    """Returns the image, uint8, shape (height, width, channels), with the operation done to it."""
    blended = _blend(operation, _move(operation, image).astype(jnp.float32)).astype(jnp.int32)
    channels = jax.vmap(_look_up, in_axes=(None, -1), out_axes=-1)(operation, blended)
    return channels.astype(jnp.uint8)


def normalise(images: jax.Array, spec: DataSpec) -> jax.Array:
    """Returns float32 images with the source's mean and deviation taken out, per channel."""
    scaled = images.astype(jnp.float32) / 255
    return (scaled - jnp.array(spec.mean, ndmin=4)) / jnp.array(spec.std, ndmin=4)


def _crop(key: jax.Array, image: jax.Array, padding: int) -> jax.Array:
    corner = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    padded = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    return jax.lax.dynamic_slice(padded, (*corner, 0), image.shape)


def make_augment(data: DataConfig, spec: DataSpec, seed: int, smoothing: float = 0.0, size: int = 0) -> Preprocess:
    """Returns the training preprocessing: random crop with zero padding, flip, one operation, resizing, mixing.

    What happens to an example is a function of (seed, epoch, its index): the same on any device, in any batch. What it
    is mixed with is its neighbour in the batch.

    Args:
        data: the options.
        spec: of the source.
        seed: of the run.
        smoothing: of the labels.
        size: side to which images are resized; 0 leaves them as they are.

    Raises:
        ValueError: the padding is as large as the images, so that a crop could show nothing of them.
    """
    height, width, _ = spec.image_shape
    if data.crop_padding >= min(height, width):
        raise ValueError(
            f"data.crop_padding={data.crop_padding} with images of {height}x{width}: must be less than their sides"
        )

    def vary_example(key: jax.Array, image: jax.Array) -> jax.Array:
        crop_key, flip_key, operation_key = *jax.random.split(key), jax.random.fold_in(key, 2)
        if data.crop_padding:
            image = _crop(crop_key, image, data.crop_padding)
        if data.flip:
            image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        if data.trivial_augment:
            image = apply_operation(draw_operation(operation_key), image)
        return image

    def keys_of(stream: Stream, block: Batch, epoch: jax.Array) -> jax.Array:
        return example_keys(jax.random.fold_in(stream_key(seed, stream), epoch), block.indices)

    def augment(block: Batch, epoch: jax.Array) -> Inputs:
        images = jnp.asarray(block.images)
        if data.crop_padding or data.flip or data.trivial_augment:
            images = jax.vmap(vary_example)(keys_of("augment", block, epoch), images)
        images = normalise(images, spec)
        if size:
            images = jax.image.resize(images, (len(images), size, size, images.shape[-1]), "linear")
        if not (smoothing or data.mixes):
            return Inputs(images)
        targets = optax.smooth_labels(jax.nn.one_hot(block.labels, spec.num_classes), smoothing)
        if not data.mixes:
            return Inputs(images, targets)
        return mix(keys_of("mix", block, epoch), images, targets, block, data)

    return augment
