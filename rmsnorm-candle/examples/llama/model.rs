//! A language model of a few Llama-style blocks, with norms of queries and keys as in Qwen 3 and
//! Gemma 3.
//!
//! The norms are ours, or candle's differentiable operations: an addition and
//! `candle_nn::ops::rms_norm_slow`.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{ops, rotary_emb};

pub const VOCABULARY: usize = 32;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
const HEAD_DIM: usize = HIDDEN / HEADS;
const INNER: usize = 96;
const BLOCKS: usize = 2;
const EPS: f64 = 1e-6;

/// The norms of the model.
#[derive(Clone, Copy, Debug)]
pub enum Norms {
    /// The norms of rmsnorm-candle.
    Ours,
    /// candle's norms with gradients.
    Slow,
}

impl Norms {
    fn norm(self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        match self {
            Norms::Ours => rmsnorm_candle::rms_norm(x, weight, EPS),
            Norms::Slow => ops::rms_norm_slow(x, weight, EPS as f32),
        }
    }

    /// The norm of heads in a fused tensor that has no other use: in inference our norm overwrites
    /// them in place.
    fn norm_heads(self, heads: Tensor, weight: &Tensor) -> Result<Tensor> {
        match self {
            Norms::Ours if !heads.track_op() && !weight.track_op() => {
                rmsnorm_candle::rms_norm_in_place(&heads, weight, EPS)?;
                Ok(heads)
            }
            Norms::Ours | Norms::Slow => self.norm(&heads, weight),
        }
    }

    /// `residual + x` and its norm.
    fn add_norm(self, x: &Tensor, residual: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Norms::Ours => rmsnorm_candle::add_rms_norm(x, residual, weight, EPS),
            Norms::Slow => {
                let sum = (residual + x)?;
                Ok((ops::rms_norm_slow(&sum, weight, EPS as f32)?, sum))
            }
        }
    }
}

/// Its parameters are variables if it is trained.
pub struct Model {
    norms: Norms,
    embedding: Tensor,
    blocks: Vec<Block>,
    norm: Tensor,
}

struct Block {
    attention_norm: Tensor,
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    out: Tensor,
    mlp_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
}

/// The cosines and sines of positions, and the causal mask.
struct Positions {
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
}

impl Positions {
    fn new(tokens: usize, dtype: DType, device: &Device) -> Result<Self> {
        let frequency = |i: usize| 10_000f32.powf(-(2.0 * i as f32) / HEAD_DIM as f32);
        let angle = |t: usize, i: usize| t as f32 * frequency(i);
        let half = HEAD_DIM / 2;
        let table = |of: fn(f32) -> f32| {
            let values: Vec<f32> = (0..tokens * half).map(|at| of(angle(at / half, at % half))).collect();
            Tensor::from_vec(values, (tokens, half), device)?.to_dtype(dtype)
        };
        let ahead = |at: usize| if at % tokens > at / tokens { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..tokens * tokens).map(ahead).collect();
        let mask = Tensor::from_vec(mask, (tokens, tokens), device)?.to_dtype(dtype)?;
        Ok(Positions { cos: table(f32::cos)?, sin: table(f32::sin)?, mask })
    }
}

impl Model {
    /// A model with the same parameters each time, and its variables if it is trained.
    pub fn new(norms: Norms, dtype: DType, device: &Device, is_trained: bool) -> Result<(Self, Vec<Var>)> {
        let mut variables = Vec::new();
        let mut seed = 0u64;
        let mut parameter = |shape: &[usize]| {
            seed += 1;
            let tensor = noise(shape, seed, device)?;
            // Weights of norms are around 1.
            let tensor = if shape.len() == 1 { (tensor + 1.0)? } else { tensor };
            let variable = Var::from_tensor(&tensor.to_dtype(dtype)?)?;
            if !is_trained {
                return Ok(variable.as_detached_tensor());
            }
            variables.push(variable.clone());
            Ok::<Tensor, candle_core::Error>(variable.into_inner())
        };
        let embedding = parameter(&[VOCABULARY, HIDDEN])?;
        let mut blocks = Vec::new();
        for _ in 0..BLOCKS {
            blocks.push(Block {
                attention_norm: parameter(&[HIDDEN])?,
                qkv: parameter(&[HIDDEN, 3 * HIDDEN])?,
                q_norm: parameter(&[HEAD_DIM])?,
                k_norm: parameter(&[HEAD_DIM])?,
                out: parameter(&[HIDDEN, HIDDEN])?,
                mlp_norm: parameter(&[HIDDEN])?,
                gate_up: parameter(&[HIDDEN, 2 * INNER])?,
                down: parameter(&[INNER, HIDDEN])?,
            });
        }
        let norm = parameter(&[HIDDEN])?;
        Ok((Model { norms, embedding, blocks, norm }, variables))
    }

    /// Logits of (batch, tokens, vocabulary) from tokens of (batch, tokens).
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, len) = tokens.dims2()?;
        let positions = Positions::new(len, self.embedding.dtype(), self.embedding.device())?;
        let mut stream = self.embedding.embedding(&tokens.flatten_all()?)?.reshape((batch, len, HIDDEN))?;
        // The addend of the residual stream before the next norm.
        let mut delta: Option<Tensor> = None;
        for block in &self.blocks {
            let y = match delta {
                None => self.norms.norm(&stream, &block.attention_norm)?,
                Some(delta) => {
                    let (y, sum) = self.norms.add_norm(&delta, &stream, &block.attention_norm)?;
                    stream = sum;
                    y
                }
            };
            let attention = block.attention(self.norms, &y, &positions)?;
            let (y, sum) = self.norms.add_norm(&attention, &stream, &block.mlp_norm)?;
            stream = sum;
            delta = Some(block.mlp(&y)?);
        }
        let y = match delta {
            None => self.norms.norm(&stream, &self.norm)?,
            Some(delta) => self.norms.add_norm(&delta, &stream, &self.norm)?.0,
        };
        y.broadcast_matmul(&self.embedding.t()?)
    }
}

impl Block {
    fn attention(&self, norms: Norms, y: &Tensor, positions: &Positions) -> Result<Tensor> {
        let (batch, len, _) = y.dims3()?;
        // Heads of queries, keys and values side by side: rows with two strides, which our norm
        // reads without a copy.
        let qkv = y.broadcast_matmul(&self.qkv)?.reshape((batch, len, 3 * HEADS, HEAD_DIM))?;
        let heads = |part: usize| qkv.narrow(2, part * HEADS, HEADS);
        let turned = |heads: Tensor| {
            rotary_emb::rope_slow(&heads.transpose(1, 2)?.contiguous()?, &positions.cos, &positions.sin)
        };
        let q = turned(norms.norm_heads(heads(0)?, &self.q_norm)?)?;
        let k = turned(norms.norm_heads(heads(1)?, &self.k_norm)?)?;
        let v = heads(2)?.transpose(1, 2)?.contiguous()?;
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (HEAD_DIM as f64).sqrt())?;
        let shares = ops::softmax(&scores.broadcast_add(&positions.mask)?, D::Minus1)?;
        let mixed = shares.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((batch, len, HIDDEN))?;
        mixed.broadcast_matmul(&self.out)
    }

    fn mlp(&self, y: &Tensor) -> Result<Tensor> {
        let both = y.broadcast_matmul(&self.gate_up)?;
        let gate = both.narrow(2, 0, INNER)?.contiguous()?;
        let up = both.narrow(2, INNER, INNER)?.contiguous()?;
        (gate.silu()? * up)?.broadcast_matmul(&self.down)
    }
}

/// Values around zero, scaled so that a product keeps the size of the other factor.
fn noise(shape: &[usize], seed: u64, device: &Device) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let inputs = shape.first().copied().unwrap_or(1) as f32;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let value = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * (3.0 / inputs).sqrt()
    };
    Tensor::from_vec(std::iter::repeat_with(value).take(len).collect(), shape, device)
}
