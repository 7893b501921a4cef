"""Pictures of trees, masks and cache moves hold what they claim to show."""

from __future__ import annotations

import io

import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt

from kdtree import captured, fixtures
from kdtree.report import draw
from kdtree.tree import DraftTree, from_parents, random_tree

WORDS = {1: "the", 2: " cat", 3: " dog", 4: "\n   ", 5: "$x$"}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def small_tree() -> DraftTree:
    """0 the, 1 cat, 2 dog (siblings), 3 a line break under cat; slot 4 unused."""
    scores = np.log([[1.0, 0.6, 0.3, 0.5, 1.0]])
    return from_parents(
        np.array([[1, 2, 3, 4, -1]]), np.array([[-1, 0, 0, 1, -1]]), np.array([4]), scores=scores, max_depth=2
    )


def texts(fig) -> list[str]:
    return [t.get_text() for t in fig.axes[0].texts if t.get_text()]


def colours(fig, shade: str) -> int:
    """Cells filled with `shade`."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    cells = [p for p in fig.axes[0].patches if isinstance(p, Rectangle)]
    return sum(p.get_facecolor() == to_rgba(shade) for p in cells)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" cat", "·cat"),
        ("  ", "··"),
        ("\n" + " " * 11, "↵·×11"),
        ("\t", "⇥"),
        ("", "∅"),
        ("é", "é"),
        ("\x00", "\\x00"),
        ("\ufffd", "\\ufffd"),
    ],
)
def test_white_space_of_a_token_shows(text, shown):
    assert draw.token_text(text) == shown


@pytest.mark.parametrize(
    ("probability", "shown"),
    [(1.0, "100%"), (0.412, "41%"), (0.0214, "2.1%"), (0.0001, "<0.1%"), (0.0, "<0.1%")],
)
def test_probabilities_are_short(probability, shown):
    assert draw.percent(probability) == shown


def test_a_first_child_stands_on_its_parents_line():
    assert draw.lines_of([-1, 0, 1, 0, 1, 3]) == [0, 0, 0, 2, 1, 2]


def test_no_two_slots_of_a_depth_share_a_line():
    tree = random_tree(np.random.RandomState(3), 20, 40, max_depth=6)
    for b in range(tree.batch):
        lines = draw.lines_of([int(p) for p in tree.parents[b]])
        places = {(line, int(depth)) for line, depth in zip(lines, tree.depths[b], strict=True)}
        assert len(places) == tree.n_slots
        assert set(lines) == set(range(max(lines) + 1))


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 0, -1], [-1, 2, 0]])
def test_a_parent_that_does_not_come_first_is_refused(parents):
    with pytest.raises(ValueError, match="parents: slot"):
        draw.lines_of(parents)


def test_a_tree_shows_every_used_slot_with_its_probability():
    shown = texts(draw.tree(small_tree(), words=WORDS))
    assert shown == ["the", "·cat", "60%", "·dog", "30%", "↵·×3", "50%"]


def test_tokens_without_a_word_show_their_number():
    assert draw.labels(small_tree(), 0, {1: "the"}) == ["the", "#2", "#3", "#4"]
    unnamed = from_parents(np.array([[-1, 5]]), np.array([[-1, 0]]), np.array([2]))
    assert draw.labels(unnamed) == ["root", "#5"]


def test_a_dollar_sign_is_no_formula():
    tree = from_parents(np.array([[1, 5]]), np.array([[-1, 0]]), np.array([2]))
    fig = draw.tree(tree, words=WORDS, probabilities=False)
    fig.canvas.draw()
    assert texts(fig) == ["the", r"\$x\$"]


def test_the_accepted_path_and_the_bonus_stand_out():
    from matplotlib.colors import to_rgba
    from matplotlib.patches import FancyBboxPatch

    fig = draw.tree(small_tree(), words=WORDS, path=[0, 1, -1], bonus=3)
    assert texts(fig)[-2:] == ["·dog", "bonus"]
    frames = [p for p in fig.axes[0].patches if isinstance(p, FancyBboxPatch)]
    assert [p.get_edgecolor() == to_rgba(draw.GREEN) for p in frames] == [True, True, False, False, False]
    assert frames[-1].get_edgecolor() == to_rgba(draw.ORANGE)


def test_frames_and_texts_of_a_real_tree_do_not_overlap():
    bundle = fixtures.get("tree_accept_smollm2_code")
    fig = draw.tree(bundle.tree(), 5, words=captured.words("code"), path=bundle.outputs["path"][5], bonus=3)
    fig.canvas.draw()
    boxes = [t.get_window_extent() for t in fig.axes[0].texts if t.get_text()]
    for i, one in enumerate(boxes):
        assert fig.bbox.x0 <= one.x0 and one.x1 <= fig.bbox.x1, "a text leaves the figure"
        assert not any(one.overlaps(other) for other in boxes[:i])


def test_an_unfit_tree_is_refused():
    tree = small_tree()
    tree.n_nodes[0] = 9
    with pytest.raises(ValueError, match="n_nodes: request 0 has 9, expected 1..5"):
        draw.tree(tree)


def test_a_mask_has_a_cell_for_every_visible_pair():
    tree = small_tree()
    fig = draw.visibility(tree, words=WORDS, bits=True)
    assert colours(fig, "#174a84") == 4  # themselves
    assert colours(fig, draw.BLUE) == 4 + 4  # the prefix, once a row; the root thrice, cat once
    assert colours(fig, draw.HIDDEN) == 16 - 8
    assert {"00000001", "00000003", "00000005", "0000000b"} <= set(texts(fig))


def test_moves_have_an_arrow_for_every_accepted_slot():
    fig = draw.moves([0, 2, 3, -1], 5, prefix=7)
    arrows = [t.arrow_patch for t in fig.axes[0].texts if getattr(t, "arrow_patch", None)]
    assert len(arrows) == 3
    shown = texts(fig)
    assert shown.count("prefix, 7 rows") == 2 and "the next prefix ends here" in shown
    assert colours(fig, "#a5d8c3") == 2 * 3


@pytest.mark.parametrize("path", [[], [1, 2], [0, 2, 2], [0, 3, 1], [0, 5]])
def test_a_path_that_cannot_be_moved_is_refused(path):
    with pytest.raises(ValueError, match="path: got"):
        draw.moves(path, 5)


def test_the_same_tree_gives_the_same_picture():
    def picture() -> bytes:
        buffer = io.BytesIO()
        draw.tree(small_tree(), words=WORDS).savefig(buffer, format="png")
        return buffer.getvalue()

    assert picture() == picture()


def test_the_words_of_a_path_leave_the_root_out():
    assert draw.accepted_words(small_tree(), 0, [0, 1, 3, -1], WORDS) == "·cat ↵·×3"
