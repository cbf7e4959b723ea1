"""Machines with H100s that need not be here: what experiments compile for them, and replay on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
from jax.sharding import Mesh

from trjax.audit.report import Report
from trjax.config.presets import preset_config
from trjax.config.run import Config
from trjax.cost.machines import Machine, make_machine, parse_topology
from trjax.cost.targets import find_target
from trjax.step.compile import lower_step
from trjax.step.expected import expect
from trjax.step.plan import Plan
from trjax.step.program import Program, make_program
from trjax.step.rules import analyze_step
from trjax.xla.compiled import Compiled, compile_lowered
from trjax.xla.topology import compile_config, make_topology_mesh


def h100s(topology: str, link_gbytes: float = 0.0) -> Machine:
    """Returns a machine of H100s, HOSTSxGPUS; 0 GB/s: the data sheet's links."""
    return make_machine(find_target("h100"), parse_topology(topology), link_gbytes)


def without_augmentation(config: Config) -> Config:
    """Returns the run without random crops and flips, whose random numbers are up to a third of what compiles."""
    return replace(config, data=replace(config.data, crop_padding=0, flip=False))


def reference_config(quick: bool = False) -> Config:
    """Returns ResNet-50 with 256 images a GPU; quick: a ResNet-8, 64 wide, which compiles fast."""
    if not quick:
        return replace(preset_config("imagenet-resnet50"), global_batch=256)
    preset = preset_config("cifar10-resnet20")
    model = replace(preset.model, arch="resnet8", width=64)  # wide, so that there is something to reduce
    return without_augmentation(replace(preset, global_batch=128, model=model))


def mesh_of(machine: Machine) -> Mesh:
    """Returns the mesh of a machine's GPUs."""
    topology = machine.topology
    return make_topology_mesh(compile_config(machine.target), topology.hosts, topology.gpus_per_host)


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Raises ValueError, with the compiler's first line, if a program does not compile."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{name} does not compile: {str(error).splitlines()[0]}") from error


def compile_checked(program: Program, name: str) -> Compiled:
    """Returns the compiled step of a program; raises ValueError if it does not compile."""
    with compiling(name):
        return compile_lowered(lower_step(program))


def compile_for(machine: Machine, config: Config) -> Compiled:
    """Returns the compiled step of a run on a machine; raises ValueError if it does not compile."""
    return compile_checked(make_program(config, mesh_of(machine)), config.reducer)


def replay_on(machine: Machine, compiled: Compiled, config: Config, plan: Plan | None = None) -> Report:
    """Predicts a step on a machine other than the one that it was compiled for: all devices join every sum.

    Args:
        machine: to replay on.
        compiled: for any number of devices, with this batch on each.
        config: the run on this machine.
        plan: that the step is made from; without, nothing is judged.
    """
    operations = tuple(replace(operation, groups=()) for operation in compiled.operations)
    expected = expect(config, plan, machine.topology) if plan else None
    return analyze_step(replace(compiled, operations=operations), machine, config.global_batch, expected)
