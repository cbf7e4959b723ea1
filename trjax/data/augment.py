"""From uint8 pixels to the network's input, on the device; augmentation keyed by example."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from trjax.config.run import DataConfig
from trjax.data.batches import Batch
from trjax.data.mixing import Inputs, mix
from trjax.data.spec import DataSpec
from trjax.data.trivial import apply_operation, draw_operation
from trjax.keys import Stream, example_keys, stream_key

Preprocess = Callable[[Batch, jax.Array], Inputs]
"""Maps a block and the epoch (int32 scalar) to what the network gets and is to say."""


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
