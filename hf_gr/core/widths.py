# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes that programs are compiled for, and how many nodes fixed-size drafts have room for. Knows no arrays.

Axes: K beams, N nodes, L levels.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

ROOM = 3.0  # times the average number of nodes below the beams: each level's room in a captured decode
HEADROOM = 4  # the same of a whole draft in Flax: beams favour large subtrees
SMALLEST_DRAFT = 16
STEPS = 8  # sizes per doubling of a draft from the root, which is drafted whole: at most a ninth is padding


def bucket(number: int, *, least: int = 1, steps: int = 1) -> int:
    """The smallest size, from `least` on, that is not below `number`; a doubling has `steps` sizes, a power of two.

    At most one part in `steps + 1` of a size above `steps` is left empty.

    Example:
        >>> [bucket(number) for number in (0, 1, 3, 5)]
        [1, 1, 4, 8]
        >>> [bucket(number, least=16, steps=2) for number in (5, 17, 24, 25, 40)]
        [16, 24, 24, 32, 48]
    """
    number = max(number, least)
    step = 1 << max((number - 1).bit_length() - steps.bit_length(), 0)
    return -(-number // step) * step


def nodes_below(nodes_per_level: Sequence[int], number: int, level: int) -> Iterator[float]:
    """The nodes that so many of a level have below them on average, by level, but the last: it needs no logits.

    Example:
        >>> [round(width) for width in nodes_below([1, 91, 6539, 11172, 12023], 20, 1)]
        [1437, 2455]
    """
    above = nodes_per_level[level]
    for below in nodes_per_level[level + 1 : -1]:
        yield min(number, above) * below / max(above, 1)


def fixed_widths(nodes_per_level: Sequence[int], num_beams: int, *, budget: int) -> tuple[tuple[int, ...], ...]:
    """Widths for `FixedTree` by level of the beams: room for a few times the nodes below them on average.

    `budget` counts nodes in addition to the live beams; as many nodes as beams are always allowed.

    Example:
        >>> fixed_widths([1, 91, 6539, 11172, 12023], 20, budget=512)
        ((128,), (), (128,), ())
        >>> fixed_widths([1, 100, 110, 120, 130], 20, budget=512)
        ((128,), (128, 128), (128,), ())
    """
    last, planned = len(nodes_per_level) - 1, []
    for level in range(last):
        widths: list[int] = []
        for depth, number in enumerate(nodes_below(nodes_per_level, num_beams, level), start=level + 1):
            width = 1 << math.ceil(math.log2(max(ROOM * number, 1.0)))
            if sum(widths) + width > max(budget, num_beams):
                break
            widths.append(min(width, 1 << math.ceil(math.log2(nodes_per_level[depth]))))
        planned.append(tuple(widths))
    return tuple(planned)


def plan_first(open_nodes: Iterable[int], num_beams: int, *, budget: int) -> tuple[int, int]:
    """How many whole levels of the catalogue are scored together with the prompt, and the size of such a draft.

    It holds the nodes of every request, and some more, so that one program serves while a catalogue changes.
    `open_nodes`, those with children by level from 1, are read no further than needed; as many nodes a level as
    beams are always allowed.

    Example:
        >>> plan_first([91, 6300, 10500], 20, budget=512)
        (1, 96)
    """
    num_levels, used, largest = 0, 0, 0
    for number in open_nodes:
        room = max(budget, used + num_beams)
        if used + number > room:
            break
        num_levels, used, largest = num_levels + 1, used + number, room
    return num_levels, min(bucket(used, least=SMALLEST_DRAFT, steps=STEPS), largest)


def plan_sizes(nodes_per_level: Sequence[int], num_beams: int, *, budget: int, first: int = 1) -> tuple[int, ...]:
    """How many nodes a draft has, by the level of the live beams; 0 where nothing is drafted.

    Padding costs as much as other nodes, so sizes follow the catalogue's average number of nodes below as many
    beams, rounded to a power of two, so that one program serves while a catalogue changes. Only two levels draft,
    since a program compiles a forward for each: the first level where that average is within the budget, and the
    one above it, for beams and filters that leave less (the one below it, if there is none above). Levels before
    `first` are decided by the prefill. As many nodes a level as beams are always allowed.

    Example:
        >>> beauty = [1, 91, 6539, 11172, 12023]
        >>> plan_sizes(beauty, 20, budget=512)
        (0, 512, 256, 0)
        >>> plan_sizes(beauty, 20, budget=512, first=2)
        (0, 0, 256, 0)
    """
    last = len(nodes_per_level) - 1
    expected, largest = [0.0] * last, [0] * last
    for level in range(first, last - 1):
        expected[level] = sum(nodes_below(nodes_per_level, num_beams, level))
        largest[level] = max(budget, num_beams * (last - 1 - level))
    fitting = next((level for level in range(first, last - 1) if expected[level] <= largest[level]), last - 2)
    sizes = [0] * last
    start = max(fitting - 1, first)
    for level in range(start, min(start + 2, last - 1)):
        wanted = max(int(HEADROOM * expected[level]), num_beams * (last - 1 - level))
        sizes[level] = min(bucket(wanted, least=SMALLEST_DRAFT), largest[level])
    return tuple(sizes)


def plan_rest(nodes_per_level: Sequence[int], num_nodes: int, *, budget: int, least: int) -> tuple[int, ...]:
    """By level, how many nodes there is room for below N that a search has found; 0 where all below is too much.

    `budget` includes those found; `least` nodes of a level are always allowed; nothing below the last but one
    needs logits.

    Example:
        >>> plan_rest([1, 91, 6539, 11172, 12023], 40, budget=512, least=20)
        (0, 0, 472, 0)
    """
    last = len(nodes_per_level) - 1
    sizes = [0] * last
    for level in range(1, last - 1):
        expected = sum(nodes_below(nodes_per_level, num_nodes, level))
        largest = max(budget - num_nodes, least * (last - 1 - level))
        if expected <= largest:
            sizes[level] = min(bucket(int(HEADROOM * expected), least=SMALLEST_DRAFT), largest)
    return tuple(sizes)
