"""What the kernels of all arches share: sizes, numbers of keys, numbers beyond float32, and the
stages that are no matrix products (docs/operator.md sections 3 to 5).

Names: G groups, H heads a group, S sinks, w the group's window, m landmarks, n rows of the call.
The keys of a group are numbered: those of the ring, oldest first, then the rows of the call. Row i
sees the last w of them up to itself; those before number `gone(i)` are evicted by then.

Rows are computed in tiles of 64 queries, and what 64 rows evict goes far together, as a block. So
the rows of a tile read the far sums from before their own block, and of that block, key by key,
what is evicted by then. A far key is known by the row that evicts it: there is at most one a group.

A launch from Python costs by the number of its arrays, so there are few: what a call changes of
the state (`state`, beside `meta`), what it does not (`sealed`), what stages tell each other
(`scratch`). Where in them a thing begins is in `sizes`. State is read from one set of arrays and
written to another, so no stage depends on what others wrote, and a call that fails has changed
nothing.

Taichi reads the annotations of these functions, so they are no Python types, and the modules of
kernels cannot postpone their evaluation.
"""

from o1core_taichi.language import ti

TILE = 64
"""Rows of a tile, and rows whose evicted keys make a block."""
SHARED = 2304
"""Numbers of every array in workgroup memory, all of one size: the language links the loops of a
kernel by names of such arrays that several of them may have, and then one array serves all."""
PART_AT = 2048
"""Where attend_weights has what the threads of a row tell each other."""
PEAKS = 16
"""Logits of a block that are loaded together."""
TOGETHER = 8
"""Neighbouring keys that one thread weighs, and landmarks that it mixes."""
MAX_LANDMARKS = 256
"""On GPUs: what workgroup memory has room for."""

LOWEST = -3.0e38
FLOOR = 1e-30
LEAST_SIZE = 2.0**-60
LOWEST_POWER = -(2**31) + 1
MOST_POWER = 100
MOST_LEAP = 60.0
"""How far the peak of a block may lie above a maximum for factors to stay within float32."""
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
    *("numerators", "weights", "shares", "keys", "values", "landmark_store"),
)
STAGES = ("far_e", "far_sums", "far_commit", "attend", "ring_commit", "meta")
"""The plan's kernels as a call runs them, in order, each with the loops that prepare it."""
FAR_E, FAR_SUMS, FAR_COMMIT, ATTEND, RING_COMMIT, META = range(len(STAGES))
FIELDS = (*NUMBERS, "room", *STATE, *SEALED, *SCRATCH, "stages", "scale")
"""What `sizes` holds: numbers; the rows that scratch has room for; where each part begins in its
array; a bit for each of `STAGES` that a launch is to run; the bits of the scale."""

Sizes = ti.types.struct(
    **dict.fromkeys(FIELDS[:-1], ti.i32), scale=ti.f32, landmark_rows=ti.i32, stride=ti.i32
)
Ring = ti.types.struct(length=ti.i32, head=ti.i32, window=ti.i32)


@ti.func
def sizes_of(sizes: ti.template()):
    """landmark_rows: of a group; stride: columns of a row, its landmarks, sinks and keys."""
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
        shares=sizes[26],
        keys=sizes[27],
        values=sizes[28],
        landmark_store=sizes[29],
        stages=sizes[30],
        scale=ti.bit_cast(sizes[31], ti.f32),
        landmark_rows=sizes[1] * sizes[2],
        stride=sizes[2] + sizes[3] + sizes[4] + TILE,
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
def evicted_by(ring: ti.template(), row: ti.i32) -> ti.i32:
    """The number of the key that a row evicts; below 0 if it evicts none."""
    return row - (ring.window - ring.length)


@ti.func
def evictor_of(ring: ti.template(), key: ti.i32) -> ti.i32:
    """The row that evicts a key."""
    return key + (ring.window - ring.length)


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
    """The first key that a tile sees: those before it were evicted by rows before its own."""
    return gone_by(ring, first_row_of(tile, rows))


@ti.func
def end_of(g: ti.template(), ring: ti.template(), tile: ti.i32, rows: ti.i32) -> ti.i32:
    """Columns of a tile: landmarks, sinks, then keys from its start on."""
    keys = ring.length + last_row_of(tile, rows) + 1 - start_of(ring, tile, rows)
    return g.landmarks + g.sinks + keys


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
        blocks = (rows + TILE - 1) // TILE
        x = i // blocks
        block = i % blocks
        ring = ring_of(meta, g, x // g.landmark_rows)
        first = ti.max(block * TILE, evictor_of(ring, 0))
        last = ti.min(rows, block * TILE + TILE)
        logits = far_logits_at(g, x)
        peaks = far_peaks_at(g, x)
        weights = far_weights_at(g, x)
        peak = LOWEST
        # Some at a time, so that their loads do not wait for each other.
        for part in range(TILE // PEAKS):
            start = block * TILE + part * PEAKS
            held = ti.Vector.zero(ti.f32, PEAKS)
            for j in ti.static(range(PEAKS)):
                held[j] = LOWEST
                if first <= start + j and start + j < last:
                    held[j] = scratch[logits + start + j]
            for j in ti.static(range(PEAKS)):
                peak = ti.max(peak, held[j])
                if first <= start + j and start + j < last:
                    scratch[peaks + start + j] = peak
        mass = 0.0
        for part in range(TILE // PEAKS):
            start = block * TILE + part * PEAKS
            held = ti.Vector.zero(ti.f32, PEAKS)
            for j in ti.static(range(PEAKS)):
                if first <= start + j and start + j < last:
                    held[j] = scratch[logits + start + j]
            for j in ti.static(range(PEAKS)):
                if first <= start + j and start + j < last:
                    weight = decay(held[j] - peak)
                    scratch[weights + start + j] = weight
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
        ring = ring_of(meta, g, x // g.landmark_rows)
        # The first row that evicts, and with it the first block that adds anything.
        first = evictor_of(ring, 0)
        # An empty far field has no maximum: what the state then holds is not looked at.
        some = meta[x // g.landmark_rows, FAR] > ti.u32(0)
        max_at = g.far_max_mass + x // g.landmarks * 2 * g.landmarks + x % g.landmarks
        mass_at = max_at + g.landmarks
        num_at = g.far_num + x * g.value_dim + t
        most = ti.select(some, state[max_at], LOWEST)
        mass = ti.select(some, state[mass_at], 0.0)
        numerator = ti.select(some, state[num_at], 0.0)
        step = g.groups * g.landmark_rows * g.value_dim
        at = numerator_at(g, 0, x) + t
        coming = 0.0
        if first < ti.min(rows, TILE):
            coming = scratch[at]
        for block in range((rows + TILE - 1) // TILE):
            added = coming
            last = ti.min(rows, (block + 1) * TILE) - 1
            # Asked for before it is needed: the sums wait for little else.
            if first < ti.min(rows, (block + 2) * TILE) and last + 1 < rows:
                coming = scratch[at + step]
            scratch[at] = numerator
            at += step
            if t == 0:
                scratch[g.running_max + block_at(g, block, x)] = most
                scratch[g.running_mass + block_at(g, block, x)] = mass
            if first <= last:
                peak = scratch[far_peaks_at(g, x) + last]
                after = ti.max(most, peak)
                carry = decay(most - after)
                share = decay(peak - after)
                numerator = numerator * carry + added * share
                mass = mass * carry + scratch[g.block_mass + block_at(g, block, x)] * share
                most = after
        next_state[num_at] = ti.select(first < rows, numerator, state[num_at])
        if t == 0:
            next_state[max_at] = ti.select(first < rows, most, state[max_at])
            next_state[mass_at] = ti.select(first < rows, mass, state[mass_at])


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
    apart: ti.template(),
    top_logit: ti.f32,
):
    """u of a landmark with all its terms, however far apart: each has a power of two of its own.

    column is where its column of the mix begins, logits where those of the landmark keys do, which
    are so many `apart`.
    """
    top = LOWEST_POWER
    for a in range(g.landmarks):
        value, power = split(sealed[column + a * g.landmarks])
        if value != 0.0:
            _, more = scaled_exp(scratch[logits + a * apart] - top_logit)
            top = ti.max(top, more + power)
    u = 0.0
    for a in range(g.landmarks):
        value, power = split(sealed[column + a * g.landmarks])
        if value != 0.0:
            f, more = scaled_exp(scratch[logits + a * apart] - top_logit)
            u += f * value * power_of_two(more + power - top)
    return u, top


def make_row_weights(shared, apart):
    """What attend_weights does for one row, by one thread or by some that share it.

    Neighbouring columns of a row are so many numbers `apart`: on GPUs the rows of a tile lie side
    by side, so that its threads read side by side. What the threads of a row tell each other goes
    through workgroup memory; of the weights in scratch each reads only those that it wrote itself,
    as not every arch makes others' visible.
    """

    @ti.func
    def combined(
        part: ti.template(),
        r: ti.i32,
        side: ti.i32,
        lane: ti.i32,
        lanes: ti.i32,
        x: ti.f32,
        sums: ti.template(),
    ):
        """The largest of what the threads of a row pass, or their sum."""
        result = x
        if ti.static(shared):
            at = PART_AT + r
            ti.simt.block.sync()
            part[at + lane * side] = x
            ti.simt.block.sync()
            result = part[at]
            for i in range(1, lanes):
                if ti.static(sums):
                    result += part[at + i * side]
                else:
                    result = ti.max(result, part[at + i * side])
        return result

    @ti.func
    def row_weights(
        g: ti.template(),
        meta: ti.template(),
        sealed: ti.template(),
        scratch: ti.template(),
        us: ti.template(),
        powers: ti.template(),
        mosts: ti.template(),
        at: ti.i32,
        share_at: ti.i32,
        store_at: ti.i32,
        r: ti.i32,
        side: ti.i32,
        lane: ti.i32,
        lanes: ti.i32,
        tile: ti.i32,
        head: ti.i32,
        row: ti.i32,
        counts: ti.i32,
        rows: ti.i32,
    ):
        """Logits of a row become the weights of its values (section 4, with its four rules).

        The row's columns begin at `at`; they are to be multiplied by its share. It is row r of
        those `side` by side in three stores, which by landmark have u, the bits of its power of
        two, and the weight of the landmark key and then the landmark's maximum; on CPUs all three
        are in one, from `store_at` on. A row that does not count is another one and writes nothing.
        """
        group = head // g.heads
        ring = ring_of(meta, g, group)
        start = start_of(ring, tile, rows)
        block = first_row_of(tile, rows) // TILE
        evicted = gone(ring, row)
        # Columns: the landmarks; the sinks; the keys from `start` on, evicted up to `near`, live up
        # to `coming`, of rows to come up to `end`.
        sinks = at + g.landmarks * apart
        keys = sinks + g.sinks * apart
        near = evicted - start
        coming = ring.length + row + 1 - start
        end = end_of(g, ring, tile, rows) - g.landmarks - g.sinks
        u_at = store_at + r
        power_at = u_at
        most_at = u_at
        if ti.static(not shared):
            power_at += g.landmarks
            most_at += 2 * g.landmarks

        shift = LOWEST
        for c in range(steps(lane, g.sinks, lanes)):
            shift = ti.max(shift, scratch[sinks + (lane + c * lanes) * apart])
        for c in range(steps(lane, coming, lanes)):
            column = lane + c * lanes
            if column >= near:
                shift = ti.max(shift, scratch[keys + column * apart])
        shift = combined(us, r, side, lane, lanes, shift, False)

        factor = 0.0
        mass = 0.0
        if g.landmarks > 0 and gone(ring, last_row_of(tile, rows)) > 0:
            x0 = head * g.landmarks
            mix = g.mix + x0 * g.landmarks
            running = block_at(g, block, x0)
            mine = steps(lane, g.landmarks, lanes)
            top_logit = LOWEST
            for c in range(mine):
                top_logit = ti.max(top_logit, scratch[at + (lane + c * lanes) * apart])
            top_logit = combined(us, r, side, lane, lanes, top_logit, False)
            for c in range(mine):
                b = lane + c * lanes
                mosts[most_at + b * side] = decay(scratch[at + b * apart] - top_logit)
            if ti.static(shared):
                ti.simt.block.sync()
            for c in range((mine + TOGETHER - 1) // TOGETHER):
                first = lane + c * TOGETHER * lanes
                columns = ti.Vector.zero(ti.i32, TOGETHER)
                u = ti.Vector.zero(ti.f32, TOGETHER)
                size = ti.Vector.zero(ti.f32, TOGETHER)
                entry = ti.Vector.zero(ti.f32, TOGETHER)
                for j in ti.static(range(TOGETHER)):
                    columns[j] = mix + ti.min(first + j * lanes, g.landmarks - 1)
                for a in range(g.landmarks):
                    weight = mosts[most_at + a * side]
                    for j in ti.static(range(TOGETHER)):
                        x = sealed[columns[j] + a * g.landmarks]
                        u[j] += weight * x
                        size[j] += weight * ti.abs(x)
                        entry[j] = ti.max(entry[j], ti.abs(x))
                for j in ti.static(range(TOGETHER)):
                    b = first + j * lanes
                    if b < g.landmarks:
                        mixed = u[j]
                        power = 0
                        # Terms may be lost below float32, unless what is there dwarfs all that can
                        # be lost.
                        if not (size[j] > LEAST_SIZE and size[j] > entry[j] * LEAST_SIZE):
                            mixed, power = mix_apart(
                                g, sealed, scratch, mix + b, at, apart, top_logit
                            )
                        if g.clamps != 0:
                            mixed = ti.max(mixed, 0.0)
                        us[u_at + b * side] = mixed
                        powers[power_at + b * side] = ti.bit_cast(power, ti.f32)
            if ti.static(shared):
                ti.simt.block.sync()
            # The scale of landmark b is log|u_b| + far_max_b, where far_max_b is that at the row:
            # of the blocks before, and of this one up to the row.
            top = LOWEST
            for c in range(mine):
                b = lane + c * lanes
                most = scratch[g.running_max + running + b]
                if near > 0:
                    most = ti.max(most, scratch[far_peaks_at(g, x0 + b) + row])
                mosts[most_at + b * side] = most
                u = us[u_at + b * side]
                power = ti.bit_cast(powers[power_at + b * side], ti.i32)
                scale = most + ti.cast(power, ti.f32) * LN2 + ti.log(ti.max(ti.abs(u), 1e-37))
                if u != 0.0:
                    top = ti.max(top, scale)
            top = combined(us, r, side, lane, lanes, top, False)
            # Everything far is now relative to exp(top + top_logit). With the weights that far_sums
            # has used, relative to the peak of the block, those of the row's evicted keys are a
            # product; but where that peak comes later than the row and is far above, a landmark's
            # factor would overflow, and each key has to be seen from the maximum at the row.
            leap = LOWEST
            for c in range(mine):
                b = lane + c * lanes
                most = mosts[most_at + b * side]
                u = us[u_at + b * side]
                power = ti.bit_cast(powers[power_at + b * side], ti.i32)
                value, more = scaled_exp(most - top)
                gain = u * value * power_of_two(more + power)
                us[u_at + b * side] = gain
                old = gain * decay(scratch[g.running_max + running + b] - most)
                mass += old * scratch[g.running_mass + running + b]
                if counts != 0:
                    scratch[at + b * apart] = old
                if near > 0 and u != 0.0:
                    peak = scratch[far_peaks_at(g, x0 + b) + last_row_of(tile, rows)]
                    leap = ti.max(leap, peak - most)
                    # Of what is below the row's maximum, nothing can overflow.
                    value, more = scaled_exp(peak - top)
                    powers[power_at + b * side] = (
                        u * value * power_of_two(ti.min(more + power, MOST_POWER))
                    )
                else:
                    powers[power_at + b * side] = 0.0
            leap = combined(us, r, side, lane, lanes, leap, False)
            for c in range(steps(lane, (near + TOGETHER - 1) // TOGETHER, lanes)):
                first = (lane + c * lanes) * TOGETHER
                sums = ti.Vector.zero(ti.f32, TOGETHER)
                if leap <= MOST_LEAP:
                    logits = far_weights_at(g, x0) + evictor_of(ring, start + first)
                    for b in range(g.landmarks):
                        gain = powers[power_at + b * side]
                        for j in ti.static(range(TOGETHER)):
                            sums[j] += gain * scratch[logits + b * g.room + j]
                else:
                    logits = far_logits_at(g, x0) + evictor_of(ring, start + first)
                    for b in range(g.landmarks):
                        gain = us[u_at + b * side]
                        most = mosts[most_at + b * side]
                        for j in ti.static(range(TOGETHER)):
                            sums[j] += gain * decay(scratch[logits + b * g.room + j] - most)
                for j in ti.static(range(TOGETHER)):
                    if first + j < near:
                        mass += sums[j]
                        if counts != 0:
                            scratch[keys + (first + j) * apart] = sums[j]
            mass = combined(us, r, side, lane, lanes, mass, True)
            # A far field of negative mass, or of none, is dropped, and leaves the shift alone.
            if mass > 0.0:
                shift = ti.max(shift, top + top_logit)
                factor = decay(top + top_logit - shift)

        # What attend multiplies by `share` in the end.
        total = 0.0
        for c in range(steps(lane, g.sinks, lanes)):
            column = sinks + (lane + c * lanes) * apart
            weight = decay(scratch[column] - shift)
            total += weight
            if counts != 0:
                scratch[column] = weight
        for c in range(steps(lane, (end + TOGETHER - 1) // TOGETHER, lanes) * TOGETHER):
            # Neighbouring keys together, as above: others are not this thread's to read.
            column = (lane + c // TOGETHER * lanes) * TOGETHER + c % TOGETHER
            if column < end:
                weight = 0.0
                if column < near:
                    if factor > 0.0:
                        weight = scratch[keys + column * apart] * factor
                elif column < coming:
                    weight = decay(scratch[keys + column * apart] - shift)
                    total += weight
                if counts != 0:
                    scratch[keys + column * apart] = weight
        for c in range(steps(lane, g.landmarks, lanes)):
            column = at + (lane + c * lanes) * apart
            # Without a far field nobody computed these, so they may hold anything.
            weight = 0.0
            if factor > 0.0:
                weight = scratch[column] * factor
            if counts != 0:
                scratch[column] = weight
        total = combined(us, r, side, lane, lanes, total, True)
        if factor > 0.0:
            total += mass * factor
        if counts != 0 and lane == 0:
            scratch[share_at] = 1.0 / ti.max(total, FLOOR)

    return row_weights


# ring_commit, meta --------------------------------------------------------------------------------


@ti.func
def ring_commit(
    g: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    next_state: ti.template(),
    k: ti.template(),
    v: ti.template(),
    group: ti.i32,
    slot: ti.i32,
    first: ti.i32,
    every: ti.i32,
    first_row: ti.i32,
    rows: ti.i32,
):
    """A slot keeps what it has, or takes the last row that is due there: each `every`th element."""
    ring = ring_of(meta, g, group)
    k_at = ring_k_at(g, group, slot)
    v_at = ring_v_at(g, group, slot)
    key = slot - ring.head
    key = ti.select(key < 0, key + ring.window, key)
    if slot < ring.window and key < ring.length + rows:
        key += (ring.length + rows - 1 - key) // ring.window * ring.window
    else:
        key = 0
    k_steps = (g.head_dim - first + every - 1) // every
    v_steps = (g.value_dim - first + every - 1) // every
    if key >= ring.length:
        row = first_row + key - ring.length
        for j in range(k_steps):
            next_state[k_at + first + j * every] = k[row, group, first + j * every]
        for j in range(v_steps):
            next_state[v_at + first + j * every] = v[row, group, first + j * every]
    else:
        for j in range(k_steps):
            next_state[k_at + first + j * every] = state[k_at + first + j * every]
        for j in range(v_steps):
            next_state[v_at + first + j * every] = state[v_at + first + j * every]


@ti.func
def meta(
    g: ti.template(),
    before: ti.template(),
    after: ti.template(),
    held: ti.template(),
    group: ti.i32,
    rows: ti.i32,
):
    """Length, head and far count after the rows; held is for the host."""
    ring = ring_of(before, g, group)
    evicted = gone_by(ring, rows)
    after[group, LENGTH] = ti.cast(ring.length + rows - evicted, ti.u32)
    after[group, HEAD] = ti.cast((ring.head + evicted) % ring.window, ti.u32)
    after[group, FAR] = before[group, FAR] + ti.cast(evicted, ti.u32)
    after[group, WINDOW] = before[group, WINDOW]
    for i in range(4):
        held[group, i] = after[group, i]


@ti.func
def commit(
    sizes: ti.template(),
    meta_in: ti.template(),
    state: ti.template(),
    meta_out: ti.template(),
    next_state: ti.template(),
    held: ti.template(),
    k: ti.template(),
    v: ti.template(),
    first: ti.i32,
    every: ti.i32,
    item: ti.i32,
    first_row: ti.i32,
    rows: ti.i32,
):
    """Part of what commits: a slot of a ring, or one of the groups behind all slots."""
    g = sizes_of(sizes)
    slots = g.groups * g.ring
    if item < slots:
        if asked(g, RING_COMMIT) != 0:
            group, slot = item // g.ring, item % g.ring
            ring_commit(
                g, meta_in, state, next_state, k, v, group, slot, first, every, first_row, rows
            )
    elif first == 0 and asked(g, META) != 0:
        meta(g, meta_in, meta_out, held, item - slots, rows)
