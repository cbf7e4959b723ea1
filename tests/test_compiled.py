from pathlib import Path

import jax
import numpy as np
from helpers import one_block_chain, tiny_config, tiny_program

from trjax.cost.targets import find_target
from trjax.data.batches import train_batches
from trjax.data.sources import load
from trjax.mesh import REPLICATED, make_mesh, placement
from trjax.step.compile import lower_step
from trjax.step.program import make_program
from trjax.xla.compiled import compile_lowered
from trjax.xla.dumps import Buffer, count_launches, parse_buffers
from trjax.xla.topology import compile_config, make_topology_mesh

# jax 0.12 prints the page, and leaves out a value that shares another's place.
ASSIGNMENT = """BufferAssignment:
allocation 7: size 1200, color 7, page 0, preallocated-temp:
 value: <5840 fill.1 @7> (size=1000,offset=0): f32[250]{0:S(7)}
 value: <5841 start{1} @0> (size=176,offset=1024): f32[44]{0:S(7)}
allocation 8: size 16, thread-local:
 value: <141 sum.5 @0> (size=4,offset=8): f32[]
"""

THUNKS = """000: kCustomKernel [source] first
001: kCommandBuffer [prev=000]
    002: kCustomKernel [source] inside
    003: kAsyncStart [prev=002]
        004: kAllReduce
    005: kAsyncDone
    006: kConvolution
007: kCopy [prev=001] outside
008: kCommandBuffer
    009: kGemm
"""


def test_buffers_worked_by_hand() -> None:
    assert parse_buffers(ASSIGNMENT.splitlines()) == (
        Buffer("fill.1", 7, 0, 1000),
        Buffer("start{1}", 7, 1024, 176),
        Buffer("sum.5", 8, 8, 4),
    )


def test_launches_worked_by_hand() -> None:
    assert count_launches(THUNKS.splitlines()) == (2, 4, 2)
    assert count_launches([]) == (0, 0, 0)


def test_reads_the_step_of_the_devices_here() -> None:
    program = tiny_program(2)
    compiled = compile_lowered(lower_step(program))
    reduced = [operation for operation in compiled.operations if operation.collective]
    assert [operation.size_bytes for operation in reduced] == [group.size_bytes for group in program.plan.groups]
    assert {operation.kind for operation in reduced} == {"blocking"}  # a rendezvous of CPU devices
    assert [operation.source.split("/")[-2] for operation in reduced] == ["all_reduce_deep", "all_reduce_first"]
    assert compiled.argument_bytes > 0
    assert compiled.temp_bytes > 0
    flops = sum(operation.flops for operation in compiled.operations)
    # Three products for each convolution (the first has no input gradient) and for the classifier, 12 images a device.
    forward = {"stem": 64 * 4 * 27, "shortcut": 16 * 8 * 4, "layer1": 16 * 8 * 36, "layer2": 16 * 8 * 72, "head": 80}
    # The strided one's input gradient is computed with the zeros between its pixels, on the CPU: four times as much.
    # The shortcut expands 4 channels to 8: two products of its input's channels, 4 x 4, and two with its kernel.
    extra = 2 * (2 * 12 * 16 * 4 * 4) + 2 * (2 * 4 * 4 * 8)
    assert flops == 2 * 12 * (3 * sum(forward.values()) - forward["stem"] + 3 * forward["layer1"]) + extra


def test_what_was_compiled_before_is_compiled_again_to_be_read() -> None:
    """JAX's cache knows the program, but not where its buffers lie, and for absent devices it cannot load it."""
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        for mesh in (make_mesh("0-1"), make_topology_mesh(compile_config(find_target("h100")), 1, 2)):
            double = jax.jit(lambda x: 2 * x, in_shardings=placement(mesh, REPLICATED))
            lowered = double.lower(jax.ShapeDtypeStruct((64,), np.float32))
            lowered.compile()  # into the cache
            assert all(compile_lowered(lowered).buffers for _ in range(2))
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_a_group_of_one_kernel_compiles_for_gpus() -> None:
    mesh = make_topology_mesh(compile_config(find_target("h100")), 1, 2)
    made = make_program(tiny_config(reducer="ddp", bucket_mb=0.0), mesh, one_block_chain())
    assert (len(made.plan.groups), [len(group.regions) for group in made.plan.groups].count(1)) == (14, 12)
    compiled = compile_lowered(lower_step(made))  # with XLA's buffers for NCCL: "Invalid filter layout"
    reduced = sorted(operation.size_bytes for operation in compiled.operations if operation.collective)
    assert reduced == sorted(group.size_bytes for group in made.plan.groups)


def test_a_trace_of_the_run_holds_what_was_read_in_that_order(tmp_path: Path) -> None:
    program, config, num_steps, num_devices = tiny_program(2), tiny_config(), 3, 2
    compiled = compile_lowered(lower_step(program))
    state = program.init()
    (batch,) = train_batches(load(config.data)[0], config.global_batch, 0, 0, 1)
    with jax.profiler.trace(str(tmp_path)):
        rates, votes = np.full(1, 0.1, np.float32), program.votes(False)
        for _ in range(num_steps):
            state, results = program.train_step(state, program.place_train(batch), rates, votes)
            jax.block_until_ready(results)
    (file,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    reduced = [operation.name for operation in compiled.operations if operation.collective]
    ran = sorted((event.start_ns, event.name) for event in events if event.name in reduced)
    assert len(ran) == len(reduced) * num_steps * num_devices
    # all devices do the first before any does the second: a rendezvous
    assert [name for _, name in ran] == [name for name in reduced for _ in range(num_devices)] * num_steps
    kernels = {operation.name for operation in compiled.operations if operation.kind == "convolution"}
    assert kernels <= {event.name for event in events}
