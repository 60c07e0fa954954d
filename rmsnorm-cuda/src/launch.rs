//! The trait [`NormBackend`]. Runs a validated call: turns its arguments into [`Params`] and the plan's steps into work on the
//! stream. All decisions are made in the plan.

mod columns;
mod tensors;
mod work;
mod workspace;

use std::collections::HashSet;

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr};
use rmsnorm_gpu::reduction;
use rmsnorm_spec::quant::{QuantSpec, ScaleKind, ScaleLayout};
use rmsnorm_spec::{
    Access, AnyCall, AnyElement, Direction, Error, Norm, NormBackend, NormSpec, Problem, Span, Statistics, Storage,
    Tensor, TensorShape,
};

use crate::backend::CudaBackend;
use crate::caps::{Arch, Caps};
use crate::error::{BACKEND, device_error, is_too_large};
use crate::params::{Matrix, Params};
use crate::plan::{self, KernelKey, Plan, WIDEST_ACCESS};
use columns::Half;
#[cfg(feature = "peers")]
pub(crate) use columns::of_ranks;
pub(crate) use tensors::Tensors;
use work::Work;
#[cfg(feature = "peers")]
pub(crate) use work::{Launch, argument};
use workspace::{Workspace, bytes_of};

impl CudaBackend {
    /// [`NormBackend::prepare`] for tensors whose addresses and strides, in bytes, are multiples of
    /// `alignment`. Values over 16 act as 16. A call on tensors with a lower alignment compiles
    /// other kernels.
    ///
    /// # Errors
    /// `Device` if a kernel cannot be compiled or loaded.
    pub fn prepare_aligned(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        prepare(self, std::slice::from_ref(problem), |_| alignment)
    }
}

rmsnorm_spec::inherent_methods!(CudaBackend);

impl NormBackend for CudaBackend {
    type In<'a, T: AnyElement> = CudaView<'a, T>;
    type Out<'a, T: AnyElement> = CudaViewMut<'a, T>;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn in_span<T: AnyElement>(view: &CudaView<'_, T>) -> Span {
        span(view)
    }

    fn out_span<T: AnyElement>(view: &CudaViewMut<'_, T>) -> Span {
        span(view)
    }

    fn workspace_len(&self, problem: &Problem) -> usize {
        plan::workspace_len(problem, self.kernels().caps())
    }

    fn has_gradient_sums(&self) -> bool {
        true
    }

    fn prepare_all(&self, problems: &[Problem]) -> Result<(), Error> {
        prepare(self, problems, |problem| dense_access_bytes(problem) as usize)
    }

    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        launch(self, call)
    }
}

/// The most groups of columns: blocks of a grid's second dimension.
const MOST_GROUPS: usize = 65_535;

/// The span of a view. Device addresses are unique in a process, across devices, so all memory
/// counts as one allocation.
fn span<T>(view: &impl DevicePtr<T>) -> Span {
    // cudarc returns an address only together with a guard of its use. With several streams this
    // makes the slice's own stream wait for the last write, which any use must do anyway; with one
    // stream it does nothing. The guard would record a use when dropped, so it is forgotten.
    let (start, guard) = view.device_ptr(view.stream());
    std::mem::forget(guard);
    Span { allocation: 0, start, len: view.len() }
}

/// Refuses groups of columns beyond a grid's limit, and scales of columns of several groups.
fn require_groups(problem: &Problem) -> Result<(), Error> {
    if problem.groups > MOST_GROUPS {
        let (groups, cols) = (problem.groups, problem.cols);
        let rule = format!(
            "the cuda backend takes up to {MOST_GROUPS} groups of columns, got {groups} of {cols} columns: reshape to more rows"
        );
        return Err(Error::Unsupported { rule });
    }
    problem.require_scales_in_groups(BACKEND)
}

/// Plans a call and enqueues its steps.
fn launch(backend: &CudaBackend, call: AnyCall<'_, '_, CudaBackend>) -> Result<(), Error> {
    let (spec, problem) = (*call.spec(), *call.problem());
    require_groups(&problem)?;
    let mut tensors = Tensors::new(backend.stream(), problem).with_part_stride(call.part_stride());
    match call.visit(&mut tensors)? {
        None => enqueue(backend, &spec, &problem, &tensors),
        Some(Statistics::Found(statistics)) => columns::first(backend, &spec, &problem, &tensors, statistics),
        Some(Statistics::Given { numbers, columns }) => {
            columns::second(backend, &spec, &problem, &tensors, (numbers, columns))
        }
    }
}

/// A call on whole rows.
fn enqueue(backend: &CudaBackend, spec: &NormSpec, problem: &Problem, tensors: &Tensors<'_>) -> Result<(), Error> {
    let (access, caps) = (access_bytes(problem, &tensors.params()), backend.kernels().caps());
    let enqueue = |caps: &Caps| {
        let plan = plan::plan(problem, access, caps);
        debug_assert!(plan.workspace.len <= backend.workspace_len(problem), "{plan:?} exceeds what callers are told");
        check_workspace(tensors.workspace_len(), plan.workspace.len)?;
        enqueue_plan(backend, spec, problem, tensors, &plan, None)
    };
    match enqueue(caps) {
        // The driver has limits that the plan does not know, as where a stream has a part of the device.
        // Only the workspace was written, which the next plan clears again.
        Err(error) if is_too_large(&error) => enqueue(&Caps { cooperates: false, ..*caps }),
        result => result,
    }
}

/// Enqueues the steps of a plan, for whole rows or for phase `half`. A missing kernel or missing
/// memory is reported before the first step, so nothing is written then.
fn enqueue_plan(
    backend: &CudaBackend,
    spec: &NormSpec,
    problem: &Problem,
    tensors: &Tensors<'_>,
    plan: &Plan,
    half: Option<&Half>,
) -> Result<(), Error> {
    let (stream, kernels) = (backend.stream(), backend.kernels());
    let mut params = tensors.params();
    // Reports an earlier error that cudarc could not return, for example in its waits for events.
    stream.context().bind_to_thread().map_err(device_error("before the launch"))?;
    let mut work = plan.steps.map(|_| None);
    for (work, step) in work.iter_mut().zip(&plan.steps) {
        *work = step.as_ref().map(|step| Work::new(step, plan, kernels)).transpose()?;
    }
    // `workspace_len` covers whole rows only; a phase may need more.
    let is_short = tensors.workspace_len().is_none_or(|given| given < plan.workspace.len);
    let allocated = (is_short && plan.workspace.len > 0)
        .then(|| Workspace::allocate(stream, kernels, plan.workspace.len))
        .transpose()?;
    // The caller's, or 0.
    let given = params[Tensor::Workspace].data;
    let workspace = allocated.as_ref().map_or(given, |workspace| workspace.address);
    // The plan's length includes room for this alignment.
    let workspace = workspace.next_multiple_of(reduction::ALIGNMENT);
    params[Tensor::Workspace].data = workspace;
    set_call(&mut params, spec, problem)?;
    if let Some(half) = half {
        params.inv_cols = inv_cols(spec.norm, half.whole_cols);
    }
    if let Some(rows) = plan.has_groups_as_rows().then(|| plan::groups_as_rows(problem)).flatten() {
        set_groups_as_rows(&mut params, &rows)?;
    }
    params.workspace_of_group = plan.workspace.of_group as u64;
    params.chunks = plan.chunks;
    params.partial_rows = plan.partial_rows;
    params.locks = workspace + bytes_of(plan.workspace.locks);
    params.row_sums = workspace + bytes_of(plan.workspace.row_sums);
    params.found = workspace;
    if let Some(quant) = &problem.quant {
        set_quant(&mut params, problem, quant);
    }
    let overlap = kernels.caps().arch >= Arch::HOPPER;
    let columns = half.map(|half| &half.columns);
    work.into_iter().flatten().try_for_each(|work| work.enqueue(stream, &params, columns, overlap))
}

/// Sets the fields that all kernels read, except tensors.
///
/// # Errors
/// `Unsupported` if rows are grouped and there are 2^32 or more.
pub(crate) fn set_call(params: &mut Params, spec: &NormSpec, problem: &Problem) -> Result<(), Error> {
    params.eps = match problem.direction {
        Direction::Forward | Direction::QuantizedForward => spec.norm.inside_root(spec.eps),
        Direction::Backward => spec.eps,
    };
    params.weight_offset = spec.weight_offset;
    params.rows = problem.rows as u64;
    let cols = plan::group(problem).cols;
    params.cols = cols as u64;
    params.parts = problem.parts as u64;
    params.inv_cols = inv_cols(spec.norm, cols);
    (params.rows_per_group, params.group_reciprocal) = rows_per_group(problem)?;
    Ok(())
}

/// Sets the fields of a call whose rows are groups of columns: the groups of a row are a group of
/// rows.
fn set_groups_as_rows(params: &mut Params, rows: &Problem) -> Result<(), Error> {
    params.rows = rows.rows as u64;
    (params.rows_per_group, params.group_reciprocal) = rows_per_group(rows)?;
    for Matrix { row_stride, group_stride, .. } in &mut params.tensors {
        (*row_stride, *group_stride) = (rows.cols as u64, *row_stride);
    }
    Ok(())
}

/// The factor that turns a sum over `cols` columns into an average: `1 / cols`, or 1 for L2 norms,
/// which have sums.
pub(crate) fn inv_cols(norm: Norm, cols: usize) -> f32 {
    (1.0 / norm.divisor(cols) as f64) as f32
}

/// Sets the fields that describe FP8 values and scales.
fn set_quant(params: &mut Params, problem: &Problem, quant: &QuantSpec) {
    params.scales_stride = scales_stride(quant, problem.cols);
    params.scales_columnwise_stride = scales_stride(&quant.columnwise(), problem.rows);
    (params.amax_floor, params.amax_ceiling) = (quant.amax_floor, quant.amax_ceiling);
    // The kernel that finds the scale writes it to `scales`; codes are then computed as with a
    // given scale.
    if quant.scale == ScaleKind::Current {
        params[Tensor::Scale] = params[Tensor::Scales];
    }
}

/// The stride of a layout of scales, for rows of `cols` columns.
fn scales_stride(quant: &QuantSpec, cols: usize) -> u64 {
    let groups = quant.scale.groups(cols).unwrap_or(0);
    let stride = match quant.layout {
        ScaleLayout::RowMajor => groups,
        ScaleLayout::ColumnMajor { ld } | ScaleLayout::PackedUe8m0 { ld } => ld,
        ScaleLayout::Swizzled128x4 => groups.div_ceil(4),
    };
    stride as u64
}

/// The rows of a group (at least 2), and 2^64 divided by that number, rounded up. Zeros for
/// ungrouped rows.
///
/// # Errors
/// `Unsupported` if the number of rows does not fit 32 bits.
fn rows_per_group(problem: &Problem) -> Result<(u64, u64), Error> {
    let Some(rows_per_group) = problem.rows_per_group else { return Ok((0, 0)) };
    if problem.rows > u32::MAX as usize {
        let rows = problem.rows;
        let rule = format!("the cuda backend takes fewer than 2^32 rows in groups, got {rows}: split the call");
        return Err(Error::Unsupported { rule });
    }
    Ok((rows_per_group as u64, u64::MAX / rows_per_group as u64 + 1))
}

/// Compiles and loads the kernels of `problems`; the addresses and strides of each are multiples of
/// `alignment` bytes.
fn prepare(backend: &CudaBackend, problems: &[Problem], alignment: impl Fn(&Problem) -> usize) -> Result<(), Error> {
    let kernels = backend.kernels();
    kernels.prepare(keys(problems, alignment, kernels.caps())?.into_iter())
}

/// The kernels of `problems`; the addresses and strides of each are multiples of `alignment` bytes.
pub(crate) fn keys(
    problems: &[Problem],
    alignment: impl Fn(&Problem) -> usize,
    caps: &Caps,
) -> Result<HashSet<KernelKey>, Error> {
    for problem in problems {
        require_groups(problem)?;
        rows_per_group(problem)?;
    }
    let access = |problem: &Problem| {
        let access = access_of(alignment(problem) as u64);
        // The columns of a group are a stride too.
        if problem.groups > 1 { access.min(dense_access_bytes(problem)) } else { access }
    };
    let plan = |problem: &Problem| plan::plan(problem, access(problem), caps);
    Ok(problems.iter().map(plan).flat_map(|plan| plan.keys()).collect())
}

/// Checks the workspace of the call: it may have been sized for another device with a smaller plan,
/// and kernels do not check lengths.
const fn check_workspace(given: Option<usize>, needed: usize) -> Result<(), Error> {
    match given {
        Some(got) if got < needed => Err(Error::Length { arg: "workspace", min: needed, max: usize::MAX, got }),
        Some(_) | None => Ok(()),
    }
}

/// The largest power of two, at most 16, that divides all addresses and strides. Statistics do not
/// count, because a thread accesses single elements of them. The workspace does not count, because
/// its start is rounded up to an aligned address.
pub(crate) fn access_bytes(problem: &Problem, params: &Params) -> u32 {
    let bits = |bits, tensor: Tensor| {
        let Matrix { data, row_stride, group_stride } = params[tensor];
        let is_counted = match tensor.shape() {
            TensorShape::Matrix => true,
            // The reduction of partial sums writes gradients one element at a time.
            TensorShape::Cols => tensor.access(problem.direction) == Some(Access::Read),
            // The transposing kernels find their access width themselves.
            TensorShape::Transposed => false,
            TensorShape::Rows
            | TensorShape::Workspace
            | TensorShape::One
            | TensorShape::Scales
            | TensorShape::ScalesColumnwise => false,
        };
        // The start of every row is a sum of multiples of the row and group strides.
        let strides = if problem.rows > 1 { row_stride | group_stride } else { 0 };
        // The same holds for every part of a row.
        let strides = if tensor == Tensor::X { strides | params.part_stride } else { strides };
        // And for every group of columns.
        let strides = if problem.groups > 1 { strides | plan::group(problem).cols as u64 } else { strides };
        let size = problem.storage(tensor).map_or(0, Storage::size) as u64;
        // A pack has as many codes as the widest matrix has elements in 16 bytes.
        let scale = if tensor == Tensor::Codes { plan::widest_input(problem) as u64 } else { 1 };
        if is_counted { bits | (data * scale) | (strides * size * scale) } else { bits }
    };
    access_of(Tensor::ALL.into_iter().fold(0, bits))
}

/// The largest power of two, at most 16, that divides a number of bytes.
pub(crate) const fn access_of(bytes: u64) -> u32 {
    1 << (bytes | WIDEST_ACCESS as u64).trailing_zeros()
}

/// [`access_bytes`] of a call with contiguous rows and parts, whose addresses are aligned to 16
/// bytes.
pub(crate) fn dense_access_bytes(problem: &Problem) -> u32 {
    let part_stride = if problem.parts > 1 { problem.rows.wrapping_mul(problem.cols) as u64 } else { 0 };
    let mut params = Params { part_stride, ..Params::default() };
    for tensor in problem.tensors.iter().filter(|tensor| tensor.is_matrix()) {
        params[tensor].row_stride = problem.cols as u64;
    }
    access_bytes(problem, &params)
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, DTypes, RowGroups, Rows};

    use super::*;

    fn of_dtypes(problem: Problem) -> Problem {
        Problem { dtypes: DTypes::uniform(DType::Bf16).widened(false, true), ..problem }
    }

    fn forward(rows: usize) -> Problem {
        of_dtypes(Problem::forward(Norm::Rms, rows, 64, DType::Bf16, &[]))
    }

    fn backward(rows: usize) -> Problem {
        of_dtypes(Problem::backward(Norm::Rms, rows, 64, DType::Bf16, &[]))
    }

    fn matrix(data: u64, row_stride: u64) -> Matrix {
        Matrix { data, row_stride, group_stride: 0 }
    }

    /// Parameters with these tensors.
    fn params<const N: usize>(tensors: [(Tensor, Matrix); N]) -> Params {
        tensors.into_iter().fold(Params::default(), |params, (tensor, at)| with(params, tensor, at))
    }

    fn with(mut params: Params, tensor: Tensor, at: Matrix) -> Params {
        params[tensor] = at;
        params
    }

    #[test]
    fn accesses_are_as_wide_as_every_address_and_stride_allows() {
        let forward = forward(2);
        use Tensor::{Bias, Mean, Residual, Rstd, Weight, Workspace, X, Y};
        let aligned = params([(X, matrix(0x1000, 64)), (Y, matrix(0x2000, 64)), (Weight, matrix(0x3000, 0))]);
        for (expected, others) in [
            (16, [].as_slice()),
            (2, &[(X, matrix(0x1002, 64))]),
            (2, &[(Y, matrix(0x2000, 65))]),
            // The lowest alignment counts, whichever tensors have it.
            (2, &[(X, matrix(0x1002, 64)), (Y, matrix(0x2002, 64))]),
            (2, &[(X, matrix(0x1000, 65)), (Y, matrix(0x2000, 65))]),
            (2, &[(X, matrix(0x1002, 65))]),
            (4, &[(Y, matrix(0x2000, 66))]),
            (8, &[(Weight, matrix(0x3008, 0))]),
            (2, &[(Bias, matrix(0x3002, 0))]),
            (4, &[(Residual, matrix(0x4000, 65))]),
            (16, &[(Rstd, matrix(0x4004, 0)), (Mean, matrix(0x4004, 0)), (Workspace, matrix(0x5004, 0))]),
        ] {
            let params = others.iter().fold(aligned, |params, &(tensor, at)| with(params, tensor, at));
            assert_eq!(access_bytes(&forward, &params), expected, "{params:?}");
        }
    }

    /// A stride of 66 elements is 132 bytes of bf16, and 264 of an f32 stream.
    #[test]
    fn strides_count_in_the_dtype_of_their_matrix() {
        let (forward, backward) = (forward(2), backward(2));
        let odd = matrix(0x1000, 66);
        for (expected, problem, tensors) in [
            (4, forward, [Tensor::X, Tensor::Y].as_slice()),
            (8, forward, &[Tensor::Residual, Tensor::ResidualOut]),
            (4, backward, &[Tensor::Dy, Tensor::Dx]),
            (8, backward, &[Tensor::X, Tensor::DresidualOut, Tensor::Dresidual]),
        ] {
            for tensor in tensors {
                assert_eq!(access_bytes(&problem, &params([(*tensor, odd)])), expected, "{tensor}");
            }
        }
    }

    /// The stride between groups counts like the stride between rows; a matrix without groups has
    /// no stride between groups.
    #[test]
    fn groups_count_as_rows_do() {
        let problem = Problem { rows_per_group: Some(2), ..forward(5) };
        let layout = |row_stride, groups: Option<usize>| {
            let rows = match groups {
                Some(stride) => Rows::grouped((), row_stride, RowGroups { rows: 2, stride }),
                None => Rows::strided((), row_stride),
            };
            rows.layout(5, 64)
        };
        for (expected, row_stride, groups) in [
            (16, 64, Some(192)),
            (8, 64, Some(196)),
            (4, 64, Some(194)),
            (2, 64, Some(193)),
            (2, 65, Some(192)),
            (2, 65, Some(193)),
            (16, 72, None),
        ] {
            let stride = layout(row_stride, groups).group_stride(problem.rows_per_group) as u64;
            assert_eq!(stride, groups.unwrap_or(2 * row_stride) as u64);
            for tensor in [Tensor::X, Tensor::Y, Tensor::Residual, Tensor::ResidualOut] {
                let params = params([(tensor, Matrix { group_stride: stride, ..matrix(0x1000, row_stride as u64) })]);
                // A stride of an f32 residual stream has twice as many bytes.
                let expected = if matches!(tensor, Tensor::X | Tensor::Y) { expected } else { 16.min(2 * expected) };
                assert_eq!(access_bytes(&problem, &params), expected, "{params:?}");
            }
        }
        assert_eq!(layout(64, None).group_stride(None), 0);
    }

    /// Computes quotients of 32-bit numbers as the kernels do.
    #[test]
    fn a_product_with_the_reciprocal_is_the_quotient() {
        let most = u64::from(u32::MAX);
        for rows in [2, 3, 5, 7, 8, 12, 31, 32, 33, 641, 65_535, 65_536, 65_537, most / 2, most - 1] {
            let problem = Problem { rows_per_group: Some(rows as usize), ..forward(most as usize) };
            let (count, reciprocal) = rows_per_group(&problem).unwrap();
            assert_eq!(count, rows);
            let around = |row: u64| [row.saturating_sub(1), row, row + 1];
            let multiples = [0, rows, 2 * rows, most / rows / 2 * rows, most / rows * rows, most - 1];
            for row in multiples.into_iter().flat_map(around).filter(|row| *row <= most) {
                let (low, high) = (reciprocal & most, reciprocal >> 32);
                let quotient = (high * row + ((low * row) >> 32)) >> 32;
                assert_eq!(quotient, row / rows, "{row} / {rows}");
            }
        }
        assert_eq!(rows_per_group(&forward(5)).unwrap(), (0, 0));
        let beyond = Problem { rows_per_group: Some(2), ..forward(1 << 32) };
        assert!(matches!(rows_per_group(&beyond), Err(Error::Unsupported { .. })));
    }

    /// A group begins in the middle of a row, also of the only one.
    #[test]
    fn the_columns_of_a_group_count_as_a_stride() {
        for (groups, expected) in [(1, 16), (2, 16), (4, 16), (8, 16), (16, 8), (32, 4), (64, 2)] {
            for rows in [1, 2] {
                let problem = Problem { groups, ..forward(rows) };
                let params = params([(Tensor::X, matrix(0x1000, 64)), (Tensor::Weight, matrix(0x2000, 0))]);
                assert_eq!(access_bytes(&problem, &params), expected, "{groups} {rows}");
                assert_eq!(dense_access_bytes(&problem), expected, "{groups} {rows}");
            }
        }
        let most = |groups| require_groups(&Problem { groups, cols: groups, ..forward(2) });
        assert!(most(MOST_GROUPS).is_ok() && most(MOST_GROUPS + 1).is_err());
        let quant = Some(QuantSpec::new(rmsnorm_spec::quant::CodeType::E4m3, ScaleKind::Row));
        assert!(require_groups(&Problem { groups: 2, quant, ..forward(2) }).is_err());
    }

    #[test]
    fn one_row_has_no_stride_to_align() {
        let params = params([(Tensor::X, matrix(0x1000, 65)), (Tensor::Y, matrix(0x2000, 67))]);
        assert_eq!(access_bytes(&forward(1), &params), 16);
        assert_eq!(access_bytes(&forward(2), &params), 2);
    }

    /// The stride between parts counts even for a single row.
    #[test]
    fn the_distance_of_parts_counts_however_many_rows_there_are() {
        for rows in [1, 2] {
            for (expected, part_stride) in [(16, 128), (8, 132), (4, 130), (2, 129)] {
                let problem = Problem { parts: 2, ..forward(rows) };
                let tensors = [(Tensor::X, matrix(0x1000, 64)), (Tensor::Y, matrix(0x2000, 64))];
                let params = Params { part_stride, ..params(tensors) };
                assert_eq!(access_bytes(&problem, &params), expected, "{rows} {part_stride}");
            }
            let dense = |cols| dense_access_bytes(&Problem { cols, parts: 3, ..forward(rows) });
            assert_eq!([4096, 4100, 4098].map(dense), [[16, 8, 4], [16, 8, 4]][rows - 1]);
        }
    }

    #[test]
    fn dense_rows_are_as_aligned_as_their_length() {
        let dense = |cols| dense_access_bytes(&Problem { cols, ..forward(2) });
        assert_eq!([4096, 4100, 4098, 4097].map(dense), [16, 8, 4, 2]);
    }

    /// As if a call that was validated for one device were launched on another.
    #[test]
    fn a_workspace_that_is_too_short_for_the_plan_is_refused() {
        for (given, is_good) in [(None, true), (Some(99), false), (Some(100), true), (Some(101), true)] {
            let result = check_workspace(given, 100);
            let refused = matches!(result, Err(Error::Length { arg: "workspace", min: 100, got: 99, .. }));
            assert_eq!((result.is_ok(), refused), (is_good, !is_good), "{given:?}");
        }
        assert!(check_workspace(Some(0), 0).is_ok());
    }
}
