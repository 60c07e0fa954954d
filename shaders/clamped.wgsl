// Backward of the clamped L2 norm: math.md, equation (23).

// mean_wdy_xhat and mean_wdy; 0 where the norm was clamped, so that rstd is a constant.
fn unless_clamped(averages: vec2<f32>, rstd: f32) -> vec2<f32> {
    return select(averages, vec2<f32>(), rstd * params.eps >= CLAMPED_FROM);
}
