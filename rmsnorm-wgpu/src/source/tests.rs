//! Checks a wide sample of programs without a device: naga must accept each, find in it the
//! properties that Rust assumes, and translate it to SPIR-V, MSL and HLSL.

use std::collections::{BTreeMap, HashSet};
use std::env;
use std::io::{Seek as _, Write as _};
use std::process::Command;

use naga::back::{hlsl, msl, spv};
use naga::front::wgsl;
use naga::valid::{Capabilities, GlobalUse, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, BuiltIn, Expression, Literal, Module, ShaderStage, StorageAccess, TypeInner};
use rmsnorm_conformance::testing::{skip_or_fail, swept};
use rmsnorm_gpu::program::{CallKey, Form};
use rmsnorm_gpu::testing::{Draw, weight_first};
use rmsnorm_shaders::{self as shaders, Source};
use rmsnorm_spec::quant::{QuantSpec, ScaleRounding};
use rmsnorm_spec::{
    CastOrder, DType, DTypes, Direction, Norm, Piece, Problem, ResidualPlacement, Slot, Tensor, TensorSet, TensorShape,
};

use super::prelude::quantizing;
use super::*;
use crate::caps::{Caps, F16};
use crate::plan::uses::uses;
use crate::plan::{ALONG_FROM, Access, FOUND_FROM, Layout, Placed, Step, Tile, gathers_scales, plan};
use crate::unfit::PlanError;

const SAMPLES_PER_PROGRAM: usize = 60;
const CALLS_PER_DEVICE: usize = 60;
/// A row length for each kind of program, and some that no vector access divides.
const COLS: [usize; 17] =
    [1, 7, 64, 100, 300, 512, 1000, 1536, 2048, 4096, 5001, 7168, 8192, 12_288, 16_384, 65_536, 600_000];

/// Random keys: everything that a plan may use, and more. The same number for each program, and
/// some of them again with a gate or with the weight before the norm.
fn wide_sample() -> Vec<KernelKey> {
    let mut draw = Draw::new(5);
    let samples = Program::ALL.into_iter().flat_map(|program| [program; SAMPLES_PER_PROGRAM]);
    let keys: Vec<_> = samples.map(|program| draw.key(program)).collect();
    let gated: Vec<_> = keys.iter().step_by(2).filter_map(|key| draw.gated_key(key)).collect();
    let first: Vec<_> = keys.iter().chain(&gated).step_by(3).filter_map(weight_first_key).collect();
    let in_groups: Vec<_> = keys.iter().chain(&gated).chain(&first).step_by(3).filter_map(in_groups).collect();
    keys.into_iter().chain(gated).chain(first).chain(in_groups).collect()
}

/// The same key with the weight before the norm, if the program and the call may have one.
fn weight_first_key(key: &KernelKey) -> Option<KernelKey> {
    let (info, CallKey { tensors, dtypes, form, gate, .. }) = (key.program.info(), key.call);
    let is_gated_before = gate.is_some_and(|gate| gate.slot == Slot::Before);
    if !info.optional.has(Tensor::Weight) || form.is_residual_after() || is_gated_before {
        return None;
    }
    let tensors = tensors.difference(Piece::Residual.tensors(info.direction)).with(Tensor::Weight);
    let dtypes = DTypes { residual: dtypes.activation, ..dtypes };
    let mut key =
        KernelKey { call: CallKey { cast_order: CastOrder::WeightFirst, tensors, dtypes, ..key.call }, ..*key };
    let gathers = |quant: &QuantSpec| gathers_scales(quant, &key.tile, is_split(&key));
    key.gathers_scales &= key.call.quant.as_ref().is_some_and(gathers);
    Some(key)
}

/// The same key with groups of columns, if the program and the call may have them.
fn in_groups(key: &KernelKey) -> Option<KernelKey> {
    let is_whole =
        matches!(key.program, Program::TransposeCodes | Program::TensorScale | Program::Clear | Program::Copy);
    let may = !is_whole && !key.call.form.is_residual_after();
    may.then_some(KernelKey { has_groups: true, gathers_scales: false, ..*key })
}

/// Keys used by plans: the same number of calls for each device.
fn planned() -> Vec<(Caps, KernelKey)> {
    let mut draw = Draw::new(2);
    let devices = [Caps::h200(), Caps::laptop(), Caps::browser(), Caps::phone(), Caps::lavapipe()];
    let mut problems = Vec::new();
    for (is_gated, caps) in [false, true].into_iter().flat_map(|is_gated| devices.map(|caps| (is_gated, caps))) {
        for call in 0..CALLS_PER_DEVICE {
            let (rows, cols) = (draw.of([1, 40, 512]), draw.of(COLS));
            let problem = if call % 3 == 2 {
                draw.quantized_forward(rows, cols)
            } else {
                draw.problem(call / 3 * 2 + call % 3, rows, cols)
            };
            let problem = match (is_gated, problem.residual_placement) {
                (false, ResidualPlacement::Before) if call % 5 == 4 => weight_first(&problem),
                (false, _) => problem,
                (true, ResidualPlacement::Before) => draw.gated(&problem),
                (true, ResidualPlacement::After) => continue,
            };
            problems.push((caps, problem, draw.layout(&problem)));
        }
    }
    let mut draw = Draw::new(9);
    for caps in devices {
        for call in 0..CALLS_PER_DEVICE / 2 {
            let (rows, cols) = (draw.of([1, 40, 512]), draw.of(COLS));
            let cast = draw.cast(rows, cols);
            let gated = draw.gated(&cast);
            let has_gate = call % 3 == 0 && gated.gate.is_some_and(|gate| gate.slot == Slot::After);
            let problem = if has_gate { gated } else { cast };
            problems.push((caps, problem, draw.layout(&problem)));
        }
    }
    let keys = |(caps, problem, layout): (Caps, Problem, Layout)| {
        let steps = match plan(&problem, &layout, &caps).map(|plan| plan.steps) {
            // A small device cannot bind a block of long rows.
            Err(PlanError::Columnwise { .. }) => Vec::new(),
            steps => steps.unwrap_or_else(|unfit| panic!("{problem:?}: {unfit}")),
        };
        let of_step = move |step| match step {
            Step::Dispatch(dispatch) => Some((caps, dispatch.key)),
            Step::Zero { .. } => None,
        };
        steps.into_iter().filter_map(of_step).collect::<Vec<_>>()
    };
    problems.into_iter().flat_map(keys).collect()
}

/// A test goes through one in this many programs, or through all with `RMSNORM_SWEEP=all`.
const SWEPT: usize = 4;

/// The [`swept`] keys of the samples, without duplicates.
fn sample() -> Vec<KernelKey> {
    let mut seen = HashSet::new();
    let keys = wide_sample().into_iter().chain(planned().into_iter().map(|(_, key)| key));
    let keys: Vec<_> = keys.filter(|key| seen.insert(*key)).collect();
    let sharing = keys.iter().step_by(3).map(|key| KernelKey { shares_binding: true, ..*key });
    let sharing: Vec<_> = sharing.filter(|key| uses(key).iter().any(|used| used.is_shared(key))).collect();
    let all: Vec<_> = keys.into_iter().chain(sharing).collect();
    swept(&all, SWEPT, |key| (key.program, key.call.gate, key.call.cast_order, key.has_groups, key.shares_binding))
}

/// Random keys and layouts.
trait DrawKeys {
    fn key(&mut self, program: Program) -> KernelKey;

    /// A key of a program for quantized calls.
    fn key_of_codes(&mut self, program: Program) -> KernelKey;

    /// The same key with a gate, if the program and the call may have one.
    fn gated_key(&mut self, key: &KernelKey) -> Option<KernelKey>;

    /// The layout of a call's tensors.
    fn layout(&mut self, problem: &Problem) -> Layout;

    fn tensors(&mut self, program: Program) -> TensorSet;

    fn tile(&mut self, program: Program) -> Tile;
}

impl DrawKeys for Draw {
    fn key(&mut self, program: Program) -> KernelKey {
        if program.info().direction == Direction::QuantizedForward {
            return self.key_of_codes(program);
        }
        let tensors = self.tensors(program);
        let is_reduction = program == Program::ReducePartials;
        let is_backward = !program.is_forward() && !is_reduction && program != Program::Copy;
        let activation = DTypes::uniform(self.of(DType::ALL));
        let parameters = [Tensor::Weight, Tensor::Bias, Tensor::NextWeight, Tensor::NextBias];
        let uses_weight = parameters.into_iter().any(|tensor| tensors.has(tensor));
        let uses_stream = is_backward || tensors.adds_residual();
        let dtypes = activation.widened(uses_weight && self.yes(), uses_stream && self.yes());
        let has_norm = program.is_forward() || is_backward;
        let norm = if has_norm { self.of([Norm::Rms, Norm::Layer, Norm::L2Clamped]) } else { Norm::Rms };
        // Backward has a mean exactly if the norm has one.
        let tensors = if is_backward { tensors.set(Tensor::Mean, norm == Norm::Layer) } else { tensors };
        let access = self.of([Access::Aligned, Access::Words, Access::Parts]);
        let keeps_rows = matches!(program, Program::Forward | Program::Backward);
        let cast_order = if program.is_forward() {
            self.of([CastOrder::AtStore, CastOrder::BeforeWeight, CastOrder::RstdFirst])
        } else {
            CastOrder::AtStore
        };
        let has_sums = is_backward && tensors.sums_over_rows() > 0;
        let accumulate = if has_sums && self.yes() { Accumulate::Atomics } else { Accumulate::Partials };
        let has_row_groups = (program.is_forward() || is_backward) && self.yes();
        // Sums that are added to are f32.
        let adds_to_gradients = is_reduction && self.yes();
        let dtypes = if adds_to_gradients { DTypes::uniform(DType::F32) } else { dtypes };
        KernelKey {
            program,
            call: CallKey {
                norm,
                dtypes,
                gradient: dtypes.activation,
                adds_to_gradients,
                cast_order,
                accumulate,
                tensors,
                has_row_groups,
                has_parts: false,
                form: form_of(program, tensors),
                gate: None,
                quant: None,
                has_weight_offset: true,
            },
            has_weight_offset: (tensors.has(Tensor::Weight) || tensors.has(Tensor::NextWeight)) && self.yes(),
            tile: self.tile(program),
            access,
            is_whole: access == Access::Aligned && keeps_rows && self.yes(),
            aliased: self.yes(),
            is_early: program == Program::Forward && self.yes(),
            visits_once: program == Program::ForwardStreaming && norm == Norm::Layer && self.yes(),
            gathers_scales: false,
            has_groups: false,
            shares_binding: false,
        }
    }

    fn key_of_codes(&mut self, program: Program) -> KernelKey {
        let access = self.of([Access::Aligned, Access::Words, Access::Parts]);
        let dtypes = DTypes::uniform(self.of(DType::ALL)).widened(self.yes(), self.yes());
        let mut problem = Problem { dtypes, ..self.quantized_forward(8, 64) };
        match (program, problem.quant.as_mut()) {
            (Program::QuantizedForward | Program::QuantizedForwardStreaming, Some(quant)) => {
                // The scale is computed first, and then used as if given.
                match (quant.scale, self.yes()) {
                    (ScaleKind::Current, true) => problem.tensors = problem.tensors.intersection(FOUND_FROM),
                    (ScaleKind::Current, false) => {
                        quant.scale = ScaleKind::Given;
                        problem.tensors = problem.tensors.without(Tensor::Scales).with(Tensor::Scale);
                    }
                    _ => {}
                }
            }
            (Program::TransposeCodes, _) => problem.tensors = program.info().optional,
            (Program::Columnwise, Some(quant)) => {
                let block = ScaleKind::Block { cols: self.of([64, 128]), is_power_of_two: self.yes() };
                quant.scale = self.of([block, ScaleKind::Mx { rounding: ScaleRounding::Up }]);
                *quant = if quant.columnwise().check().is_ok() { *quant } else { QuantSpec::new(quant.codes, block) };
                let optional = [Tensor::Residual, Tensor::Weight, Tensor::Bias];
                let along = ALONG_FROM.difference(TensorSet::of(&optional)).without(Tensor::Gate);
                problem.tensors = along.union(self.some(&optional)).set(Tensor::Mean, problem.norm == Norm::Layer);
            }
            (Program::TensorScale, Some(quant)) => {
                quant.scale = ScaleKind::Current;
                problem.tensors = program.info().optional;
            }
            _ => problem.tensors = TensorSet::of(&[self.of([Tensor::Scales, Tensor::Amax, Tensor::ScalesColumnwise])]),
        }
        let rows_per_group = (program != Program::TensorScale && program != Program::Clear && self.yes()).then_some(2);
        let call = program.info().key(&Problem { rows_per_group, ..problem });
        let mut key = KernelKey {
            program,
            call,
            has_weight_offset: call.has_weight_offset && call.tensors.has(Tensor::Weight),
            tile: self.tile(program),
            access,
            is_whole: access == Access::Aligned && program.is_on_chip() && self.yes(),
            aliased: self.yes(),
            is_early: false,
            visits_once: program == Program::QuantizedForwardStreaming && call.norm == Norm::Layer && self.yes(),
            gathers_scales: false,
            has_groups: false,
            shares_binding: false,
        };
        if let Some(quant) = key.call.quant.filter(|_| program.writes_codes() && program != Program::Columnwise) {
            let lanes = lanes_of_set(quant.scale, is_split(&key)).unwrap_or(1);
            if !key.tile.threads_per_row.is_multiple_of(lanes) {
                let reduction = if key.tile.groups * lanes >= 64 { key.tile.reduction } else { Reduction::Workgroup };
                key.tile = Tile::new(lanes, key.tile.groups, key.tile.packs, reduction);
            }
            key.gathers_scales = gathers_scales(&quant, &key.tile, is_split(&key)) && self.yes();
        }
        key
    }

    fn gated_key(&mut self, key: &KernelKey) -> Option<KernelKey> {
        let program = key.program.info();
        if !program.optional.has(Tensor::Gate) || key.call.form.is_residual_after() {
            return None;
        }
        let CallKey { norm, dtypes, tensors, .. } = key.call;
        let bare = Problem::forward(norm, 1, 8, dtypes.activation, TensorSet::NONE);
        let problem = self.gated(&Problem { direction: program.direction, dtypes, tensors, ..bare });
        let drawn = program.key(&problem);
        let mut key = KernelKey { call: CallKey { tensors: drawn.tensors, gate: drawn.gate, ..key.call }, ..*key };
        key.call.dtypes.residual = problem.dtypes.residual;
        let gathers = |quant: &QuantSpec| gathers_scales(quant, &key.tile, is_split(&key));
        key.gathers_scales &= key.call.quant.as_ref().is_some_and(gathers);
        Some(key)
    }

    fn layout(&mut self, problem: &Problem) -> Layout {
        let (offset, padding) = (self.of([0, 0, 4, 2]), self.of([0, 0, 2, 1]));
        let row_stride = (problem.cols + padding) as u64;
        let group_stride = problem.rows_per_group.map_or(0, |rows| rows as u64 * row_stride + self.of([0, 8, 2, 1]));
        let placed = |dtype: DType| Placed {
            storage: dtype.into(),
            offset: offset * dtype.size() as u64,
            row_stride,
            group_stride,
        };
        let DTypes { activation, weight, residual } = problem.dtypes;
        let tensors = [activation, weight, residual].map(placed);
        let codes = problem.storage(Tensor::Codes).map(|storage| Placed { storage, offset, ..placed(activation) });
        let scales = problem.storage(Tensor::Scales).map(|storage| Placed::vector(storage, 4 * offset / 2));
        let gradient = Placed { storage: problem.storage(Tensor::Dweight).unwrap_or(weight.into()), ..placed(weight) };
        Layout::new(problem, tensors.into_iter().chain(codes), [gradient], self.yes(), self.yes())
            .with_codes(problem, scales, [codes; 2])
    }

    fn tensors(&mut self, program: Program) -> TensorSet {
        use Tensor::{
            Bias, Dbias, Dresidual, DresidualOut, Dweight, Mean, NextBias, NextMean, NextRstd, NextWeight, Residual,
            ResidualOut, Rstd, Weight, X, Y,
        };
        match program {
            // The norm of a sum, or a sum only. x is overwritten only if y replaces it.
            Program::Forward | Program::ForwardStreaming if self.of([false, true, true]) => {
                let drawn = self.some(&[Weight, Bias, Residual, Mean, Rstd]).with(X).with(ResidualOut);
                let next = self.some(&[NextWeight, NextBias, NextMean, NextRstd]).with(NextWeight).with(Y);
                match self.yes() {
                    true => drawn.union(next),
                    false => drawn,
                }
            }
            Program::Forward | Program::ForwardStreaming => {
                let drawn = self.some(&[Weight, Bias, Residual, ResidualOut, Mean, Rstd]);
                let adds_residual = drawn.has(Residual);
                match self.yes() {
                    true => drawn.with(Y).without(Residual).set(ResidualOut, adds_residual),
                    false => drawn.with(X).with(Y).set(ResidualOut, adds_residual && drawn.has(ResidualOut)),
                }
            }
            Program::Backward | Program::BackwardColumns => {
                let drawn = self.some(&[Weight, DresidualOut, Dweight, Dbias, Dresidual]);
                drawn.union(TensorSet::of(&[X, Tensor::Dy, Tensor::Dx, Rstd]))
            }
            Program::BackwardRowSums => TensorSet::of(&[X, Tensor::Dy, Rstd]).set(Weight, self.yes()),
            Program::ReducePartials => {
                let has_dweight = self.yes();
                TensorSet::NONE.set(Dweight, has_dweight).set(Dbias, !has_dweight || self.yes())
            }
            Program::Copy => TensorSet::of(&[X, Y]),
            Program::QuantizedForward
            | Program::QuantizedForwardStreaming
            | Program::TransposeCodes
            | Program::Columnwise
            | Program::TensorScale
            | Program::Clear => program.info().optional,
        }
    }

    fn tile(&mut self, program: Program) -> Tile {
        if program == Program::Columnwise {
            return Tile::new(8, self.of([8, 16, 32]), 1, Reduction::Workgroup);
        }
        let threads_per_row: u32 = self.of([1, 2, 8, 16, 32, 64, 96, 160, 256, 448, 512]);
        let groups = if threads_per_row.is_power_of_two() { self.of([1, 2, 8]).min(1024 / threads_per_row) } else { 1 };
        let is_whole = program.is_on_chip() || program == Program::Copy;
        let lanes = self.of([8, 32, 64]);
        let is_full = (threads_per_row * groups).is_multiple_of(lanes);
        let reduction =
            if has_sums(program) && is_full && self.yes() { Reduction::Subgroup(lanes) } else { Reduction::Workgroup };
        let streams = matches!(program, Program::ForwardStreaming | Program::QuantizedForwardStreaming);
        let packs = if is_whole || streams { self.of([1, 2, 3, 4, 5, 7, 8]) } else { 1 };
        let rows_at_once = if program == Program::Backward { self.of([1, 2]) } else { 1 };
        let reads_again = program == Program::Backward && self.yes();
        Tile { rows_at_once, reads_again, ..Tile::new(threads_per_row, groups, packs, reduction) }
    }
}

/// The form of a random forward key with a residual.
fn form_of(program: Program, tensors: TensorSet) -> Form {
    let has_next = tensors.has(Tensor::NextWeight);
    match (program, tensors.has(Tensor::X), tensors.has(Tensor::Y)) {
        (Program::Forward | Program::ForwardStreaming, true, true) if has_next => Form::AddsAndNorms,
        (Program::Forward | Program::ForwardStreaming, true, false) => Form::AddsToResidual,
        _ => Form::Norm,
    }
}

/// A program, parsed by naga.
fn parsed(key: &KernelKey) -> (Module, ModuleInfo) {
    parsed_for(key, F16::Converts)
}

/// As [`parsed`], for a device that converts f16 in this way.
fn parsed_for(key: &KernelKey, f16: F16) -> (Module, ModuleInfo) {
    let text = text(key, f16);
    let module = wgsl::parse_str(&text).unwrap_or_else(|error| panic!("{key:?}\n{}", error.emit_to_string(&text)));
    // Programs may need only capabilities that every device has.
    let has = |is_needed, capability| if is_needed { capability } else { Capabilities::empty() };
    let capabilities = has(matches!(key.tile.reduction, Reduction::Subgroup(_)), Capabilities::SUBGROUP)
        | has(f16 != F16::Integers, Capabilities::SHADER_FLOAT16_IN_FLOAT32);
    let info = Validator::new(ValidationFlags::all(), capabilities).validate(&module);
    let info = info.unwrap_or_else(|error| panic!("{key:?}\n{}", error.emit_to_string(&text)));
    assert!(module.overrides.is_empty(), "{key:?}");
    (module, info)
}

/// Runs a check on every program of the sample, on two threads.
fn for_all(check: impl Fn(&KernelKey, &Module, &ModuleInfo) + Sync) {
    let keys = sample();
    let (first, second) = keys.split_at(keys.len() / 2);
    std::thread::scope(|scope| {
        for half in [first, second] {
            let check = &check;
            scope.spawn(move || {
                for key in half {
                    let (module, info) = parsed(key);
                    check(key, &module, &info);
                }
            });
        }
    });
}

#[test]
fn programs_of_a_wide_sample_translate() {
    for_all(|key, module, info| {
        let options = spv::Options { lang_version: (1, 3), ..Default::default() };
        let entry = spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: ENTRY.into() };
        let words =
            spv::write_vec(module, info, &options, Some(&entry)).unwrap_or_else(|error| panic!("{key:?}\n{error}"));
        assert_eq!(words.first(), Some(&0x0723_0203));

        let options = msl::Options { lang_version: (2, 4), ..Default::default() };
        let written = msl::write_string(module, info, &options, &msl::PipelineOptions::default());
        assert!(written.unwrap_or_else(|error| panic!("{key:?}\n{error}")).0.contains("kernel void"));

        let options = hlsl::Options { shader_model: hlsl::ShaderModel::V6_0, ..Default::default() };
        let (mut text, entry) = (String::new(), hlsl::PipelineOptions::default());
        let written = hlsl::Writer::new(&mut text, &options, &entry).write(module, info, None);
        written.unwrap_or_else(|error| panic!("{key:?}\n{error}"));
        assert!(text.contains("numthreads"));
    });
}

/// The variable that names the folder where `npm install webgpu` was run.
const TINT_VARIABLE: &str = "RMSNORM_TINT";

/// Tint, the compiler of Chromium, accepts each program without a message. It is stricter than naga
/// where threads may diverge before a barrier. Programs with subgroups get the directive that naga
/// refuses; wgpu has no subgroups in browsers.
#[test]
fn tint_accepts_a_wide_sample() {
    let Some(folder) = env::var_os(TINT_VARIABLE).filter(|folder| !folder.is_empty()) else {
        let reason = format!("{TINT_VARIABLE} is not set; fix: npm install --prefix DIR webgpu, and set it to DIR");
        return skip_or_fail("tint", reason).unwrap();
    };
    let directive = |key: &KernelKey| match key.tile.reduction {
        Reduction::Subgroup(_) => "enable subgroups;\n",
        Reduction::Workgroup => "",
    };
    let conversions = [F16::Converts, F16::Unpacks, F16::Integers].into_iter().cycle();
    let programs = sample().into_iter().zip(conversions);
    let programs = programs.map(|(key, f16)| format!("{}{}\0", directive(&key), text(&key, f16)));
    let programs: Vec<String> = programs.chain([check_f16() + "\0"]).collect();
    let mut input = tempfile::tempfile().expect("a file");
    input.write_all(programs.concat().as_bytes()).expect("a writable file");
    input.rewind().expect("a file");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/source/tint.mjs");
    let output = Command::new("node").arg(script).arg(folder).stdin(input).output().expect("node");
    let [printed, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let first: Vec<&str> = printed.lines().take(20).collect();
    assert!(printed == format!("{} programs\n", programs.len()), "{}: {errors}\n{}", output.status, first.join("\n"));
}

#[test]
fn programs_bind_what_rust_says() {
    for_all(|key, module, _| {
        let mut bound = BTreeMap::new();
        for (_, variable) in module.global_variables.iter() {
            let Some(place) = &variable.binding else { continue };
            assert_eq!(place.group, 0);
            let AddressSpace::Storage { access } = variable.space else {
                assert_eq!((place.binding, variable.space), (params::BINDING, AddressSpace::Uniform));
                continue;
            };
            let TypeInner::Array { stride, .. } = module.types[variable.ty].inner else { panic!("{key:?}") };
            let name = variable.name.clone().unwrap_or_default();
            bound.insert(place.binding, (name, access.contains(StorageAccess::STORE), stride));
        }
        let said = bindings(key).into_iter();
        let said = said.map(|each| (each.number(), (each.tensor.name().to_owned(), each.is_written, each.unit)));
        assert_eq!(bound, said.collect(), "{key:?}");
    });
}

#[test]
fn workgroups_are_what_rust_says() {
    for_all(|key, module, _| {
        let [entry] = &module.entry_points[..] else { panic!("{key:?}") };
        assert_eq!(entry.workgroup_size, [key.tile.threads(), 1, 1]);
        let shared = module.global_variables.iter().filter(|(_, each)| each.space == AddressSpace::WorkGroup);
        let bytes: u32 = shared.map(|(_, each)| module.types[each.ty].inner.size(module.to_ctx())).sum();
        assert_eq!(bytes, workgroup_bytes(key), "{key:?}");
    });
}

/// 16-bit tensors move by the pair, unless an f32 tensor of the call splits its quads.
#[test]
fn aligned_accesses_are_as_wide_as_they_may_be() {
    for key in sample().into_iter().filter(|key| key.access == Access::Aligned) {
        let moves_quads = is_split(&key) || key.program == Program::ReducePartials;
        let has_elements = |tensor: Tensor| matches!(tensor.shape(), TensorShape::Matrix | TensorShape::Cols);
        let is_moved = |binding: &Binding| has_elements(binding.tensor) && key.program != Program::TransposeCodes;
        for binding in bindings(&key).into_iter().filter(is_moved) {
            let expected = match (storage_of(&key, binding.tensor).size(), moves_quads) {
                (4, _) | (2, false) => 16,
                (2, true) | (1, false) => 8,
                _ => 4,
            };
            assert_eq!(binding.unit, expected, "{} of {key:?}", binding.tensor);
        }
    }
}

/// The value of a constant.
fn constant(module: &Module, name: &str) -> Option<Literal> {
    let (_, constant) = module.constants.iter().find(|(_, constant)| constant.name.as_deref() == Some(name))?;
    let Expression::Literal(literal) = module.global_expressions[constant.init] else { return None };
    Some(literal)
}

/// The `HAS_` constant of a gradient is true if the program sums it.
#[test]
fn flags_are_those_of_the_tensors() {
    for_all(|key, module, _| {
        for (name, tensor) in [("HAS_DWEIGHT", Tensor::Dweight), ("HAS_DBIAS", Tensor::Dbias)] {
            assert_eq!(constant(module, name), Some(Literal::Bool(key.call.tensors.has(tensor))), "{name} of {key:?}");
        }
        assert_eq!(
            constant(module, "GRADIENTS"),
            Some(Literal::U32(key.call.tensors.sums_over_rows() as u32)),
            "{key:?}"
        );
        assert_eq!(constant(module, "HAS_WEIGHT_OFFSET"), Some(Literal::Bool(key.has_weight_offset)), "{key:?}");
    });
}

/// The order of a sum over a row matches the chains counted in the plan's tests.
#[test]
fn sums_over_a_row_are_made_as_planned() {
    for_all(|key, module, _| {
        let [entry] = &module.entry_points[..] else { panic!("{key:?}") };
        let is_subgroup = Some(naga::Binding::BuiltIn(BuiltIn::SubgroupInvocationId));
        let asks = entry.function.arguments.iter().any(|argument| {
            let TypeInner::Struct { members, .. } = &module.types[argument.ty].inner else { return false };
            members.iter().any(|member| member.binding == is_subgroup)
        });
        let threads = key.tile.threads_per_row;
        let lanes = match key.tile.reduction {
            Reduction::Subgroup(lanes) if has_sums(key.program) => Some(lanes),
            Reduction::Subgroup(_) | Reduction::Workgroup => None,
        };
        assert_eq!(asks, lanes.is_some(), "{key:?}");
        assert_eq!(constant(module, "SEGMENT"), Some(Literal::U32(key.tile.segment().min(threads))), "{key:?}");
        let shuffles_twice = lanes.is_some_and(|lanes| 8 < threads / lanes && threads / lanes <= lanes);
        assert_eq!(constant(module, "IS_SHUFFLED_TWICE"), Some(Literal::Bool(shuffles_twice)), "{key:?}");
    });
}

#[test]
fn planned_programs_fit_their_devices() {
    for (caps, key) in planned() {
        assert!(workgroup_bytes(&key) <= caps.workgroup_bytes, "{key:?}, {caps:?}");
        assert!(key.tile.threads() <= caps.max_threads, "{key:?}, {caps:?}");
        match key.tile.reduction {
            Reduction::Workgroup => {}
            Reduction::Subgroup(lanes) => assert_eq!((Some(lanes), key.tile.threads() % lanes), (caps.subgroup, 0)),
        }
    }
}

/// The uniform buffer is one word after the other, as `Uniform` packs them. The words of a tensor
/// belong to one that the program binds, but for scales: a function that the program does not call
/// may read their place.
#[test]
fn params_are_words_of_what_is_bound() {
    for_all(|key, module, _| {
        let mut types = module.types.iter().map(|(_, each)| each);
        let params = types.find(|each| each.name.as_deref() == Some("Params")).expect("a struct");
        let TypeInner::Struct { members, span } = &params.inner else { panic!("{params:?}") };
        let uniform = Uniform::of(&text(key, F16::Converts));
        assert_eq!(u64::from(*span).next_multiple_of(16), uniform.size(), "{key:?}");
        for (index, member) in members.iter().enumerate() {
            assert_eq!(member.offset as usize, 4 * index, "{key:?}");
            let name = member.name.as_deref().unwrap_or_default();
            let tensor = Tensor::from_name(name.trim_end_matches("_row_stride").trim_end_matches("_group_stride"));
            let is_bound = tensor.is_none_or(|tensor| uses(key).iter().any(|used| used.tensor == tensor));
            assert!(is_bound || name == "scales", "{name} of {key:?}");
        }
    });
}

#[test]
fn the_sample_has_all_that_keys_hold() {
    let keys = wide_sample();
    for program in Program::ALL {
        let these: Vec<_> = keys.iter().filter(|key| key.program == program).collect();
        for access in [Access::Aligned, Access::Words, Access::Parts] {
            for dtype in DType::ALL {
                let is_there = these.iter().any(|key| key.access == access && key.call.dtypes.activation == dtype);
                assert!(is_there, "{program:?} {access:?} {dtype}");
            }
        }
        assert_eq!(these.iter().any(|key| matches!(key.tile.reduction, Reduction::Subgroup(_))), has_sums(program));
        // Each with and without, if calls of the program can choose.
        let both =
            |what: &dyn Fn(&KernelKey) -> bool| these.iter().any(|key| what(key)) && !these.iter().all(|key| what(key));
        assert!(both(&|key| key.aliased), "{program:?}");
        let works_on_rows = !matches!(program, Program::TransposeCodes | Program::TensorScale | Program::Clear);
        let takes_parts = works_on_rows && !matches!(program, Program::ReducePartials | Program::Copy)
            || program == Program::TransposeCodes;
        assert_eq!(both(&|key| key.call.has_row_groups), takes_parts, "{program:?}");
        assert_eq!(both(&|key| key.is_whole), program.is_on_chip(), "{program:?}");
        let of_columns = takes_parts && program != Program::TransposeCodes || program == Program::ReducePartials;
        assert_eq!(both(&|key| key.has_groups), of_columns, "{program:?}");
        assert_eq!(
            both(&|key| key.call.tensors.is_in_place() && key.call.tensors.adds_residual()),
            program.is_forward() && !program.writes_codes(),
            "{program:?}"
        );
        assert_eq!(both(&|key| key.call.adds_to_gradients), program.info().stores_gradients, "{program:?}");
        let has_gradients = matches!(program, Program::Backward | Program::BackwardColumns);
        assert_eq!(both(&|key| key.call.accumulate == Accumulate::Atomics), has_gradients, "{program:?}");
        // The program's files name tensors that it never has.
        let is_along = program == Program::Columnwise;
        let may_lack = |tensor: &Tensor| match is_along {
            true => matches!(tensor, Tensor::Residual | Tensor::Weight | Tensor::Bias | Tensor::Mean | Tensor::Gate),
            false => works_on_rows && !matches!(tensor.name(), "x" | "y" | "dx" | "dy"),
        };
        for tensor in program.info().optional.iter().filter(may_lack) {
            let is_given = tensor == Tensor::Rstd && !program.is_forward();
            assert!(is_given || both(&|key| key.call.tensors.has(tensor)), "{program:?} {tensor:?}");
        }
    }
}

#[test]
fn absent_tensors_have_no_binding() {
    let names = |tensors: &[Tensor]| {
        let tensors = TensorSet::of(tensors);
        let key = KernelKey { aliased: false, ..Draw::new(1).key(Program::Forward) };
        let key = KernelKey { call: CallKey { tensors, form: Form::Norm, ..key.call }, ..key };
        bindings(&key).into_iter().map(|each| each.tensor.name()).collect::<Vec<_>>()
    };
    assert_eq!(names(&[Tensor::X, Tensor::Y]), ["x", "y"]);
    assert_eq!(names(&[Tensor::Y]), ["y"]);
    assert_eq!(names(&[Tensor::Y, Tensor::ResidualOut]), ["y", "residual_out"]);
}

#[test]
fn whole_calls_bind_no_more_than_any_device_has_by_default() {
    for program in Program::ALL {
        let mut key = Draw::new(1).key(program);
        // `dresidual` and all other tensors are one too many. Quantized calls exist with the
        // maximum number.
        let rare = [Tensor::Dresidual, Tensor::Y, Tensor::Scale, Tensor::Amax, Tensor::Rstd];
        let rare = TensorSet::of(if program.writes_codes() { &rare } else { &rare[..1] });
        let next = TensorSet::of(&[Tensor::NextWeight, Tensor::NextBias, Tensor::NextMean, Tensor::NextRstd]);
        let of_gate = Piece::GateAfter.tensors(program.info().direction);
        let tensors = program.info().optional.difference(rare).difference(next).difference(of_gate);
        (key.call.norm, key.call.form, key.call.tensors) = (Norm::Layer, Form::Norm, tensors);
        if program == Program::Columnwise {
            key.call.tensors = ALONG_FROM.difference(of_gate);
        }
        assert!(bindings(&key).len() <= 8, "{program:?}");
        if matches!(program, Program::Forward | Program::ForwardStreaming) {
            // Two RMS norms around a residual, with the statistics for backward. Layer norms reach
            // the same number in inference only.
            (key.call.norm, key.call.form) = (Norm::Rms, Form::AddsAndNorms);
            let without = [Tensor::Bias, Tensor::Mean, Tensor::NextBias, Tensor::NextMean, Tensor::Gate];
            key.call.tensors = program.info().optional.difference(TensorSet::of(&without));
            assert_eq!(bindings(&key).len(), 8, "{program:?}");
        }
        // All tensors, of which vectors and statistics share a binding. A given scale has an amax.
        let scales = TensorSet::NONE.set(Tensor::Scales, program.writes_codes());
        key.call.tensors =
            if program == Program::Columnwise { ALONG_FROM } else { program.info().optional.difference(scales) };
        key.shares_binding = true;
        assert!(bindings(&key).len() <= 8, "{program:?}");
    }
}

#[test]
fn f16_needs_no_conversion_of_wgsl() {
    for program in Program::ALL {
        let keys = wide_sample().into_iter().filter(|key| key.program == program && dtypes(key).contains(&DType::F16));
        for key in keys.take(4) {
            parsed_for(&key, F16::Integers);
            parsed_for(&key, F16::Unpacks);
        }
    }
    for text in [UNPACKS_F16, &check_f16()] {
        let module = wgsl::parse_str(text).expect("WGSL");
        let is_valid = |capabilities| Validator::new(ValidationFlags::all(), capabilities).validate(&module).is_ok();
        assert!(is_valid(Capabilities::SHADER_FLOAT16_IN_FLOAT32) && !is_valid(Capabilities::empty()));
    }
}

#[test]
fn every_constant_is_read_somewhere() {
    let preludes =
        [Program::Forward, Program::QuantizedForward].map(|program| prelude(&Draw::new(1).key(program), F16::Unpacks));
    let lines = preludes.iter().flat_map(|prelude| prelude.lines());
    let names = lines.filter_map(|line| line.strip_prefix("const ")?.split(' ').next());
    let lines = shaders::ALL.iter().flat_map(|source| source.text.lines());
    let code = lines.map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    let read: HashSet<&str> =
        code.flat_map(|line| line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')).collect();
    // A program uses only one of these alternatives.
    for name in names.filter(|name| !quantizing().contains(*name)) {
        assert!(read.contains(name), "nobody reads {name}");
    }
}

#[test]
fn every_file_is_used_and_every_block_ends() {
    let texts = wide_sample().into_iter().map(|key| (key.has_groups, text(&key, F16::Converts)));
    let programs: Vec<String> = texts
        .map(|(has_groups, text)| {
            let sets_group = text.matches("column_group = work.group.z;").count();
            assert_eq!(sets_group, usize::from(has_groups), "{text}");
            text
        })
        .chain([check_f16()])
        .collect();
    for Source { path, text } in shaders::ALL {
        let comment = text.lines().next().expect("a comment");
        assert!(programs.iter().any(|program| program.contains(comment)), "{path}");
        // naga would see a line that `unroll` does not recognize, and an unknown counter would
        // count packs.
        for line in text.lines().filter(|line| line.contains("@unroll")) {
            let counter = unroll::opened(line).unwrap_or_else(|| panic!("{path}: {line}"));
            assert!(["J", "K", "N", "K of BATCH", "AFTER"].contains(&counter), "{path}: {line}");
        }
        assert_eq!(text.matches('{').count(), text.matches('}').count(), "{path}");
    }
}

/// The name of the array that a tensor lies in.
fn binding_of(used: &Use, key: &KernelKey) -> &'static str {
    if used.is_shared(key) { Tensor::Workspace.name() } else { used.tensor.name() }
}

/// The functions of a tensor access the tensor itself, and nothing else.
#[test]
fn accessors_reach_their_own_tensor() {
    for_all(|key, module, info| {
        for used in uses(key) {
            let own = |is_there: bool, verb: &str| is_there.then(|| format!("{verb}_{}", used.tensor));
            let names = match used.kind {
                Kind::Workspace | Kind::Cleared | Kind::Found => continue,
                Kind::Amax => [Some("fold_amax".to_owned()), None],
                Kind::Scales if key.gathers_scales => [Some("store_word_of_scales".to_owned()), None],
                // A gradient is added to where it is stored.
                Kind::Elements | Kind::Statistic | Kind::Scalar | Kind::Scales | Kind::Bytes | Kind::ColumnBytes => [
                    own(used.is_loaded && key.program != Program::ReducePartials, "load"),
                    own(used.is_stored, "store"),
                ],
            };
            for name in names.into_iter().flatten() {
                let found = module.functions.iter().find(|(_, each)| each.name.as_ref() == Some(&name));
                let (function, _) = found.unwrap_or_else(|| panic!("no {name} in {key:?}"));
                let reached = module.global_variables.iter().filter(|(handle, variable)| {
                    matches!(variable.space, AddressSpace::Storage { .. }) && !info[function][*handle].is_empty()
                });
                let reached: Vec<_> = reached.filter_map(|(_, variable)| variable.name.as_deref()).collect();
                assert_eq!(reached, [binding_of(&used, key)], "{name} of {key:?}");
            }
        }
    });
}

/// A program reads and writes what it binds: a chain that forgets a tensor of the call leaves it
/// untouched. Only statistics are bound for writing where they are read.
#[test]
fn programs_access_every_tensor_of_the_call() {
    for_all(|key, module, info| {
        let main = info.get_entry_point(0);
        for used in uses(key) {
            let is_it = |name: &Option<String>| name.as_deref() == Some(binding_of(&used, key));
            let (handle, _) = module.global_variables.iter().find(|(_, each)| is_it(&each.name)).expect("a binding");
            let (is_read, is_written) =
                (main[handle].contains(GlobalUse::READ), main[handle].contains(GlobalUse::WRITE));
            let is_column =
                matches!(used.tensor.shape(), TensorShape::Matrix | TensorShape::Cols) && !used.is_shared(key);
            assert!(is_read || is_written, "{} of {key:?}", used.tensor);
            assert!(!is_column || (is_written == used.is_stored), "{} of {key:?}", used.tensor);
        }
    });
}
