// mean_wdy_xhat and mean_wdy of every row, as the first pass writes them.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<vec2<f32>>;
