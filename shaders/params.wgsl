// What every program is told at run time: the mirror of rmsnorm-wgpu/src/params.rs, field for field.
//
// A tensor has its first element, counted from the start of its binding, and its row stride, 0 for vectors. Where rows lie in
// groups, the first element is that of the group in which the dispatch begins, maybe in front of the binding: sums wrap.
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
    accumulates: u32, // 1: partial rows hold sums of earlier dispatches, to be added to
    zero: u32, // what is added to an index so that compilers do not hold what was loaded
    dresidual: vec2<u32>,
    rows_per_group: u32, // where rows lie in groups, as all that follows
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
    scales: u32, // bytes, where scales are
    amax: u32,
    scales_stride: u32, // as their layout has it: groups, ld or tiles of a row
    amax_floor: u32, // bits of f32
    amax_ceiling: u32,
    codes_columnwise: vec2<u32>, // rows are columns
    scales_columnwise: u32,
    scales_columnwise_stride: u32,
    next_weight: vec2<u32>,
    next_bias: vec2<u32>,
    next_mean: u32,
    next_rstd: u32,
    unused: vec2<u32>, // so that the size is a multiple of 16
}

@group(0) @binding(0) var<uniform> params: Params;

// Elements from one partial row of dweight or dbias to the next.
fn partial_stride() -> u32 { return (params.cols + (PADDING - 1u)) / PADDING * PADDING; }
