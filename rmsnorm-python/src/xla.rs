//! Handlers of XLA's foreign function interface for `jax.ffi`: one per direction and platform, for
//! every norm and set of tensors.
//!
//! | module | role |
//! |---|---|
//! | `api` | the structs of the C header |
//! | `frame` | the contents of a call frame |

mod api;
mod frame;

use std::borrow::Cow;
use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{LazyLock, PoisonError, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{
    DType, DTypes, Direction, Error, NormSpec, Problem, RowLayout, Storage, Tensor, TensorSet, TensorShape,
};

use crate::call::{Call, gated, kind};
use crate::foreign::{Place, python_name, shape_of};
pub(crate) use api::xla_layouts;
use frame::{Array, Frame, invalid};

/// A tensor of a call. `own`: its dimensions; `batch`: the dimensions that `vmap` puts before them.
struct Named<'a> {
    tensor: Tensor,
    array: Array<'a>,
    batch: &'a [i64],
    own: &'a [i64],
}

/// Pairs arrays with the names that an attribute lists, separated by commas.
fn named<'a>(names: &str, arrays: Vec<Array<'a>>, rank: usize, groups: usize) -> Result<Vec<Named<'a>>, Error> {
    let names: Vec<&str> = names.split(',').collect();
    if names.len() != arrays.len() {
        let rule = format!("expected {} arrays, {}, got {}", names.len(), names.join(", "), arrays.len());
        return Err(invalid("tensors", rule));
    }
    let named = |(name, array): (&str, Array<'a>)| {
        let tensor =
            Tensor::from_name(name).ok_or_else(|| invalid("tensors", format!("no tensor is named {name:?}")))?;
        let own = match tensor.shape() {
            TensorShape::Matrix => rank,
            TensorShape::Rows => rank - usize::from(groups == 1),
            TensorShape::Cols | TensorShape::Workspace => 1,
            TensorShape::Transposed | TensorShape::One | TensorShape::Scales | TensorShape::ScalesColumnwise => {
                return Err(invalid(tensor.name(), "only tensors of forward and backward are supported here"));
            }
        };
        let dims = array.dims();
        let at = dims.len().checked_sub(own).ok_or_else(|| {
            invalid(tensor.name(), format!("expected at least {own} dimensions, got the shape {dims:?}"))
        })?;
        Ok(Named { tensor, array, batch: &dims[..at], own: &dims[at..] })
    };
    names.into_iter().zip(arrays).map(named).collect()
}

/// The number of elements of an array with these dimensions.
fn count(dims: &[i64]) -> usize {
    dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).product()
}

/// The calls of a frame: one, or one per member of a batch if its members cannot be folded into
/// rows.
fn calls(frame: &Frame<'_>, direction: Direction) -> Result<Vec<Call>, Error> {
    let (norm, cast_order) = kind(frame.string("norm")?, frame.string("cast_order")?)?;
    let rank = usize::try_from(frame.integer("rank")?).ok().filter(|rank| *rank > 0);
    let rank = rank.ok_or_else(|| invalid("rank", "x must have at least one dimension"))?;
    let groups = usize::try_from(frame.integer("groups")?).ok().filter(|groups| *groups > 0);
    let groups = groups.ok_or_else(|| invalid("groups", "expected at least 1"))?;
    let mut tensors = named(frame.string("inputs")?, frame.args(), rank, groups)?;
    let outputs = named(frame.string("outputs")?, frame.results(), rank, groups)?;
    let main = outputs.first().map(|first| (first.batch, first.own));
    let (batch, own) = main.ok_or(Error::Missing { arg: "outputs", why: "every call needs at least one output" })?;
    tensors.extend(outputs);

    // `vmap` puts the same number of dimensions before every tensor; they are 1 for a tensor that
    // all members share.
    for Named { tensor, batch: theirs, own: dims, .. } in &tensors {
        let go_together =
            theirs.len() == batch.len() && theirs.iter().zip(batch).all(|(one, all)| *one == 1 || one == all);
        let expected = shape_of(*tensor, own, groups).unwrap_or(Cow::Borrowed(dims));
        if !go_together || **dims != *expected {
            let rule = format!(
                "expected the shape {expected:?} in a batch of {batch:?}, got {dims:?} in a batch of {theirs:?}"
            );
            return Err(invalid(tensor.name(), rule));
        }
    }
    let cols = count(&own[rank - 1..]);
    let rows = count(&own[..rank - 1]);
    // If members share all per-column tensors and nothing else, the batch is folded into the rows.
    let is_of_columns = |tensor: Tensor| matches!(tensor.shape(), TensorShape::Cols | TensorShape::Workspace);
    let is_one = |named: &Named<'_>| {
        if is_of_columns(named.tensor) { count(named.batch) == 1 } else { named.batch == batch }
    };
    let (members, rows) = if tensors.iter().all(is_one) { (1, count(batch) * rows) } else { (count(batch), rows) };

    let mut spec = NormSpec::new(norm, rows, cols, frame.float("eps")?).weight_offset(frame.float("weight_offset")?);
    spec = spec.groups(groups).cast_order(cast_order);
    if tensors.iter().any(|named| named.tensor == Tensor::Gate) {
        spec = gated(spec, frame.string("activation")?, frame.flag("gate_before")?)?;
    }
    if direction == Direction::Forward && frame.flag("residual_after")? {
        spec = spec.residual_after();
    }
    // Nothing works in place here: a call without x or dx has another tensor in its place.
    let main = if direction == Direction::Backward { Tensor::Dy } else { Tensor::Y };
    let is_cast = tensors.iter().fold(TensorSet::NONE, |set, named| set.with(named.tensor)).is_cast();
    let main = tensors.iter().find(|named| is_cast && named.tensor == main);
    let y_dtype = main.map(|named| named.array.storage(named.tensor)).transpose()?.and_then(Storage::float);
    let call = |member: usize| {
        let mut call = Call::new(direction, spec);
        call.y_dtype = y_dtype;
        for Named { tensor, array, batch: theirs, own } in &tensors {
            let layout = if tensor.is_matrix() {
                RowLayout::dense(&[rows, cols])
            } else {
                RowLayout::dense(&[if is_of_columns(*tensor) { count(own) } else { rows.saturating_mul(groups) }])
            };
            let layout = layout.ok_or_else(|| invalid(tensor.name(), "its size exceeds the address space"))?;
            call.with(*tensor, array.part(*tensor, place_in(theirs, batch, member), layout)?)?;
        }
        Ok(call)
    };
    (0..members).map(call).collect()
}

/// The index of a batch's member in a tensor with the batch dimensions `theirs`, each 1 or as in
/// `batch`.
fn place_in(theirs: &[i64], batch: &[i64], member: usize) -> usize {
    let (mut rest, mut step, mut place) = (member, 1, 0);
    for (&own, &all) in theirs.iter().zip(batch).rev() {
        let (own, all) = (own.max(1) as usize, all.max(1) as usize);
        place += if own == 1 { 0 } else { rest % all * step };
        step *= own;
        rest /= all;
    }
    place
}

fn run(frame: &Frame<'_>, direction: Direction, is_cuda: bool) -> Result<(), Error> {
    if is_cuda && frame.stage() == api::STAGE_INITIALIZE {
        return initialize(frame, direction);
    }
    if frame.stage() == api::STAGE_EXECUTE {
        let place = if is_cuda { frame.cuda()? } else { Place::Cpu { threads: None } };
        for call in calls(frame, direction)? {
            // SAFETY:
            // - memory: XLA's buffers, as large as their dimensions say, alive for the call and for
            //   the work of its stream;
            // - sharing: only this call has its results; XLA orders all other uses with the stream;
            // - stream: XLA's, of the device's primary context.
            unsafe { call.run(place)? };
        }
    }
    Ok(())
}

/// Compiles a call's kernels before the program runs or is captured into a CUDA graph.
///
/// XLA calls this before every execution, so prepared calls are remembered by their address. If
/// another program later gets the same address, its kernels are compiled on execution, which a
/// capture allows.
fn initialize(frame: &Frame<'_>, direction: Direction) -> Result<(), Error> {
    static PREPARED: LazyLock<RwLock<HashSet<(usize, usize)>>> = LazyLock::new(RwLock::default);
    let key = (frame.ordinal()?, frame.call_id());
    if PREPARED.read().unwrap_or_else(PoisonError::into_inner).contains(&key) {
        return Ok(());
    }
    if let Some(call) = calls(frame, direction)?.first() {
        call.prepare(key.0)?;
    }
    PREPARED.write().unwrap_or_else(PoisonError::into_inner).insert(key);
    Ok(())
}

/// Handles a call of XLA. Returns null, or an error that XLA owns.
///
/// # Safety
/// - Frame: XLA made it.
unsafe fn handle(frame: *const api::CallFrame, direction: Direction, is_cuda: bool) -> *mut c_void {
    // SAFETY:
    // - frame: the caller's promise.
    let frame = unsafe { Frame::new(frame) };
    if frame.answers_metadata() {
        return null_mut();
    }
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&frame, direction, is_cuda)));
    let error = match done {
        Ok(Ok(())) => return null_mut(),
        Ok(Err(error)) => error,
        Err(_) => return frame.error(api::INTERNAL, "rmsnorm panicked, which is a bug in rmsnorm"),
    };
    let code = if matches!(error, Error::Unsupported { .. }) {
        api::UNIMPLEMENTED
    } else if matches!(error, Error::Device { .. } | Error::Unavailable { .. }) {
        api::INTERNAL
    } else {
        api::INVALID_ARGUMENT
    };
    frame.error(code, &error.to_string())
}

/// Declares a handler for each direction and platform.
macro_rules! handlers {
    ($($name:ident: $direction:ident as $target:literal on $platform:literal;)*) => {
        $(
            unsafe extern "C" fn $name(frame: *mut api::CallFrame) -> *mut c_void {
                // SAFETY:
                // - frame: only XLA calls this.
                unsafe { handle(frame, Direction::$direction, $platform == "CUDA") }
            }
        )*

        /// {(target, platform): capsule}, for `jax.ffi.register_ffi_target`.
        #[pyfunction]
        pub(crate) fn xla_handlers(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
            let handlers = PyDict::new(py);
            $(
                // SAFETY:
                // - address: of a function, which lives as long as the process; JAX requires a
                //   capsule without a name.
                let capsule = unsafe {
                    let capsule = pyo3::ffi::PyCapsule_New($name as *mut c_void, std::ptr::null(), None);
                    Bound::from_owned_ptr_or_err(py, capsule)?
                };
                handlers.set_item(($target, $platform), capsule)?;
            )*
            Ok(handlers)
        }
    };
}

handlers! {
    forward_cpu: Forward as "rmsnorm_forward" on "cpu";
    backward_cpu: Backward as "rmsnorm_backward" on "cpu";
    forward_cuda: Forward as "rmsnorm_forward" on "CUDA";
    backward_cuda: Backward as "rmsnorm_backward" on "CUDA";
}

/// The workspace of a backward call in f32 elements, on the CPU or on any CUDA device. No device is
/// queried: a program may be lowered on a machine without one. `norm`: the names of the kind and of
/// the cast order. `tensors`: names separated by commas. `dtypes`: of activations, weight and
/// residual. `pieces`: the gate's activation, whether it is before the norm, and the groups of
/// columns.
#[pyfunction]
pub(crate) fn xla_workspace_len(
    is_cuda: bool,
    norm: (&str, &str),
    shape: (usize, usize),
    tensors: &str,
    dtypes: (String, String, String),
    pieces: (Option<&str>, bool, usize),
) -> PyResult<usize> {
    let (rows, cols) = shape;
    let refuse = |what: &str| PyValueError::new_err(format!("rmsnorm knows no {what}"));
    let to_python = |error: Error| PyValueError::new_err(error.to_string());
    let (norm, cast_order) = kind(norm.0, norm.1).map_err(to_python)?;
    let dtype =
        |name: &str| DType::ALL.into_iter().find(|&dtype| python_name(dtype) == name).ok_or_else(|| refuse(name));
    let dtypes = DTypes { activation: dtype(&dtypes.0)?, weight: dtype(&dtypes.1)?, residual: dtype(&dtypes.2)? };
    let tensors: Option<Vec<Tensor>> = tensors.split(',').map(Tensor::from_name).collect();
    let tensors = tensors.ok_or_else(|| refuse("such tensor"))?;
    let ((activation, is_before, groups), spec) = (pieces, NormSpec::new(norm, rows, cols, 0.0));
    let spec = activation.map_or(Ok(spec), |activation| gated(spec, activation, is_before));
    let gate = spec.map_err(to_python)?.gate;
    let problem = Problem::backward(norm, rows, cols, dtypes.activation, &tensors[..]);
    let tensors = problem.tensors.set(Tensor::Dx, tensors.contains(&Tensor::Dx));
    let problem = Problem { tensors, dtypes, gate, groups, cast_order, ..problem };
    Ok(if is_cuda {
        rmsnorm_core::cuda::workspace_len_bound(&problem)
    } else {
        CpuBackend::new().workspace_len(&problem)
    })
}
