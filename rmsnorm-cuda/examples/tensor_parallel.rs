//! Tensor parallelism with one process per GPU. The weights of the feed-forward blocks are divided
//! among the ranks. Between two blocks, one kernel computes the sum over ranks, adds the residual
//! and normalizes.
//!
//!     cargo run --release -p rmsnorm-cuda --features peers --example tensor_parallel [-- --ranks N]
//!
//! The program starts itself once for each rank. With fewer GPUs than ranks, all ranks share the
//! first GPU. A small kernel stands in for cuBLAS. Rank 0 also computes every block alone, with the
//! weights of all ranks: the sums must match bit for bit.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use rmsnorm_cuda::cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, CudaView, LaunchConfig, PushKernelArg,
};
use rmsnorm_cuda::cudarc::nvrtc;
use rmsnorm_cuda::spec::{NormSpec, bf16};
use rmsnorm_cuda::{CudaBackend, Forward, PeerCard, PeerGroup, PeerSeat};
use rmsnorm_dist::ShardedNorm;

type Outcome<T> = Result<T, Box<dyn Error>>;

const TOKENS: usize = 64;
const HIDDEN: usize = 2048;
/// The inner size of a block, summed over all ranks.
const INNER: usize = 4096;
const BLOCKS: usize = 6;
const EPS: f32 = 1e-6;

/// Longer than a rank takes to start.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["--rank", rank, ranks, device, folder] => {
            run_rank(&Place { rank: rank.parse()?, ranks: ranks.parse()?, folder: folder.into() }, device.parse()?)
        }
        ["--ranks", ranks] => start(Some(ranks.parse()?)),
        [] => start(None),
        _ => Err("--ranks N, or nothing".into()),
    }
}

/// Starts a process for each rank; fails if a rank fails.
fn start(ranks: Option<usize>) -> Outcome<()> {
    let devices = match CudaBackend::device_count() {
        Ok(count) => count,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let ranks = ranks.unwrap_or(devices.clamp(2, 8));
    println!("{ranks} ranks on {}", if ranks <= devices { "a GPU each" } else { "one GPU, which they have in turn" });
    let folder = env::temp_dir().join(format!("tensor-parallel-{}", process::id()));
    fs::create_dir(&folder)?;
    let started = (0..ranks).map(|rank| {
        let device = if ranks <= devices { rank } else { 0 };
        let numbers = [rank, ranks, device].map(|number| number.to_string());
        Command::new(env::current_exe()?).arg("--rank").args(numbers).arg(&folder).spawn()
    });
    let started: Vec<_> = started.collect::<Result<_, _>>()?;
    let mut is_good = true;
    for mut process in started {
        is_good &= process.wait()?.success();
    }
    let same = is_good && (1..ranks).all(|rank| output(&folder, rank) == output(&folder, 0));
    fs::remove_dir_all(&folder)?;
    if !same {
        eprintln!("a rank has failed, or has other bits than rank 0");
        exit(1);
    }
    println!("all ranks have the same bits");
    Ok(())
}

fn output(folder: &Path, rank: usize) -> Option<Vec<u8>> {
    fs::read(folder.join(format!("output-{rank}"))).ok()
}

/// The number of this rank, and the folder for the exchange of cards. A real program uses its
/// launcher instead.
struct Place {
    rank: usize,
    ranks: usize,
    folder: PathBuf,
}

impl Place {
    /// Publishes this rank's card and waits for the cards of all ranks.
    fn exchange(&self, card: &PeerCard) -> Outcome<Vec<PeerCard>> {
        let path = |rank: usize| self.folder.join(format!("card-{rank}"));
        let new = self.folder.join(format!("new-{}", self.rank));
        fs::write(&new, card.as_bytes())?;
        fs::rename(new, path(self.rank))?;
        let start = Instant::now();
        let mut cards = Vec::new();
        while cards.len() < self.ranks {
            match fs::read(path(cards.len())) {
                Ok(bytes) => cards.push(PeerCard::from_bytes(bytes.try_into().map_err(|_| "a card was cut")?)),
                Err(error) if start.elapsed() > PATIENCE => return Err(error.into()),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
        Ok(cards)
    }
}

/// A rank's share of a block: columns of the first matrix, rows of the second.
struct Weights {
    up: CudaSlice<bf16>,
    down: CudaSlice<bf16>,
}

fn run_rank(place: &Place, device: usize) -> Outcome<()> {
    let context = CudaContext::new(device)?;
    let stream = context.new_stream()?;
    let backend = CudaBackend::from_stream(stream.clone())?;
    let seat = PeerSeat::new(&backend, place.rank, place.ranks, TOKENS * HIDDEN * size_of::<bf16>())?;
    let cards = place.exchange(seat.card())?;
    let group: PeerGroup = seat.join(&cards)?;
    let matmul = Matmul::new(&stream)?;

    let inner = INNER / place.ranks;
    let weights = |rank: usize, block: usize| -> Outcome<Weights> {
        let seed = (1 + rank + place.ranks * block) as u64;
        Ok(Weights {
            up: stream.clone_htod(&random(2 * seed, HIDDEN * inner, 1.0 / (HIDDEN as f32).sqrt()))?,
            down: stream.clone_htod(&random(2 * seed + 1, inner * HIDDEN, 1.0 / (INNER as f32).sqrt()))?,
        })
    };
    let norm_weight = stream.clone_htod(&random(7, HIDDEN, 1.0))?;
    let spec = NormSpec::rms(TOKENS, HIDDEN, EPS);
    // Every rank has a copy of the residual stream and of its norm.
    let mut sum = stream.clone_htod(&random(8, TOKENS * HIDDEN, 1.0))?;
    let (mut y, mut next) = (stream.alloc_zeros::<bf16>(TOKENS * HIDDEN)?, sum.clone());
    backend.forward(&spec, Forward::new(sum.as_view(), y.as_view_mut()).weight(norm_weight.as_view()))?;

    let mut hidden = stream.alloc_zeros::<bf16>(TOKENS * inner)?;
    let mut partial = stream.alloc_zeros::<bf16>(TOKENS * HIDDEN)?;
    let mut checked = 0;
    for block in 0..BLOCKS {
        let own = weights(place.rank, block)?;
        // Rank 0 first computes the block alone, from the current residual stream.
        let alone = if place.rank == 0 {
            let mut parts = stream.alloc_zeros::<bf16>(place.ranks * TOKENS * HIDDEN)?;
            for rank in 0..place.ranks {
                let of_rank = weights(rank, block)?;
                matmul.block(&stream, y.as_view(), &of_rank, &mut hidden, &mut partial)?;
                let mut part = parts.slice_mut(rank * TOKENS * HIDDEN..(rank + 1) * TOKENS * HIDDEN);
                stream.memcpy_dtod(&partial, &mut part)?;
            }
            let (mut alone, mut y) = (sum.clone(), y.clone());
            let args = Forward::new(parts.as_view(), y.as_view_mut()).parts(place.ranks, TOKENS * HIDDEN);
            let args = args.weight(norm_weight.as_view()).residual(sum.as_view()).residual_out(alone.as_view_mut());
            backend.forward(&spec, args)?;
            Some([stream.clone_dtoh(&alone)?, stream.clone_dtoh(&y)?])
        } else {
            None
        };

        matmul.block(&stream, y.as_view(), &own, &mut hidden, &mut partial)?;
        let args = Forward::new(partial.as_view(), y.as_view_mut()).weight(norm_weight.as_view());
        group.forward_reduced(&spec, args.residual(sum.as_view()).residual_out(next.as_view_mut()))?;
        std::mem::swap(&mut sum, &mut next);

        let outputs = [stream.clone_dtoh(&sum)?, stream.clone_dtoh(&y)?];
        stream.synchronize()?;
        group.check()?;
        if let Some(alone) = alone {
            if bits(&alone[0]) != bits(&outputs[0]) {
                return Err(format!("block {block}: the sum over ranks is not that of one device").into());
            }
            // The kernel adds the squares of a row in another order, so a rounded value may be off
            // by one.
            let apart = |(one, two): (u16, u16)| one.abs_diff(two);
            let most = bits(&alone[1]).into_iter().zip(bits(&outputs[1])).map(apart).max();
            if most > Some(1) {
                return Err(format!("block {block}: y is {most:?} roundings apart from that of one device").into());
            }
            checked += 1;
        }
        if block + 1 == BLOCKS {
            let [sum, y] = outputs;
            let bytes = bits(&sum).into_iter().chain(bits(&y)).flat_map(u16::to_le_bytes);
            fs::write(place.folder.join(format!("output-{}", place.rank)), bytes.collect::<Vec<u8>>())?;
        }
    }
    if place.rank == 0 {
        println!("{checked} blocks: each sum has the bits of one device's");
    }
    Ok(())
}

fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Numbers in -scale..scale, the same on every rank for a given seed.
fn random(seed: u64, len: usize, scale: f32) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| bf16::from_f32(scale * next())).collect()
}

/// A stand-in for cuBLAS.
struct Matmul(CudaFunction);

impl Matmul {
    /// out (rows x cols) = a (rows x inner) b (inner x cols); if `is_cut`, negative results become
    /// 0.
    const SOURCE: &str = r#"
        __device__ float to_f32(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
        __device__ unsigned short to_bf16(float value) {
            const unsigned bits = __float_as_uint(value);
            return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        }
        extern "C" __global__ void matmul(
            const unsigned short* a, const unsigned short* b, unsigned short* out, int inner, int cols, int is_cut
        ) {
            const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
            if (col >= cols) return;
            float sum = 0.0f;
            for (int k = 0; k < inner; ++k) sum += to_f32(a[(size_t)row * inner + k]) * to_f32(b[(size_t)k * cols + col]);
            out[(size_t)row * cols + col] = to_bf16(is_cut && sum < 0.0f ? 0.0f : sum);
        }
    "#;

    fn new(stream: &Arc<CudaStream>) -> Outcome<Self> {
        // cudarc loads NVRTC through the system's loader, and panics if it is missing.
        let module = stream.context().load_module(nvrtc::compile_ptx(Self::SOURCE)?)?;
        Ok(Matmul(module.load_function("matmul")?))
    }

    /// Computes this rank's partial sum of a block's output.
    fn block(
        &self,
        stream: &Arc<CudaStream>,
        y: CudaView<'_, bf16>,
        weights: &Weights,
        hidden: &mut CudaSlice<bf16>,
        partial: &mut CudaSlice<bf16>,
    ) -> Outcome<()> {
        let inner = hidden.len() / TOKENS;
        self.launch(stream, y, &weights.up, hidden, (HIDDEN, inner), true)?;
        self.launch(stream, hidden.as_view(), &weights.down, partial, (inner, HIDDEN), false)
    }

    fn launch(
        &self,
        stream: &Arc<CudaStream>,
        a: CudaView<'_, bf16>,
        b: &CudaSlice<bf16>,
        out: &mut CudaSlice<bf16>,
        (inner, cols): (usize, usize),
        is_cut: bool,
    ) -> Outcome<()> {
        let lengths = [TOKENS * inner, inner * cols, TOKENS * cols];
        if [a.len(), b.len(), out.len()] != lengths {
            return Err(format!("a product of other lengths than {lengths:?}").into());
        }
        let (inner, columns, is_cut) = (inner as i32, cols as i32, i32::from(is_cut));
        let config = LaunchConfig {
            grid_dim: (cols.div_ceil(128) as u32, TOKENS as u32, 1),
            block_dim: (128, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(&a).arg(b).arg(out).arg(&inner).arg(&columns).arg(&is_cut);
        // SAFETY:
        // - arguments: the kernel's, in its order;
        // - memory: the kernel reads and writes only the lengths that were checked above.
        unsafe { launch.launch(config) }?;
        Ok(())
    }
}
