"""What the kernels of all arches share: sizes, numbers of keys, numbers beyond float32, and the
stages that are no matrix products (docs/operator.md sections 3 to 5).

Names: G groups, H heads a group, S sinks, w the group's window, m landmarks, n rows of the call.
The keys of a group are numbered: those of the ring, oldest first, then the rows of the call. Row i
sees the last w of them up to itself; those before number `gone(i)` are evicted by then.

Evicted keys go far in blocks of 64. A tile of rows reads the far sums as they were before its first
row's block, and the keys evicted since then one by one; so all rows are computed together.

A launch from Python costs by the number of its arrays, so there are few: what a call changes of
the state (`state`, beside `meta`), what it does not (`sealed`), what stages tell each other
(`scratch`). Where in them a thing begins is in `sizes`. State is read from one set of arrays and
written to another, so no stage depends on what others wrote, and a call that fails has changed
nothing.

Taichi reads the annotations of these functions, so they are no Python types, and the modules of
kernels cannot postpone their evaluation.
"""

from o1core_taichi.language import ti

BLOCK = 64
"""Evicted keys that go far together."""
TILE = 64
"""Rows, and columns, of a tile."""
BAND = BLOCK + TILE
"""Keys beyond the window that a tile of rows can have in reach."""
MAX_LANDMARKS = 256
"""On GPUs: what workgroup memory has room for."""

LOWEST = -3.0e38
FLOOR = 1e-30
LEAST_SIZE = 2.0**-60
LOWEST_POWER = -(2**31) + 1
LOG2_E = 1.44269504
LN2 = 0.69314718
# ln 2 in two parts, the first of so few bits that its product with a small integer is exact.
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4

LENGTH, HEAD, FAR, WINDOW = 0, 1, 2, 3

F1 = ti.types.ndarray(dtype=ti.f32, ndim=1)
F3 = ti.types.ndarray(dtype=ti.f32, ndim=3)
F4 = ti.types.ndarray(dtype=ti.f32, ndim=4)
I1 = ti.types.ndarray(dtype=ti.i32, ndim=1)
I2 = ti.types.ndarray(dtype=ti.i32, ndim=2)
U2 = ti.types.ndarray(dtype=ti.u32, ndim=2)

# Sizes --------------------------------------------------------------------------------------------

NUMBERS = ("groups", "heads", "landmarks", "sinks", "ring", "head_dim", "value_dim", "clamps")
"""Of the geometry; heads of a group, clamps 1 for the rectifier fm."""
STATE = ("ring_k", "ring_v", "far_max_mass", "far_num")
SEALED = ("sink_k", "sink_v", "k_landmarks", "q_landmarks", "mix")
SCRATCH = (
    *("far_logits", "far_peaks", "far_weights", "block_mass", "running_max", "running_mass"),
    *("numerators", "weights", "landmark_store"),
)
STAGES = ("far_e", "far_commit", "attend", "ring_commit", "meta")
"""The plan's kernels as a call runs them, in order, each with the loops that prepare it."""
FAR_E, FAR_COMMIT, ATTEND, RING_COMMIT, META = range(len(STAGES))
FIELDS = (*NUMBERS, "room", *STATE, *SEALED, *SCRATCH, "stages", "scale")
"""What `sizes` holds: numbers; the rows that scratch has room for; where each part begins in its
array; a bit for each of `STAGES` that a launch is to run; the bits of the scale."""

Sizes = ti.types.struct(
    **dict.fromkeys(FIELDS[:-1], ti.i32), scale=ti.f32, landmark_rows=ti.i32, stride=ti.i32
)
Ring = ti.types.struct(length=ti.i32, head=ti.i32, window=ti.i32)


@ti.func
def sizes_of(sizes: ti.template()):
    """landmark_rows: of a group; stride: of the weights, a row's sinks, keys and landmarks."""
    return Sizes(
        groups=sizes[0],
        heads=sizes[1],
        landmarks=sizes[2],
        sinks=sizes[3],
        ring=sizes[4],
        head_dim=sizes[5],
        value_dim=sizes[6],
        clamps=sizes[7],
        room=sizes[8],
        ring_k=sizes[9],
        ring_v=sizes[10],
        far_max_mass=sizes[11],
        far_num=sizes[12],
        sink_k=sizes[13],
        sink_v=sizes[14],
        k_landmarks=sizes[15],
        q_landmarks=sizes[16],
        mix=sizes[17],
        far_logits=sizes[18],
        far_peaks=sizes[19],
        far_weights=sizes[20],
        block_mass=sizes[21],
        running_max=sizes[22],
        running_mass=sizes[23],
        numerators=sizes[24],
        weights=sizes[25],
        landmark_store=sizes[26],
        stages=sizes[27],
        scale=ti.bit_cast(sizes[28], ti.f32),
        landmark_rows=sizes[1] * sizes[2],
        stride=sizes[3] + sizes[4] + BAND + sizes[2],
    )


@ti.func
def asked(g: ti.template(), stage: ti.i32) -> ti.i32:
    """1 if a launch is to run a stage, 0 if its loops are to be empty."""
    return (g.stages >> stage) & 1


# Where things begin: a ring slot's key or value, a landmark's logits, and so on. A landmark row x
# is landmark b of head h of group g: `(g*H + h)*m + b`.


@ti.func
def ring_k_at(g: ti.template(), group: ti.i32, slot: ti.i32) -> ti.i32:
    return g.ring_k + (group * g.ring + slot) * g.head_dim


@ti.func
def ring_v_at(g: ti.template(), group: ti.i32, slot: ti.i32) -> ti.i32:
    return g.ring_v + (group * g.ring + slot) * g.value_dim


@ti.func
def sink_k_at(g: ti.template(), group: ti.i32, sink: ti.i32) -> ti.i32:
    return g.sink_k + (group * g.sinks + sink) * g.head_dim


@ti.func
def sink_v_at(g: ti.template(), group: ti.i32, sink: ti.i32) -> ti.i32:
    return g.sink_v + (group * g.sinks + sink) * g.value_dim


@ti.func
def k_landmark_at(g: ti.template(), group: ti.i32, b: ti.i32) -> ti.i32:
    return g.k_landmarks + (group * g.landmarks + b) * g.head_dim


@ti.func
def far_logits_at(g: ti.template(), x: ti.i32) -> ti.i32:
    return g.far_logits + x * g.room


@ti.func
def far_peaks_at(g: ti.template(), x: ti.i32) -> ti.i32:
    return g.far_peaks + x * g.room


@ti.func
def far_weights_at(g: ti.template(), x: ti.i32) -> ti.i32:
    return g.far_weights + x * g.room


@ti.func
def block_at(g: ti.template(), block: ti.i32, x: ti.i32) -> ti.i32:
    """Among block_mass, running_max or running_mass."""
    return block * g.groups * g.landmark_rows + x


@ti.func
def numerator_at(g: ti.template(), block: ti.i32, x: ti.i32) -> ti.i32:
    return g.numerators + (block * g.groups * g.landmark_rows + x) * g.value_dim


@ti.func
def weights_at(g: ti.template(), group: ti.i32, query: ti.i32, rows: ti.i32) -> ti.i32:
    """The weights of a query, which is numbered as below."""
    return g.weights + (group * g.heads * head_rows(rows) + query) * g.stride


# Keys ---------------------------------------------------------------------------------------------


@ti.func
def ring_of(meta: ti.template(), g: ti.template(), group: ti.i32):
    """Where a group's ring stands before the call."""
    own = ti.cast(meta[group, WINDOW], ti.i32)
    return Ring(
        length=ti.cast(meta[group, LENGTH], ti.i32),
        head=ti.cast(meta[group, HEAD], ti.i32),
        window=ti.select(own == 0, g.ring, own),
    )


@ti.func
def gone_by(ring: ti.template(), rows: ti.i32) -> ti.i32:
    """The number of the first key that is still live once `rows` rows were pushed."""
    return ti.max(0, ring.length + rows - ring.window)


@ti.func
def gone(ring: ti.template(), row: ti.i32) -> ti.i32:
    return gone_by(ring, row + 1)


@ti.func
def slot_of(ring: ti.template(), key: ti.i32) -> ti.i32:
    """The slot of a key that is in the ring; a remainder would cost more than the rest."""
    slot = ring.head + key
    return ti.select(slot >= ring.window, slot - ring.window, slot)


# Queries ------------------------------------------------------------------------------------------
#
# The queries of a group are numbered head by head. In long calls every head is given whole tiles;
# in shorter ones a tile is shared by several heads, all of which see the same keys.


@ti.func
def head_rows(rows: ti.i32) -> ti.i32:
    """Numbers that a head takes up."""
    return ti.select(rows < TILE, rows, (rows + TILE - 1) // TILE * TILE)


@ti.func
def first_row_of(tile: ti.i32, rows: ti.i32) -> ti.i32:
    """The first row of the call that a tile has."""
    return ti.select(rows < TILE, 0, tile * TILE % head_rows(rows))


@ti.func
def last_row_of(tile: ti.i32, rows: ti.i32) -> ti.i32:
    return ti.min(rows, first_row_of(tile, rows) + TILE) - 1


@ti.func
def start_of(ring: ti.template(), tile: ti.i32, rows: ti.i32) -> ti.i32:
    """The first key of the block whose running far sums a tile reads."""
    return gone(ring, first_row_of(tile, rows)) // BLOCK * BLOCK


@ti.func
def end_of(g: ti.template(), ring: ti.template(), tile: ti.i32, rows: ti.i32) -> ti.i32:
    """Columns of a tile's weights up to the landmarks: sinks, then keys from its start on."""
    return g.sinks + ring.length + last_row_of(tile, rows) + 1 - start_of(ring, tile, rows)


# Numbers beyond float32 ---------------------------------------------------------------------------


@ti.func
def decay(x: ti.f32) -> ti.f32:
    """exp of what is at most 0, up to rounding."""
    return ti.exp(ti.min(ti.max(x, -200.0), 0.0))


@ti.func
def power_of_two(power: ti.i32) -> ti.f32:
    bits = ti.cast(ti.min(ti.max(power, -126), 127) + 127, ti.u32) << ti.u32(23)
    return ti.select(power < -126, 0.0, ti.bit_cast(bits, ti.f32))


@ti.func
def split(number: ti.f32):
    """`number = value * 2^power` with a value between 1 and 2 in magnitude, or 0; denormals too."""
    bits = ti.bit_cast(number, ti.u32)
    digits = bits & ti.u32(0x007FFFFF)
    power = ti.cast((bits >> ti.u32(23)) & ti.u32(255), ti.i32) - 127
    if power == -127:
        normal = ti.bit_cast(ti.cast(digits, ti.f32), ti.u32)
        power = ti.cast(normal >> ti.u32(23), ti.i32) - 127 - 149
        digits = normal & ti.u32(0x007FFFFF)
    value = ti.bit_cast((bits & ti.u32(0x80000000)) | digits | ti.u32(0x3F800000), ti.f32)
    if (bits & ti.u32(0x7FFFFFFF)) == ti.u32(0):
        value = 0.0
        power = 0
    return value, power


@ti.func
def scaled_exp(x: ti.f32):
    """exp(x) as value and power of two, however large or small."""
    bounded = ti.min(ti.max(x, -1.0e9), 1.0e9)
    power = ti.ceil(bounded * LOG2_E)
    rest = (bounded - power * LN2_HIGH) - power * LN2_LOW
    return ti.exp(ti.min(rest, 0.0)), ti.cast(power, ti.i32)


# far_sums, first part -----------------------------------------------------------------------------


@ti.func
def far_peaks(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    scratch: ti.template(),
    rows: ti.i32,
):
    """Running maxima of the landmark logits within each block; at the last, weights and mass."""
    for i in range(count):
        g = sizes_of(sizes)
        blocks = (rows + BLOCK - 1) // BLOCK
        x = i // blocks
        block = i % blocks
        ring = ring_of(meta, g, x // g.landmark_rows)
        first = block * BLOCK
        last = ti.min(gone_by(ring, rows), first + BLOCK)
        logits = far_logits_at(g, x)
        peaks = far_peaks_at(g, x)
        weights = far_weights_at(g, x)
        peak = LOWEST
        for key in range(first, last):
            peak = ti.max(peak, scratch[logits + key])
            scratch[peaks + key] = peak
        mass = 0.0
        for key in range(first, last):
            weight = decay(scratch[logits + key] - peak)
            scratch[weights + key] = weight
            mass += weight
        if first < last:
            scratch[g.block_mass + block_at(g, block, x)] = mass


# far_commit ---------------------------------------------------------------------------------------


@ti.func
def far_commit(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    next_state: ti.template(),
    scratch: ti.template(),
    rows: ti.i32,
):
    """Running sums over the blocks: before each of them, and after the last the new state."""
    for i in range(count):
        g = sizes_of(sizes)
        t = i % g.value_dim
        x = i // g.value_dim
        group = x // g.landmark_rows
        end = gone_by(ring_of(meta, g, group), rows)
        # An empty far field has no maximum: what the state then holds is not looked at.
        some = meta[group, FAR] > ti.u32(0)
        max_at = g.far_max_mass + x // g.landmarks * 2 * g.landmarks + x % g.landmarks
        mass_at = max_at + g.landmarks
        num_at = g.far_num + x * g.value_dim + t
        most = ti.select(some, state[max_at], LOWEST)
        mass = ti.select(some, state[mass_at], 0.0)
        numerator = ti.select(some, state[num_at], 0.0)
        step = g.groups * g.landmark_rows * g.value_dim
        at = numerator_at(g, 0, x) + t
        coming = 0.0
        if end > 0:
            coming = scratch[at]
        for block in range(end // BLOCK + 1):
            added = coming
            # Asked for before it is needed: the sums wait for little else.
            if (block + 1) * BLOCK < end:
                coming = scratch[at + step]
            scratch[at] = numerator
            at += step
            if t == 0:
                scratch[g.running_max + block_at(g, block, x)] = most
                scratch[g.running_mass + block_at(g, block, x)] = mass
            if block * BLOCK < end:
                peak = scratch[far_peaks_at(g, x) + ti.min((block + 1) * BLOCK, end) - 1]
                after = ti.max(most, peak)
                carry = decay(most - after)
                share = decay(peak - after)
                numerator = numerator * carry + added * share
                mass = mass * carry + scratch[g.block_mass + block_at(g, block, x)] * share
                most = after
        next_state[num_at] = ti.select(end > 0, numerator, state[num_at])
        if t == 0:
            next_state[max_at] = ti.select(end > 0, most, state[max_at])
            next_state[mass_at] = ti.select(end > 0, mass, state[mass_at])


# attend_weights -----------------------------------------------------------------------------------


@ti.func
def steps(lane: ti.i32, things: ti.i32, lanes: ti.template()) -> ti.i32:
    """How many of so many things a thread has when every `lanes`-th is its."""
    return ti.max(0, (things - lane + lanes - 1) // lanes)


@ti.func
def mix_apart(
    g: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    column: ti.i32,
    logits: ti.i32,
    top_logit: ti.f32,
):
    """u of a landmark with all its terms, however far apart: each has a power of two of its own.

    column is where its column of the mix begins, logits where those of the landmark keys do.
    """
    top = LOWEST_POWER
    for a in range(g.landmarks):
        value, power = split(sealed[column + a * g.landmarks])
        if value != 0.0:
            _, more = scaled_exp(scratch[logits + a] - top_logit)
            top = ti.max(top, more + power)
    u = 0.0
    for a in range(g.landmarks):
        value, power = split(sealed[column + a * g.landmarks])
        if value != 0.0:
            f, more = scaled_exp(scratch[logits + a] - top_logit)
            u += f * value * power_of_two(more + power - top)
    return u, top


def make_row_weights(lanes):
    """What attend_weights does for one row, which has so many threads: 1 on CPUs.

    What the threads of a row tell each other goes through workgroup memory; of the weights in
    scratch each reads only those that it wrote itself, as not every arch makes others' visible.
    """

    @ti.func
    def combined(part: ti.template(), base: ti.i32, lane: ti.i32, x: ti.f32, sums: ti.template()):
        """The largest of what the threads of a row pass, or their sum."""
        result = x
        if ti.static(lanes > 1):
            ti.simt.block.sync()
            part[base + lane] = x
            ti.simt.block.sync()
            if lane < 4:
                for i in range(1, lanes // 4):
                    other = part[base + lane + 4 * i]
                    if ti.static(sums):
                        result += other
                    else:
                        result = ti.max(result, other)
                part[base + lane] = result
            ti.simt.block.sync()
            result = part[base]
            for i in ti.static(range(1, 4)):
                if ti.static(sums):
                    result += part[base + i]
                else:
                    result = ti.max(result, part[base + i])
        return result

    @ti.func
    def row_weights(
        g: ti.template(),
        meta: ti.template(),
        sealed: ti.template(),
        scratch: ti.template(),
        store: ti.template(),
        part: ti.template(),
        base: ti.i32,
        part_at: ti.i32,
        lane: ti.i32,
        head: ti.i32,
        row: ti.i32,
        last: ti.i32,
        counts: ti.i32,
        rows: ti.i32,
    ):
        """Logits of a row become the weights of its values (section 4, with its four rules).

        store has from `base` on, by landmark, u, the bits of its power of two, and the weight
        of the landmark key and then the landmark's maximum. last is the last row of the workgroup;
        a row that does not count is one of another and writes nothing.
        """
        group = head // g.heads
        query = head % g.heads * head_rows(rows) + row
        at = weights_at(g, group, query, rows)
        tile = query // TILE
        ring = ring_of(meta, g, group)
        start = start_of(ring, tile, rows)
        evicted = gone(ring, row)
        # Columns: the sinks; the keys from `start` on, evicted up to `near`, live up to `coming`,
        # of rows to come up to `end`; the landmarks.
        near = g.sinks + evicted - start
        coming = g.sinks + ring.length + row + 1 - start
        end = end_of(g, ring, tile, rows)
        power_at = ti.select(lanes > 1, MAX_LANDMARKS, g.landmarks)
        most_at = 2 * power_at

        shift = LOWEST
        for c in range(steps(lane, g.sinks, lanes)):
            shift = ti.max(shift, scratch[at + lane + c * lanes])
        for c in range(steps(lane, coming - g.sinks, lanes)):
            column = g.sinks + lane + c * lanes
            if column >= near:
                shift = ti.max(shift, scratch[at + column])
        shift = combined(part, part_at, lane, shift, False)

        factor = 0.0
        mass = 0.0
        if g.landmarks > 0 and gone(ring, last) > 0:
            x0 = head * g.landmarks
            mix = g.mix + x0 * g.landmarks
            running = block_at(g, start // BLOCK, x0)
            mine = steps(lane, g.landmarks, lanes)
            top_logit = LOWEST
            for c in range(mine):
                top_logit = ti.max(top_logit, scratch[at + end + lane + c * lanes])
            top_logit = combined(part, part_at, lane, top_logit, False)
            for c in range(mine):
                b = lane + c * lanes
                store[base + most_at + b] = decay(scratch[at + end + b] - top_logit)
            if ti.static(lanes > 1):
                ti.simt.block.sync()
            for c in range(mine):
                b = lane + c * lanes
                u = 0.0
                size = 0.0
                entry = 0.0
                for a in range(g.landmarks):
                    x = sealed[mix + a * g.landmarks + b]
                    term = store[base + most_at + a] * x
                    u += term
                    size += ti.abs(term)
                    entry = ti.max(entry, ti.abs(x))
                power = 0
                # Terms may be lost below float32, unless what is there dwarfs all that can be lost.
                if not (size > LEAST_SIZE and size > entry * LEAST_SIZE):
                    u, power = mix_apart(g, sealed, scratch, mix + b, at + end, top_logit)
                if g.clamps != 0:
                    u = ti.max(u, 0.0)
                store[base + b] = u
                store[base + power_at + b] = ti.bit_cast(power, ti.f32)
            if ti.static(lanes > 1):
                ti.simt.block.sync()
            # The scale of landmark b is log|u_b| + far_max_b, where far_max_b is that at the row:
            # of the blocks before, of the rest of this one, of the one that has begun since.
            top = LOWEST
            for c in range(mine):
                b = lane + c * lanes
                peaks = far_peaks_at(g, x0 + b)
                most = scratch[g.running_max + running + b]
                if evicted > start:
                    most = ti.max(most, scratch[peaks + evicted - 1])
                if evicted > start + BLOCK:
                    most = ti.max(most, scratch[peaks + start + BLOCK - 1])
                store[base + most_at + b] = most
                u = store[base + b]
                power = ti.bit_cast(store[base + power_at + b], ti.i32)
                scale = most + ti.cast(power, ti.f32) * LN2 + ti.log(ti.max(ti.abs(u), 1e-37))
                if u != 0.0:
                    top = ti.max(top, scale)
            top = combined(part, part_at, lane, top, False)
            # Everything far is now relative to exp(top + top_logit): the weight of each landmark at
            # its maximum, then those of the keys it has seen, in the blocks before and since.
            for c in range(mine):
                b = lane + c * lanes
                most = store[base + most_at + b]
                value, power = scaled_exp(most - top)
                power += ti.bit_cast(store[base + power_at + b], ti.i32)
                gain = store[base + b] * value * power_of_two(power)
                store[base + b] = gain
                old = gain * decay(scratch[g.running_max + running + b] - most)
                mass += old * scratch[g.running_mass + running + b]
                if counts != 0:
                    scratch[at + end + b] = old
            if ti.static(lanes > 1):
                ti.simt.block.sync()
            for c in range(steps(lane, evicted - start, lanes)):
                key = start + lane + c * lanes
                logits = far_logits_at(g, x0) + key
                weight = 0.0
                for b in range(g.landmarks):
                    apart = scratch[logits + b * g.room] - store[base + most_at + b]
                    weight += store[base + b] * decay(apart)
                mass += weight
                if counts != 0:
                    scratch[at + g.sinks + key - start] = weight
            mass = combined(part, part_at, lane, mass, True)
            # A far field of negative mass, or of none, is dropped, and leaves the shift alone.
            if mass > 0.0:
                shift = ti.max(shift, top + top_logit)
                factor = decay(top + top_logit - shift)

        total = 0.0
        for c in range(steps(lane, g.sinks, lanes)):
            total += decay(scratch[at + lane + c * lanes] - shift)
        for c in range(steps(lane, coming - g.sinks, lanes)):
            column = g.sinks + lane + c * lanes
            if column >= near:
                total += decay(scratch[at + column] - shift)
        total = combined(part, part_at, lane, total, True)
        if factor > 0.0:
            total += mass * factor
        share = 1.0 / ti.max(total, FLOOR)
        if counts != 0:
            for c in range(steps(lane, g.sinks, lanes)):
                column = lane + c * lanes
                scratch[at + column] = decay(scratch[at + column] - shift) * share
            for c in range(steps(lane, end - g.sinks, lanes)):
                column = g.sinks + lane + c * lanes
                weight = 0.0
                if column < near:
                    if factor > 0.0:
                        weight = scratch[at + column] * (factor * share)
                elif column < coming:
                    weight = decay(scratch[at + column] - shift) * share
                scratch[at + column] = weight
            for c in range(steps(lane, g.landmarks, lanes)):
                column = end + lane + c * lanes
                # Without a far field nobody computed these, so they may hold anything.
                weight = 0.0
                if factor > 0.0:
                    weight = scratch[at + column] * (factor * share)
                scratch[at + column] = weight

    return row_weights


# ring_commit, meta --------------------------------------------------------------------------------


@ti.func
def ring_commit(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    next_state: ti.template(),
    k: ti.template(),
    v: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Each slot keeps what it has, or takes the last row that is due there."""
    for i in range(count):
        g = sizes_of(sizes)
        width = g.head_dim + g.value_dim
        t = i % width
        slot = i // width % g.ring
        group = i // (width * g.ring)
        ring = ring_of(meta, g, group)
        at = ring_k_at(g, group, slot) + t
        if t >= g.head_dim:
            at = ring_v_at(g, group, slot) + t - g.head_dim
        x = state[at]
        if slot < ring.window:
            key = slot - ring.head
            key = ti.select(key < 0, key + ring.window, key)
            if key < ring.length + rows:
                key += (ring.length + rows - 1 - key) // ring.window * ring.window
                row = first_row + key - ring.length
                if key >= ring.length:
                    if t < g.head_dim:  # noqa: SIM108 - only one of them may be read
                        x = k[row, group, t]
                    else:
                        x = v[row, group, t - g.head_dim]
        next_state[at] = x


@ti.func
def meta(
    count: ti.template(),
    sizes: ti.template(),
    before: ti.template(),
    after: ti.template(),
    held: ti.template(),
    rows: ti.i32,
):
    """Length, head and far count after the rows; held is for the host."""
    for group in range(count):
        ring = ring_of(before, sizes_of(sizes), group)
        evicted = gone_by(ring, rows)
        after[group, LENGTH] = ti.cast(ring.length + rows - evicted, ti.u32)
        after[group, HEAD] = ti.cast((ring.head + evicted) % ring.window, ti.u32)
        after[group, FAR] = before[group, FAR] + ti.cast(evicted, ti.u32)
        after[group, WINDOW] = before[group, WINDOW]
        for i in range(4):
            held[group, i] = after[group, i]
