# SPDX-License-Identifier: Apache-2.0
"""Plans of which each line can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvpush_client.layout import Group, GroupKind, Layout
from kvpushd.core.layout import BlockLists, Window
from kvpushd.core.overlap import bytes_per_position, covers, granularity, mappable, sends, shared_layers
from kvpushd.core.plan import plan, window_bytes
from kvpushd.errors import Invalid, LayoutMismatch, OverLimit
from tests.core.pools import Model, Shape, changed, listed, rank, ranks, whole

# Two layers of eight heads; a token of a head is 4 bytes, a block of 4 tokens 128, a layer of 8 blocks 1024.
MODEL = Model((0, 0), heads=8)
FOURS = Shape((Group(4),))
POOL = rank(MODEL, FOURS)


def rows(
    source: Layout, source_blocks: BlockLists, target: Layout, target_blocks: BlockLists, window: Window
) -> list[tuple[int, int, int]]:
    runs = plan(source, source_blocks, target, target_blocks, window)
    return list(zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True))


def test_equal_ranks_move_whole_blocks() -> None:
    assert rows(POOL, [listed(0, 5, 2)], POOL, [listed(0, 1, 6)], Window(0, 8, 0, 1)) == [
        (256, 768, 128),
        (640, 128, 128),
    ]


def test_blocks_that_are_neighbours_on_both_sides_move_as_one() -> None:
    assert rows(POOL, [listed(0, 2, 3, 4)], POOL, [listed(0, 5, 6, 7)], Window(0, 12, 0, 1)) == [
        (256, 640, 384)
    ]


def test_blocks_that_are_neighbours_on_one_side_only_do_not_merge() -> None:
    assert rows(POOL, [listed(0, 2, 3)], POOL, [listed(0, 6, 5)], Window(0, 8, 0, 1)) == [
        (256, 768, 128),
        (384, 640, 128),
    ]


def test_a_pool_that_is_all_wanted_moves_as_one() -> None:
    everything = [listed(0, *range(8))]
    assert rows(POOL, everything, POOL, everything, whole(POOL, 32)) == [(0, 0, 2048)]


def test_a_part_of_a_block_moves_by_head() -> None:
    assert rows(POOL, [listed(0, 0)], POOL, [listed(0, 1)], Window(1, 3, 0, 1)) == [
        (4 + 16 * head, 128 + 4 + 16 * head, 8) for head in range(8)
    ]


def test_a_part_of_a_block_moves_as_one_where_tokens_are_outside_of_heads() -> None:
    pool = rank(MODEL, replace(FOURS, order="LPBNH"))
    assert rows(pool, [listed(0, 0)], pool, [listed(0, 1)], Window(1, 3, 0, 1)) == [(32, 128 + 32, 64)]


def test_a_rank_with_half_of_the_heads_gets_that_half() -> None:
    upper = rank(MODEL, FOURS, heads=range(4, 8))
    assert rows(POOL, [listed(0, 3)], upper, [listed(0, 2)], Window(0, 4, 0, 1)) == [
        (3 * 128 + 64, 2 * 64, 64)
    ]


def test_a_rank_with_half_of_the_heads_fills_that_half() -> None:
    upper = rank(MODEL, FOURS, heads=range(4, 8))
    assert rows(upper, [listed(0, 2)], POOL, [listed(0, 3)], Window(0, 4, 0, 1)) == [
        (2 * 64, 3 * 128 + 64, 64)
    ]


def test_layers_are_matched_by_name_and_counted_in_the_senders_order() -> None:
    second = rank(MODEL, FOURS, layers=range(1, 2))
    assert rows(POOL, [listed(0, 0)], second, [listed(0, 0)], whole(POOL, 4)) == [(1024, 0, 128)]
    assert rows(second, [listed(0, 0)], POOL, [listed(0, 0)], whole(second, 4)) == [(0, 1024, 128)]
    assert rows(POOL, [listed(0, 0)], second, [listed(0, 0)], Window(0, 4, 0, 1)) == []


def test_large_blocks_are_cut_where_small_ones_end() -> None:
    model, eights = Model((0,), heads=1), Shape((Group(8),))
    small, large = rank(model, FOURS), rank(model, eights)
    assert rows(small, [listed(0, 7, 1, 3)], large, [listed(0, 5, 2)], Window(0, 12, 0, 1)) == [
        (16, 5 * 32 + 16, 16),
        (48, 2 * 32, 16),
        (112, 5 * 32, 16),
    ]


def test_positions_count_not_places_in_the_lists() -> None:
    prefix_present = [listed(8, 4)]
    assert rows(POOL, [listed(0, 0, 1, 2)], POOL, prefix_present, Window(0, 12, 0, 1)) == [(256, 512, 128)]


def test_positions_that_one_side_does_not_name_are_left_out() -> None:
    assert rows(POOL, [listed(0, 0)], POOL, [listed(4, 0)], whole(POOL, 8)) == []
    assert rows(POOL, [listed(0)], POOL, [listed(0, 0)], whole(POOL, 8)) == []
    assert rows(POOL, [], POOL, [listed(0, 0)], whole(POOL, 8)) == []
    assert rows(POOL, [listed(0, 0)], POOL, [listed(0, 0)], whole(POOL, 8, start=8)) == []


def test_a_list_that_ends_before_the_window_ends_the_plan() -> None:
    short, long = [listed(0, 0)], [listed(0, 4, 5)]
    assert rows(POOL, short, POOL, long, Window(0, 8, 0, 1)) == [(0, 512, 128)]
    assert rows(POOL, long, POOL, short, Window(0, 8, 0, 1)) == [(512, 0, 128)]


def test_blocks_that_are_out_of_step_are_cut_on_both_sides() -> None:
    one = rank(Model((0,), heads=1), FOURS)
    assert rows(one, [listed(0, 0, 2)], one, [listed(2, 1, 5)], Window(0, 8, 0, 1)) == [
        (8, 16, 8),
        (32, 24, 8),
        (40, 80, 8),
    ]


def test_a_plan_refuses_to_guess_which_list_of_a_group_is_meant() -> None:
    with pytest.raises(Invalid, match="source: blocks of group 0 are listed twice"):
        plan(POOL, [listed(0, 0), listed(4, 1)], POOL, [listed(0, 0)], Window(0, 8, 0, 1))


def test_groups_are_matched_by_the_names_of_their_layers_not_by_index() -> None:
    shape = Shape((Group(4), Group(4)))
    source = rank(Model((0, 1), heads=1), shape)
    target = rank(Model((1, 0), heads=1), shape)
    mine = [listed(0, 0, group=0), listed(0, 1, group=1)]
    theirs = [listed(0, 2, group=0), listed(0, 3, group=1)]
    assert rows(source, mine, target, theirs, whole(source, 4)) == [(0, 48, 16), (128 + 16, 128 + 32, 16)]


def test_a_sliding_window_moves_only_the_positions_it_has_kept() -> None:
    shape = Shape((Group(4), Group(4, GroupKind.SLIDING_WINDOW)))
    pool = rank(Model((0, 1), heads=1), shape)
    mine = [listed(0, 0, 1, 2), listed(8, 3, group=1)]
    theirs = [listed(0, 0, 1, 2), listed(4, 6, 7, group=1)]
    assert rows(pool, mine, pool, theirs, whole(pool, 12)) == [(0, 0, 48), (128 + 48, 128 + 112, 16)]


OPAQUE = rank(Model((0,), heads=2, opaque=True), FOURS)


def test_an_opaque_block_moves_whole_though_the_window_ends_inside() -> None:
    assert rows(OPAQUE, [listed(0, 0, 1)], OPAQUE, [listed(0, 4, 2)], Window(4, 5, 0, 1)) == [(32, 64, 32)]


def test_a_window_that_begins_inside_an_opaque_block_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"group 0.*opaque.*position 5, inside a block of the source"):
        plan(OPAQUE, [listed(0, 0, 1)], OPAQUE, [listed(0, 4, 2)], Window(5, 8, 0, 1))
    with pytest.raises(LayoutMismatch, match="position 4, inside a block of the target"):
        plan(OPAQUE, [listed(0, 0, 1)], OPAQUE, [listed(2, 4, 2)], Window(4, 8, 0, 1))


def test_opaque_heads_are_told_apart_by_rank() -> None:
    second = rank(Model((0,), heads=2, opaque=True), FOURS, heads=range(1, 2))
    assert rows(OPAQUE, [listed(0, 3)], second, [listed(0, 1)], Window(0, 4, 0, 1)) == [(3 * 32 + 16, 16, 16)]


def test_a_window_of_layers_that_the_sender_does_not_have_is_refused() -> None:
    with pytest.raises(Invalid, match="layers 0 to 3, expected inside 0 to 2"):
        plan(POOL, [listed(0, 0)], POOL, [listed(0, 0)], Window(0, 4, 0, 3))


def test_a_plan_that_would_fill_the_memory_is_refused_before_it_is_made() -> None:
    model, shape = Model((0,), heads=512, planes=(1,)), Shape((Group(65_536),), blocks=1)
    source, target = rank(model, shape), rank(model, replace(shape, order="LPBNH"))
    assert rows(source, [listed(0, 0)], source, [listed(0, 0)], whole(source, 65_536)) == [(0, 0, 2**25)]
    with pytest.raises(OverLimit, match="16,777,216 runs"):
        plan(source, [listed(0, 0)], target, [listed(0, 0)], whole(source, 65_536))


def test_blocks_that_never_fall_in_step_are_refused_before_they_fill_the_memory() -> None:
    model, blocks = Model((0,), heads=1), range(300)
    source, target = (rank(model, Shape((Group(size),), blocks=300)) for size in (65_536, 65_535))
    with pytest.raises(OverLimit):
        plan(source, [listed(0, *blocks)], target, [listed(0, *blocks)], whole(source, 300 * 65_535))


@pytest.mark.parametrize(("ids", "said"), [((8,), "8 to 8"), ((-1, 2), "-1 to 2")])
def test_a_block_that_its_pool_does_not_have_is_refused_by_the_plan_too(
    ids: tuple[int, ...], said: str
) -> None:
    with pytest.raises(Invalid, match=f"target: blocks of group 0 are {said}, expected 0 to 7"):
        plan(POOL, [listed(0, 0, 1)], POOL, [listed(0, *ids)], Window(0, 8, 0, 1))


def test_the_bytes_of_a_position_are_those_of_the_shared_heads() -> None:
    half = rank(MODEL, FOURS, layers=range(1, 2), heads=range(4))
    assert bytes_per_position(POOL, POOL).tolist() == [32, 32]
    assert bytes_per_position(POOL, half).tolist() == [0, 16]
    assert window_bytes(POOL, half, Window(3, 10, 0, 2)) == 7 * 16


def test_the_bytes_of_an_opaque_window_are_those_of_whole_blocks() -> None:
    assert window_bytes(OPAQUE, OPAQUE, Window(4, 9, 0, 1)) == 8 * 8


def test_layers_are_shared_where_names_and_heads_meet() -> None:
    lower, upper = rank(MODEL, FOURS, heads=range(4)), rank(MODEL, FOURS, heads=range(4, 8))
    second = rank(MODEL, FOURS, layers=range(1, 2))
    assert shared_layers(POOL, second) == (1,)
    assert shared_layers(second, POOL) == (0,)
    assert shared_layers(lower, upper) == ()


def test_a_frontier_moves_by_token_unless_a_shared_layer_is_opaque() -> None:
    assert granularity(POOL, POOL) == 1
    assert granularity(OPAQUE, OPAQUE) == 4
    assert granularity(changed(POOL, 0, opaque=True), rank(MODEL, FOURS, layers=range(1, 2))) == 1


def test_ranks_of_different_pipeline_stages_are_mappable_and_do_not_send() -> None:
    first, second = rank(MODEL, FOURS, layers=range(1)), rank(MODEL, FOURS, layers=range(1, 2))
    mappable(first, second)
    assert not sends(first, second)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (rank(Model((0, 0), heads=8, planes=(8,)), FOURS), r"planes\[0\]\.cell_bytes is 4 .* 8 "),
        (rank(Model((0, 0), heads=8, planes=(4, 4)), FOURS), "number of planes is 1 .* 2 "),
        (rank(Model((0, 0), heads=8, opaque=True), FOURS), "opaque is False .* True "),
        (rank(Model((0, 0), heads=16), FOURS), "total_heads is 8 .* 16 "),
        (
            rank(MODEL, Shape((Group(4, GroupKind.SLIDING_WINDOW),))),
            "kind of group is full .* sliding_window ",
        ),
    ],
)
def test_pools_that_cannot_be_mapped_are_refused_with_the_field_and_both_values(
    other: Layout, said: str
) -> None:
    with pytest.raises(LayoutMismatch, match=r"layer 'layers\.0': " + said):
        mappable(POOL, other)
    with pytest.raises(LayoutMismatch, match=said):
        plan(POOL, [listed(0, 0)], other, [listed(0, 0)], whole(POOL, 4))


def test_opaque_pools_of_unequal_block_sizes_are_refused() -> None:
    eights = rank(Model((0,), heads=2, opaque=True), Shape((Group(8),)))
    with pytest.raises(LayoutMismatch, match=r"block_size .* is 4 at the sender and 8 at the receiver"):
        mappable(OPAQUE, eights)


def test_a_state_has_no_positions_and_is_refused() -> None:
    state = rank(MODEL, Shape((Group(4, GroupKind.STATE),)))
    with pytest.raises(LayoutMismatch, match="state"):
        mappable(state, state)
    with pytest.raises(LayoutMismatch, match="state"):
        plan(state, [listed(0, 0)], state, [listed(0, 0)], whole(state, 4))


def _degrees(heads: int) -> list[int]:
    return [tp for tp in range(1, 9) if heads % tp == 0 or tp % heads == 0]


PAIRS = [(h, p, d) for h in (1, 2, 3, 4, 6, 8) for p in _degrees(h) for d in _degrees(h)]


@pytest.mark.parametrize(("heads", "senders", "receivers"), PAIRS)
def test_each_head_of_each_receiver_comes_from_exactly_one_sender(
    heads: int, senders: int, receivers: int
) -> None:
    model = Model((0, 0), heads)
    sources = ranks(model, FOURS, senders, [range(1), range(1, 2)])
    for target in ranks(model, FOURS, receivers):
        covers(sources, target)
        served = Counter(
            (source.layers[index].name, head)
            for source in sources
            if sends(source, target)
            for index in shared_layers(source, target)
            for head in range(heads)
            if source.layers[index].first_head
            <= head
            < source.layers[index].first_head + source.layers[index].heads
        )
        for layer in target.layers:
            for head in range(layer.first_head, layer.first_head + layer.heads):
                assert served[layer.name, head] == 1


def test_replicated_receivers_are_served_by_different_replicas() -> None:
    latent = Model((0,), heads=1)
    sources, targets = ranks(latent, FOURS, 4), ranks(latent, FOURS, 4)
    assert [[sends(source, target) for source in sources].index(True) for target in targets] == [0, 1, 2, 3]


def test_a_head_that_no_sender_has_is_named() -> None:
    lower = rank(MODEL, FOURS, heads=range(4))
    with pytest.raises(LayoutMismatch, match=r"'layers\.0'.*heads 0 to 7.*sends head 4"):
        covers([lower], POOL)


def test_a_head_that_is_missing_between_others_is_named() -> None:
    ends = [rank(MODEL, FOURS, heads=heads) for heads in (range(2), range(4, 8))]
    with pytest.raises(LayoutMismatch, match="sends head 2"):
        covers(ends, POOL)


def test_a_layer_that_no_sender_has_is_named() -> None:
    with pytest.raises(LayoutMismatch, match=r"'layers\.1'.*sends head 0"):
        covers([rank(MODEL, FOURS, layers=range(1))], POOL)


def test_senders_that_hide_that_they_are_replicas_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"head 0 would be sent by more than one rank"):
        covers([POOL, POOL], POOL)
    covers([replace(POOL, replica=0, replicas=2), replace(POOL, replica=1, replicas=2)], POOL)


def test_layers_that_only_the_sender_has_are_no_matter() -> None:
    covers([POOL], rank(MODEL, FOURS, layers=range(1, 2)))
