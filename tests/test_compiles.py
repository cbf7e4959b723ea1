"""XLA compiles small models for every GPU that trjax knows, on a machine without one.

A failed check in XLA ends the process, and would end pytest. So a child process compiles, and its death is a failed
test that shows the check.

XLA of jaxlib 0.10 (not of 0.12) fuses what computes the operand of a product into the product's Triton kernel, and
ignores the stride of a slice on the way. It aborts if the next operation back takes a broadcast. BatchNorm from
moments multiplies the input of a projection with stride 2, which is such a slice times the mask. Before the barrier in
`moments._convolve_forward`, float32 projections of 32x32 pixels aborted for H100, H200 and B200: XLA splits the sum
there at the bounds of examples, and can then fuse the mask.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from trjax.cost.targets import TARGETS, find_target
from trjax.models.chain import Chain, apply_segment, init_chain
from trjax.models.resnet import Block, Head, StemSegment
from trjax.xla.topology import compile_config, make_topology_mesh

EXAMPLES = 128


class Case(NamedTuple):
    """A stem, a block and a GPU to compile them for. `str` makes one word of it, and `read` a case of the word.

    Attributes:
        target: name of the GPU.
        width: channels of the stem.
        expansion: channels of the block's result for each channel of the stem.
        shortcut: `projection`, `padding` or `bottleneck`, which has a projection too.
        dtype: type to compute in.
        side: height and width of the images, in pixels.
        stem: `cifar`, or `blur` for ImageNet's with blur-pool. The block has stride 2, but 1 after `blur`.
    """

    target: str = "h100"
    width: int = 32
    expansion: int = 8
    shortcut: str = "projection"
    dtype: str = "float32"
    side: int = 32
    stem: str = "cifar"

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def read(cls, word: str) -> "Case":
        """Returns the case that a word describes."""
        target, width, expansion, shortcut, dtype, side, stem = word.split(",")
        return cls(target, int(width), int(expansion), shortcut, dtype, int(side), stem)


def make_chain(case: Case) -> Chain:
    """Returns the stem, the block and a head."""
    dtype, bottleneck, blur = jnp.dtype(case.dtype), case.shortcut == "bottleneck", case.stem == "blur"
    width = case.width * case.expansion // (4 if bottleneck else 1)
    return {
        "stem": StemSegment(case.width, "imagenet" if blur else "cifar", dtype, blur=blur),
        "block": Block(width, 1 if blur else 2, bottleneck, case.shortcut != "padding", dtype, blur=blur),
        "head": Head(10),
    }


def compile_case(case: Case) -> None:
    """Compiles the gradients of a case's chain for one GPU."""
    chain, image_shape = make_chain(case), (case.side, case.side, 3)
    mesh = make_topology_mesh(compile_config(find_target(case.target)), 1, 1)

    def differentiate(params: Any, batch_stats: Any, x: jax.Array, mask: jax.Array, keys: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            y, stats = x, {}
            for name, module in chain.items():
                own = params[name], batch_stats[name]
                y, stats[name] = apply_segment(module, *own, y, train=True, mask=mask, keys=keys)
            return y.sum(), stats

        return jax.value_and_grad(loss, has_aux=True)(params)

    variables = jax.eval_shape(lambda: init_chain(chain, jax.random.key(0), image_shape))
    x = jax.ShapeDtypeStruct((EXAMPLES, *image_shape), jnp.float32)
    mask, keys = jax.eval_shape(lambda: (jnp.ones(EXAMPLES), jax.random.split(jax.random.key(0), EXAMPLES)))
    on_gpu = NamedSharding(mesh, PartitionSpec())
    jax.jit(differentiate, in_shardings=on_gpu).lower(*variables, x, mask, keys).compile()


def compile_apart(cases: Sequence[Case]) -> dict[str, str]:
    """Compiles cases in a child process, and starts another one after each case that ends it.

    Returns:
        The cases that do not compile, each with the reason: XLA's check or the error's last line.
    """
    failed, rest = {}, list(map(str, cases))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    while rest:
        child = subprocess.run([sys.executable, __file__, *rest], capture_output=True, text=True, env=environment)
        done = child.stdout.split()
        assert done == rest[: len(done)], child.stdout
        if child.returncode == 0:
            assert done == rest
            break
        lines = child.stderr.splitlines() or [f"exit status {child.returncode}"]
        failed[rest[len(done)]] = next((line for line in lines if "Check failed" in line), lines[-1])
        rest = rest[len(done) + 1 :]
    return failed


def test_the_cases_that_aborted_compile() -> None:
    """The block of `experiments/overlap.py --quick`, for two kinds of GPU."""
    assert compile_apart([Case("h100"), Case("b200")]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_neighbours_compile(target: str, dtype: str) -> None:
    """Widths and expansions that a user may choose, images of other sizes, and each kind of shortcut."""
    cases = [Case(target, *sizes, dtype=dtype) for sizes in product((8, 16, 32, 48, 64), (2, 4, 8))]
    cases += [Case(target, shortcut=shortcut, dtype=dtype) for shortcut in ("padding", "bottleneck")]
    cases += [Case(target, dtype=dtype, side=side) for side in (7, 28, 64)]
    cases += [Case(target, shortcut="bottleneck", dtype=dtype, side=64, stem="blur")]
    assert compile_apart(cases) == {}


def test_a_case_that_ends_the_child_is_named() -> None:
    case = Case("h100", dtype="float31")
    ((name, reason),) = compile_apart([case]).items()
    assert name == str(case)
    assert "float31" in reason


if __name__ == "__main__":
    for word in sys.argv[1:]:
        compile_case(Case.read(word))
        print(word, flush=True)
