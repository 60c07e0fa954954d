//! A language model of a few Llama-style blocks, with norms of queries and keys as in Qwen 3 and
//! Gemma 3.
//!
//! It is generic over its norms: burn's modules and ours are configured, called and saved in the
//! same way.

use burn::module::{Module, ModuleDisplay};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Device, Int, Tensor};

pub const VOCABULARY: usize = 32;
pub const TOKENS: usize = 16;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
const HEAD_DIM: usize = HIDDEN / HEADS;
const INNER: usize = 96;
const BLOCKS: usize = 2;
const EPS: f64 = 1e-6;

/// An RMS norm of the model.
pub trait RmsNorm: Module + ModuleDisplay {
    /// A norm over `size` elements.
    fn new(size: usize, device: &Device) -> Self;

    /// The norm of `x`.
    fn norm<const D: usize>(&self, x: Tensor<D>) -> Tensor<D>;

    /// The norm of `residual + x`, and that sum.
    fn add_norm(&self, x: Tensor<3>, residual: Tensor<3>) -> (Tensor<3>, Tensor<3>);
}

impl RmsNorm for rmsnorm_burn::nn::RmsNorm {
    fn new(size: usize, device: &Device) -> Self {
        rmsnorm_burn::nn::RmsNormConfig::new(size).with_epsilon(EPS).init(device)
    }

    fn norm<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward(x)
    }

    fn add_norm(&self, x: Tensor<3>, residual: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        rmsnorm_burn::add_rms_norm(x, residual, self.gamma.val(), self.epsilon)
    }
}

impl RmsNorm for burn::nn::RmsNorm {
    fn new(size: usize, device: &Device) -> Self {
        burn::nn::RmsNormConfig::new(size).with_epsilon(EPS).init(device)
    }

    fn norm<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward(x)
    }

    fn add_norm(&self, x: Tensor<3>, residual: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let sum = residual + x;
        (self.forward(sum.clone()), sum)
    }
}

#[derive(Module, Debug)]
pub struct Model<N: Module> {
    embedding: Embedding,
    blocks: Vec<Block<N>>,
    norm: N,
    rotary: RotaryEncoding,
}

#[derive(Module, Debug)]
struct Block<N: Module> {
    attention_norm: N,
    qkv: Linear,
    q_norm: N,
    k_norm: N,
    out: Linear,
    mlp_norm: N,
    gate_up: Linear,
    down: Linear,
}

impl<N: RmsNorm> Model<N> {
    pub fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(device);
        let block = || Block {
            attention_norm: N::new(HIDDEN, device),
            qkv: linear(HIDDEN, 3 * HIDDEN),
            q_norm: N::new(HEAD_DIM, device),
            k_norm: N::new(HEAD_DIM, device),
            out: linear(HIDDEN, HIDDEN),
            mlp_norm: N::new(HIDDEN, device),
            gate_up: linear(HIDDEN, 2 * INNER),
            down: linear(INNER, HIDDEN),
        };
        // The embedding also computes the logits, so its values are small.
        let initializer = Initializer::Normal { mean: 0.0, std: 1.0 / (HIDDEN as f64).sqrt() };
        Model {
            embedding: EmbeddingConfig::new(VOCABULARY, HIDDEN).with_initializer(initializer).init(device),
            blocks: (0..BLOCKS).map(|_| block()).collect(),
            norm: N::new(HIDDEN, device),
            rotary: RotaryEncodingConfig::new(TOKENS, HEAD_DIM).init(device),
        }
    }

    /// Logits of (batch, tokens, vocabulary) from tokens of (batch, tokens).
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut stream = self.embedding.forward(tokens);
        // The addend of the residual stream before the next norm.
        let mut delta: Option<Tensor<3>> = None;
        for block in &self.blocks {
            let y = match delta {
                None => block.attention_norm.norm(stream.clone()),
                Some(delta) => {
                    let (y, sum) = block.attention_norm.add_norm(delta, stream);
                    stream = sum;
                    y
                }
            };
            let (y, sum) = block.mlp_norm.add_norm(block.attention(y, &self.rotary), stream);
            stream = sum;
            delta = Some(block.mlp(y));
        }
        let y = match delta {
            None => self.norm.norm(stream),
            Some(delta) => self.norm.add_norm(delta, stream).0,
        };
        y.matmul(self.embedding.weight.val().transpose().unsqueeze())
    }
}

impl<N: RmsNorm> Block<N> {
    fn attention(&self, y: Tensor<3>, rotary: &RotaryEncoding) -> Tensor<3> {
        let [batch, len, _] = y.dims();
        // Heads of queries, keys and values side by side: rows with two strides, which our norm
        // reads without a copy.
        let qkv = self.qkv.forward(y).reshape([batch, len, 3 * HEADS, HEAD_DIM]);
        let heads = |part: usize| qkv.clone().narrow(2, part * HEADS, HEADS);
        let q = rotary.forward(self.q_norm.norm(heads(0)).swap_dims(1, 2));
        let k = rotary.forward(self.k_norm.norm(heads(1)).swap_dims(1, 2));
        let v = heads(2).swap_dims(1, 2);
        let scores = q.matmul(k.transpose()) / (HEAD_DIM as f64).sqrt();
        let ahead = generate_autoregressive_mask(batch, len, &scores.device()).unsqueeze_dim::<4>(1);
        let shares = softmax(scores.mask_fill(ahead.expand([batch, HEADS, len, len]), f32::NEG_INFINITY), 3);
        self.out.forward(shares.matmul(v).swap_dims(1, 2).reshape([batch, len, HIDDEN]))
    }

    fn mlp(&self, y: Tensor<3>) -> Tensor<3> {
        let both = self.gate_up.forward(y);
        let (gate, up) = (both.clone().narrow(2, 0, INNER), both.narrow(2, INNER, INNER));
        self.down.forward(silu(gate) * up)
    }
}
