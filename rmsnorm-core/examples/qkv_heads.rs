//! The norms of queries and keys, in place in a fused QKV buffer. Each head of each token is a row;
//! nothing is copied.
//!
//!     cargo run --release -p rmsnorm-core --example qkv_heads

use rmsnorm_core::cpu::{CpuBackend, Forward};
use rmsnorm_core::{NormSpec, RowLayout};

const TOKENS: usize = 512;
const QUERY_HEADS: usize = 32;
const KEY_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
/// Queries, keys and values of one token; there are as many values as keys.
const TOKEN: usize = (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = CpuBackend::new();
    let mut qkv: Vec<f32> = (0..TOKENS * TOKEN).map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0).collect();
    let before = qkv.clone();

    // First head, number of heads, and weight.
    for (first, heads, weight) in [(0, QUERY_HEADS, [1.0f32; HEAD_DIM]), (QUERY_HEADS, KEY_HEADS, [0.5; HEAD_DIM])] {
        // A framework has the dimensions and strides of the view. They need two row strides, so
        // they become rows in groups.
        let (dims, strides) = ([TOKENS, heads, HEAD_DIM], [TOKEN as isize, HEAD_DIM as isize, 1]);
        let layout = RowLayout::fold(&dims, &strides).ok_or("more than two strides")?;
        let rows = &mut qkv[first * HEAD_DIM..][..layout.span()];
        let norm = NormSpec::rms(layout.rows, layout.cols, 1e-6);
        backend.forward(&norm, Forward::<_, f32>::in_place(layout.rows(rows)).weight(&weight))?;
        println!("{heads} heads of {TOKENS} tokens: {} rows of {}, {:?}", layout.rows, layout.cols, layout.groups);
    }

    // The mean square of every normalized head equals the square of its weight; the values are
    // unchanged.
    for (token, (after, before)) in qkv.chunks(TOKEN).zip(before.chunks(TOKEN)).enumerate() {
        let (normalized, values) = after.split_at((QUERY_HEADS + KEY_HEADS) * HEAD_DIM);
        for (head, row) in normalized.chunks(HEAD_DIM).enumerate() {
            let mean_square = row.iter().map(|x| x * x).sum::<f32>() / HEAD_DIM as f32;
            let expected = if head < QUERY_HEADS { 1.0 } else { 0.25 };
            if (mean_square - expected).abs() > 1e-3 {
                return Err(format!("head {head} of token {token} has a mean square of {mean_square}").into());
            }
        }
        if values != &before[before.len() - values.len()..] {
            return Err(format!("the values of token {token} were touched").into());
        }
    }
    println!("queries and keys are normalized, values untouched");
    Ok(())
}
