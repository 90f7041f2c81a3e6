"""Sealing at the edges: extreme landmark logits, ridges, long prompts, short ones."""

from __future__ import annotations

import numpy as np
import pytest
from support import SMALL, small_rows

import o1core
from o1core.far import nystrom
from o1core.testing import Oracle, check_output, check_state, random_rows


def aligned(size: float, rows: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows whose mean query and mean key point the same way, with landmark logits of `size`."""
    q, k, v = random_rows(1, rows, heads_per_group=2, head_dim=16)
    length = np.sqrt(abs(size) * 4)
    q[:, :, 0] = length
    k[:, :, 0] = np.sign(size) * length
    return q, k, v


@pytest.mark.parametrize("size", [1.0, 40.0, 80.0, 95.0, 110.0, 400.0, 1e4, 1e9])
def test_large_landmark_logits_stay_right(engine: o1core.O1Batch, size: float) -> None:
    """Beyond about 100 the mix is 0 in float32 and the far field carries nothing."""
    q, k, v = aligned(size)
    config = o1core.Config(8, 32, 2)
    layer = engine.seal(q[:100], k[:100], v[:100], config)
    state = layer.state()
    assert all(np.isfinite(state.arrays[n]).all() for n in ("mix", "far_max", "far_mass"))
    assert (np.abs(state.mix).max() == 0) == (size > 100)
    oracle = Oracle(config, (q[:100], k[:100], v[:100]))
    oracle.append((q[100:], k[100:], v[100:]))
    out = layer.extend(q[100:], k[100:], v[100:])
    check_output(out, oracle.expected(range(100, 200)))
    if size < 1e3:  # beyond, 1e-4 is finer than float32 can tell exp(logit)
        check_state(layer.state(), oracle.state())


@pytest.mark.parametrize("size", [-40.0, -75.0])
def test_small_landmark_logits_stay_right(engine: o1core.O1Batch, size: float) -> None:
    q, k, v = aligned(size)
    config = o1core.Config(8, 32, 2)
    layer = engine.seal(q[:100], k[:100], v[:100], config)
    oracle = Oracle(config, (q[:100], k[:100], v[:100]))
    oracle.append((q[100:], k[100:], v[100:]))
    check_output(layer.extend(q[100:], k[100:], v[100:]), oracle.expected(range(100, 200)))


@pytest.mark.parametrize("size", [-110.0, -800.0, -1e6])
def test_a_mix_beyond_float32_is_refused(engine: o1core.O1Batch, size: float) -> None:
    q, k, v = aligned(size)
    with pytest.raises(ValueError, match=r"mixing matrix does not fit float32 .* landmarks=0"):
        engine.seal(q, k, v, o1core.Config(8, 32, 2))
    engine.seal(q, k, v, o1core.Config(0, 32, 2)).extend(q, k, v)


@pytest.mark.parametrize("ridge", [1e-30, 1e-12, 1e-6, 1e-2, 10.0])
def test_ridge(ridge: float) -> None:
    """The definition, solved another way, at true scale."""
    logits = np.random.default_rng(0).standard_normal((2, 3, 8, 8))
    mix = nystrom.mixing_matrix(logits, ridge)
    a = np.exp(logits)
    gram = a.swapaxes(-1, -2) @ a
    diagonal = np.trace(gram, axis1=-2, axis2=-1)[..., None, None] / 8
    want = np.linalg.inv(gram + ridge * diagonal * np.eye(8)) @ a.swapaxes(-1, -2)
    np.testing.assert_allclose(mix, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


def test_a_singular_gram_matrix_gets_more_ridge() -> None:
    """Equal landmarks make A singular; with next to no ridge Cholesky fails until it has grown."""
    mix = nystrom.mixing_matrix(np.zeros((1, 1, 8, 8)), 1e-22)
    assert np.isfinite(mix).all()
    np.testing.assert_allclose(mix.sum(), 8 * 8 * 1 / 64, rtol=1e-3)


def test_no_ridge_helps_then_the_diagonal_does() -> None:
    mix = nystrom.mixing_matrix(np.zeros((1, 1, 8, 8)), 1e-30)
    np.testing.assert_allclose(mix[0, 0], np.eye(8) / 8)


def test_the_same_matrix_at_any_scale() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 1, 8, 8))
    plain = nystrom.mixing_matrix(logits, 1e-6)
    shifted = nystrom.mixing_matrix(logits + 50.0, 1e-6)
    np.testing.assert_allclose(shifted * np.exp(50.0), plain, rtol=1e-5)


@pytest.mark.parametrize("rows", [41, 42, 43, 44])
def test_when_a_prompt_seals(engine: o1core.O1Batch, rows: int) -> None:
    """SMALL has window 32 and sinks 2: 42 rows are too few, 43 enough."""
    layer = engine.seal(*small_rows(rows), SMALL)
    assert SMALL.seal_rows == 43
    assert layer.exact_only == (rows < 43)
    assert layer.rows_seen == rows


def test_the_layers_window_decides_not_a_groups_own(engine: o1core.O1Batch) -> None:
    config = o1core.Config(8, 32, 2, windows=(32, 300))
    layer = engine.seal(*small_rows(43), config)
    assert not layer.exact_only
    assert tuple(layer.state().meta[1]) == (41, 0, 0)


def test_an_empty_prompt(engine: o1core.O1Batch) -> None:
    q, k, v = small_rows(60)
    layer = engine.seal(q[:0], k[:0], v[:0], SMALL)
    assert layer.exact_only
    layer.extend(q, k, v)
    assert not layer.exact_only
    bare = engine.seal(q[:0], k[:0], v[:0], o1core.Config(0, 32, 0))
    assert not bare.exact_only
    assert bare.extend(q, k, v).shape == (60, 4, 12)


def test_a_long_prompt_is_absorbed_in_blocks(engine: o1core.O1Batch) -> None:
    rows = 2 * nystrom.SEAL_BLOCK + 300
    prompt = random_rows(4, rows, groups=2, heads_per_group=2, drift=2.0)
    check_state(engine.seal(*prompt, SMALL).state(), Oracle(SMALL, prompt).state())
