"""The tree's picture: where bars go, what blocks cannot share, and labels that fit."""

from nanobook import radixviz, style
from nanobook.radixviz import Edge

TREE = [
    Edge(
        "you are a guide",
        22,
        (Edge("when", 3, (Edge("open", 9), Edge("close", 5))), Edge("may", 8)),
    ),
    Edge("translate", 6),
]


def test_a_path_has_a_row_and_a_first_child_continues_it():
    assert radixviz.num_rows(TREE) == 4
    placed = [
        (bar.edge.label, bar.start, bar.row, bar.parent_row) for bar in radixviz.place(TREE, 8)
    ]
    assert placed == [
        ("you are a guide", 0, 0, 0),
        ("when", 22, 0, 0),
        ("open", 25, 0, 0),
        ("close", 25, 1, 0),
        ("may", 22, 2, 0),
        ("translate", 0, 3, 0),
    ]


def test_whole_blocks_end_where_a_multiple_of_the_block_size_does():
    whole = {bar.edge.label: bar.whole for bar in radixviz.place(TREE, 8)}
    # 22 tokens hold two blocks of eight; the third ends two tokens into "when".
    assert whole == {
        "you are a guide": 16, "when": 2, "open": 7, "close": 0, "may": 2, "translate": 0
    }  # fmt: skip
    for bar in radixviz.place(TREE, 1):
        assert bar.whole == bar.edge.num_tokens


def test_only_what_blocks_cannot_share_is_hatched():
    fig, ax = style.figure(height=radixviz.height(TREE))
    radixviz.draw(ax, TREE, block_size=8)
    hatched = {(patch.get_x(), patch.get_width()) for patch in ax.patches if patch.get_hatch()}
    assert hatched == {(16, 6), (24, 1)}
    assert ax.get_xlim() == (0, 34)
    fig.clear()


def test_labels_are_cut_to_their_bars_and_leaves_have_the_room_to_the_right():
    _, ax = style.figure()
    long = "so much that it does not fit"
    radixviz.draw(ax, [Edge(long, 5, (Edge(long, 2, (Edge("x", 1),)), Edge(long, 1)))], 4, width=54)
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["so …", "", "x", long]


def test_an_empty_tree_can_be_drawn():
    _, ax = style.figure(height=radixviz.height([]))
    radixviz.draw(ax, [], 16)
    assert not ax.patches
