//! The arguments of the command line, as clap reads them.
//!
//! Names of backends, operations and dtypes stay strings here: the commands read them, so that a wrong one is answered
//! in one line that names its source, be it a flag or a file.

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Fused RMSNorm and LayerNorm, forward and backward: what this machine has, proven and measured.
///
/// Without a command: the devices, a quick conformance run and a short benchmark.
#[derive(Debug, Parser)]
#[command(name = "rmsnorm", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List every backend: what it runs on, or why it cannot
    Devices(DevicesArgs),
    /// Prove a backend: every output against its error bound, on generated cases
    Conformance(ConformanceArgs),
    /// Measure forward and backward against this machine's copy bandwidth
    Bench(BenchArgs),
    /// Put measurements of earlier runs, and published kernels', side by side
    ///
    /// Reads what `bench --json` writes, and the results of the scripts that time published kernels: lists of rows. All are GB/s over the fewest bytes that an operation must move. The first source in the
    /// files is the one that others are compared with.
    Compare(CompareArgs),
    /// Compile what a model's norms need, and keep it on disk: its first calls then wait for no compiler
    ///
    /// Of each length, operation and dtype every kernel that calls with some number of rows run, where tensors lie row by row and
    /// begin where allocations do. Kernels compile on all of the system's threads.
    Warm(WarmArgs),
    /// Find the best tiles for this device, prove them, and keep them for every later process
    ///
    /// Measures, for each rung of a backend's tables of tiles, what else the rung may hold, on large calls and small ones, and takes
    /// what is faster by more than the noise. Proves each change by the cases of the suite for its lengths. The table goes into the
    /// folder of compiled kernels (RMSNORM_CACHE_DIR), and backends load it when they are opened on the same device, driver and
    /// version: rmsnorm devices says so. A run starts from the built-in table and replaces the file: what it does not reach is built in.
    /// Bits of results depend on the table: RMSNORM_TUNING=off goes without, RMSNORM_TUNING=FILE pins one.
    Tune(TuneArgs),
    /// Normalize the tensors of a safetensors file
    ///
    /// The file holds x of any rank and, if wanted, weight, bias, residual, dy and dresidual_out, in F32, F16 or BF16.
    /// The trailing dimensions that weight (or bias) has are normalized, without them the last one. The output gets y
    /// and rstd, mean for layer_norm, residual_out if there is a residual and, if there is dy, dx, dweight and dbias.
    /// The file's metadata may give settings in place of flags. Tensors and metadata of other names are refused, but for the
    /// metadata "format", which frameworks write.
    Run(RunArgs),
}

/// Arguments of `rmsnorm devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print a JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// How the cpu backend runs. Other backends have no such choice and ignore these.
#[derive(Debug, Default, Args)]
pub struct CpuArgs {
    /// Instruction set of the cpu backend: portable, avx2, avx512 [default: the strongest that the processor has]
    #[arg(long, value_name = "ISA")]
    pub isa: Option<String>,
    /// Threads of the cpu backend [default: all]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Arguments of `rmsnorm conformance`.
#[derive(Debug, Args)]
pub struct ConformanceArgs {
    /// The backend to prove: cpu, cuda or wgpu; cuda:N and wgpu:N for the device of that number
    #[arg(long, value_name = "BACKEND", default_value = "cpu")]
    pub backend: String,
    /// How it runs.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// How much to run: smoke (seconds), core (the fixed list), full (many random cases) or stress (large tensors)
    #[arg(long, value_name = "PROFILE", default_value = "core")]
    pub profile: String,
    /// Seed of the cases of the full profile
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Run only so many cases, spread over the profile's list: a part of the full profile, seed after seed, is a soak
    #[arg(long, value_name = "N")]
    pub most_cases: Option<usize>,
    /// Run only the K-th of N parts of what the profile runs, so that N processes can share it
    #[arg(long, value_name = "K/N", conflicts_with_all = ["most_cases", "case"])]
    pub part: Option<String>,
    /// Print the ids of the cases, one a line, and run none
    #[arg(long, conflicts_with = "json")]
    pub list: bool,
    /// End with the first case that fails
    #[arg(long)]
    pub fail_fast: bool,
    /// Cases that run at once, those of the stress profile one by one [default: as many as the system has threads]
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZero<usize>>,
    /// Run only the case with this id, as a failure prints it; may be given several times
    #[arg(long, value_name = "ID")]
    pub case: Vec<String>,
    /// Prove a group of so many ranks, each of which has a part of x: threads on the cpu, GPUs on cuda
    ///
    /// Cases are the profile's sums of parts, smoke's or core's. Every rank must give the same bits, within the bounds of one device.
    #[arg(long, value_name = "N", conflicts_with_all = ["most_cases", "part", "case", "list", "json", "jobs", "fail_fast", "seed"])]
    pub ranks: Option<NonZero<usize>>,
    /// Write one JSON object per case and one for the summary to this file (`-`: stdout)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Arguments of `rmsnorm bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The backends to measure, such as cpu,cuda or wgpu:1 [default: all that this machine has]
    #[arg(long, value_name = "BACKEND,..", value_delimiter = ',')]
    pub backend: Vec<String>,
    /// How they run.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// The norms to measure: rms_norm, layer_norm [default: both]
    #[arg(long, value_name = "NORM,..", value_delimiter = ',')]
    pub norm: Vec<String>,
    /// The operations to measure: forward, add_forward, backward, forward_add (the residual added after the norm),
    /// forward_add_forward (and the next norm of that), quantized_forward, add_quantized_forward [default: the first three]; with
    /// --ranks forward_reduced, forward_reduced_rows, forward_columns
    #[arg(long, value_name = "OP,..", value_delimiter = ',')]
    pub op: Vec<String>,
    /// How quantized_forward makes its codes, which are E4M3: tensor (a given scale), delayed (and amax), transposed (and the
    /// codes transposed), current, row, block128, mx, block128_columnwise (and a copy
    /// along columns), mx_columnwise [default: all]
    #[arg(long, value_name = "QUANT,..", value_delimiter = ',')]
    pub quant: Vec<String>,
    /// How backward sums weight gradients over the rows: partials, locks, atomics [default: partials]
    #[arg(long, value_name = "REDUCTION,..", value_delimiter = ',')]
    pub reduction: Vec<String>,
    /// Measure a group of so many ranks: threads on the cpu, GPUs on cuda
    ///
    /// By --op forward_reduced, the norm of a sum over them, or forward_columns, that of rows whose columns are divided: the shape is that of each
    /// rank's. On GPUs in one kernel and, where NCCL is found, composed of it and our norms. A time is that of the slowest rank.
    #[arg(long, value_name = "N", conflicts_with_all = ["sweep", "reduction", "quant", "list", "append", "compare", "plot", "seconds"])]
    pub ranks: Option<NonZero<usize>>,
    /// The shapes to measure, as rows x cols: 4096x4096; @NAME is a list of benches/shapes.toml, such as @h200-forward
    /// [default: a list for each backend]
    #[arg(long, value_name = "MxN,..", value_delimiter = ',')]
    pub shapes: Vec<String>,
    /// Print the shapes that --shapes names, one a line, and measure none
    #[arg(long, requires = "shapes", conflicts_with_all = ["json", "append", "plot"])]
    pub list: bool,
    /// Sweeps instead of shapes: cols, row lengths at a fixed number of bytes, and rows, numbers of rows of one length
    #[arg(long, value_name = "SWEEP,..", value_delimiter = ',', conflicts_with = "shapes")]
    pub sweep: Vec<String>,
    /// The dtypes to measure: f32, f16, bf16 [default: f32,bf16]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Seconds of samples for each row of the table
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    pub seconds: f64,
    /// Write the measurements as JSON to this file (`-`: stdout)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Add the measurements to those in this file, which is of this machine; without the file, as --json
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub append: Option<PathBuf>,
    /// Compare with the measurements of these files, as `rmsnorm compare` reads them
    #[arg(long, value_name = "FILE,..", value_delimiter = ',')]
    pub compare: Vec<PathBuf>,
    /// Draw rates over row lengths, and times over numbers of rows, into this SVG file [implies --sweep cols,rows unless
    /// shapes are given]
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Arguments of `rmsnorm compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Reports of `rmsnorm bench --json`, and results of published kernels
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Print a table for a page: a line per operation and shape, a column per source, the fastest in bold, and below it the
    /// machine, the date, the commit and the versions
    #[arg(long)]
    pub markdown: bool,
    /// Keep these operations, such as "rms_norm forward", in this order [default: all]
    #[arg(long, value_name = "NORM OP,..", value_delimiter = ',')]
    pub op: Vec<String>,
    /// Keep these dtypes [default: all]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Keep these shapes, such as 4096x1024 [default: all]
    #[arg(long, value_name = "ROWSxCOLS,..", value_delimiter = ',')]
    pub shapes: Vec<String>,
    /// Hold our measurements to the speeds that this file aims at, such as benches/targets.toml
    #[arg(long, value_name = "FILE.toml")]
    pub targets: Option<PathBuf>,
    /// Draw rates over row lengths, and times over numbers of rows, into this SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Arguments of `rmsnorm warm`.
#[derive(Debug, Args)]
pub struct WarmArgs {
    /// The backends to compile for, such as cuda or wgpu:1 [default: all GPUs that this machine has]
    #[arg(long, value_name = "BACKEND,..", value_delimiter = ',')]
    pub backend: Vec<String>,
    /// The lengths of a row: a model's hidden size, the size of its heads
    #[arg(long, value_name = "N,..", value_delimiter = ',', required = true)]
    pub cols: Vec<NonZero<usize>>,
    /// The norms: rms_norm, layer_norm [default: both]
    #[arg(long, value_name = "NORM,..", value_delimiter = ',')]
    pub norm: Vec<String>,
    /// The operations: forward, add_forward, backward, forward_add, forward_add_forward, quantized_forward, add_quantized_forward
    /// [default: the first three]
    #[arg(long, value_name = "OP,..", value_delimiter = ',')]
    pub op: Vec<String>,
    /// How quantized_forward makes its codes, as of rmsnorm bench [default: all]
    #[arg(long, value_name = "QUANT,..", value_delimiter = ',')]
    pub quant: Vec<String>,
    /// The dtypes of activations: f32, f16, bf16 [default: bf16]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Weights are f32, whatever the activations are
    #[arg(long)]
    pub f32_weight: bool,
}

/// Arguments of `rmsnorm tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The backend to tune, such as cuda or wgpu:1 [default: the first GPU of this machine, else cpu]
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<String>,
    /// How long it may take, proof included. What users need most comes first, and what is not reached stays as it is
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    pub minutes: f64,
    /// Tune only these: forward, backward, add_forward, to_codes, to_codes_by_row, to_codes_by_block [default: all]
    #[arg(long, value_name = "KIND,..", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Tune only for rows of these lengths [default: all, those of models first]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub cols: Vec<NonZero<usize>>,
    /// Tune only for these dtypes: f32, f16, bf16 [default: all, bf16 first]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Print what was found, and write no table
    #[arg(long)]
    pub dry_run: bool,
    /// Write the table to this file instead, for RMSNORM_TUNING
    #[arg(short, long, value_name = "FILE", conflicts_with = "dry_run")]
    pub output: Option<PathBuf>,
}

/// Arguments of `rmsnorm run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The safetensors file with the inputs
    #[arg(value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// The safetensors file to write; it appears complete or not at all
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: PathBuf,
    /// The backend that computes: cpu, cuda or wgpu; cuda:N and wgpu:N for the device of that number
    #[arg(long, value_name = "BACKEND", default_value = "cpu")]
    pub backend: String,
    /// How it runs.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// The scalars of the norm.
    #[command(flatten)]
    pub settings: SettingArgs,
    /// Go without the tensors and metadata of the file whose names are not known or not about this norm, with a note
    #[arg(long)]
    pub allow_unknown: bool,
    /// Print what was done as a JSON object
    #[arg(long)]
    pub json: bool,
}

/// The flags of `rmsnorm run` that the file's metadata may give instead. The flag wins.
#[derive(Debug, Default, Args)]
pub struct SettingArgs {
    /// rms_norm or layer_norm; needed here or as metadata "op"
    #[arg(long, value_name = "OP")]
    pub op: Option<String>,
    /// Added to the variance inside the root; needed here or as metadata "eps"
    #[arg(long, value_name = "E", allow_hyphen_values = true)]
    pub eps: Option<String>,
    /// Added to every weight, 1 for Gemma; or metadata "weight_offset" [default: 0]
    #[arg(long, value_name = "O", allow_hyphen_values = true)]
    pub weight_offset: Option<String>,
    /// at_store, or before_weight for Llama's roundings; or metadata "cast_order" [default: at_store]
    #[arg(long, value_name = "ORDER")]
    pub cast_order: Option<String>,
    /// 8-bit results.
    #[command(flatten)]
    pub quantize: QuantizeArgs,
}

/// The flags of 8-bit results, each of which the file's metadata may give instead. The flag wins.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "8-bit results")]
pub struct QuantizeArgs {
    /// Write codes of this format and their scales in place of y: e4m3, e5m2 or int8; or metadata "codes"
    #[arg(long, value_name = "FORMAT")]
    pub codes: Option<String>,
    /// What shares a scale: tensor (given by the file's tensor scale), current (the tensor's own), row, block128, block64 or mx; or
    /// metadata "scale" [default: row]
    #[arg(long, value_name = "KIND")]
    pub scale: Option<String>,
    /// 1 to round the scales of blocks up to powers of two; or metadata "pow2" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub pow2: Option<String>,
    /// How MX rounds: up or floor; or metadata "mx_rounding" [default: up]
    #[arg(long, value_name = "RULE")]
    pub mx_rounding: Option<String>,
    /// What is quantized: f32, or rounded to the dtype of x first; or metadata "source" [default: f32]
    #[arg(long, value_name = "SOURCE")]
    pub source: Option<String>,
    /// A smaller largest magnitude counts as this; or metadata "amax_floor" [default: 0]
    #[arg(long, value_name = "A")]
    pub amax_floor: Option<String>,
    /// A larger one counts as this; or metadata "amax_ceiling" [default: inf]
    #[arg(long, value_name = "A")]
    pub amax_ceiling: Option<String>,
    /// Where scales lie: row_major, column_major, packed_ue8m0 or swizzled128x4; or metadata "layout" [default: row_major]
    #[arg(long, value_name = "LAYOUT")]
    pub layout: Option<String>,
    /// 1 to write the transposed copy codes_t, too; or metadata "transposed" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub transposed: Option<String>,
    /// 1 to write codes and scales along columns, too: codes_columnwise, transposed, and scales_columnwise; of block128, block64 and mx;
    /// or metadata "columnwise" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub columnwise: Option<String>,
    /// 1 to write y beside the codes; or metadata "keep_y" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub keep_y: Option<String>,
}
