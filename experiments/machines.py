"""Machines with H100s that need not be here: what experiments compile for, and replay on."""

from dataclasses import replace

import jax
from jax.sharding import Mesh

from trjax.audit.report import Report
from trjax.config.presets import preset_config
from trjax.config.run import Config
from trjax.cost.machines import Machine, make_machine, parse_topology
from trjax.cost.targets import find_target
from trjax.models.chain import Chain
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


def quick_config() -> Config:
    """Returns a run that compiles fast and has something to reduce: ResNet-8, 64 wide, without augmentation."""
    preset = preset_config("cifar10-resnet20")
    return without_augmentation(
        replace(preset, global_batch=128, model=replace(preset.model, arch="resnet8", width=64))
    )


def mesh_of(machine: Machine) -> Mesh:
    """Returns the mesh of a machine's GPUs."""
    topology = machine.topology
    return make_topology_mesh(compile_config(machine.target), topology.hosts, topology.gpus_per_host)


def compile_program(program: Program, name: str) -> Compiled:
    """Returns the compiled step of a program.

    Raises:
        ValueError: it does not compile.
    """
    try:
        return compile_lowered(lower_step(program))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{name} does not compile: {str(error).splitlines()[0]}") from error


def compile_for(machine: Machine, config: Config, chain: Chain | None = None) -> tuple[Compiled, Plan]:
    """Returns the compiled step of a run on a machine, and its plan.

    Raises:
        ValueError: it does not compile.
    """
    program = make_program(config, mesh_of(machine), chain)
    return compile_program(program, config.reducer), program.plan


def replay_on(machine: Machine, compiled: Compiled, config: Config, plan: Plan | None = None) -> Report:
    """Returns what a step takes on a machine other than the one that it was compiled for: all devices join every sum.

    Args:
        machine: to replay on.
        compiled: for any number of devices, with this batch on each.
        config: the run on this machine.
        plan: that the step is made from; without, nothing is judged.
    """
    operations = tuple(replace(operation, groups=()) for operation in compiled.operations)
    expected = expect(config, plan, machine.topology) if plan else None
    return analyze_step(replace(compiled, operations=operations), machine, config.global_batch, expected)
