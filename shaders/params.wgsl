// The run-time parameters of every program: the mirror of rmsnorm-wgpu/src/params.rs, field for
// field.
//
// A tensor has its first element, counted from the start of its binding, and its row stride, 0 for
// vectors. If rows are in groups, the first element is the start of the group in which the dispatch
// begins. It may lie before the binding, so index sums wrap.
struct Params {
    x: vec2<u32>,
    residual: vec2<u32>,
    dy: vec2<u32>,
    dresidual_out: vec2<u32>,
    y: vec2<u32>,
    residual_out: vec2<u32>,
    dx: vec2<u32>,
    weight: vec2<u32>,
    bias: vec2<u32>,
    dweight: vec2<u32>,
    dbias: vec2<u32>,
    mean: u32,
    rstd: u32,
    workspace: u32, // partial rows: a multiple of 4
    row_sums: u32, // in the workspace's binding; even
    rows: u32,
    cols: u32,
    chunks: u32,
    partial_rows: u32,
    eps: f32,
    weight_offset: f32,
    share: f32, // 1 / cols
    first_chunk: u32, // chunks of earlier dispatches
    accumulates: u32, // 1: add to the partial rows of earlier dispatches
    zero: u32, // 0; added to an index, it keeps compilers from holding an earlier load in registers
    dresidual: vec2<u32>,
    rows_per_group: u32, // if rows are in groups, like the strides below
    first_in_group: u32, // rows of the first group that belong to earlier dispatches
    x_group_stride: u32,
    residual_group_stride: u32,
    dy_group_stride: u32,
    dresidual_out_group_stride: u32,
    y_group_stride: u32,
    residual_out_group_stride: u32,
    dx_group_stride: u32,
    dresidual_group_stride: u32,
    codes_group_stride: u32,
    first_row: u32, // rows of earlier dispatches
    codes: vec2<u32>,
    codes_t: vec2<u32>,
    scale: u32,
    scales: u32, // in bytes if scales are bytes
    amax: u32,
    scales_stride: u32, // depends on the layout: groups, ld or tiles of a row
    amax_floor: u32, // bits of f32
    amax_ceiling: u32,
    codes_columnwise: vec2<u32>, // rows are columns
    scales_columnwise: u32,
    scales_columnwise_stride: u32,
    next_weight: vec2<u32>,
    next_bias: vec2<u32>,
    next_mean: u32,
    next_rstd: u32,
    unused: vec2<u32>, // pads the size to a multiple of 16
}

@group(0) @binding(0) var<uniform> params: Params;

// Elements between partial rows of dweight or dbias.
fn partial_stride() -> u32 { return (params.cols + (PADDING - 1u)) / PADDING * PADDING; }
