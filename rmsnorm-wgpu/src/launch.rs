//! Prepares a validated call: turns its arguments into bindings and the plan's steps into commands.
//! All decisions are in the plan.

mod bindings;
mod tensors;
mod workspace;

use std::ops::Range;
use std::sync::Arc;

use rmsnorm_spec::quant::{QuantSpec, ScaleLayout};
use rmsnorm_spec::{Direction, Element, Error, GradReduction, NormSpec, Piece, PieceSet, Problem, Tensor};
use wgpu::{BindGroup, Buffer, CommandEncoder, ComputePass, ComputePassDescriptor};

use crate::error::{BACKEND, invalid, unsupported};
use crate::kernel::Kernel;
use crate::params::Numbers;
use crate::plan::{self, Access, Dispatch, Layout, Plan, Program, Step};
use crate::shared::Shared;
use crate::view::WgpuSlice;
use bindings::Groups;
pub(crate) use tensors::Tensors;
use workspace::Workspace;

/// The target of encoding: `&mut encoder` or `&mut pass`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Target<'a, 'p> {
    /// An encoder without an open pass. Consecutive calls share a new compute pass.
    Encoder(&'a mut CommandEncoder),
    /// An open compute pass. Its pipeline and bind group 0 change. A pass cannot zero memory, so
    /// calls with `GradReduction::Atomics` need an encoder.
    Pass(&'a mut ComputePass<'p>),
}

impl<'a> From<&'a mut CommandEncoder> for Target<'a, '_> {
    fn from(encoder: &'a mut CommandEncoder) -> Self {
        Target::Encoder(encoder)
    }
}

impl<'a, 'p> From<&'a mut ComputePass<'p>> for Target<'a, 'p> {
    fn from(pass: &'a mut ComputePass<'p>) -> Self {
        Target::Pass(pass)
    }
}

/// Commands with all their resources. Encoding them cannot fail.
#[derive(Debug, Default)]
pub(crate) struct Work {
    commands: Vec<Command>,
}

#[derive(Debug)]
enum Command {
    Zero { buffer: Buffer, bytes: Range<u64> },
    Dispatch(Bound),
}

/// A kernel with the arguments of its dispatch.
#[derive(Debug)]
struct Bound {
    kernel: Arc<Kernel>,
    group: BindGroup,
    grid: [u32; 3],
}

impl Work {
    /// Whether there are no commands.
    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }
}

/// Encodes the commands of calls into an encoder or a compute pass, in order. wgpu orders
/// dispatches that touch the same buffers.
///
/// # Errors
/// `InvalidArgument`, with nothing encoded, if a command cannot be in a compute pass.
pub(crate) fn encode(calls: &[Work], target: Target<'_, '_>) -> Result<(), Error> {
    let commands = || calls.iter().flat_map(|work| &work.commands);
    match target {
        Target::Encoder(encoder) => {
            // wgpu makes two command buffers per compute pass, with idle time between them, so
            // consecutive dispatches share a pass. The pass ends before the encoder is used for
            // other commands.
            let mut open: Option<ComputePass<'static>> = None;
            let descriptor = ComputePassDescriptor { label: Some("rmsnorm"), timestamp_writes: None };
            for command in commands() {
                match command {
                    Command::Zero { buffer, bytes } => {
                        open = None;
                        encoder.clear_buffer(buffer, bytes.start, Some(bytes.end - bytes.start));
                    }
                    Command::Dispatch(bound) => {
                        bound.encode(
                            open.get_or_insert_with(|| encoder.begin_compute_pass(&descriptor).forget_lifetime()),
                        );
                    }
                }
            }
        }
        Target::Pass(pass) => {
            if commands().any(|command| matches!(command, Command::Zero { .. })) {
                let rule = "GradReduction::Atomics zeroes its workspace, which a compute pass cannot do: encode the call \
                            into the encoder";
                return Err(invalid("grad_reduction", rule));
            }
            for command in commands() {
                if let Command::Dispatch(bound) = command {
                    bound.encode(pass);
                }
            }
        }
    }
    Ok(())
}

impl Bound {
    fn encode(&self, pass: &mut ComputePass<'_>) {
        let Bound { kernel, group, grid: [x, y, z] } = self;
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, group, &[]);
        pass.dispatch_workgroups(*x, *y, *z);
    }
}

/// Refuses what this backend lacks: parts, and scales of columns of several groups.
pub(crate) fn require_pieces(problem: &Problem) -> Result<(), Error> {
    const PIECES: PieceSet = PieceSet::of(&Piece::ALL).without(Piece::Parts);
    problem.require_pieces(BACKEND, PIECES)?;
    problem.require_scales_in_groups(BACKEND)
}

/// Compiles the kernels of calls on dense tensors.
///
/// # Errors
/// As [`prepare_call`].
pub(crate) fn prepare(shared: &Shared, problems: &[Problem]) -> Result<(), Error> {
    let mut keys = Vec::new();
    for problem in problems {
        require_pieces(problem)?;
        rows_per_group(problem)?;
        keys.extend(plan::plan(problem, &Layout::dense(problem), &shared.caps)?.keys());
    }
    shared.kernels.prepare(keys.into_iter())
}

/// A copy with a kernel, the reference of measurements: from one buffer to another, or to a part of
/// the same buffer. The caller ensures that the two do not overlap.
///
/// # Errors
/// As [`prepare_call`].
pub(crate) fn copy<T: Element>(shared: &Shared, from: WgpuSlice<'_, T>, to: WgpuSlice<'_, T>) -> Result<Work, Error> {
    let (len, tensors) = (from.len().min(to.len()), Tensors::of_copy(from, to)?);
    if len == 0 {
        return Ok(Work::default());
    }
    let access = Access::of_copy(from.offset(), to.offset(), T::DTYPE, len as u64);
    let steps = plan::copy(T::DTYPE, len as u64, access, from.buffer() == to.buffer(), &shared.caps)?;
    work(shared, &Plan { steps, ..Plan::default() }, &tensors, None, Numbers::default())
}

/// The commands of a call.
///
/// # Errors
/// `Unsupported` and `Device`. The caller catches errors that wgpu reports.
pub(crate) fn prepare_call(
    shared: &Shared,
    spec: &NormSpec,
    problem: &Problem,
    tensors: Tensors<'_>,
) -> Result<Work, Error> {
    if matches!(problem.grad_reduction, GradReduction::Atomics) {
        tensors.check_clearable(Tensor::Workspace)?;
    }
    let (is_aliased, reduce_aliased) = tensors.aliases();
    let layout = Layout::new(problem, tensors.inputs_and_matrices(), tensors.gradients(), is_aliased, reduce_aliased)
        .with_codes(problem, tensors.scales(), tensors.transposed());
    let plan = plan::plan(problem, &layout, &shared.caps)?;
    debug_assert!(
        problem.direction != Direction::Backward
            || plan.workspace.len <= plan::workspace_len(problem, &shared.caps) as u64,
        "the plan needs a larger workspace than workspace_len reports: {plan:?}"
    );
    let workspace = (plan.workspace.len > 0)
        .then(|| Workspace::of_call(shared, tensors.get(Tensor::Workspace), plan.workspace.len))
        .transpose()?;
    // Equal for all dispatches of the call.
    let numbers = Numbers {
        eps: match problem.direction {
            Direction::Forward | Direction::QuantizedForward => spec.norm.inside_root(spec.eps),
            Direction::Backward => spec.eps,
        },
        weight_offset: spec.weight_offset,
        share: (1.0 / problem.norm.divisor(problem.cols / problem.groups) as f64) as f32,
        // Plans have no more groups than a grid.
        groups: problem.groups as u32,
        partial_rows: plan.partial_rows,
        rows_per_group: rows_per_group(problem)?,
        ..problem.quant.map_or_else(Numbers::default, |quant| of_quant(&quant, problem))
    };
    work(shared, &plan, &tensors, workspace.as_ref(), numbers)
}

/// The parameters of a quantized call that describe its scales.
fn of_quant(quant: &QuantSpec, problem: &Problem) -> Numbers {
    let stride = |quant: &QuantSpec, cols: usize| {
        let groups = quant.scale.groups(cols).unwrap_or(0);
        let stride = match quant.layout {
            ScaleLayout::RowMajor => groups,
            ScaleLayout::ColumnMajor { ld } | ScaleLayout::PackedUe8m0 { ld } => ld,
            ScaleLayout::Swizzled128x4 => groups.div_ceil(4),
        };
        stride as u32
    };
    // Scales fit a binding, so strides that are used fit 32 bits. The addition turns -0.0, whose
    // bits would compare as the largest, into 0.0.
    let bits = |amax: f32| (amax + 0.0).to_bits();
    Numbers {
        scales_stride: stride(quant, problem.cols),
        scales_columnwise_stride: stride(&quant.columnwise(), problem.rows),
        amax_floor: bits(quant.amax_floor),
        amax_ceiling: bits(quant.amax_ceiling),
        ..Numbers::default()
    }
}

/// Rows of a group, as shaders count them; 0 if the rows are not in groups.
///
/// # Errors
/// `Unsupported` if the rows exceed 32 bits: a shader adds the rows of its group in earlier
/// dispatches to a row.
fn rows_per_group(problem: &Problem) -> Result<u32, Error> {
    let Some(rows_per_group) = problem.rows_per_group else { return Ok(0) };
    if u32::try_from(problem.rows).is_err() {
        return Err(unsupported(format!("the wgpu backend has fewer than 2^32 rows in groups, got {}", problem.rows)));
    }
    // A group has fewer rows than the matrix.
    Ok(rows_per_group as u32)
}

/// The plan's steps as commands.
fn work(
    shared: &Shared,
    plan: &Plan,
    tensors: &Tensors<'_>,
    workspace: Option<&Workspace>,
    numbers: Numbers,
) -> Result<Work, Error> {
    let mut groups = Groups::new(shared, tensors, workspace);
    let mut kernels = Vec::with_capacity(plan.steps.len());
    for step in &plan.steps {
        let Step::Dispatch(dispatch) = step else { continue };
        let kernel = shared.kernels.get(&dispatch.key, plan)?;
        groups.add(&kernel, dispatch, of_dispatch(numbers, dispatch, tensors.cols(), plan))?;
        kernels.push(kernel);
    }
    let mut dispatches = kernels.into_iter().zip(groups.make()?);
    let mut commands = Vec::with_capacity(plan.steps.len());
    for step in &plan.steps {
        commands.push(match step {
            Step::Zero { first, len } => {
                let Some(workspace) = workspace else { continue };
                Command::Zero { buffer: workspace.buffer.clone(), bytes: workspace.bytes(*first, *len) }
            }
            Step::Dispatch(Dispatch { grid: [x, y], key, .. }) => {
                let grid = [*x, *y, if key.has_groups { numbers.groups } else { 1 }];
                let Some((kernel, group)) = dispatches.next() else { continue };
                Command::Dispatch(Bound { kernel, group, grid })
            }
        });
    }
    Ok(Work { commands })
}

/// The parameters of one dispatch, without the places of its tensors.
fn of_dispatch(numbers: Numbers, dispatch: &Dispatch, cols: u64, plan: &Plan) -> Numbers {
    let rows = dispatch.rows.end - dispatch.rows.start;
    // A copy or a clear is one row with its length as the number of columns.
    let is_one_row = matches!(dispatch.key.program, Program::Copy | Program::Clear);
    let (rows, cols) = if is_one_row { (1, rows) } else { (rows, cols) };
    let cols = if dispatch.key.has_groups { cols / u64::from(numbers.groups) } else { cols };
    Numbers {
        // The plan keeps both within a binding, hence within 32 bits.
        rows: rows as u32,
        cols: cols as u32,
        first_row: dispatch.rows.start as u32,
        chunks: dispatch.chunks,
        first_chunk: dispatch.first_chunk,
        accumulates: u32::from(dispatch.accumulates),
        row_sums: plan.workspace.row_sums as u32,
        first_in_group: dispatch.rows.start.checked_rem(u64::from(numbers.rows_per_group)).unwrap_or_default() as u32,
        ..numbers
    }
}
