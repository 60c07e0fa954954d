// Partial rows, as the second stage reads them.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<vec4<f32>>;
