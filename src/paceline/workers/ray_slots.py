"""Where the actors of a group may stand: bundles of placement groups, one for each actor."""

import contextlib
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from paceline.errors import ResourcesError
from paceline.workers.base import Resources

_LOOK_S = 0.005
_COME_FREE_S = 1.0


@dataclass(frozen=True)
class Slot:
    """One bundle: the resources of one worker, on some node."""

    placement: PlacementGroup
    bundle: int


class Slots:
    """What one group has reserved. The first ones come together, all or none; more can be added one by one.

    `standing` is a request for one more that the cluster has not granted yet. It stays, so that an autoscaler sees it.
    """

    def __init__(self, bundle: Mapping[str, float], strategy: str):
        self.bundle, self._strategy = dict(bundle), strategy
        self._slots: list[Slot] = []
        self._owned: list[PlacementGroup] = []
        self._standing: PlacementGroup | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def reserve(self, count: int, timeout_s: float) -> None:
        """The first slots: of the placement group that this process is in, if that has room, else of a new one."""
        here = slots_here(count, self.bundle)
        if here is not None:
            self._slots = here
            return
        check_feasible(count, self.bundle)
        self._let_come_free(count, min(timeout_s, _COME_FREE_S))
        group = _requested([self.bundle] * count, self._strategy)
        self._owned.append(group)
        self._slots = [Slot(group, index) for index in range(count)]
        self.wait_for(count, (), timeout_s)

    def _let_come_free(self, count: int, timeout_s: float) -> None:
        """What was given back a moment ago is not free at once. Ray looks again only a second after it has refused a
        request: better to wait before asking."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            free = free_resources()
            if all(free.get(name, 0) >= count * amount for name, amount in self.bundle.items()):
                return
            time.sleep(_LOOK_S)

    def wait_for(self, count: int, occupied: Collection[Slot], timeout_s: float) -> None:
        """Until so many slots are there: granted, or occupied by somebody who lives. Ray itself moves what a lost node
        had to another one, if there is room."""
        deadline = time.monotonic() + timeout_s
        while self._num_there(occupied) < count:
            if time.monotonic() >= deadline:
                raise ResourcesError(
                    f"{count} workers with {in_words(self.bundle)} each could not be placed within {timeout_s:g} s. "
                    f"The cluster has {in_words(cluster_resources())}; free: {in_words(free_resources())}. Wait for "
                    "others to finish, ask for less, or raise start_timeout_s."
                )
            time.sleep(_LOOK_S)

    def _num_there(self, occupied: Collection[Slot]) -> int:
        placements = {slot.placement.id: slot.placement for slot in self._slots}
        granted = {id for id, placement in placements.items() if _is_granted(placement)}
        return sum(slot.placement.id in granted or slot in occupied for slot in self._slots)

    def grow(self, limit: float, timeout_s: float = 0.0) -> bool:
        """Take what the cluster grants, up to `limit` slots in all, waiting so long for each; says whether there are
        more than before."""
        before, deadline = len(self._slots), time.monotonic() + timeout_s
        while len(self._slots) < limit:
            if self._standing is None:
                self._standing = _requested([self.bundle])
            if _is_granted(self._standing):
                self._add(self._standing)
                self._standing, deadline = None, time.monotonic() + timeout_s
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(_LOOK_S)
        return len(self._slots) > before

    def ask_for(self, count: int) -> None:
        """Have at least so many, though the cluster may not have granted them yet."""
        while len(self._slots) < count:
            self._add(_requested([self.bundle]))

    def give_up(self, slot: Slot) -> None:
        """Its node will be gone soon: what comes next shall stand elsewhere."""
        self._slots.remove(slot)
        if slot.placement in self._owned and all(other.placement != slot.placement for other in self._slots):
            self._owned.remove(slot.placement)
            remove_placement_group(slot.placement)

    def release(self) -> None:
        if ray.is_initialized():
            for group in [*self._owned, *filter(None, [self._standing])]:
                remove_placement_group(group)
        self._slots, self._owned, self._standing = [], [], None

    def _add(self, group: PlacementGroup) -> None:
        self._owned.append(group)
        self._slots.append(Slot(group, 0))


def _requested(bundles: list[dict[str, float]], strategy: str = "PACK") -> PlacementGroup:
    """A placement group. When Ctrl-C hits, Ray may have made it, and nobody else knows it: its name finds it."""
    name = f"paceline-{uuid.uuid4().hex}"
    try:
        made: PlacementGroup = placement_group(bundles, strategy=strategy, name=name)
        return made
    except BaseException:
        with contextlib.suppress(Exception):  # there is none
            remove_placement_group(get_placement_group(name))
        raise


def slots_here(count: int, bundle: Mapping[str, float]) -> list[Slot] | None:
    """Bundles of the placement group in which this process itself runs, as a trial of Ray Tune does; None if there are
    not enough that suit."""
    placement = ray.util.get_current_placement_group()
    if placement is None:
        return None
    own = any(ray.get_runtime_context().get_assigned_resources().values())  # type: ignore[no-untyped-call]  # then the first bundle is this process's
    fitting = [
        Slot(placement, index)
        for index, spec in enumerate(placement.bundle_specs)
        if index >= int(own) and all(spec.get(name, 0) >= amount for name, amount in bundle.items())
    ]
    return fitting[:count] if len(fitting) >= count else None


def bundle_of(resources: Resources) -> dict[str, float]:
    """What one worker takes from the cluster: exactly what was asked for, and one CPU when nothing was said."""
    bundle = {"CPU": 1.0 if resources.cpus is None else float(resources.cpus), "GPU": float(resources.gpus)}
    return {name: amount for name, amount in {**bundle, **resources.custom}.items() if amount > 0}


def check_feasible(num_workers: int, bundle: Mapping[str, float]) -> None:
    """Raise at once when the cluster, even empty, could not hold the workers."""
    total = cluster_resources()
    missing = {
        name: num_workers * amount for name, amount in bundle.items() if num_workers * amount > total.get(name, 0)
    }
    nodes = [node["Resources"] for node in living_nodes()]
    fits = any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
    if missing or not fits:
        what = in_words(missing) if missing else f"{in_words(bundle)} on one node"
        raise ResourcesError(
            f"{num_workers} workers with {in_words(bundle)} each need {what}; the whole cluster has "
            f"{in_words({name: total.get(name, 0) for name in bundle})} on {len(nodes)} node(s). Ask for fewer workers "
            "or less for each, or add nodes."
        )


def cluster_resources() -> dict[str, float]:
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return total


def living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def draining_nodes() -> set[str]:
    """The nodes that are about to be taken away. There is no public call for it; where it cannot be asked (through
    the Ray client), the nodes' end is all we get to know."""
    try:
        return set(ray._private.state.state.get_draining_nodes())
    except Exception:
        return set()


def in_words(resources: Mapping[str, float]) -> str:
    known = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(("node:", "bundle", "memory", "object")) and "_group_" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(known.items()) if amount) or "nothing"


def free_resources() -> dict[str, float]:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


def _is_granted(group: PlacementGroup) -> bool:
    """Asked again and again: Ray's own wait counts in whole seconds."""
    return bool(group.wait(0))
