//! Compiles the programs of plans, for several devices and without a GPU. All of them must compile,
//! and tuned ones must keep their registers.
//!
//! Without NVRTC the tests print why and pass, unless `RMSNORM_REQUIRE` names `nvrtc`.

mod listing;

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{io, thread};

use rmsnorm_conformance::testing::{skip_or_fail, swept};
use rmsnorm_gpu::program::{CallKey, QuantNumbers};
use rmsnorm_gpu::testing::{Draw, weight_first};
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleRounding};
use rmsnorm_spec::{
    Activation, CastOrder, DType, DTypes, Direction, Gate, GradReduction, GradStore, Norm, Problem, ResidualPlacement,
    Slot, Tensor, TensorSet,
};

use super::super::*;
use crate::caps::Caps;
use crate::plan::{Program, Tile, columns, drawn_devices, plan};

/// The columns that plans were tuned for, and the most that a cluster holds.
const TUNED_COLS: [usize; 45] = [
    96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1600, 1792, 2048, 2304,
    2560, 2880, 3072, 3584, 3840, 4096, 4608, 5120, 6144, 7168, 8192, 10240, 11264, 12288, 14336, 16384, 20480, 24576,
    32768, 40960, 49152, 65536, 131072, 262144,
];
/// Columns that prevent vector accesses, and one length of each program.
const ODD_COLS: [usize; 12] = [1, 7, 100, 300, 1000, 1500, 6000, 10007, 20000, 50000, 100001, 600000];
/// Columns of the measured calls to codes.
const COLS_TO_CODES: [usize; 7] = [128, 1024, 2048, 4096, 8192, 12288, 16384];
/// Columns of sums of several parts: usual lengths, the longest rows of each ladder, and lengths
/// between tiles.
const COLS_OF_PARTS: [usize; 14] =
    [128, 512, 1024, 2048, 2880, 4096, 7168, 8192, 16384, 32768, 65536, 131072, 262144, 600000];
/// Columns of calls with a gate: heads, a hidden dimension, and a row of each other program.
const COLS_OF_GATES: [usize; 13] = [64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 300_000, 600_000];
const SAMPLES_PER_DEVICE: usize = 48;
/// In addition, sums of several parts.
const PARTS_PER_DEVICE: usize = 12;
/// In addition, calls with a gate.
const GATES_PER_DEVICE: usize = 24;
const ROWS: usize = 8192;
/// More rows than multiprocessors, but not too many to keep.
const SOME_ROWS: [usize; 3] = [200, 500, 1000];
/// So few rows that forward holds them and backward is split; columns of the measured split calls.
const FEW_ROWS: usize = 64;
const SPLIT_COLS: [usize; 8] = [128, 256, 512, 1024, 2048, 4096, 5120, 12288];
/// Bytes of stack frame, spill stores and spill loads of two words, which more rows in flight
/// outweigh: layer norm forward of 2048 columns takes 129 us with and without them (H200,
/// 2026-11-21).
const MOST_SPILLED: u32 = 24;
/// The limit with a second norm: six words, for layer norm of 8192 columns, whose four blocks of
/// 256 threads leave 64 registers per thread. All other forms keep [`MOST_SPILLED`].
const MOST_SPILLED_TWICE: u32 = 72;
/// The limit of layer norm backward on clusters of eight: 1600x49152 takes 135 us with 52 bytes
/// spilled, 159 us with fewer blocks (H200, 2026-11-29).
const MOST_SPILLED_IN_CLUSTERS: u32 = 52;
/// The limit to codes: scales per row of 12288 columns take 39.9 us with 48 bytes spilled, 48 us
/// with fewer blocks (H200, 2026-11-23).
const MOST_SPILLED_TO_CODES: u32 = 128;
/// The limit with several parts: two words, for layer norm by 512 threads with eight packs, which
/// have at most 128 registers.
const MOST_SPILLED_OF_PARTS: u32 = 32;

/// NVRTC; `None` if it is missing and not required.
pub(super) fn nvrtc() -> Option<&'static Nvrtc> {
    match library::nvrtc() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) => {
            skip_or_fail("nvrtc", error).unwrap();
            None
        }
    }
}

/// One program for one device.
#[derive(Clone, Copy)]
struct Job {
    key: KernelKey,
    arch: Arch,
    /// Columns of the planned call; other calls may have the same program.
    cols: usize,
}

/// The assembler's report on one kernel of a program.
#[derive(Debug, Default, PartialEq, Eq)]
struct Usage {
    kernel: String,
    registers: u32,
    /// Bytes of spill stores, spill loads and stack frame.
    spills: u32,
}

struct Outcome {
    job: Job,
    usage: Usage,
    code_bytes: usize,
    code_hash: String,
    time: Duration,
}

/// Calls of training and inference, as tuned: one dtype, all tensors aligned.
fn tuned() -> Vec<Job> {
    let mut jobs = Vec::new();
    // bf16 stands for f16: they have the same tiles, and a conversion takes one instruction for
    // either.
    for dtype in [DType::Bf16, DType::F32] {
        for norm in Norm::USUAL {
            let is_layer = norm == Norm::Layer;
            let weight = TensorSet::of(&[Tensor::Weight]);
            let forward = weight.with(Tensor::Rstd).set(Tensor::Bias, is_layer).set(Tensor::Mean, is_layer);
            let add = forward.with(Tensor::Residual).with(Tensor::ResidualOut);
            let twice = add.with(Tensor::NextWeight).set(Tensor::NextBias, is_layer);
            let backward = weight.with(Tensor::Dweight).set(Tensor::Dbias, is_layer);
            for cols in TUNED_COLS {
                let problems = [
                    Problem::forward(norm, FEW_ROWS, cols, dtype, forward),
                    Problem::forward(norm, ROWS, cols, dtype, forward),
                    Problem::forward(norm, ROWS, cols, dtype, add),
                    Problem::backward(norm, ROWS, cols, dtype, backward),
                    after(Problem::forward(norm, ROWS, cols, dtype, add), false),
                    after(Problem::forward(norm, ROWS, cols, dtype, twice), true),
                ];
                jobs.extend(problems.iter().flat_map(|problem| of_plan(problem, 16, &Caps::h200())));
            }
            for cols in SPLIT_COLS {
                let problem = Problem::backward(norm, FEW_ROWS, cols, dtype, backward);
                jobs.extend(of_plan(&problem, 16, &Caps::h200()));
            }
        }
    }
    unique(jobs)
}

/// The same call with its residual added after the norm, with or without a next norm.
fn after(problem: Problem, has_next: bool) -> Problem {
    let tensors = problem.tensors.set(Tensor::Y, has_next);
    Problem { tensors, residual_placement: ResidualPlacement::After, ..problem }
}

/// Calls to codes, as tuned: every kind of scale with only a weight, and typical calls with layer
/// norm and residuals.
fn tuned_to_codes() -> Vec<Job> {
    let kinds = [
        ScaleKind::Given,
        ScaleKind::Current,
        ScaleKind::Row,
        ScaleKind::Block { cols: 128, is_power_of_two: false },
        ScaleKind::Mx { rounding: ScaleRounding::Up },
    ];
    let mut jobs = Vec::new();
    for norm in Norm::USUAL {
        let weight = TensorSet::of(&[Tensor::Weight, Tensor::Rstd]).set(Tensor::Bias, norm == Norm::Layer);
        let add = weight.with(Tensor::Residual).with(Tensor::ResidualOut);
        for (kind, cols) in kinds.into_iter().flat_map(|kind| COLS_TO_CODES.map(|cols| (kind, cols))) {
            let quant = QuantSpec::new(CodeType::E4m3, kind);
            for tensors in [weight, add, weight.with(Tensor::Amax)] {
                if tensors.has(Tensor::Amax) && kind != ScaleKind::Given {
                    continue;
                }
                // With few rows, one kernel finds a tensor's scale and writes the codes.
                let some = SOME_ROWS.into_iter().chain([FEW_ROWS]).filter(|_| kind == ScaleKind::Current);
                for rows in some.chain([ROWS]) {
                    let problem = Problem::quantized_forward(norm, rows, cols, DType::Bf16, quant, tensors);
                    jobs.extend(of_plan(&problem, 16, &Caps::h200()));
                }
            }
        }
    }
    // The transposed copy, by one kernel or by a second one.
    let (copied, quant) = (TensorSet::of(&[Tensor::CodesT]), QuantSpec::new(CodeType::E4m3, ScaleKind::Given));
    for (rows, cols) in [(ROWS, 8192), (ROWS + 1, 6400)] {
        let problem = Problem::quantized_forward(Norm::Rms, rows, cols, DType::Bf16, quant, copied);
        jobs.extend(of_plan(&problem, 16, &Caps::h200()));
    }
    for norm in Norm::USUAL {
        let weight = copied.with(Tensor::Weight).with(Tensor::Rstd).set(Tensor::Bias, norm == Norm::Layer);
        for (cols, dtype) in
            [512, 1024, 2048, 4096].into_iter().flat_map(|cols| [(cols, DType::Bf16), (cols, DType::F32)])
        {
            for tensors in [weight, weight.with(Tensor::Amax).with(Tensor::Y)] {
                let problem = Problem::quantized_forward(norm, 2 * ROWS, cols, dtype, quant, tensors);
                jobs.extend(of_plan(&problem, 16, &Caps::h200()));
            }
        }
    }
    unique(jobs)
}

/// Sums of several parts, with or without a residual.
fn of_parts() -> Vec<Job> {
    let bf16 = DTypes::uniform(DType::Bf16);
    let mut jobs = Vec::new();
    for norm in Norm::USUAL {
        let weight = TensorSet::of(&[Tensor::Weight, Tensor::Rstd]).set(Tensor::Bias, norm == Norm::Layer);
        let add = weight.with(Tensor::Residual).with(Tensor::ResidualOut);
        for dtypes in [bf16, bf16.widened(false, true), DTypes::uniform(DType::F32)] {
            for (tensors, cols) in
                [weight, add].into_iter().flat_map(|tensors| COLS_OF_PARTS.map(|cols| (tensors, cols)))
            {
                let problem = Problem::forward(norm, ROWS, cols, dtypes.activation, tensors);
                let problem = Problem { dtypes, parts: 8, ..problem };
                // Other devices are in the wide sample.
                jobs.extend(of_plan(&problem, 16, &Caps::h200()));
            }
        }
    }
    unique(jobs)
}

/// Calls with a gate in either slot, as tuned.
fn with_gates() -> Vec<Job> {
    let mut jobs = Vec::new();
    for (norm, slot) in Norm::USUAL.into_iter().flat_map(|norm| [(norm, Slot::Before), (norm, Slot::After)]) {
        let is_layer = norm == Norm::Layer;
        let weight = TensorSet::of(&[Tensor::Weight, Tensor::Gate]).set(Tensor::Bias, is_layer);
        let forward = weight.with(Tensor::Rstd).set(Tensor::Mean, is_layer);
        let backward = weight.with(Tensor::Dweight).set(Tensor::Dbias, is_layer).with(Tensor::Dgate);
        let backward = backward.set(Tensor::Bias, is_layer && slot == Slot::After);
        let gate = Some(Gate { activation: Activation::Silu, slot });
        for dtype in [DType::Bf16, DType::F32] {
            for cols in COLS_OF_GATES {
                let problems = [
                    Problem::forward(norm, ROWS, cols, dtype, forward),
                    Problem::backward(norm, ROWS, cols, dtype, backward),
                    Problem::backward(norm, FEW_ROWS, cols, dtype, backward),
                ];
                let problems = problems.map(|problem| Problem { gate, ..problem });
                jobs.extend(problems.iter().flat_map(|problem| of_plan(problem, 16, &Caps::h200())));
            }
        }
        let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
        for cols in COLS_TO_CODES {
            let problem = Problem::quantized_forward(norm, ROWS, cols, DType::Bf16, quant, forward);
            jobs.extend(of_plan(&Problem { gate, ..problem }, 16, &Caps::h200()));
        }
    }
    // The second stage of gradients is that of calls without a gate.
    jobs.retain(|job| job.key.call.gate.is_some());
    jobs.extend(with_groups());
    unique(jobs)
}

/// Groups of columns, as in Mamba2: every program of one group.
fn with_groups() -> Vec<Job> {
    const GROUPS: usize = 8;
    let gate = Some(Gate { activation: Activation::Silu, slot: Slot::Before });
    let forward = TensorSet::of(&[Tensor::Weight, Tensor::Gate, Tensor::Rstd]);
    let backward = forward.with(Tensor::Dweight).with(Tensor::Dgate);
    let mut jobs = Vec::new();
    for cols in [512, 4096, 65536, 300_000, 600_000] {
        let problems = [
            Problem::forward(Norm::Rms, ROWS, GROUPS * cols, DType::Bf16, forward),
            Problem::backward(Norm::Rms, ROWS, GROUPS * cols, DType::Bf16, backward),
            Problem::backward(Norm::Rms, FEW_ROWS, GROUPS * cols, DType::Bf16, backward),
        ];
        let to_codes = [
            (ScaleKind::Given, TensorSet::of(&[Tensor::Amax])),
            (ScaleKind::Given, TensorSet::of(&[Tensor::CodesT])),
            (ScaleKind::Current, TensorSet::NONE),
            (ScaleKind::Mx { rounding: ScaleRounding::Up }, TensorSet::NONE),
            (ScaleKind::Mx { rounding: ScaleRounding::Up }, TensorSet::of(&[Tensor::CodesColumnwise])),
        ];
        let to_codes = to_codes.map(|(scale, outputs)| {
            let (quant, tensors) = (QuantSpec::new(CodeType::E4m3, scale), forward.union(outputs));
            Problem::quantized_forward(Norm::Rms, ROWS, GROUPS * cols, DType::Bf16, quant, tensors)
        });
        for problem in problems.into_iter().chain(to_codes) {
            jobs.extend(of_plan(&Problem { gate, groups: GROUPS, ..problem }, 16, &Caps::h200()));
        }
    }
    jobs
}

/// A sample of all calls, the same number for each device.
fn wide_sample() -> Vec<Job> {
    let blackwell = Caps { arch: Arch(100), ..Caps::h200() };
    let (mut draw, mut parts, mut gates) = (Draw::new(1), Draw::new(2), Draw::new(4));
    let mut jobs = Vec::new();
    for caps in [Caps::h200(), Caps::a100(), Caps::t4(), blackwell] {
        for sample in 0..SAMPLES_PER_DEVICE {
            let access_bytes = draw.of([1, 2, 4, 8, 16, 16]);
            let cols = if draw.yes() { draw.of(TUNED_COLS) } else { draw.of(ODD_COLS) };
            let rows = draw.of([FEW_ROWS, ROWS, ROWS]);
            // One of four calls is to codes.
            let problem = match sample % 4 {
                0 => {
                    let rows_per_group = draw.of([None, None, None, Some(3)]);
                    let problem = Problem { rows_per_group, ..draw.quantized_forward(rows, cols) };
                    // Also as if there were many rows.
                    let large = Caps { tuning: caps.tuning.with_large_plans(), ..caps };
                    jobs.extend(of_plan(&problem, access_bytes, &large));
                    problem
                }
                _ => draw.problem(sample / 4 * 3 + sample % 4, rows, cols),
            };
            // One of three backward calls uses locks.
            let locks = problem.direction == Direction::Backward && draw.of([true, false, false]);
            let grad_reduction = if locks { GradReduction::Locks { groups: 64 } } else { problem.grad_reduction };
            let problem = Problem { grad_reduction, ..problem };
            jobs.extend(of_plan(&problem, access_bytes, &caps));
        }
        for _ in 0..PARTS_PER_DEVICE {
            let cols = if parts.yes() { parts.of(COLS_OF_PARTS) } else { parts.of(ODD_COLS) };
            let rows_per_group = parts.of([None, None, Some(3)]);
            let problem = Problem { rows_per_group, ..parts.parts(ROWS, cols) };
            jobs.extend(of_plan(&problem, parts.of([1, 2, 4, 8, 16, 16]), &caps));
        }
        for sample in 0..GATES_PER_DEVICE {
            let cols = if gates.yes() { gates.of(COLS_OF_GATES) } else { gates.of(ODD_COLS) };
            let rows = gates.of([FEW_ROWS, ROWS, ROWS]);
            let problem = match sample % 4 {
                0 => gates.quantized_forward(rows, cols),
                _ => gates.problem(sample / 4 * 3 + sample % 4, rows, cols),
            };
            // Half of the forward calls add a residual after the norm, and are left out.
            if problem.residual_placement == ResidualPlacement::Before {
                let problem = gates.gated(&problem);
                let groups = gates.of([1, 1, 3]);
                let in_groups = Problem { groups, cols: groups * problem.cols, ..problem };
                let is_refused = in_groups.require_scales_in_groups("cuda").is_err();
                let problem = if is_refused { problem } else { in_groups };
                jobs.extend(of_plan(&problem, gates.of([2, 4, 8, 16, 16]), &caps));
            }
        }
    }
    unique(jobs)
}

fn of_plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Vec<Job> {
    plan(problem, access_bytes, caps).keys().map(|key| Job { key, arch: caps.arch, cols: problem.cols }).collect()
}

fn unique(jobs: Vec<Job>) -> Vec<Job> {
    let mut seen = HashSet::new();
    jobs.into_iter().filter(|job| seen.insert((job.key, job.arch))).collect()
}

/// One of this many programs is compiled; all of them with `RMSNORM_SWEEP=all`, which takes ten
/// minutes on one core.
const SWEPT: usize = 10;

/// Compiles the [`swept`] jobs on two threads, each program on each device at least once; panics if
/// one fails.
fn compile_all(nvrtc: &Nvrtc, jobs: &[Job]) -> Vec<Outcome> {
    let jobs = swept(jobs, SWEPT, |job| (job.key.program, job.arch));
    let (next, outcomes, errors) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match compile_one(nvrtc, *job) {
                        Ok(outcome) => outcomes.lock().expect("no panic").push(outcome),
                        Err(error) => errors.lock().expect("no panic").push(error.to_string()),
                    }
                }
            });
        }
    });
    let errors = errors.into_inner().expect("no panic");
    let first = errors.iter().take(3).map(String::as_str).collect::<Vec<_>>().join("\n\n");
    assert!(errors.is_empty(), "{} of {} programs do not compile; the first:\n{first}", errors.len(), jobs.len());
    outcomes.into_inner().expect("no panic")
}

fn compile_one(nvrtc: &Nvrtc, job: Job) -> Result<Outcome, Error> {
    let start = Instant::now();
    let mut request = Request::new(&job.key, job.arch);
    request.options.push("--ptxas-options=-v".into());
    let compiled = nvrtc.compile_logged(request.file, &request.source, &request.options);
    let (cubin, log) = compiled.map_err(|failure| request.error(nvrtc, failure))?;
    assert_eq!(&cubin[..4], b"\x7fELF");
    let entry = job.key.program.info().stem;
    let usage = usage(&log).into_iter().find(|usage| usage.kernel == entry);
    let usage = usage.unwrap_or_else(|| panic!("no kernel {entry}: {log}"));
    let code = listing::code(&cubin, entry);
    let mut code_hash = Id::of(MAGIC, [format!("{code:?}").as_str()]).to_string();
    code_hash.truncate(8);
    Ok(Outcome { job, usage, code_bytes: code.len(), code_hash, time: start.elapsed() })
}

/// Parses the assembler's messages, which come in this order for each kernel.
fn usage(log: &str) -> Vec<Usage> {
    let mut kernels: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Usage { kernel, ..Usage::default() });
        } else if let Some(kernel) = kernels.last_mut() {
            kernel.spills += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
            kernel.spills += number_before(line, " bytes stack frame");
            kernel.registers += number_before(line, " registers");
        }
    }
    kernels
}

/// The number before these words; 0 if they do not occur.
fn number_before(line: &str, words: &str) -> u32 {
    let before = line.find(words).map_or("", |end| &line[..end]);
    before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

impl Outcome {
    fn row(&self) -> String {
        let Job {
            key: KernelKey { program, call: CallKey { norm, dtypes, tensors, .. }, tile, ranks, .. },
            arch,
            cols,
        } = self.job;
        let Usage { registers, spills, .. } = self.usage;
        let (kernel, norm) = (program.info().stem, norm.name());
        format!(
            "{arch} {kernel} {norm} {dtypes} cols {cols}: {registers} registers, {spills} bytes \
             spilled\n    {tensors:?}\n    {tile:?}, {ranks} ranks\n"
        )
    }
}

/// Prints the number of programs for each device, and those that spill, to stderr directly, because
/// the test harness would capture it.
fn report(title: &str, outcomes: &[Outcome]) {
    let mut text = String::new();
    let archs: BTreeSet<Arch> = outcomes.iter().map(|outcome| outcome.job.arch).collect();
    for arch in archs {
        let these: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.job.arch == arch).collect();
        let registers = these.iter().map(|outcome| outcome.usage.registers).max();
        let slowest = these.iter().map(|outcome| outcome.time).max().unwrap_or_default();
        let spilling: Vec<_> = these.iter().filter(|outcome| outcome.usage.spills > 0).collect();
        let (programs, registers, spill) = (these.len(), registers.unwrap_or(0), spilling.len());
        let _ = writeln!(
            text,
            "{title}: {arch}: {programs} programs, up to {registers} registers, {spill} spill, slowest {slowest:.1?}"
        );
        text.extend(spilling.iter().map(|outcome| outcome.row()));
    }
    io::stderr().write_all(text.as_bytes()).expect("a stderr");
}

#[test]
fn tuned_programs_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &tuned());
    report("tuned", &outcomes);
    listing::compare(nvrtc, &outcomes);
    let most = |Job { key: KernelKey { program, call, tile, .. }, .. }: &Job| {
        if *program == Program::Backward && call.norm == Norm::Layer && tile.cluster == 8 {
            MOST_SPILLED_IN_CLUSTERS
        } else if call.form.norms_twice() {
            MOST_SPILLED_TWICE
        } else {
            MOST_SPILLED
        }
    };
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > most(&outcome.job)).count();
    assert_eq!(
        spilling, 0,
        "tuned programs spill more than {MOST_SPILLED} bytes, {MOST_SPILLED_TWICE} with a next norm or \
         {MOST_SPILLED_IN_CLUSTERS} in backward on clusters; the table has them"
    );
}

#[test]
fn tuned_programs_of_codes_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &tuned_to_codes());
    report("tuned to codes", &outcomes);
    listing::compare(nvrtc, &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED_TO_CODES).count();
    assert_eq!(spilling, 0, "tuned programs spill more than {MOST_SPILLED_TO_CODES} bytes; the table has them");
}

#[test]
fn programs_of_parts_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &of_parts());
    report("parts", &outcomes);
    listing::compare(nvrtc, &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED_OF_PARTS).count();
    assert_eq!(
        spilling, 0,
        "programs of several parts spill more than {MOST_SPILLED_OF_PARTS} bytes; the table has them"
    );
}

/// The limit of these on a device that was tuned for: to codes with a scale per row, a thread has 32
/// columns of 8192 and their f32 weights.
const MOST_SPILLED_OF_CAST_ORDERS: u32 = 144;

/// Norms that round rstd, and norms with the weight before them: forward, backward and to codes,
/// with and without a gate after the norm.
fn of_cast_orders() -> Vec<Job> {
    let gate = Some(Gate { activation: Activation::Silu, slot: Slot::After });
    let block = ScaleKind::Block { cols: 128, is_power_of_two: false };
    let quants = [ScaleKind::Given, ScaleKind::Row, block].map(|scale| QuantSpec::new(CodeType::E4m3, scale));
    let mut jobs = Vec::new();
    for (i, cols) in [8, 64, 129, 1000, 4096, 4097, 8192, 17_920, 65_536, 262_144].into_iter().enumerate() {
        let (norm, dtype) = (Norm::ALL[i % 2], [DType::Bf16, DType::F16, DType::F32][i % 3]);
        let is_layer = norm == Norm::Layer;
        let weight = TensorSet::of(&[Tensor::Weight, Tensor::Rstd]).set(Tensor::Mean, is_layer);
        let sum = TensorSet::of(&[Tensor::Residual, Tensor::ResidualOut]);
        let forward = Problem::forward(norm, ROWS, cols, dtype, weight);
        let backward = Problem::backward(norm, ROWS, cols, dtype, weight.with(Tensor::Dweight).with(Tensor::Dbias));
        let few = Problem { rows: FEW_ROWS, ..backward };
        let along = weight.with(Tensor::CodesColumnwise).with(Tensor::ScalesColumnwise);
        let codes = quants.map(|quant| {
            let tensors = if quant.has_columnwise() { along } else { weight };
            Problem::quantized_forward(norm, ROWS, cols, dtype, quant, tensors)
        });
        let after = |problem: &Problem| Problem {
            tensors: problem.tensors.with(Tensor::Gate),
            gate,
            dtypes: problem.dtypes.widened(true, false),
            ..*problem
        };
        let first = [forward, backward, few].into_iter().chain(codes).flat_map(|problem| [problem, after(&problem)]);
        let first = first.map(|problem| weight_first(&problem));
        let plain = Problem { tensors: forward.tensors.without(Tensor::Weight), ..forward };
        let added = Problem { tensors: forward.tensors.union(sum), ..forward };
        let twice = Problem { residual_placement: ResidualPlacement::After, ..added };
        let rounded = [forward, plain, added, twice, after(&forward)].into_iter().chain(codes);
        let rounded = rounded.map(|problem| Problem { cast_order: CastOrder::RstdFirst, ..problem });
        let in_groups = [2, 1][usize::from(cols % 2 == 1)];
        let grouped = [forward, backward].map(|problem| Problem { groups: in_groups, ..weight_first(&problem) });
        for problem in first.chain(rounded).chain(grouped) {
            let caps = [Caps::h200(), Caps::a100(), Caps::t4()][i % 3];
            jobs.extend(of_plan(&problem, [16, 16, 2 * problem.dtypes.activation.size() as u32][i % 3], &caps));
        }
    }
    unique(jobs)
}

#[test]
fn programs_of_cast_orders_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &of_cast_orders());
    report("cast orders", &outcomes);
    let hopper = outcomes.iter().filter(|outcome| outcome.job.arch == Arch::HOPPER);
    let spilling = hopper.filter(|outcome| outcome.usage.spills > MOST_SPILLED_OF_CAST_ORDERS).count();
    assert_eq!(
        spilling, 0,
        "programs of cast orders spill more than {MOST_SPILLED_OF_CAST_ORDERS} bytes on Hopper; the table has them"
    );
}

#[test]
fn programs_with_gates_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &with_gates());
    report("gates", &outcomes);
    listing::compare(nvrtc, &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED_TO_CODES).count();
    assert_eq!(
        spilling, 0,
        "programs with gates, some of codes, spill more than {MOST_SPILLED_TO_CODES} bytes; the table has them"
    );
}

#[test]
fn programs_of_a_wide_sample_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    report("wide sample", &compile_all(nvrtc, &wide_sample()));
}

/// Kernels that store gradients as sums, or add to them: the reduction of partial sums, and split
/// calls. All others are the same as for rounded gradients.
fn of_sums() -> Vec<Job> {
    let mut jobs = Vec::new();
    for caps in [Caps::h200(), Caps::t4()] {
        for (dtypes, rows) in DTypes::ALL.into_iter().flat_map(|dtypes| [FEW_ROWS, ROWS].map(|rows| (dtypes, rows))) {
            for (tensors, grad_store) in [
                ([Tensor::Weight, Tensor::Dweight].as_slice(), GradStore::Sum),
                (&[Tensor::Weight, Tensor::Dweight, Tensor::Dbias], GradStore::Accumulated),
                (&[Tensor::Dbias], GradStore::Accumulated),
            ] {
                let problem = Problem::backward(Norm::Layer, rows, 1000, dtypes.activation, tensors);
                let of = |grad_store| of_plan(&Problem { dtypes, grad_store, ..problem }, 16, &caps);
                let rounded = of(GradStore::Rounded);
                let is_other = |job: &Job| rounded.iter().all(|rounded| rounded.key != job.key);
                jobs.extend(of(grad_store).into_iter().filter(is_other));
            }
        }
    }
    unique(jobs)
}

#[test]
fn programs_of_sums_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let jobs = of_sums();
    for program in [Program::BackwardSplit, Program::ReducePartials] {
        for adds_to_gradients in [false, true] {
            let is_it = |job: &Job| (job.key.program, job.key.call.adds_to_gradients) == (program, adds_to_gradients);
            assert!(jobs.iter().any(is_it), "{program:?}, adds: {adds_to_gradients}");
        }
    }
    assert!(jobs.iter().all(|job| job.key.program.info().stores_gradients && job.key.call.gradient == DType::F32));
    let outcomes = compile_all(nvrtc, &jobs);
    report("sums", &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED).count();
    assert_eq!(spilling, 0, "programs of sums spill more than {MOST_SPILLED} bytes; the table has them");
}

/// The most bytes that a program of a cast spills: a gate beside two f32 matrices.
const MOST_SPILLED_OF_CASTS: u32 = MOST_SPILLED_TO_CODES;

/// Row lengths of every program of forward and backward.
const COLS_OF_CASTS: [usize; 8] = [64, 128, 1000, 4096, 8192, 17_920, 65_536, 600_011];

/// Calls whose y has another dtype than their x: typical ones, and every option.
fn of_casts() -> Vec<Job> {
    let mut jobs = Vec::new();
    for (norm, dtypes) in Norm::ALL.into_iter().flat_map(|norm| DTypes::CASTS.map(|dtypes| (norm, dtypes))) {
        let saved = TensorSet::of(&[Tensor::Rstd]).set(Tensor::Mean, norm == Norm::Layer);
        let gradients = TensorSet::of(&[Tensor::Weight, Tensor::Dweight]).set(Tensor::Dbias, norm == Norm::Layer);
        for cols in COLS_OF_CASTS {
            let forward = Problem::forward(norm, ROWS, cols, dtypes.activation, saved.with(Tensor::Weight));
            let tensors = forward.tensors.without(Tensor::X).with(Tensor::Residual);
            jobs.extend(of_plan(&Problem { dtypes, tensors, ..forward }, 16, &Caps::h200()));
            for rows in [FEW_ROWS, ROWS] {
                let backward = Problem::backward(norm, rows, cols, dtypes.activation, gradients);
                let tensors = backward.tensors.without(Tensor::Dx).with(Tensor::Dresidual);
                jobs.extend(of_plan(&Problem { dtypes, tensors, ..backward }, 16, &Caps::h200()));
            }
        }
    }
    let mut draw = Draw::new(61);
    for caps in [Caps::h200(), Caps::t4()] {
        for sample in 0..60 {
            let problem = draw.cast(draw_rows(sample), COLS_OF_CASTS[sample % 8] - sample % 3);
            let gated = draw.gated(&problem);
            let is_after = gated.gate.is_some_and(|gate| gate.slot == Slot::After);
            let problem = if is_after && sample % 2 == 0 { gated } else { problem };
            jobs.extend(of_plan(&problem, [2, 4, 8, 16][sample % 4], &caps));
        }
    }
    unique(jobs)
}

fn draw_rows(sample: usize) -> usize {
    if sample.is_multiple_of(3) { FEW_ROWS } else { ROWS }
}

#[test]
fn programs_of_casts_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let jobs = of_casts();
    for program in [Program::Forward, Program::ForwardStreaming, Program::Backward, Program::BackwardColumns] {
        assert!(jobs.iter().any(|job| job.key.program == program && job.key.call.form.is_cast()), "{program:?}");
    }
    let outcomes = compile_all(nvrtc, &jobs);
    report("casts", &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED_OF_CASTS).count();
    assert_eq!(spilling, 0, "programs of casts spill more than {MOST_SPILLED_OF_CASTS} bytes; the table has them");
}

/// A loaded table may have any legal tile.
#[test]
fn programs_by_any_legal_table_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let tensors = TensorSet::of(&[Tensor::Weight, Tensor::Rstd]);
    let add = tensors.with(Tensor::Residual).with(Tensor::ResidualOut);
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Block { cols: 128, is_power_of_two: false });
    let mut jobs = Vec::new();
    for caps in drawn_devices() {
        for (number, cols) in [24, 128, 1000, 3072, 8192, 30_000].into_iter().enumerate() {
            let norm = Norm::USUAL[number % 2];
            let layer = |tensors: TensorSet| tensors.set(Tensor::Mean, norm == Norm::Layer);
            let backward = layer(tensors.with(Tensor::Dweight).with(Tensor::Dbias));
            let problem = match number % 3 {
                0 => Problem::forward(norm, ROWS, cols, DType::Bf16, layer(add)),
                1 => Problem::quantized_forward(norm, ROWS, cols, DType::Bf16, quant, layer(tensors)),
                _ => Problem::forward(norm, ROWS, cols, DType::F32, layer(tensors)),
            };
            jobs.extend(of_plan(&problem, 16, &caps));
            jobs.extend(of_plan(&Problem::backward(norm, ROWS, cols, DType::Bf16, backward), 16, &caps));
        }
    }
    report("legal", &compile_all(nvrtc, &unique(jobs)));
}

/// Columns of one rank: heads, a divided hidden dimension, a row too long for a block; and odd
/// numbers.
const COLS_OF_A_RANK: [usize; 8] = [128, 512, 1024, 2048, 4096, 8192, 16384, 262_144];
const ODD_COLS_OF_A_RANK: [usize; 4] = [7, 129, 1001, 140_001];

/// Both phases of calls on column-divided rows: typical ones, and every option.
fn of_columns() -> Vec<Job> {
    let bf16 = DTypes::uniform(DType::Bf16);
    let mut jobs = Vec::new();
    for norm in Norm::USUAL {
        let is_layer = norm == Norm::Layer;
        let weight =
            TensorSet::of(&[Tensor::Weight, Tensor::Rstd]).set(Tensor::Bias, is_layer).set(Tensor::Mean, is_layer);
        let add = weight.with(Tensor::Residual).with(Tensor::ResidualOut);
        let saved = TensorSet::of(&[Tensor::Weight]).set(Tensor::Mean, is_layer);
        let backward = saved.with(Tensor::Dweight).set(Tensor::Dbias, is_layer);
        let all = backward.with(Tensor::DresidualOut).with(Tensor::Dresidual).with(Tensor::Dbias);
        for dtypes in [bf16, bf16.widened(true, true), DTypes::uniform(DType::F32)] {
            let aligned = COLS_OF_A_RANK.map(|cols| (cols, 16));
            let odd = ODD_COLS_OF_A_RANK.map(|cols| (cols, dtypes.activation.size() as u32));
            for (cols, access_bytes) in aligned.into_iter().chain(odd) {
                let problems = [
                    Problem::forward(norm, ROWS, cols, dtypes.activation, weight),
                    Problem::forward(norm, ROWS, cols, dtypes.activation, add),
                    Problem::backward(norm, ROWS, cols, dtypes.activation, backward),
                    Problem::backward(norm, ROWS, cols, dtypes.activation, all),
                ];
                let problems = problems.map(|problem| Problem { dtypes, ..problem });
                jobs.extend(problems.iter().flat_map(|problem| of_halves(problem, access_bytes, &Caps::h200())));
            }
        }
    }
    unique(jobs)
}

/// The same on other devices, in random calls.
fn wide_sample_of_columns() -> Vec<Job> {
    let blackwell = Caps { arch: Arch(100), ..Caps::h200() };
    let mut draw = Draw::new(3);
    let mut jobs = Vec::new();
    for caps in [Caps::h200(), Caps::a100(), Caps::t4(), blackwell] {
        for number in 0..SAMPLES_PER_DEVICE {
            let cols = if draw.yes() { draw.of(COLS_OF_A_RANK) } else { draw.of(ODD_COLS_OF_A_RANK) };
            let problem = draw.problem(number, ROWS, cols);
            if problem.residual_placement == ResidualPlacement::Before {
                let problem = Problem { grad_reduction: GradReduction::Partials, ..problem };
                jobs.extend(of_halves(&problem, draw.of([2, 4, 8, 16, 16]), &caps));
            }
        }
    }
    unique(jobs)
}

fn of_halves(problem: &Problem, access_bytes: u32, caps: &Caps) -> Vec<Job> {
    let keys = columns::statistics(&columns::first_half(problem), access_bytes, caps)
        .keys()
        .chain(columns::given(problem, access_bytes, caps).keys());
    let keys = keys.filter(|key| key.program.is_half());
    keys.map(|key| Job { key, arch: caps.arch, cols: problem.cols }).collect()
}

#[test]
fn halves_on_columns_compile_and_keep_their_registers() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &of_columns());
    report("columns", &outcomes);
    listing::compare(nvrtc, &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED).count();
    assert_eq!(spilling, 0, "halves on columns spill more than {MOST_SPILLED} bytes; the table has them");
}

#[test]
fn halves_of_a_wide_sample_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    report("wide sample of columns", &compile_all(nvrtc, &wide_sample_of_columns()));
}

/// Norms of sums over ranks, as tuned: one dtype, all tensors aligned, typical lengths.
#[cfg(feature = "peers")]
fn tuned_of_ranks() -> Vec<Job> {
    let mut jobs = Vec::new();
    for (norm, ranks) in Norm::USUAL.into_iter().flat_map(|norm| [2, 4, 8].map(|ranks| (norm, ranks))) {
        let tensors = TensorSet::of(&[Tensor::Weight, Tensor::Residual, Tensor::ResidualOut, Tensor::Rstd]);
        let tensors = tensors.set(Tensor::Bias, norm == Norm::Layer).set(Tensor::Mean, norm == Norm::Layer);
        for (dtype, cols) in
            [DType::Bf16, DType::F32].into_iter().flat_map(|dtype| [1024, 4096, 8192].map(|cols| (dtype, cols)))
        {
            let cols = if dtype == DType::F32 { cols / 2 } else { cols };
            let problem = Problem::forward(norm, ROWS, cols, dtype, tensors);
            jobs.extend(of_ranks(&problem, 16, ranks, &Caps::h200()));
            let alone = Problem { tensors: tensors.without(Tensor::Residual).without(Tensor::ResidualOut), ..problem };
            for problem in [problem, alone, Problem { cols: 2 * cols, ..problem }] {
                jobs.extend(exchange_of_ranks(&problem, 16, ranks, &Caps::h200()));
            }
        }
        jobs.push(gather_of_ranks(ranks, &Caps::h200()));
    }
    unique(jobs)
}

/// Norms of sums over ranks: a sample of all calls.
#[cfg(feature = "peers")]
fn wide_sample_of_ranks() -> Vec<Job> {
    let blackwell = Caps { arch: Arch(100), ..Caps::h200() };
    let mut draw = Draw::new(2);
    let mut jobs = Vec::new();
    for caps in [Caps::h200(), Caps::a100(), Caps::t4(), blackwell] {
        // Half of the random calls add a residual after the norm, and are left out.
        for number in 0..SAMPLES_PER_DEVICE {
            let cols = draw.of([1, 7, 100, 1000, 1536, 4096, 4100, 6001, 8192]);
            let problem = draw.problem(3 * number, ROWS, cols);
            if problem.residual_placement == ResidualPlacement::Before {
                let (access_bytes, ranks) = (draw.of([2, 4, 8, 16, 16]), draw.of([1, 2, 3, 4, 8]));
                jobs.extend(of_ranks(&problem, access_bytes, ranks, &caps));
                if number % 4 == 0 {
                    jobs.extend(exchange_of_ranks(&Problem { parts: 1, ..problem }, access_bytes, ranks, &caps));
                }
            }
        }
        // A row in shared memory.
        let long = Problem::forward(draw.of(Norm::USUAL), ROWS, 12_001, DType::Bf16, &[Tensor::Residual]);
        jobs.extend(of_ranks(&long, 2, draw.of([2, 4, 8]), &caps));
        jobs.push(gather_of_ranks(draw.of([1, 2, 3, 4, 8]), &caps));
    }
    unique(jobs)
}

#[cfg(feature = "peers")]
fn of_ranks(problem: &Problem, access_bytes: u32, ranks: u32, caps: &Caps) -> Vec<Job> {
    use crate::plan::{ranks::Group, reduce_forward_packs, reduce_forward_rows};

    let group = Group { ranks, sharers: 1, bytes: 64 << 20 };
    let by_rows = reduce_forward_rows::plan(problem, access_bytes, &group, caps).expect("rows that fit");
    let plans = reduce_forward_packs::plans(problem, access_bytes, &group, caps).expect("rows that fit");
    let jobs = plans.iter().chain([&by_rows]);
    jobs.map(|plan| Job { key: plan.key, arch: caps.arch, cols: problem.cols }).collect()
}

#[cfg(feature = "peers")]
fn exchange_of_ranks(problem: &Problem, access_bytes: u32, ranks: u32, caps: &Caps) -> Option<Job> {
    use crate::plan::forward_exchange::{plan, tile};
    use crate::plan::ranks::Group;

    let group = Group { ranks, sharers: 1, bytes: 64 << 20 };
    let plan = plan(problem, tile(problem)?, access_bytes, &group, caps).expect("room");
    Some(Job { key: plan.key, arch: caps.arch, cols: problem.cols })
}

#[cfg(feature = "peers")]
fn gather_of_ranks(ranks: u32, caps: &Caps) -> Job {
    use crate::plan::{gather_numbers::plan, ranks::Group};

    let plan = plan(&Group { ranks, sharers: 1, bytes: 64 << 20 }, caps).expect("room for a row");
    Job { key: plan.key, arch: caps.arch, cols: 0 }
}

#[cfg(feature = "peers")]
#[test]
fn tuned_programs_of_ranks_compile_and_spill_nothing() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &tuned_of_ranks());
    report("tuned of ranks", &outcomes);
    listing::compare(nvrtc, &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > 0).count();
    assert_eq!(spilling, 0, "tuned programs spill; the table has them");
}

#[cfg(feature = "peers")]
#[test]
fn programs_of_a_wide_sample_of_ranks_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    report("wide sample of ranks", &compile_all(nvrtc, &wide_sample_of_ranks()));
}

/// The programs of the clamped L2 norm, for calls that RMS norm's are listed for: one in eight.
fn clamped() -> Vec<Job> {
    let lists = [tuned(), tuned_to_codes(), of_parts(), with_gates(), of_columns()].into_iter().flatten();
    #[cfg(feature = "peers")]
    let lists = lists.chain(tuned_of_ranks());
    let has_norm = |job: &Job| job.key.call.norm == Norm::Rms && !job.key.program.info().is_reduction;
    let jobs = lists.filter(has_norm).map(|mut job| {
        job.key.call.norm = Norm::L2Clamped;
        job
    });
    swept_by_program(unique(jobs.collect()))
}

/// One in eight jobs, and one of each program.
fn swept_by_program(jobs: Vec<Job>) -> Vec<Job> {
    let mut seen = HashSet::new();
    let is_taken = |(index, job): &(usize, Job)| seen.insert(job.key.program) || index % 8 == 0;
    jobs.into_iter().enumerate().filter(is_taken).map(|(_, job)| job).collect()
}

#[test]
fn programs_of_the_clamped_norm_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let outcomes = compile_all(nvrtc, &clamped());
    report("clamped L2 norm", &outcomes);
    let spilling = outcomes.iter().filter(|outcome| outcome.usage.spills > MOST_SPILLED_TO_CODES).count();
    assert_eq!(spilling, 0, "programs spill more than {MOST_SPILLED_TO_CODES} bytes; the table has them");
}

#[test]
fn the_samples_have_every_program() {
    let sample = [wide_sample(), wide_sample_of_columns()].concat();
    #[cfg(feature = "peers")]
    let sample = [sample, wide_sample_of_ranks()].concat();
    for program in Program::ALL {
        assert!(sample.iter().any(|job| job.key.program == program), "{program:?}");
    }
    for program in [Program::Forward, Program::ForwardCluster, Program::ForwardLong, Program::ForwardStreaming] {
        let has = |jobs: &[Job], has_parts| {
            jobs.iter().any(|job| job.key.program == program && job.key.call.has_parts == has_parts)
        };
        assert!(has(&of_parts(), true) && has(&wide_sample(), true) && has(&wide_sample(), false), "{program:?}");
    }
    let gated = [with_gates(), wide_sample()].concat();
    for program in Program::ALL {
        let may = program.info().optional.has(Tensor::Gate) && !program.divides_columns();
        #[cfg(feature = "peers")]
        let may = may && !program.has_peers();
        let has_gate = gated.iter().any(|job| job.key.program == program && job.key.call.gate.is_some());
        assert_eq!(has_gate, may, "{program:?}");
    }
}

#[test]
fn the_assemblers_messages_are_understood() {
    let log = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'first' for 'sm_90'\n\
        ptxas info    : Function properties for first\n\
        ptxas         .     800 bytes stack frame, 12 bytes spill stores, 30 bytes spill loads\n\
        ptxas info    : Used 40 registers, used 1 barriers, 800 bytes cumulative stack size\n\
        ptxas info    : Compile time = 110.614 ms\n\
        ptxas info    : Compiling entry function 'second' for 'sm_90'\n\
        \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 8 registers\n";
    let kernel = |kernel: &str, registers, spills| Usage { kernel: kernel.into(), registers, spills };
    assert_eq!(usage(log), [kernel("first", 40, 842), kernel("second", 8, 0)]);
}
