// From y to codes and scales: math.md, equations (Q1) to (Q5). Shared by the programs that write
// codes.
//
// Magnitudes are compared as the bits of floats, so NaN is the largest.

// One unused element if threads exchange magnitudes only with shuffles.
var<workgroup> magnitudes: array<atomic<u32>, MAGNITUDES>;

// Whether the amax of a row passes through `magnitudes`.
fn has_row_magnitude() -> bool { return SCALE == BY_ROW && THREADS_PER_ROW > SHUFFLED_LANES; }

// Call before the sums of the row: their barriers separate this from `largest_of_row`.
fn clear_row_magnitude(lane: u32) {
    if (has_row_magnitude() && lane % THREADS_PER_ROW == 0u) { atomicStore(&magnitudes[lane / THREADS_PER_ROW], 0u); }
}

// The maximum over adjacent lanes, as far as shuffles reach.
fn largest_of_lanes(magnitude: u32, lanes: u32) -> u32 {
    var largest = magnitude;
    for (var distance = min(lanes, SHUFFLED_LANES) / 2u; distance > 0u; distance /= 2u) {
        largest = max(largest, shuffled(largest, distance));
    }
    return largest;
}

// Every thread of the workgroup must call this, once; each gets the amax of its row.
fn largest_of_row(magnitude: u32, lane: u32) -> u32 {
    let largest = largest_of_lanes(magnitude, THREADS_PER_ROW);
    if (!has_row_magnitude()) { return largest; }
    let row = lane / THREADS_PER_ROW;
    if (lane % SHUFFLED_LANES == 0u) { atomicMax(&magnitudes[row], largest); }
    workgroupBarrier();
    return atomicLoad(&magnitudes[row]);
}

// Every thread of the workgroup must call this; each gets the maximum over the lanes that share its
// scale.
fn largest_of_set(magnitude: u32, lane: u32) -> u32 {
    if (SET_LANES <= SHUFFLED_LANES) { return largest_of_lanes(magnitude, SET_LANES); }
    atomicStore(&magnitudes[lane], magnitude);
    workgroupBarrier();
    var largest = 0u;
    for (var i = 0u; i < SET_LANES; i += 1u) {
        largest = max(largest, atomicLoad(&magnitudes[lane / SET_LANES * SET_LANES + i]));
    }
    workgroupBarrier();
    return largest;
}

// The amax of the existing columns from `col` on.
fn largest_of_quad(col: u32, values: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(within(col, values)) & vec4(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

fn largest_of_pair(thread: u32, k: u32, v: Pair) -> u32 {
    return max(largest_of_quad(column(thread, k, 0u), v.lo), largest_of_quad(column(thread, k, 1u), v.hi));
}

// (Q1).
fn v_of(h: Kept_0, statistics: RowStatistics, weight: Kept_W, bias: Kept_W) -> Pair {
    let y = y_0(h, statistics, weight, bias);
    if (!IS_ROUNDED) { return y; }
    return Pair(rounded_T(y.lo), rounded_T(y.hi));
}

// The scale given by the caller. If the scale or its reciprocal is not a normal number, values are
// multiplied with a power of two first.
fn given_scale() -> Scale {
    if (SCALE != GIVEN) { return Scale(1.0, 1.0, 1.0, 0u); }
    let value = load_scale();
    let bits = bitcast<u32>(value);
    // 2^49 / (value * 2^149)
    if (bits < 0x00800000u) { return Scale(value, 1.2676506002282294e30, 562949953421312.0 / f32(bits), 0u); }
    if (bits >= 0x7e800000u) { return Scale(value, 5.9604644775390625e-8, 1.0 / (value * 5.9604644775390625e-8), 0u); }
    return Scale(value, 1.0, 1.0 / value, 0u);
}

// The scale of the columns from `col` on that share it; computed and stored by their lanes
// together.
fn scale_of_set(row: u32, exists: bool, lane: u32, col: u32, magnitude: u32) -> Scale {
    let scale = scale_of(largest_of_set(magnitude, lane));
    let is_inside = exists && col < params.cols;
    if (GATHERS_SCALES) {
        // Each lane gets the word of four scales; scales past the row are zeros.
        var word = select(0u, scale.byte, is_inside) << (8u * (col / SET % 4u));
        word |= shuffled(word, SET_LANES);
        word |= shuffled(word, 2u * SET_LANES);
        if (is_inside && col % (4u * SET) == 0u) { store_word_of_scales(row, col / SET, word); }
    } else if (is_inside && col % SET == 0u) {
        store_scales(row, col / SET, scale);
    }
    return scale;
}

// Index of the scale of a row and a group of columns in its binding.
fn at_scales(row: u32, group: u32) -> u32 {
    let there = params.first_row + row;
    return params.scales + index_of_scale(there, ATBLOCK, params.scales_stride);
}

// `stride` depends on the layout: groups, ld or tiles of a row.
fn index_of_scale(there: u32, group: u32, stride: u32) -> u32 {
    var index = there * stride + group;
    if (SCALE_LAYOUT == COLUMN_MAJOR) {
        index = group * stride + there;
    } else if (SCALE_LAYOUT == PACKED_UE8M0) {
        index = (group / 4u * stride + there) * 4u + group % 4u;
    } else if (SCALE_LAYOUT == SWIZZLED_128X4) {
        let tile = there / 128u * stride + group / 4u;
        index = tile * 512u + there % 32u * 16u + there % 128u / 32u * 4u + group % 4u;
    }
    return index;
}

// The codes of a pair. Computes and stores the scales of blocks.
fn codes_of(row: u32, exists: bool, lane: u32, k: u32, v: Pair, of_row: Scale) -> Kept_codes {
    let thread = lane % THREADS_PER_ROW;
    var lo = of_row;
    var hi = of_row;
    if (SCALE == BY_BLOCK && IS_SPLIT) {
        let lo_col = column(thread, k, 0u);
        let hi_col = column(thread, k, 1u);
        lo = scale_of_set(row, exists, lane, lo_col, largest_of_quad(lo_col, v.lo));
        hi = scale_of_set(row, exists, lane, hi_col, largest_of_quad(hi_col, v.hi));
    } else if (SCALE == BY_BLOCK) {
        lo = scale_of_set(row, exists, lane, column(thread, k, 0u), largest_of_pair(thread, k, v));
        hi = lo;
    }
    return kept_codes(Pair(v.lo * lo.power * lo.reciprocal, v.hi * hi.power * hi.reciprocal));
}

// Updates the amax of all rows in memory.
fn fold_magnitude(magnitude: u32, lane: u32) {
    let largest = largest_of_lanes(magnitude, THREADS_PER_ROW);
    if (lane % min(THREADS_PER_ROW, SHUFFLED_LANES) == 0u) { fold_amax(largest); }
}
