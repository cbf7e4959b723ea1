"""`python -m trjax.explain`: what a run compiles to, before it runs."""

import signal
import sys
from collections.abc import Sequence

from trjax.mesh import start_platform
from trjax.plan import Plan
from trjax.presets import parse_config
from trjax.program import plan_config
from trjax.records import format_table
from trjax.step import conv_order_of

_USAGE = """usage: python -m trjax.explain plan [OPTIONS]

  plan   the table of groups and regions: where every gradient lives

`python -m trjax.explain plan --help` lists the options, which are those of trjax.train."""


def format_plan(plan: Plan) -> str:
    """Returns the table of all regions, and the totals of each group."""
    rows = []
    for group in plan.groups:
        for region in group.regions:
            offset, size = (count * group.itemsize_bytes for count in (region.offset_elements, region.size_elements))
            order = "" if len(region.shape) != 4 else "".join("HWIO"[dim] for dim in region.physical_order)
            shape = "x".join(str(dim) for dim in region.shape)
            rows.append([group.name, region.kind.value, region.name, shape, order, offset, size])
    regions = format_table(["group", "kind", "region", "shape", "order", "offset bytes", "bytes"], rows)
    totals, parameters = [], 0
    for group in plan.groups:
        gradients = sum(region.size_elements for region in group.regions if region.kind.value.startswith("G_"))
        parameters += gradients
        totals.append(
            [group.name, len(group.regions), gradients, group.size_elements, group.size_bytes, group.launch_after]
        )
    header = ["group", "regions", "parameters", "elements", "bytes", "launched after the backward of"]
    size_bytes = sum(group.size_bytes for group in plan.groups)
    sums = f"{parameters:,} parameters, {size_bytes:,} bytes in {len(plan.groups)} AllReduces a step"
    return f"{regions}\n\n{format_table(header, totals)}\n\n{sums}"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] != "plan":
        print(f"error: unknown command {arguments[0]!r}\n{_USAGE}", file=sys.stderr)
        return 2
    try:
        config = parse_config(arguments[1:], "python -m trjax.explain plan", "Print where every gradient lives.")
        start_platform("cpu", "all")  # shapes only: no GPU is asked
        # The layout is a GPU's unless the CPU is asked for: that is where it is of interest.
        print(format_plan(plan_config(config, conv_order_of("cpu" if config.platform == "cpu" else "cuda"))))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command, without a traceback
    sys.exit(main(sys.argv[1:]))
