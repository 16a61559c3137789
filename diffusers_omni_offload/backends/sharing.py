"""Which leaves belong to more than one owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diffusers_omni_offload.weights.leaves import Leaf, extent, is_plain
from diffusers_omni_offload.weights.withheld import is_withheld


def shared_leaves(blocks: Sequence[Sequence[Leaf]], elsewhere: Iterable[Leaf]) -> list[Leaf]:
    """Leaves whose bytes are held by two streamed blocks, or by a streamed block and a module that isn't streamed.

    Both the same tensor object and different tensors that overlap in memory count.

    Args:
        blocks: the leaves of each streamed block.
        elsewhere: the leaves of everything else.

    Returns:
        Each such leaf once, those of blocks first.
    """
    owned = [(owner, leaf) for owner, leaves in enumerate(blocks) for leaf in leaves]
    owned += [(-1, leaf) for leaf in elsewhere]
    intervals: dict[int, list[tuple[int, int, int, Leaf]]] = {}
    for owner, leaf in owned:
        if is_withheld(leaf.tensor) or not is_plain(leaf):
            # It has no memory of its own that it could share with another object.
            intervals.setdefault(-id(leaf.tensor), []).append((0, 1, owner, leaf))
            continue
        storage, start, stop = extent(leaf.tensor)
        if stop > start and not leaf.tensor.is_meta:
            intervals.setdefault(storage.data_ptr(), []).append((start, stop, owner, leaf))
    shared: dict[int, Leaf] = {}
    for group in intervals.values():
        if len(group) == 1:
            continue
        group.sort(key=lambda item: item[:2])
        cluster: list[tuple[int, Leaf]] = []
        end = -1
        for start, stop, owner, leaf in [*group, (1 << 62, 1 << 62, -1, group[0][3])]:
            if start >= end and cluster:
                owners = {member for member, _ in cluster}
                if len(owners) > 1:
                    shared.update((id(member.tensor), member) for _, member in cluster)
                cluster = []
            end = max(end, stop)
            cluster.append((owner, leaf))
    return [*{id(leaf.tensor): leaf for _, leaf in owned if id(leaf.tensor) in shared}.values()]
