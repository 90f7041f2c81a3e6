"""The landmark far field (docs/operator.md sections 2 to 4).

Per head: a mixing matrix, and for each landmark the maximum, mass and numerator of every key that
left the window, as seen by that landmark's query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from o1core.checks import F32, MAX_KEY, MAX_VALUE
from o1core.far.base import Arrays, FarField
from o1core.layout import MAX_SUB_CHUNK, Buffer, Kernel, Meta, Strategy, up_to

if TYPE_CHECKING:
    from o1core.config import Geometry

F64 = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating[Any]]

# Keys absorbed by one product while sealing: long enough for BLAS, short enough for the cache.
SEAL_BLOCK = 512
# A failed factorisation is tried again with the ridge tenfold, this many times.
RIDGE_TRIES = 12
F32_MAX = float(np.finfo(np.float32).max)


class Nystrom(FarField):
    """Landmark means, a mixing matrix a head, and running sums over the evicted keys."""

    name = "nystrom"
    around_attend: ClassVar[Mapping[Strategy, tuple[tuple[Kernel, ...], tuple[Kernel, ...]]]] = {
        "sub-chunk": (
            (
                Kernel(
                    "far_e",
                    ("heads", "landmarks"),
                    ("meta", "ring_k", "q_landmarks", "far_max_mass"),
                    ("scratch",),
                ),
            ),
            (
                Kernel(
                    "far_commit",
                    ("heads", "landmarks"),
                    ("meta", "ring_v", "scratch"),
                    ("far_max_mass", "far_num"),
                ),
            ),
        ),
        "whole-call": (
            (
                Kernel(
                    "far_e",
                    ("heads", "landmarks", "rows"),
                    ("meta", "ring_k", "q_landmarks", "k"),
                    ("scratch",),
                ),
                Kernel(
                    "far_sums",
                    ("heads", "landmarks", "sub_chunks"),
                    ("meta", "ring_v", "v", "scratch"),
                    ("scratch",),
                ),
                Kernel(
                    "far_commit",
                    ("heads", "landmarks"),
                    ("meta", "far_max_mass", "far_num", "scratch"),
                    ("far_max_mass", "far_num", "scratch"),
                ),
            ),
            (),
        ),
    }
    attend_reads: ClassVar[Mapping[Strategy, tuple[str, ...]]] = {
        "sub-chunk": ("k_landmarks", "mix", "far_num", "scratch"),
        "whole-call": ("k_landmarks", "mix", "scratch"),
    }

    def scratch_parts(self, g: Geometry, rows: int, sub_chunks: int) -> dict[str, tuple[int, ...]]:
        landmarks = up_to(g.landmarks, 4)
        by_row = (g.heads, landmarks, MAX_SUB_CHUNK * sub_chunks)
        by_sub_chunk = (sub_chunks, g.heads, landmarks)
        return {
            "far_logits": by_row,
            "far_peaks": by_row,
            "far_weights": by_row,
            "block_mass": by_sub_chunk,
            "running": (*by_sub_chunk, 4),
            "numerators": (*by_sub_chunk, up_to(g.value_dim, 4)),
            # Where there is no workgroup memory for what a row knows of its landmarks.
            "landmark_store": (g.heads, rows, 3, g.landmarks),
        }

    def arrays(self, g: Geometry) -> dict[str, tuple[int, ...]]:
        head = (g.groups, g.heads_per_group, g.landmarks)
        return {
            "k_landmarks": (g.groups, g.landmarks, g.head_dim),
            "q_landmarks": (*head, g.head_dim),
            "mix": (*head, g.landmarks),
            "far_max": head,
            "far_mass": head,
            "far_num": (*head, g.value_dim),
        }

    def buffers(self, g: Geometry) -> tuple[Buffer, ...]:
        shape = self.arrays(g)
        both = (g.groups, g.heads_per_group, 2, g.landmarks)
        return (
            Buffer("k_landmarks", 5, shape["k_landmarks"], "float32", "sealed"),
            Buffer("q_landmarks", 6, shape["q_landmarks"], "float32", "sealed"),
            Buffer("mix", 7, shape["mix"], "float32", "sealed"),
            Buffer("far_max_mass", 8, both, "float32", "state"),
            Buffer("far_num", 9, shape["far_num"], "float32", "state"),
        )

    def pack(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        packed = {n: arrays[n] for n in ("k_landmarks", "q_landmarks", "mix", "far_num")}
        packed["far_max_mass"] = np.stack((arrays["far_max"], arrays["far_mass"]), axis=2)
        return packed

    def unpack(self, buffers: Arrays) -> dict[str, npt.NDArray[Any]]:
        arrays = {n: buffers[n] for n in ("k_landmarks", "q_landmarks", "mix", "far_num")}
        arrays["far_max"] = buffers["far_max_mass"][:, :, 0]
        arrays["far_mass"] = buffers["far_max_mass"][:, :, 1]
        return arrays

    def seal(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        g: Geometry,
        evicted: tuple[int, ...],
        ridge: float,
    ) -> dict[str, npt.NDArray[Any]]:
        groups, heads, m = g.groups, g.heads_per_group, g.landmarks
        if not (np.isfinite(q).all() and np.isfinite(k).all()):
            raise ValueError("q and k must be finite to seal: landmarks are means over all rows")
        q_means = segment_means(q, m).transpose(1, 0, 2).reshape(groups, heads, m, g.head_dim)
        k_means = segment_means(k, m).transpose(1, 0, 2)
        mix = mixing_matrix(g.scale * (q_means @ k_means[:, None].swapaxes(-1, -2)), ridge)
        q_landmarks = q_means.astype(np.float32)
        far_max = np.full((groups, heads * m), -np.inf)
        far_mass = np.zeros((groups, heads * m))
        far_num = np.zeros((groups, heads * m, g.value_dim))
        for i in range(groups):
            one = slice(i, i + 1)
            queries = g.scale * q_landmarks[i].reshape(heads * m, -1).astype(np.float64)
            last = g.sinks + evicted[i]
            for first in range(g.sinks, last, SEAL_BLOCK):
                rows = slice(first, min(first + SEAL_BLOCK, last))
                keys, values = (x[rows, i].astype(np.float64)[None] for x in (k, v))
                with np.errstate(under="ignore"):
                    far_max[one], weights, carry = weigh(far_max[one], keys @ queries.T)
                    far_mass[one], far_num[one] = absorb(
                        far_mass[one], far_num[one], weights, carry, values
                    )
        shape = (groups, heads, m)
        return {
            "k_landmarks": k_means.astype(np.float32),
            "q_landmarks": q_landmarks,
            "mix": mix,
            "far_max": far_max.astype(np.float32).reshape(shape),
            "far_mass": far_mass.astype(np.float32).reshape(shape),
            "far_num": far_num.astype(np.float32).reshape(*shape, -1),
        }

    def check(self, arrays: Arrays, g: Geometry, meta: Meta) -> None:
        far = np.array([group.far for group in meta], np.float64)[:, None, None]
        # A weight is at most 1, so neither sum can outgrow the keys; 1% is for rounding.
        mass = 1.01 * far
        for name, limit, rule in (
            ("k_landmarks", MAX_KEY, f"at most {MAX_KEY:.3g} in magnitude"),
            ("q_landmarks", MAX_KEY, f"at most {MAX_KEY:.3g} in magnitude"),
            ("mix", F32_MAX, "finite"),
            ("far_mass", mass, f"what {far.max():.0f} far keys can give"),
            ("far_num", (mass * MAX_VALUE)[..., None], f"what {far.max():.0f} far keys can give"),
        ):
            within = np.abs(arrays[name], dtype=np.float64) <= limit  # NaN is not
            if not within.all():
                found = arrays[name][~within][0]
                rule = rule if np.isfinite(found) else "finite"
                raise ValueError(f"state array {name} must be {rule}, got {found:.3g}")
        if (arrays["far_mass"] < 0).any():
            raise ValueError(f"state array far_mass must be >= 0, got {arrays['far_mass'].min():g}")
        if not mix_fits(arrays["mix"]):
            raise ValueError(_MIX_RULE.format(np.abs(arrays["mix"]).max()))
        for i, group in enumerate(meta):
            seen = np.isfinite(arrays["far_max"][i])
            unseen = np.isneginf(arrays["far_max"][i]) & (arrays["far_mass"][i] == 0)
            if not (seen if group.far else unseen).all():
                rule = "finite" if group.far else "-inf, with far_mass 0,"
                raise ValueError(
                    f"state array far_max must be {rule} in group {i}, "
                    f"where {group.far} keys went far"
                )


_MIX_RULE = (
    "mixing matrix does not fit float32 (landmarks times its largest entry, {:.3g}, must stay "
    "finite): the landmark logits of this prompt are extreme; use landmarks=0 for this layer"
)


def segment_means(rows: F32, m: int) -> F64:
    """Means of the m contiguous segments `[i*t//m, (i+1)*t//m)`, `[m, heads, dim]` in float64."""
    t = rows.shape[0]
    return np.stack(
        [rows[i * t // m : (i + 1) * t // m].mean(axis=0, dtype=np.float64) for i in range(m)]
    )


def mixing_matrix(logits: F64, ridge: float) -> F32:
    """`(AᵀA + λI)⁻¹ Aᵀ` for `A = exp(logits)`, `[..., m, m]`, rounded to float32 once.

    Worked on `exp(logits - largest)`, so nothing overflows whatever the logits; the factor is put
    back at the end. Entries below float32 become 0 (the far field of that head then carries
    nothing), entries beyond it are a ValueError (docs/operator.md section 2).
    """
    top = logits.max(axis=(-2, -1), keepdims=True)
    a = np.exp(logits - top)
    gram = a.swapaxes(-1, -2) @ a
    mean = np.trace(gram, axis1=-2, axis2=-1)[..., None, None] / gram.shape[-1]
    each = [x.reshape(-1, *x.shape[-2:]) for x in (a, gram, mean, top)]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        solved = [_solve(*head, ridge=ridge) for head in zip(*each, strict=True)]
        mix64 = np.stack(solved).reshape(logits.shape)
        mix: F32 = mix64.astype(np.float32)
    if not mix_fits(mix):
        raise ValueError(_MIX_RULE.format(np.abs(mix64).max()))
    return mix


def mix_fits(mix: npt.NDArray[Any]) -> bool:
    """Whether a sum of m weights times entries of `mix` stays finite in float32."""
    with np.errstate(invalid="ignore"):
        return bool(np.abs(mix).max(initial=0) <= F32_MAX / mix.shape[-1])


def _solve(a: F64, gram: F64, mean: F64, top: F64, *, ridge: float) -> F64:
    """One head's mix, from `A` relative to `exp(top)`, its Gram matrix and its mean diagonal."""
    eye = np.eye(len(a))
    for attempt in range(RIDGE_TRIES + 1):
        try:
            lower = np.linalg.cholesky(gram + ridge * 10.0**attempt * mean * eye)
        except np.linalg.LinAlgError:
            continue
        solved: F64 = np.linalg.solve(lower.T, np.linalg.solve(lower, a.T)) * np.exp(-top)
        return solved
    fallback: F64 = eye / mean * np.exp(-2.0 * top)
    return fallback


def weigh(far_max: Floats, logits: Floats) -> tuple[Floats, Floats, Floats]:
    """How evicted keys enter the far sums (section 3): new maxima, weights of the keys, carry.

    far_max `[G,x]`, logits `[G,keys,x]`, where x runs over the heads and landmarks of a group.
    Weights `[G,keys,x]` are relative to the new maxima, and so are old sums times carry `[G,x]`.
    Sealing does this in float64 with blocks of a prompt, the numpy backend in float32 with
    sub-chunks.
    """
    after = np.maximum(far_max, logits.max(axis=1))
    return after, np.exp(logits - after[:, None]), np.exp(far_max - after)


def absorb(
    far_mass: Floats, far_num: Floats, weights: Floats, carry: Floats, values: Floats
) -> tuple[Floats, Floats]:
    """The far sums with the keys added: far_mass `[G,x]`, far_num `[G,x,value_dim]`, both new.

    weights and carry as `weigh` gives them, values `[G,keys,value_dim]`. The old sums are not
    written.
    """
    by_key = weights.swapaxes(1, 2)
    # With one key there is nothing to sum up, and BLAS takes three times as long as numpy.
    added = by_key * values if values.shape[1] == 1 else by_key @ values
    added += far_num if (carry == 1).all() else far_num * carry[..., None]
    return far_mass * carry + weights.sum(axis=1), added


NYSTROM = Nystrom()
