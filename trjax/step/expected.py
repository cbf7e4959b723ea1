"""The collectives that a step should compile to."""

from collections import Counter
from dataclasses import dataclass, field

from trjax.config.run import Config
from trjax.cost.machines import Topology
from trjax.models.chain import list_spans
from trjax.step.buckets import ITEM_BYTES, RegionKind, natural_key
from trjax.step.plan import Plan
from trjax.step.reducers import make_reducer


@dataclass(frozen=True)
class Expected:
    """Collectives that a step should hold.

    Attributes:
        plan: that it is made from.
        groups: of the plan: group, opcode and bytes that each device hands in.
        others: bytes of the AllReduces that no group holds.
    """

    plan: Plan
    groups: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    others: Counter[int] = field(default_factory=Counter)


def _has_backward(plan: Plan, statistic: str) -> bool:
    """Tells whether the backward goes through a normalisation: something below it is trained."""
    layer, lowest = statistic.rpartition("/")[0], plan.segments.index(plan.groups[-1].launch_after)
    segment = plan.segments.index(layer.partition("/")[0])
    in_segment = [name for name in plan.trained if name.startswith(f"{plan.segments[segment]}/")]
    below = any(natural_key(name.rpartition("/")[0]) < natural_key(layer) for name in in_segment)
    return segment > lowest or (segment == lowest and below)


def expect(config: Config, plan: Plan, topology: Topology) -> Expected:
    """Returns the collectives that a run's step should compile to.

    With `bn=sync` every layer's moments are reduced, in forward and, above what is frozen, in backward; and once more
    where that computes the forward again. Where the optimizer needs norms of parameters that are spread over the
    devices, their squares are: one for the clip, two of every parameter for lars.
    """
    if topology.world_size == 1:
        return Expected(plan)
    reducer = make_reducer(config)
    groups = Counter((group.name, *call) for group in plan.groups for call in reducer.calls(group, topology))
    others: Counter[int] = Counter()
    spans = list_spans(plan.segments, config.remat)
    lowest = next(at for at, span in enumerate(spans) if plan.groups[-1].launch_after in span)
    pulled = {segment for span in spans[lowest:] for segment in span}  # through which the backward goes
    for region in plan.regions:
        if config.bn == "sync" and region.kind is RegionKind.B_NEXT_MEAN:
            moments_bytes = 2 * ITEM_BYTES * region.size_elements
            through = _has_backward(plan, region.name)
            again = config.remat != "none" and region.name.partition("/")[0] in pulled
            others[moments_bytes + ITEM_BYTES] += config.accumulate * (1 + again)  # with the count
            others[moments_bytes] += config.accumulate * through
    if reducer.sharded and config.optim.clip_norm:
        others[ITEM_BYTES] += 1
    if reducer.sharded and config.optim.kind in ("lars", "lamb"):
        others[2 * ITEM_BYTES * len(plan.trained)] += 1
    return Expected(plan, groups, others)
