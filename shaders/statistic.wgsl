// TENSOR: one f32 a row.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<f32>;

// if IS_LOADED
fn load_TENSOR(row: u32) -> f32 { return TENSOR[params.TENSOR + row]; }
// end
// if IS_STORED
fn store_TENSOR(row: u32, value: f32) { TENSOR[params.TENSOR + row] = value; }
// end
