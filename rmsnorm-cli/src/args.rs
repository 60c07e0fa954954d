//! The arguments of the command line, as clap reads them.
//!
//! Names of backends, operations and dtypes stay strings here. The commands parse them, so that the
//! error of a wrong name is one line that names its source: an option or a file.

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Fused RMSNorm and LayerNorm, forward and backward, on CPUs and GPUs.
///
/// Without a command, rmsnorm lists the devices of this machine, checks their results with a short
/// test run and prints a table of their speeds.
#[derive(Debug, Parser)]
#[command(name = "rmsnorm", version)]
pub struct Cli {
    /// The command, or none for the overview.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List every backend with its device, or why it is missing and how to fix that
    Devices(DevicesArgs),
    /// Test a backend: compare each output with an f64 reference and its error bound
    Conformance(ConformanceArgs),
    /// Measure speed, and compare it with the memory bandwidth of the device
    Bench(BenchArgs),
    /// Print saved measurements side by side
    ///
    /// Reads files of `rmsnorm bench --json`, and the JSON lists that the scripts for other
    /// projects' kernels write. All rates count the fewest bytes that an operation must move. The
    /// other sources are compared with the first source in the files.
    Compare(CompareArgs),
    /// Compile the kernels of a model in advance and keep them on disk
    ///
    /// The first calls of later processes then need no compiler. Compiles the kernels for each row
    /// length, operation and dtype, for every number of rows, for contiguous tensors. All CPU
    /// threads compile.
    Warm(WarmArgs),
    /// Search the fastest tile sizes for this device and keep them
    ///
    /// Measures the candidates for each entry of the tuning table, with large and small calls, and
    /// keeps a candidate that is faster by more than the noise. The test suite checks each change.
    /// The table goes into the cache folder (RMSNORM_CACHE_DIR); later processes on the same
    /// device, driver and version load it, and `rmsnorm devices` shows it. Each run starts from the
    /// built-in table and replaces the file. On GPUs the table can change the last bits of results:
    /// RMSNORM_TUNING=off selects the built-in table, RMSNORM_TUNING=FILE a certain one.
    Tune(TuneArgs),
    /// Normalize the tensors of a safetensors file
    ///
    /// The input file holds x, with any number of dimensions, and optionally weight, bias,
    /// residual, dy and dresidual_out, in F32, F16 or BF16. The dimensions of weight or bias are
    /// normalized; without both, the last dimension of x. The output file gets y and rstd; mean for
    /// layer_norm; residual_out with a residual; dx, dweight and dbias with dy. The metadata of the
    /// input file may hold settings in place of options. Tensors and metadata with other names are
    /// errors; only the metadata "format", which frameworks write, is ignored.
    Run(RunArgs),
    /// Check reports of the test suite that others made
    #[command(subcommand)]
    Report(ReportCommand),
}

/// The commands of `rmsnorm report`.
#[derive(Debug, Subcommand)]
pub enum ReportCommand {
    /// Check that reports are as the suite wrote them, and print what they prove
    ///
    /// Reads reports of `rmsnorm conformance --json` and of the page for browsers: all lines, or the
    /// last one. Refuses a report that was changed, that is from another version of the suite, or
    /// that covers no whole profile.
    Check(CheckArgs),
}

/// Arguments of `rmsnorm report check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Reports
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// Arguments of `rmsnorm devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print a JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// The options of the cpu backend. Other backends ignore them.
#[derive(Debug, Default, Args)]
pub struct CpuArgs {
    /// Instruction set of the cpu backend: portable, avx2, avx512 [default: the best that the
    /// processor has]
    #[arg(long, value_name = "ISA")]
    pub isa: Option<String>,
    /// Number of threads of the cpu backend [default: all]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Arguments of `rmsnorm conformance`.
#[derive(Debug, Args)]
pub struct ConformanceArgs {
    /// The backend to test: cpu, cuda or wgpu; cuda:N and wgpu:N name the device with that number
    #[arg(long, value_name = "BACKEND", default_value = "cpu")]
    pub backend: String,
    /// The options of the cpu backend.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// The list of cases: smoke (seconds), core (a fixed list), full (many random cases) or stress
    /// (large tensors)
    #[arg(long, value_name = "PROFILE", default_value = "core")]
    pub profile: String,
    /// Seed of the random cases of profile full
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Run only N cases, spread over the profile's list
    #[arg(long, value_name = "N")]
    pub most_cases: Option<usize>,
    /// Run only the K-th of N parts of the profile, so that N processes can share the work
    #[arg(long, value_name = "K/N", conflicts_with_all = ["most_cases", "case"])]
    pub part: Option<String>,
    /// Print the ids of the cases, one per line, and run none
    #[arg(long, conflicts_with = "json")]
    pub list: bool,
    /// Stop at the first case that fails
    #[arg(long)]
    pub fail_fast: bool,
    /// Number of cases that run at once; profile stress runs one by one [default: threads of the
    /// system]
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZero<usize>>,
    /// Run only the case with this id, which a failure prints; may be given several times
    #[arg(long, value_name = "ID")]
    pub case: Vec<String>,
    /// Test a group of N ranks: threads on the cpu, GPUs on cuda
    ///
    /// Tests norms of a sum over the ranks, with profile smoke or core, and norms of rows or
    /// columns that are divided among the ranks. All ranks must give the same bits, within the
    /// error bounds of one device.
    #[arg(long, value_name = "N", conflicts_with_all = ["most_cases", "part", "case", "list", "json", "jobs", "fail_fast", "seed"])]
    pub ranks: Option<NonZero<usize>>,
    /// Write a JSON object for each case and one for the summary to this file; - is stdout
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Arguments of `rmsnorm bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The backends to measure, such as cpu,cuda or wgpu:1 [default: all of this machine]
    #[arg(long, value_name = "BACKEND,..", value_delimiter = ',')]
    pub backend: Vec<String>,
    /// The options of the cpu backend.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// The norms to measure: rms_norm, layer_norm, l2_norm, l2_norm_clamped [default: the first two]
    #[arg(long, value_name = "NORM,..", value_delimiter = ',')]
    pub norm: Vec<String>,
    /// The operations to measure: forward, add_forward (adds a residual first), backward,
    /// forward_add (adds the residual after the norm), forward_add_forward (also computes the next
    /// norm of that sum), quantized_forward, add_quantized_forward [default: the first three]; with
    /// --ranks: forward_reduced, forward_reduced_rows, forward_columns
    #[arg(long, value_name = "OP,..", value_delimiter = ',')]
    pub op: Vec<String>,
    /// The scales of quantized_forward, whose codes are E4M3: tensor (one given scale), delayed (a
    /// given scale; writes amax), transposed (a given scale; writes a transposed copy), current
    /// (one computed scale), row, block128, mx, block128_columnwise and mx_columnwise (with a
    /// second copy that is quantized along the columns) [default: all]
    #[arg(long, value_name = "QUANT,..", value_delimiter = ',')]
    pub quant: Vec<String>,
    /// The forms of the norms: plain, gate_after (the result multiplied by silu of a gate), gate_before
    /// (x multiplied by it), groups8 (8 groups of columns), gate_before_groups8, before_weight (x_hat
    /// rounded before the weight), rstd_first (rstd rounded before), weight_first (the weight before the
    /// norm), no_weight (no bias either), to_f32 (f32 y and parameters, x of --dtype), from_f32 (y of
    /// --dtype, f32 x and parameters) [default: plain]
    #[arg(long, value_name = "FORM,..", value_delimiter = ',')]
    pub form: Vec<String>,
    /// The way in which backward sums weight gradients over the rows: partials, locks, atomics
    /// [default: partials]
    #[arg(long, value_name = "REDUCTION,..", value_delimiter = ',')]
    pub reduction: Vec<String>,
    /// Measure groups of N ranks: threads on the cpu, GPUs on cuda
    ///
    /// forward_reduced is the norm of a sum over the ranks, forward_reduced_rows the same with the
    /// residual divided by rows, and forward_columns the norm of rows whose columns are divided
    /// among the ranks. Shapes are per rank. GPUs run one fused kernel and, if NCCL is found, NCCL
    /// followed by rmsnorm's kernels. Each time is the time of the slowest rank.
    #[arg(long, value_name = "N,..", value_delimiter = ',', conflicts_with_all = ["sweep", "form", "reduction", "quant", "list", "append", "compare", "plot", "seconds"])]
    pub ranks: Vec<NonZero<usize>>,
    /// The shapes to measure, rows x columns, such as 4096x1024; @NAME is a list of
    /// benches/shapes.toml, such as @h200-forward [default: a list for each backend]
    #[arg(long, value_name = "MxN,..", value_delimiter = ',')]
    pub shapes: Vec<String>,
    /// Print the shapes that --shapes names, one per line, and measure nothing
    #[arg(long, requires = "shapes", conflicts_with_all = ["json", "append", "plot"])]
    pub list: bool,
    /// Measure a series of shapes: cols (row lengths at a fixed number of bytes), rows (numbers of
    /// rows of one length), between (24 shapes that nobody chose, drawn from --seed); the least and
    /// the median share of the copy follow the table
    #[arg(long, value_name = "SWEEP,..", value_delimiter = ',', conflicts_with = "shapes")]
    pub sweep: Vec<String>,
    /// The seed of --sweep between
    #[arg(long, value_name = "SEED", default_value_t = 0, requires = "sweep")]
    pub seed: u64,
    /// The dtypes to measure: f32, f16, bf16 [default: f32,bf16]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Seconds of samples for each row of the table
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    pub seconds: f64,
    /// Write the measurements as JSON to this file; - is stdout
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Add the measurements to a JSON file of this machine, or create the file
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub append: Option<PathBuf>,
    /// Compare with the measurements in these files, as rmsnorm compare does
    #[arg(long, value_name = "FILE,..", value_delimiter = ',')]
    pub compare: Vec<PathBuf>,
    /// Draw rates over row lengths and times over numbers of rows as an SVG file [implies --sweep
    /// cols,rows unless --shapes is given]
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Arguments of `rmsnorm compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Files of rmsnorm bench --json, and results of other projects' kernels
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Print a table for a page: a line per operation and shape, a column per source, the fastest in
    /// bold; below it the machine, date, commit and versions
    #[arg(long)]
    pub markdown: bool,
    /// Compare these operations alone, in this order, such as forward/rms_norm [default: all]
    #[arg(long, value_name = "OP/NORM,..", value_delimiter = ',')]
    pub op: Vec<String>,
    /// Compare these dtypes alone [default: all]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Compare these shapes alone, in this order, such as 4096x1024 [default: all]
    #[arg(long, value_name = "MxN,..", value_delimiter = ',')]
    pub shapes: Vec<String>,
    /// Compare rmsnorm's measurements with the target speeds in this file, such as
    /// benches/targets.toml
    #[arg(long, value_name = "FILE.toml")]
    pub targets: Option<PathBuf>,
    /// Draw rates over row lengths and times over numbers of rows as an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Draw the times of all operations and sources at one shape, the one with the most
    /// measurements, as bars into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub bars: Option<PathBuf>,
}

/// Arguments of `rmsnorm warm`.
#[derive(Debug, Args)]
pub struct WarmArgs {
    /// The backends to compile for, such as cuda or wgpu:1 [default: all GPUs of this machine]
    #[arg(long, value_name = "BACKEND,..", value_delimiter = ',')]
    pub backend: Vec<String>,
    /// GPUs to compile for that this machine need not have: a100, h100 (SXM), h200, t4. This needs
    /// NVRTC, and neither a GPU nor a driver
    #[arg(long, value_name = "GPU,..", value_delimiter = ',', conflicts_with = "backend")]
    pub gpu: Vec<String>,
    /// Row lengths: the hidden size of a model, the size of its heads
    #[arg(long, value_name = "N,..", value_delimiter = ',', required = true)]
    pub cols: Vec<NonZero<usize>>,
    /// The norms: rms_norm, layer_norm, l2_norm, l2_norm_clamped [default: the first two]
    #[arg(long, value_name = "NORM,..", value_delimiter = ',')]
    pub norm: Vec<String>,
    /// The operations: forward, add_forward, backward, forward_add, forward_add_forward,
    /// quantized_forward, add_quantized_forward [default: the first three]
    #[arg(long, value_name = "OP,..", value_delimiter = ',')]
    pub op: Vec<String>,
    /// The scales of quantized_forward, as in rmsnorm bench [default: all]
    #[arg(long, value_name = "QUANT,..", value_delimiter = ',')]
    pub quant: Vec<String>,
    /// The forms of the norms, as in rmsnorm bench [default: plain]
    #[arg(long, value_name = "FORM,..", value_delimiter = ',')]
    pub form: Vec<String>,
    /// The dtypes of the activations: f32, f16, bf16 [default: bf16]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// The weights are f32 [default: the dtype of the activations]
    #[arg(long)]
    pub f32_weight: bool,
}

/// Arguments of `rmsnorm tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The backend to tune, such as cuda or wgpu:1 [default: the first GPU of this machine, or cpu
    /// without one]
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<String>,
    /// Minutes that the search and its checks may take, at most 1440. The most common shapes come
    /// first; entries that are not reached keep their built-in values
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    pub minutes: f64,
    /// Tune only these kinds: forward, backward, add_forward, to_codes, to_codes_by_row,
    /// to_codes_by_block [default: all]
    #[arg(long, value_name = "KIND,..", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Tune only for these row lengths [default: all, the lengths of models first]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub cols: Vec<NonZero<usize>>,
    /// Tune only for these dtypes: f32, f16, bf16 [default: all, bf16 first]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub dtype: Vec<String>,
    /// Print the result and write no table
    #[arg(long)]
    pub dry_run: bool,
    /// Write the table to this file, for RMSNORM_TUNING [default: the cache folder]
    #[arg(short, long, value_name = "FILE", conflicts_with = "dry_run")]
    pub output: Option<PathBuf>,
}

/// Arguments of `rmsnorm run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The input file
    #[arg(value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// The output file; it appears complete or not at all
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: PathBuf,
    /// The backend that computes: cpu, cuda or wgpu; cuda:N and wgpu:N name the device with that
    /// number
    #[arg(long, value_name = "BACKEND", default_value = "cpu")]
    pub backend: String,
    /// The options of the cpu backend.
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// Ignore tensors and metadata that this run does not use, and print a note [default: they are
    /// errors]
    #[arg(long)]
    pub allow_unknown: bool,
    /// Print the summary as a JSON object
    #[arg(long)]
    pub json: bool,
    /// The settings of the norm.
    #[command(flatten)]
    pub settings: SettingArgs,
}

/// The options of `rmsnorm run` that the metadata of the file may hold instead. The option wins.
#[derive(Debug, Default, Args)]
pub struct SettingArgs {
    /// The norm: rms_norm, layer_norm, l2_norm or l2_norm_clamped; required here or as metadata "op"
    #[arg(long, value_name = "OP")]
    pub op: Option<String>,
    /// Added to the variance inside the root; required here or as metadata "eps"
    #[arg(long, value_name = "E", allow_hyphen_values = true)]
    pub eps: Option<String>,
    /// Added to every weight; 1 for Gemma; or metadata "weight_offset" [default: 0]
    #[arg(long, value_name = "O", allow_hyphen_values = true)]
    pub weight_offset: Option<String>,
    /// Where y is rounded: at_store, before_weight as Llama does, rstd_first as DeepSeek-V4 does,
    /// or weight_first, which normalizes x * weight as Muse Spark does; or metadata "cast_order"
    /// [default: at_store]
    #[arg(long, value_name = "ORDER")]
    pub cast_order: Option<String>,
    /// Where the activation of the file's tensor `gate` is multiplied: after the norm, or before it;
    /// or metadata "gate"
    #[arg(long, value_name = "after|before")]
    pub gate: Option<String>,
    /// The function of the gate: silu or sigmoid; required with a gate, here or as metadata
    /// "activation"
    #[arg(long, value_name = "FUNCTION")]
    pub activation: Option<String>,
    /// The number of groups of columns, each with its own statistics; it divides the columns; or
    /// metadata "groups" [default: 1]
    #[arg(long, value_name = "N")]
    pub groups: Option<String>,
    /// The dtype of y: f32, f16 or bf16. It may differ from that of x if one of the two is f32 and
    /// there is no residual; gate and dy then have it too; or metadata "out_dtype" [default: that
    /// of x]
    #[arg(long, value_name = "DTYPE")]
    pub out_dtype: Option<String>,
    /// 8-bit results.
    #[command(flatten)]
    pub quantize: QuantizeArgs,
}

/// The options of 8-bit results, which the metadata of the file may hold instead. The option wins.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "8-bit results")]
pub struct QuantizeArgs {
    /// Quantize: write codes in this format, and scales, in place of y: e4m3, e5m2 or int8; or
    /// metadata "codes"
    #[arg(long, value_name = "FORMAT")]
    pub codes: Option<String>,
    /// The elements that share a scale: tensor (all; the file's tensor `scale` gives it), current
    /// (all; the scale is computed), row, block128, block64 or mx; or metadata "scale" [default:
    /// row]
    #[arg(long, value_name = "KIND")]
    pub scale: Option<String>,
    /// 1 rounds the scales of blocks up to powers of two; or metadata "pow2" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub pow2: Option<String>,
    /// Rounding of the scales of mx: up or floor; or metadata "mx_rounding" [default: up]
    #[arg(long, value_name = "RULE")]
    pub mx_rounding: Option<String>,
    /// The values that are quantized: f32, or rounded (to the dtype of x first); or metadata
    /// "source" [default: f32]
    #[arg(long, value_name = "SOURCE")]
    pub source: Option<String>,
    /// Lower limit of the largest magnitude from which a scale is computed; or metadata
    /// "amax_floor" [default: 0]
    #[arg(long, value_name = "A")]
    pub amax_floor: Option<String>,
    /// Upper limit of the largest magnitude from which a scale is computed; or metadata
    /// "amax_ceiling" [default: inf]
    #[arg(long, value_name = "A")]
    pub amax_ceiling: Option<String>,
    /// Layout of the scales: row_major, column_major, packed_ue8m0 or swizzled128x4; or metadata
    /// "layout" [default: row_major]
    #[arg(long, value_name = "LAYOUT")]
    pub layout: Option<String>,
    /// 1 also writes the transposed codes, codes_t; or metadata "transposed" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub transposed: Option<String>,
    /// 1 also writes a copy that is quantized along the columns: codes_columnwise (transposed) and
    /// scales_columnwise; for block128, block64 and mx; or metadata "columnwise" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub columnwise: Option<String>,
    /// 1 also writes y; or metadata "keep_y" [default: 0]
    #[arg(long, value_name = "0|1")]
    pub keep_y: Option<String>,
}
