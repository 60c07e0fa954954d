// The sums over a row: layer norm has two.

alias Sum = vec2<f32>;

fn sum_from(first: f32, second: f32) -> Sum { return vec2(first, second); }
fn sum_parts(sum: Sum) -> vec2<f32> { return sum; }
