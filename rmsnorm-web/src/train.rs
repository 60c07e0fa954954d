//! A small network that learns to tell two spirals apart: residual blocks with RMS norms, by our
//! fused kernels or by a chain of plain operations. Everything else is the same.
//!
//! ```text
//! h = points W_in
//! h = h + relu(norm(h) W_up) W_down        for each block
//! loss = cross entropy of norm(h) W_out
//! ```

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::value;
use rmsnorm_spec::{Error, NormSpec};
use rmsnorm_wgpu::wgpu::CommandEncoder;
use rmsnorm_wgpu::{Backward, Forward, TestBuffer, WgpuBackend, WgpuSlice};
use web_time::Instant;

use crate::plain::{A_BT, AB, AT_B, Matrix, Plain, RELU_AB, Shape};

const POINTS: usize = 128;
const WIDTH: usize = 32;
const HIDDEN: usize = 64;
const CLASSES: usize = 2;
const BLOCKS: usize = 2;
const EPS: f32 = 1e-6;

/// Steps of Adam.
pub(crate) const STEPS: usize = 200;

/// Steps between two points of the loss curve.
pub(crate) const EVERY: usize = 4;

/// Steps after which the host waits for the device.
const WAIT: usize = 20;

const LEARNING_RATE: f32 = 2e-3;

/// How the norms are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norms {
    /// By one kernel forward, with the residual sum, and two backward.
    Fused,
    /// By one kernel for each operation, as a framework without a fused norm does.
    Plain,
}

/// The losses of a training, and the time of a step.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Curve {
    /// The mean cross entropy, before each step that is a multiple of [`EVERY`].
    pub(crate) losses: Vec<f32>,
    /// Time of a step in ms.
    pub(crate) step_ms: f64,
}

/// Learned numbers, with their gradient and the moments of Adam.
struct Parameter {
    values: Matrix,
    gradient: Matrix,
    moments: [Matrix; 2],
    len: usize,
}

struct Block {
    norm: Parameter,
    up: Parameter,
    down: Parameter,
    /// The sum that is normalized, the result, 1 / rms, and the two products.
    h: Matrix,
    n: Matrix,
    rstd: Matrix,
    a: Matrix,
    branch: Matrix,
}

struct Network<'b> {
    backend: &'b WgpuBackend,
    plain: &'b Plain<'b>,
    norms: Norms,
    points: Matrix,
    labels: Matrix,
    input: Parameter,
    blocks: Vec<Block>,
    /// The last norm has no branch.
    last: Block,
    output: Parameter,
    logits: Matrix,
    /// The loss of each point, their mean, and the means of all steps.
    losses: Matrix,
    loss: Matrix,
    curve: TestBuffer<f32>,
}

/// Trains, and calls `progress` with the number of steps.
///
/// # Errors
/// Errors of the device.
pub(crate) async fn train(
    backend: &WgpuBackend,
    norms: Norms,
    progress: &mut dyn FnMut(usize),
) -> Result<Curve, Error> {
    let plain = Plain::new(backend);
    // Compiles all kernels.
    backend.catch(|backend| Network::new(backend, &plain, norms)?.step(LEARNING_RATE, 1)).await?;
    let network = Network::new(backend, &plain, norms)?;
    let start = Instant::now();
    for step in 0..STEPS {
        backend.catch(|_| network.step(LEARNING_RATE, step + 1)).await?;
        if step % WAIT == 0 {
            backend.fetch_part(&network.curve, 0..1).await?;
            progress(step);
        }
    }
    backend.catch(|_| network.end()).await?;
    let losses = backend.fetch_part(&network.curve, 0..STEPS + 1).await?;
    let step_ms = start.elapsed().as_secs_f64() * 1e3 / STEPS as f64;
    Ok(Curve { losses: losses.into_iter().step_by(EVERY).collect(), step_ms })
}

/// Two spirals, which turn once, and their numbers.
fn spirals() -> (Vec<f32>, Vec<f32>) {
    let point = |i: usize| {
        let (turn, label) = ((i / 2) as f32 / (POINTS / 2) as f32, i % 2);
        let angle = std::f32::consts::TAU * turn + std::f32::consts::PI * label as f32;
        let radius = 0.2 + 0.8 * turn;
        ([radius * angle.cos(), radius * angle.sin()], label as f32)
    };
    let (points, labels): (Vec<_>, Vec<_>) = (0..POINTS).map(point).unzip();
    (points.concat(), labels)
}

impl Parameter {
    fn new(plain: &Plain<'_>, values: &[f32]) -> Self {
        let zeros = || plain.matrix(values.len());
        let (gradient, moments) = (zeros(), [zeros(), zeros()]);
        Parameter { values: plain.upload(values), gradient, moments, len: values.len() }
    }

    /// A matrix whose product with `rows` numbers is about as large as these.
    fn random(plain: &Plain<'_>, seed: u64, rows: usize, cols: usize) -> Self {
        let scale = 1.0 / (rows as f32).sqrt();
        let values: Vec<f32> = (0..rows * cols).map(|i| value::<f32>(seed, i) * scale).collect();
        Parameter::new(plain, &values)
    }

    fn ones(plain: &Plain<'_>, len: usize) -> Self {
        Parameter::new(plain, &vec![1.0; len])
    }
}

impl Block {
    fn new(plain: &Plain<'_>, seed: u64) -> Self {
        let matrix = |cols: usize| plain.matrix(POINTS * cols);
        Block {
            norm: Parameter::ones(plain, WIDTH),
            up: Parameter::random(plain, seed, WIDTH, HIDDEN),
            down: Parameter::random(plain, seed + 1, HIDDEN, WIDTH),
            h: matrix(WIDTH),
            n: matrix(WIDTH),
            rstd: matrix(1),
            a: matrix(HIDDEN),
            branch: matrix(WIDTH),
        }
    }
}

fn whole(matrix: &Matrix) -> WgpuSlice<'_, f32> {
    WgpuSlice::whole(matrix)
}

impl<'b> Network<'b> {
    fn new(backend: &'b WgpuBackend, plain: &'b Plain<'b>, norms: Norms) -> Result<Self, Error> {
        let (points, labels) = spirals();
        Ok(Network {
            backend,
            plain,
            norms,
            points: plain.upload(&points),
            labels: plain.upload(&labels),
            input: Parameter::random(plain, 1, 2, WIDTH),
            blocks: (0..BLOCKS).map(|i| Block::new(plain, 10 + 2 * i as u64)).collect(),
            last: Block::new(plain, 100),
            output: Parameter::random(plain, 2, WIDTH, CLASSES),
            logits: plain.matrix(POINTS * CLASSES),
            losses: plain.matrix(POINTS),
            loss: plain.matrix(1),
            curve: TestBuffer::new(backend, STEPS + 1)?,
        })
    }

    /// The loss after all steps.
    fn end(&self) -> Result<(), Error> {
        let mut encoder = self.backend.device().create_command_encoder(&Default::default());
        self.forward(&mut encoder, STEPS)?;
        self.backend.queue().submit([encoder.finish()]);
        Ok(())
    }

    /// One step of gradient descent, in one submission. Steps are counted from 1.
    fn step(&self, rate: f32, number: usize) -> Result<(), Error> {
        let mut encoder = self.backend.device().create_command_encoder(&Default::default());
        self.forward(&mut encoder, number - 1)?;
        self.backward(&mut encoder)?;
        let blocks = self.blocks.iter().flat_map(|block| [&block.norm, &block.up, &block.down]);
        for parameter in blocks.chain([&self.input, &self.last.norm, &self.output]) {
            let Parameter { values, gradient, moments: [first, second], len } = parameter;
            self.plain.adam(&mut encoder, [values, gradient, first, second], *len, rate, number);
        }
        self.backend.queue().submit([encoder.finish()]);
        Ok(())
    }

    /// The forward pass, and its loss into the curve.
    fn forward(&self, encoder: &mut CommandEncoder, steps: usize) -> Result<(), Error> {
        let plain = self.plain;
        plain.product(encoder, AB, [&self.points, &self.input.values], &self.blocks[0].h, [POINTS, 2, WIDTH]);
        for (i, block) in self.blocks.iter().enumerate() {
            self.norm(encoder, block, i.checked_sub(1).map(|before| &self.blocks[before]))?;
            plain.product(encoder, AB, [&block.n, &block.up.values], &block.a, [POINTS, WIDTH, HIDDEN]);
            plain.product(encoder, RELU_AB, [&block.a, &block.down.values], &block.branch, [POINTS, HIDDEN, WIDTH]);
        }
        self.norm(encoder, &self.last, self.blocks.last())?;
        plain.product(encoder, AB, [&self.last.n, &self.output.values], &self.logits, [POINTS, WIDTH, CLASSES]);
        plain.cross_entropy(encoder, &self.logits, &self.labels, &self.losses, Shape { rows: POINTS, cols: CLASSES });
        plain.row_mean(encoder, &self.losses, &self.loss, Shape { rows: 1, cols: POINTS });
        encoder.copy_buffer_to_buffer(&self.loss, 0, self.curve.buffer(), 4 * steps as u64, 4);
        Ok(())
    }

    /// The norm of a block: of its `h`, or of the sum of `h` and the branch of the block before.
    fn norm(&self, encoder: &mut CommandEncoder, block: &Block, before: Option<&Block>) -> Result<(), Error> {
        let Block { norm, h, n, rstd, .. } = block;
        if self.norms == Norms::Plain {
            let sum = before.map(|before| (&before.branch, &before.h));
            self.plain.norm(encoder, sum, h, &norm.values, n, rstd, SHAPE, EPS);
            return Ok(());
        }
        let args = match before {
            None => Forward::new(whole(h), whole(n)),
            Some(before) => {
                Forward::new(whole(&before.branch), whole(n)).residual(whole(&before.h)).residual_out(whole(h))
            }
        };
        let spec = NormSpec::rms(POINTS, WIDTH, EPS);
        self.backend.encode_forward(encoder, &spec, args.weight(whole(&norm.values)).rstd(whole(rstd)))
    }

    fn backward(&self, encoder: &mut CommandEncoder) -> Result<(), Error> {
        let plain = self.plain;
        let Network { last, output, logits, labels, .. } = self;
        let dlogits = plain.cross_entropy_gradient(encoder, logits, labels, Shape { rows: POINTS, cols: CLASSES });
        plain.product(encoder, AT_B, [&last.n, &dlogits], &output.gradient, [WIDTH, POINTS, CLASSES]);
        let dn = plain.matrix(POINTS * WIDTH);
        plain.product(encoder, A_BT, [&dlogits, &output.values], &dn, [POINTS, CLASSES, WIDTH]);
        let mut dh = self.norm_backward(encoder, last, &dn, None)?;
        for block in self.blocks.iter().rev() {
            let relu = plain.relu(encoder, &block.a, POINTS * HIDDEN);
            plain.product(encoder, AT_B, [&relu, &dh], &block.down.gradient, [HIDDEN, POINTS, WIDTH]);
            let dr = plain.matrix(POINTS * HIDDEN);
            plain.product(encoder, A_BT, [&dh, &block.down.values], &dr, [POINTS, WIDTH, HIDDEN]);
            let da = plain.relu_gradient(encoder, &dr, &block.a, POINTS * HIDDEN);
            plain.product(encoder, AT_B, [&block.n, &da], &block.up.gradient, [WIDTH, POINTS, HIDDEN]);
            let dn = plain.matrix(POINTS * WIDTH);
            plain.product(encoder, A_BT, [&da, &block.up.values], &dn, [POINTS, HIDDEN, WIDTH]);
            dh = self.norm_backward(encoder, block, &dn, Some(&dh))?;
        }
        plain.product(encoder, AT_B, [&self.points, &dh], &self.input.gradient, [2, POINTS, WIDTH]);
        Ok(())
    }

    /// The gradient of a block's `h`: through the norm, and past it.
    fn norm_backward(
        &self,
        encoder: &mut CommandEncoder,
        block: &Block,
        dn: &Matrix,
        past: Option<&Matrix>,
    ) -> Result<Matrix, Error> {
        let Block { norm, h, rstd, .. } = block;
        let dx = self.plain.matrix(POINTS * WIDTH);
        if self.norms == Norms::Plain {
            self.plain.norm_backward(encoder, [dn, h, rstd, &norm.values], past, &dx, &norm.gradient, SHAPE);
            return Ok(dx);
        }
        let args = Backward::new(whole(dn), whole(h), whole(rstd), whole(&dx));
        let args = args.weight(whole(&norm.values)).dweight(whole(&norm.gradient));
        let args = match past {
            Some(past) => args.dresidual_out(whole(past)),
            None => args,
        };
        self.backend.encode_backward(encoder, &NormSpec::rms(POINTS, WIDTH, EPS), args)?;
        Ok(dx)
    }
}

const SHAPE: Shape = Shape { rows: POINTS, cols: WIDTH };

#[cfg(test)]
mod tests {
    use super::*;

    /// Both learn the spirals. Their curves differ by less than the width of a line in the page's
    /// picture, which is 2 of 220 pixels over four powers of ten.
    #[test]
    fn network_learns_with_either_norm() {
        let backend = match rmsnorm_conformance::testing::available(WgpuBackend::new(0)) {
            Ok(Some(backend)) => backend,
            Ok(None) => return,
            Err(failure) => panic!("{failure:?}"),
        };
        let train = |norms| pollster::block_on(train(&backend, norms, &mut |_| {})).expect("the device works");
        let (fused, plain) = (train(Norms::Fused), train(Norms::Plain));
        let last = STEPS / EVERY;
        for (i, (a, b)) in fused.losses.iter().zip(&plain.losses).enumerate() {
            assert!((a / b).log10().abs() < 2.0 / 220.0 * 4.0, "step {}: {a} and {b}", i * EVERY);
        }
        assert_eq!((fused.losses.len(), plain.losses.len()), (last + 1, last + 1));
        assert!(fused.losses[0] > 0.5 && fused.losses[last] < 0.01, "{fused:?}");
    }
}
