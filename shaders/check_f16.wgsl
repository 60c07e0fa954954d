// Checks that the device converts f16 like the integer arithmetic of `io_f16.wgsl`: round to
// nearest even, keep subnormals, NaN to NaN. WGSL allows either neighbour, and zeros for
// subnormals. A thread checks one magnitude and the values around it. A conversion is monotonic and
// can change its result only at, next to and halfway between f16 values; if it is right there, it
// is right everywhere.

// The number of magnitudes converted correctly: 0 if the shader did not run.
@group(0) @binding(0) var<storage, read_write> right: array<atomic<u32>>;

fn is_nan_f32(bits: vec4<u32>) -> vec4<bool> { return (bits & vec4(0x7fffffffu)) > vec4(0x7f800000u); }

fn halves(words: vec2<u32>) -> vec4<u32> { return vec4(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u); }

fn is_nan_f16(halves: vec4<u32>) -> vec4<bool> { return (halves & vec4(0x7fffu)) > vec4(0x7c00u); }

// NaN payloads may differ.
fn unpacks(words: vec2<u32>) -> bool {
    let by_integers = bitcast<vec4<u32>>(quad_f16(words));
    let by_device = bitcast<vec4<u32>>(unpack_f16(words));
    return all((by_integers == by_device) | (is_nan_f32(by_integers) & is_nan_f32(by_device)));
}

// Converts to f16, and back again: a compiler may optimize the pair away.
fn packs(bits: vec4<u32>) -> bool {
    let values = bitcast<vec4<f32>>(bits);
    let words = words_f16(values);
    let by_integers = halves(words);
    let packed = pack_f16(values);
    let by_device = halves(packed);
    if (!all((by_integers == by_device) | (is_nan_f16(by_integers) & is_nan_f16(by_device)))) { return false; }
    let back = bitcast<vec4<u32>>(unpack_f16(packed | vec2(unknown_zero())));
    let rounded = bitcast<vec4<u32>>(quad_f16(words));
    return all((rounded == back) | (is_nan_f32(rounded) & is_nan_f32(back)));
}

// For both signs.
fn packs_about(bits: u32) -> bool {
    let negative = bits | 0x80000000u;
    let near = packs(vec4(bits, negative, bits + 1u, negative + 1u));
    return near && packs(vec4(max(bits, 1u) - 1u, max(negative, 0x80000001u) - 1u, bits, negative));
}

// The bits of an f16 magnitude as f32. Infinity counts as the value after 65504.
fn widened(half: u32) -> u32 {
    if (half >= 0x7c00u) { return 0x47800000u + ((half - 0x7c00u) << 18u); }
    return bitcast<u32>(quad_f16(vec2(half, 0u)).x);
}

@compute @workgroup_size(128)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let half = id.x;
    let word = half | ((half | 0x8000u) << 16u);
    let here = widened(half);
    // Between two values of a binade, the bits of the midpoint are the midpoint of the bits. The
    // first midpoint is given, because f32 is normal there and 0 is not in a binade.
    let between = select(here + (widened(half + 1u) - here) / 2u, 0x33000000u, half == 0u);
    if (unpacks(vec2(word, half)) && packs_about(here) && packs_about(between)) { atomicAdd(&right[0], 1u); }
}
