"""Figures that explain verify_attn: what they say is what the formulas say."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from kdtree.measure import roofline
from kdtree.report import draw_mla

SHAPE = {"B": 1, "H": 64, "N": 33, "L": 4096, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def no_figure_is_left():
    yield
    plt.close("all")


def words(fig) -> list[str]:
    """Every piece of text of a figure."""
    return [t.get_text() for t in fig.findobj(matplotlib.text.Text) if t.get_text()]


def test_absorption_names_the_widths_of_k26():
    said = words(draw_mla.absorption(64))
    for part in ("query [H, 192]", "query [H, 576]", "key of a token [576]", "output [H, 512]"):
        assert part in said
    assert "64 heads read 20,480 numbers a token" in said
    assert "64 heads read 576 numbers a token" in said


def test_absorption_draws_to_scale():
    fig = draw_mla.absorption(2, kv_lora_rank=32, qk_rope=8, qk_nope=16, v_head=16)
    left, right = fig.axes
    assert {p.get_width() for p in left.patches} == {32, 8, 16}
    assert {p.get_width() for p in right.patches} == {32, 8}
    # Cards in front of cards: four for what each head has, one for what all share.
    assert len(left.patches) == 2 + 4 * (2 + 2 + 1 + 1)
    assert len(right.patches) == 2 + 4 * 2 + 2 + 1 + 4


def test_weights_that_the_mask_hides_are_left_blank():
    weights = np.array([[0.6, 0.4, np.nan], [0.5, 0.2, 0.3]])
    fig = draw_mla.attention_weights(weights, 1, ["a", "b"])
    drawn = fig.axes[0].images[0].get_array()
    assert np.ma.getmaskarray(drawn).tolist() == np.isnan(weights).tolist()
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["a", "b"]


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        draw_mla.attention_weights(np.zeros((2, 3)), 2, ["a", "b"])


def test_reads_count_every_row_once_a_block_and_once():
    found = draw_mla.kv_reads(SHAPE, 8)
    once = (4096 + 33) * 1152
    assert list(found.values()) == [once * 33 * 64, once * 264, once]
    ragged = draw_mla.kv_reads(SHAPE | {"B": 2, "L": [10, 0]}, 10_000)
    assert list(ragged.values())[1:] == [(10 + 33 + 33) * 1152] * 2


def test_the_reads_figure_has_a_bar_for_each():
    fig = draw_mla.kv_reads_figure(SHAPE, 8)
    widths = [bar.get_width() for bar in fig.axes[0].patches]
    assert sorted(widths) == sorted(draw_mla.kv_reads(SHAPE, 8).values())
    assert "4.5 MiB" in words(fig)


def test_intensity_is_flop_over_bytes_and_grows_with_heads_and_slots():
    found = draw_mla.intensity(SHAPE, (8, 64), (1, 9))
    flop, moved = roofline.flop_bytes("verify_attn", SHAPE | {"H": 8, "N": 9})
    assert found[8][1] == flop / moved
    assert found[8][0] < found[8][1] < found[64][1]


def test_the_intensity_figure_draws_lines_and_knees():
    fig = draw_mla.intensity_figure(SHAPE, (8, 64), (1, 9, 33), {"H200": 206.0})
    said = words(fig)
    assert "8 heads" in said and "64 heads" in said and "knee of H200: 206" in said
    assert len(fig.axes[0].lines) == 3
